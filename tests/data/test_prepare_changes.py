"""Input that changes during preparation, bad rows, and the check of first rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.sample_texts import (
    TEXTS,
    files_of,
    prepared,
    texts_of,
    use_small_units,
    write_gz,
    write_jsonl,
)
from toolkit.config.prepare import OnBadRow, PrepareConfig
from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.manifest import read_manifest
from toolkit.data.prepare import input_changes as changes
from toolkit.data.prepare import run, tokenise
from toolkit.data.prepare.inspect import inspect
from toolkit.data.prepare.plan import PreparationPlan, WorkUnit
from toolkit.errors import InputError
from toolkit.progress import Progress

BROKEN = b'{"id": 1, "text": "half a li\n'


def make_input(folder: Path) -> Path:
    """Four files, of which two are read in ranges and two are read together; b.jsonl has a broken line in its
    middle.
    """
    write_jsonl(folder / "a.jsonl", TEXTS[:90])
    lines = write_jsonl(folder / "b.jsonl", TEXTS[90:180]).read_bytes().splitlines(keepends=True)
    (folder / "b.jsonl").write_bytes(b"".join([*lines[:60], BROKEN, *lines[60:]]))
    for name, texts in (("c.jsonl.gz", TEXTS[180:200]), ("d.jsonl.gz", TEXTS[200:220])):
        write_gz(folder / name, write_jsonl(folder.parent / "scratch.jsonl", texts).read_bytes())
    return folder


def corrected(folder: Path) -> None:
    (folder / "b.jsonl").write_bytes(
        (folder / "b.jsonl").read_bytes().replace(BROKEN, b'{"id": 1, "text": "a whole line"}\n')
    )


def removed(folder: Path) -> None:
    (folder / "b.jsonl").write_bytes((folder / "b.jsonl").read_bytes().replace(BROKEN, b""))


def file_removed(folder: Path) -> None:
    (folder / "b.jsonl").unlink()


def file_added_between(folder: Path) -> None:
    removed(folder)
    write_jsonl(folder / "aa.jsonl", TEXTS[220:240])
    write_gz(
        folder / "cc.jsonl.gz", write_jsonl(folder.parent / "scratch.jsonl", TEXTS[240:260]).read_bytes()
    )


def one_of_two_read_together(folder: Path) -> None:
    removed(folder)
    write_gz(folder / "c.jsonl.gz", write_jsonl(folder.parent / "scratch.jsonl", TEXTS[260:280]).read_bytes())


CHANGES = (corrected, file_removed, file_added_between, one_of_two_read_together)


@pytest.mark.parametrize(
    ("change", "workers"),
    [
        *((change, 1) for change in CHANGES),
        *(pytest.param(change, 2, marks=pytest.mark.full) for change in (removed, file_added_between)),
    ],
)
def test_after_a_correction_only_the_changed_files_are_read_again(
    change: Callable[[Path], None],
    workers: int,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_small_units(monkeypatch, unit=5000)
    source = make_input(tmp_path / "in")
    with pytest.raises(InputError, match=r"b\.jsonl, the line at byte .*(?s:.*)start again to continue"):
        prepared(source, tmp_path / "data", tokenizer)
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "data" / ".work" / "parts").iterdir()}
    assert len(done) > 9  # a.jsonl was tokenised before b.jsonl was read
    (source / "a.jsonl").touch()  # the same content
    change(source)
    read: list[str] = []
    whole = tokenise.read_documents
    monkeypatch.setattr(
        tokenise, "read_documents", lambda plan, unit: read.extend(names_of(plan, unit)) or whole(plan, unit)
    )
    monkeypatch.setattr(
        run.shutil, "rmtree", lambda *_, **__: None
    )  # the parts are kept, so that the test can compare them
    prepared(source, tmp_path / "data", tokenizer, workers=workers)
    monkeypatch.undo()
    use_small_units(monkeypatch, unit=5000)
    if workers == 1:  # reads of worker processes cannot be counted here
        assert "a.jsonl" not in read
        assert read
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "data" / ".work" / "parts").iterdir()}
    of_a = [name for name in done if name.startswith(("000000", "000001"))]
    assert of_a
    assert all(kept[name] == done[name] for name in of_a)
    prepared(source, tmp_path / "fresh", tokenizer)
    made = {
        name: content
        for name, content in files_of(tmp_path / "data").items()
        if not name.startswith(".work/")
    }
    assert made == files_of(tmp_path / "fresh")


def names_of(plan: PreparationPlan, unit: WorkUnit) -> list[str]:
    return [plan.sources[number].name for number in range(unit.first, unit.last)]


def test_change_after_the_first_pass_is_included(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards already exist, one more than needed."""
    use_small_units(monkeypatch)
    source = make_input(tmp_path / "in")
    removed(source)
    monkeypatch.setattr(run.report, "write_results", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepared(source, tmp_path / "data", tokenizer)
    monkeypatch.undo()
    (tmp_path / "data" / "train-00001.bin").write_bytes(b"of a shard that is no more")
    (source / "a.jsonl").unlink()
    prepared(source, tmp_path / "data", tokenizer)
    prepared(source, tmp_path / "fresh", tokenizer)
    assert files_of(tmp_path / "data") == files_of(tmp_path / "fresh")


def interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_changed_input_can_move_the_validation_threshold(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a small input loses its validation document, another one is chosen."""
    source = write_jsonl(tmp_path / "in" / "a.jsonl", TEXTS[:6]).parent
    write_jsonl(source / "b.jsonl", TEXTS[6:12])
    monkeypatch.setattr(run.merge, "plan_shards", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepared(source, tmp_path / "data", tokenizer, validation=1e-9)
    monkeypatch.undo()
    prepared(source, tmp_path / "before", tokenizer, validation=1e-9)
    (chosen,) = texts_of(tmp_path / "before", "validation")
    for name, texts in (("a.jsonl", TEXTS[:6]), ("b.jsonl", TEXTS[6:12])):
        if chosen in texts:
            write_jsonl(source / name, [text for text in texts if text != chosen])
    prepared(source, tmp_path / "data", tokenizer, validation=1e-9)
    prepared(source, tmp_path / "fresh", tokenizer, validation=1e-9)
    assert files_of(tmp_path / "data") == files_of(tmp_path / "fresh")
    assert texts_of(tmp_path / "data", "validation") != [chosen]


# -- rows that are broken


BAD = [BROKEN, b'["no object"]\n', b'{"id": 3}\n', b'{"text": 7}\n', b"\xff\xfe{\n"]


def make_bad(folder: Path, rows: int = 40) -> Path:
    """Several bad rows of each kind, in a file that is read in ranges and in one that is not."""
    lines = write_jsonl(folder / "a.jsonl", TEXTS[:rows]).read_bytes().splitlines(keepends=True)
    mixed: list[bytes] = []
    for number, line in enumerate(lines):
        mixed += [line, BAD[number % len(BAD)]] if number % 2 and number > 8 else [line]
    (folder / "a.jsonl").write_bytes(b"".join(mixed))
    write_gz(folder / "b.jsonl.gz", b"".join(mixed).replace(b'"text": "', b'"text": "b '))
    return folder


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_bad_rows_are_skipped_and_counted(
    workers: int, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_bad(tmp_path / "in")
    prepared(source, tmp_path / "whole", tokenizer, on_bad_row=OnBadRow.skip)
    use_small_units(monkeypatch, unit=1500, part=700, batch=300)
    manifest = prepared(source, tmp_path / "data", tokenizer, on_bad_row=OnBadRow.skip, workers=workers)
    assert files_of(tmp_path / "data") == files_of(tmp_path / "whole")
    assert sorted([*texts_of(manifest.folder, "train"), *texts_of(manifest.folder, "validation")]) == sorted(
        [*TEXTS[:40], *(f"b {text}" for text in TEXTS[:40])]
    )
    assert read_manifest(manifest.folder).bad_rows["count"] == 32
    first = manifest.bad_rows["first"]
    assert len(first) == 10
    assert first[0].startswith("a.jsonl, the line at byte ")
    report = json.loads((manifest.folder / "report.json").read_text())
    assert (report["bad"], report["read"], report["documents"]) == (32, 112, 80)
    lines = "\n".join(inspect(PrepareConfig(inspect=str(manifest.folder)), Progress.silent()))
    assert "bad rows   32 were skipped" in lines
    assert first[9] in lines


def test_a_refused_preparation_continues_with_skip(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of earlier documents are the same in either mode."""
    use_small_units(monkeypatch, unit=5000)
    source = make_input(tmp_path / "in")
    with pytest.raises(InputError, match="or write on_bad_row=skip"):
        prepared(source, tmp_path / "data", tokenizer)
    read: list[str] = []
    whole = tokenise.read_documents
    monkeypatch.setattr(
        tokenise, "read_documents", lambda plan, unit: read.extend(names_of(plan, unit)) or whole(plan, unit)
    )
    assert prepared(source, tmp_path / "data", tokenizer, on_bad_row=OnBadRow.skip).bad_rows["count"] == 1
    assert "a.jsonl" not in read
    prepared(source, tmp_path / "fresh", tokenizer, on_bad_row=OnBadRow.skip)
    assert files_of(tmp_path / "data") == files_of(tmp_path / "fresh")
    with pytest.raises(
        InputError, match="made with on_bad_row=skip"
    ):  # the control: a finished folder is of one recipe
        prepared(source, tmp_path / "data", tokenizer)


def test_a_preparation_that_refused_special_tokens_continues_with_them_as_text(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_units(monkeypatch, unit=1000)
    plain = [text.replace("<|endoftext|>", "") for text in TEXTS[:60]]
    source = write_jsonl(tmp_path / "in" / "a.jsonl", plain).parent
    write_jsonl(source / "b.jsonl", [*plain[:10], "an <|endoftext|> inside"])
    with pytest.raises(InputError, match="special_tokens=text"):
        prepared(source, tmp_path / "data", tokenizer, special_tokens=SpecialTokens.refuse)
    done = len(list((tmp_path / "data" / ".work" / "parts").glob("*.json")))
    assert done > 3
    assert prepared(source, tmp_path / "data", tokenizer).special_tokens == {"<|endoftext|>": 1}
    prepared(source, tmp_path / "fresh", tokenizer)
    assert files_of(tmp_path / "data") == files_of(tmp_path / "fresh")


def test_the_first_rows_of_every_file_are_checked_before_any_work(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "in" / "a.jsonl", TEXTS[:50]).parent
    write_jsonl(source / "b.jsonl", TEXTS[:50], "body")
    (source / "c.jsonl").write_bytes(BROKEN)
    (source / "d.txt").write_bytes(b"\x89PNG\r\n\x1a\n" + os.urandom(99))
    monkeypatch.setattr(run, "make_plan", interrupted)  # which reads every byte
    with pytest.raises(InputError) as caught:
        prepared(source, tmp_path / "data", tokenizer)
    assert [problem.key for problem in caught.value.problems] == ["text", "input", "input"]
    assert all(
        name in problem.seen
        for name, problem in zip(("b.jsonl", "c.jsonl", "d.txt"), caught.value.problems, strict=True)
    )
    for name in ("b.jsonl", "c.jsonl", "d.txt"):
        (source / name).unlink()
    with pytest.raises(KeyboardInterrupt):  # the control
        prepared(source, tmp_path / "data", tokenizer)


def test_a_changed_file_is_checked_too(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_units(monkeypatch, unit=5000)
    source = make_input(tmp_path / "in")
    with pytest.raises(InputError, match=r"b\.jsonl"):
        prepared(source, tmp_path / "data", tokenizer)
    write_jsonl(source / "b.jsonl", TEXTS[:20], "body")
    before = files_of(tmp_path / "data")
    monkeypatch.setattr(changes, "hash_sources", interrupted)
    with pytest.raises(InputError, match=r"text=text, no such field"):
        prepared(source, tmp_path / "data", tokenizer)
    assert files_of(tmp_path / "data") == before
