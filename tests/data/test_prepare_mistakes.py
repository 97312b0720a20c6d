"""Existing outputs are found or refused by name; and other user errors."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.sample_texts import (
    TEXTS,
    files_of,
    prepared,
    small_tokenizer,
    use_small_units,
    write_gz,
    write_jsonl,
)
from toolkit.config.prepare import InputFormat, PrepareConfig, TokenizerConfig
from toolkit.data.manifest_file import MANIFEST_HASH_KEY, hash_manifest
from toolkit.data.prepare import run, tokenise
from toolkit.data.prepare.run import output_folder, prepare
from toolkit.data.prepare.worker_pool import run_tasks
from toolkit.data.tokens import stdlib
from toolkit.errors import InputError
from toolkit.progress import Progress


def test_finished_preparation_is_found_without_writing(
    corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(corpus, tmp_path / "data", tokenizer)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    monkeypatch.setattr(tokenise, "start_tokenising", None)
    assert (
        prepared(corpus, tmp_path / "data", tokenizer, workers=3, memory_mib=9) == first
    )  # settings that do not affect the bytes may differ
    for file in corpus.rglob("*.jsonl"):
        file.touch()  # the content is compared, not the time
    assert prepared(corpus, tmp_path / "data", tokenizer) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == before


def test_another_recipe_or_input_is_refused_by_name(tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in" / "a.jsonl", TEXTS[:20]).parent
    output = tmp_path / "data"
    prepared(source, output, tokenizer)
    made = files_of(output)
    with pytest.raises(InputError) as caught:
        prepared(source, output, tokenizer, seed=3, deduplicate=True, licence="CC0-1.0")
    assert {problem.key for problem in caught.value.problems} == {"seed", "deduplicate", "licence"}
    assert "seed=0" in caught.value.problems[1].remedy + caught.value.problems[0].remedy
    content = (source / "a.jsonl").read_bytes()
    changes: dict[str, Callable[[], object]] = {
        "a.jsonl has different content": lambda: (source / "a.jsonl").write_bytes(
            content.replace(b"data", b"DATA")
        ),
        "a.jsonl has": lambda: (source / "a.jsonl").write_bytes(content[:-1]),
        "b.jsonl is new": lambda: (
            (source / "a.jsonl").write_bytes(content),
            write_jsonl(source / "b.jsonl", ["x"]),
        ),
        "a.jsonl is gone": lambda: (
            (source / "a.jsonl").unlink(),
            (source / "b.jsonl").unlink(),
            write_jsonl(source / "z.jsonl", ["x"]),
        ),
    }
    for seen, change in changes.items():
        change()
        with pytest.raises(InputError, match="gone|is new" if "gone" in seen else seen):
            prepared(source, output, tokenizer)
    assert files_of(output) == made
    other = small_tokenizer(tmp_path / "other")
    other.write_text(other.read_text().replace("garden", "gerden") + " ")
    with pytest.raises(InputError, match=r"tokenizer\.path"):
        prepared(source, output, other)


def test_input_changed_during_preparation_is_read_again(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "in" / "a.jsonl", TEXTS[:20])
    units = tokenise.find_unfinished_units
    monkeypatch.setattr(
        tokenise, "find_unfinished_units", lambda *args: (write_jsonl(source, TEXTS[:21]), units(*args))[1]
    )
    with pytest.raises(InputError, match=r"a\.jsonl changed since the preparation began"):
        prepared(source, tmp_path / "data", tokenizer)
    monkeypatch.undo()
    with pytest.raises(InputError, match="seed=0"):
        prepared(source, tmp_path / "data", tokenizer, seed=5)
    prepared(source, tmp_path / "data", tokenizer)
    prepared(source, tmp_path / "fresh", tokenizer)
    assert files_of(tmp_path / "data") == files_of(tmp_path / "fresh")


def one(name: str, content: bytes, **options: object) -> tuple[str, bytes, dict[str, object]]:
    return name, content, options


MISTAKES = {
    "no such": (one("", b""), "input", "a file, a folder"),
    "line 2": (one("a.jsonl.gz", b"", gz=b'{"text": "a"}\n{"text": \n'), "input", "line 2"),
    "the line at byte 14": (one("a.jsonl", b'{"text": "a"}\n{"text": \n'), "input", "the line at byte 14"),
    "no field": (one("a.jsonl", b'{"body": "a"}\n'), "text", "text=text, no such field"),
    "no object": (one("a.jsonl", b'["a"]\n'), "text", "no such field"),
    "no text": (one("a.jsonl", b'{"text": 3}\n'), "text", "text=3"),
    "no column": (one("a.parquet", b"", parquet=True), "text", "text=text, no such column"),
    "no Parquet": (one("a.parquet", b"nothing"), "input", "a.parquet"),
    "truncated gz": (one("a.jsonl.gz", b"", gz=b'{"text": "a"}\n' * 99, cut=5), "input", "a.jsonl.gz"),
    "no training text": (one("a.jsonl", b'{"text": ""}\n\n'), "input", "2 without text"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_name_key_and_file(mistake: str, tokenizer: Path, tmp_path: Path) -> None:
    (name, content, options), key, seen = MISTAKES[mistake]
    source = tmp_path / "in" / name if name else tmp_path / "absent"
    if name:
        source.parent.mkdir()
        source.write_bytes(content)
    if "gz" in options:
        write_gz(source, options["gz"])  # type: ignore[arg-type]
        source.write_bytes(source.read_bytes()[: -options.get("cut", 0) or None])  # type: ignore[operator]
    if "parquet" in options:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), source)
    with pytest.raises(InputError) as caught:
        prepared(source, tmp_path / "data", tokenizer)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert seen in problem.seen or seen in problem.rule
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_error_in_a_worker_is_reported_by_the_command(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_units(monkeypatch, unit=100)
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:5])
    (tmp_path / "a.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes() + b"{\n")
    with pytest.raises(InputError, match=r"every line of a \.jsonl file is JSON"):
        prepared(tmp_path / "a.jsonl", tmp_path / "data", tokenizer, workers=2)


def test_invalid_outputs_and_tokenizers_are_refused(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="it contains other files"):
        prepared(corpus, tmp_path / "mine", tokenizer)
    with pytest.raises(InputError, match="the output folder is writable"):
        prepared(corpus, tmp_path / "mine" / "letter.txt" / "data", tokenizer)
    with pytest.raises(InputError, match=r"tokenizer\.end_of_text=None"):
        prepared(corpus, tmp_path / "a", TokenizerConfig(path=str(tokenizer)))
    with pytest.raises(InputError, match=r"(?s)tokenizer\.end_of_text=<eod>.*special tokens are"):
        prepared(corpus, tmp_path / "b", TokenizerConfig(path=str(tokenizer), end_of_text="<eod>"))
    with pytest.raises(InputError, match=r"tokenizer\.path=.*absent"):
        prepared(corpus, tmp_path / "c", TokenizerConfig(path=str(tmp_path / "absent")))
    with pytest.raises(InputError, match="seed=1 with input=stdlib"):
        prepare(PrepareConfig(input="stdlib", seed=1), Progress.silent())
    assert output_folder(PrepareConfig(input="corpora/books.jsonl.zst")) == Path("data/books")
    with pytest.raises(InputError, match="needs an output"):
        output_folder(PrepareConfig(input="corpora/*.jsonl"))


def test_failed_preparation_without_tokens_leaves_the_output_usable(tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in" / "a.jsonl", TEXTS[:20], "body")
    for mistake in ({"seed": 1}, {"text": "bodi"}, {"format": InputFormat.parquet}):
        with pytest.raises(InputError):
            prepared(source, tmp_path / "data", tokenizer, **mistake)
    assert prepared(source, tmp_path / "data", tokenizer, text="body").recipe["text"] == "body"


def ends_itself() -> Callable[[int, Callable[[int], None]], None]:
    """The kernel kills a worker in its second task, as when memory runs out."""
    return lambda number, advance: advance(5) if number < 2 else os.kill(os.getpid(), signal.SIGKILL)


def test_killed_worker_is_reported() -> None:
    with (
        Progress.silent().task("working") as task,
        pytest.raises(InputError, match=r"code -9 \(SIGKILL\)") as caught,
    ):
        run_tasks(ends_itself, [0, 1, 2, 3], 2, task)
    assert caught.value.problems[0].key == "workers"


def test_second_process_is_refused_by_the_lock(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    work = tmp_path / "data" / run.WORK
    work.mkdir(parents=True)
    with run._lock(work), pytest.raises(InputError, match="is being prepared by another process"):
        prepared(corpus, tmp_path / "data", tokenizer)
    prepared(corpus, tmp_path / "data", tokenizer)


def test_preparing_stdlib_gives_the_data_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the data that training with data=stdlib finds."""
    (tmp_path / "library").mkdir()
    for number, text in enumerate(TEXTS[:40]):
        (tmp_path / "library" / f"{number}.py").write_text(text)
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda _: str(tmp_path / "library"))
    config = PrepareConfig(
        input="stdlib", output=str(tmp_path / "data"), tokenizer=TokenizerConfig(vocab_size=300)
    )
    manifest = prepare(config, Progress.silent())
    assert manifest == stdlib.ensure_stdlib(tmp_path / "data", 300)
    assert manifest.tokenizer.ends_documents


def test_a_folder_of_another_recipe_version_is_refused_with_a_remedy_that_works(
    tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS[:20])
    prepared(source, tmp_path / "data", tokenizer)
    manifest = tmp_path / "data" / "manifest.json"
    content = json.loads(manifest.read_text().replace('"version": 2', '"version": 1'))
    manifest.write_text(json.dumps({**content, MANIFEST_HASH_KEY: hash_manifest(content)}))
    with pytest.raises(InputError, match=r"made by recipe version 1(?s:.*)output=FOLDER") as caught:
        prepared(source, tmp_path / "data", tokenizer)
    assert len(caught.value.problems) == 1
    prepared(source, tmp_path / "other", tokenizer)
