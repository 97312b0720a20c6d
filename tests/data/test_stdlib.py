"""The embedded text and its tokenizer: reproducible, and made once by concurrent processes.

pytest -m full tests/data/test_stdlib.py     # the whole standard library, about 15 s
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from toolkit.data.manifest import DataManifest, read_manifest
from toolkit.data.tokens import stdlib
from toolkit.data.tokens import tokenizer as bpe
from toolkit.data.tokens.index import IndexFile
from toolkit.data.tokens.stdlib import ensure_stdlib, is_validation, read_source_texts
from toolkit.data.tokens.token_array import open_split, verify_tokens
from toolkit.errors import InputError
from toolkit.progress import Progress

VOCAB_SIZE = 400


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small library: 60 typical files, and folders that are skipped."""
    root = tmp_path_factory.mktemp("library")
    for number in range(60):
        file = root / f"package{number % 3}" / f"module{number}.py"
        file.parent.mkdir(exist_ok=True)
        body = "".join(
            f"def function_{number}_{line}(value):\n    return value + {line}\n\n" for line in range(number)
        )
        file.write_text(f'"""Module {number}: naïve 数 <|endoftext|>."""\n\n{body}', encoding="utf-8")
    (root / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (root / "empty.py").write_bytes(b"")
    for skipped in (
        "test",
        "package0/tests",
        "idlelib/idle_test",
        "site-packages/other",
        "package1/__pycache__",
    ):
        (root / skipped).mkdir(parents=True)
        (root / skipped / "no.py").write_text("no = 1")
    (root / "package0" / "data.txt").write_text("no")
    return root


@pytest.fixture(scope="module")
def made(root: Path, tmp_path_factory: pytest.TempPathFactory) -> DataManifest:
    return ensure_stdlib(tmp_path_factory.mktemp("made") / "data", VOCAB_SIZE, root=root)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_only_library_sources_are_read(root: Path) -> None:
    texts = read_source_texts(root)
    assert len(texts) == 62
    assert [name for name, _ in texts] == sorted(name for name, _ in texts)
    assert not any("no.py" in name for name, _ in texts)


def test_every_document_is_in_its_split_once(root: Path, made: DataManifest) -> None:
    texts = dict(read_source_texts(root))
    expected = {
        side: sorted(text for text in texts.values() if is_validation(text) == side) for side in (False, True)
    }
    tokenizer = bpe.read_tokenizer(made.tokenizer_folder)
    for name, side in (("train", False), ("validation", True)):
        split = made.split(name)
        row = np.empty((1, split.tokens), dtype=np.int64)
        open_split(made.folder, name).read(np.zeros(1, dtype=np.int64), row)
        assert (row == made.tokenizer.end_of_text).sum() == split.documents == len(expected[side])
        documents = np.split(row[0], np.cumsum(IndexFile(made.folder / f"{name}-00000.idx").lengths)[:-1])
        assert all(document[-1] == made.tokenizer.end_of_text for document in documents)
        decoded = sorted(tokenizer.decode(document[:-1].tolist()).encode() for document in documents)
        assert decoded == sorted(text.decode(errors="replace").encode() for text in expected[side])
    assert made.split("validation").documents > 0


def test_documents_are_shuffled(root: Path, made: DataManifest) -> None:
    names = {text: name for name, text in read_source_texts(root)}
    tokenizer = bpe.read_tokenizer(made.tokenizer_folder)
    row = np.fromfile(made.folder / "train-00000.bin", "<u2")
    documents = np.split(row, np.cumsum(IndexFile(made.folder / "train-00000.idx").lengths)[:-1])
    decoded = (tokenizer.decode(document[:-1].tolist()).encode() for document in documents)
    written = [names[text] for text in decoded if text in names]
    ascending = np.mean([first < second for first, second in pairwise(written)])
    assert len(written) > 50
    assert 0.3 < ascending < 0.7  # 1 if documents are in the order of names


def test_stdlib_data_is_reproducible_and_found_quickly(
    root: Path, made: DataManifest, tmp_path: Path
) -> None:
    """Run in another process, where hashes are seeded differently."""
    command = [sys.executable, "-c", WORKER, str(tmp_path / "data"), str(VOCAB_SIZE), str(root)]
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=120, check=True)
    assert files_of(tmp_path / "data" / made.folder.name) == files_of(made.folder)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    begin = time.monotonic()
    again = ensure_stdlib(tmp_path / "data", VOCAB_SIZE, root=root)
    assert time.monotonic() - begin < 1.0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == before
    assert again == read_manifest(tmp_path / "data")
    assert verify_tokens(tmp_path / "data", Progress.silent()).splits == made.splits


def test_another_vocabulary_keeps_the_first_generation(root: Path, tmp_path: Path) -> None:
    first = ensure_stdlib(tmp_path, 300, root=root)
    tokens = open_split(tmp_path, "train").tokens
    second = ensure_stdlib(tmp_path, 350, root=root)
    assert (first.tokenizer.size, second.tokenizer.size) == (300, 350)
    assert open_split(tmp_path, "train").tokens == second.split("train").tokens < tokens
    assert open_split(first.folder, "train").tokens == tokens
    assert ensure_stdlib(tmp_path, 300, root=root) == first
    assert open_split(tmp_path, "train").tokens == tokens


def test_changed_text_makes_another_generation(root: Path, tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "a.py").write_text("a = 1\n" * 50)
    first = ensure_stdlib(tmp_path / "data", 260, root=tmp_path / "library")
    (tmp_path / "library" / "a.py").write_text("a = 2\n" * 50)
    assert (
        ensure_stdlib(tmp_path / "data", 260, root=tmp_path / "library").origin.xxh3_128
        != first.origin.xxh3_128
    )


WORKER = """
import sys
from pathlib import Path
from toolkit.data.tokens import stdlib
write = stdlib._write_generation
def make(*arguments):
    print("makes", flush=True)
    write(*arguments)
stdlib._write_generation = make
print(stdlib.ensure_stdlib(sys.argv[1], int(sys.argv[2]), root=Path(sys.argv[3])).split("train").data_hash)
"""


def test_concurrent_processes_make_stdlib_data_once(root: Path, made: DataManifest, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path / "data"), str(VOCAB_SIZE), str(root)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    lines = [line for worker in workers for line in worker.communicate(timeout=120)[0].splitlines()]
    assert lines.count("makes") == 1
    assert lines.count(made.split("train").data_hash) == 4


KILLED = """
import sys, time
from pathlib import Path
from toolkit.data.tokens import stdlib
def stop(*arguments):
    print("writing", flush=True)
    time.sleep(60)
stdlib.write_manifest = stop
stdlib.ensure_stdlib(sys.argv[1], int(sys.argv[2]), root=Path(sys.argv[3]))
"""


def test_killed_process_leaves_no_partial_generation(root: Path, made: DataManifest, tmp_path: Path) -> None:
    """Killed when every file but the manifest is written, while another process waits for the lock."""
    command = [str(tmp_path / "data"), str(VOCAB_SIZE), str(root)]
    killed = subprocess.Popen([sys.executable, "-c", KILLED, *command], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "writing\n"
    waiting = subprocess.Popen([sys.executable, "-c", WORKER, *command], stdout=subprocess.PIPE, text=True)
    assert list((tmp_path / "data").glob("*.partial"))
    with pytest.raises(InputError):
        read_manifest(tmp_path / "data")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=30)
    assert waiting.communicate(timeout=60)[0].split() == ["makes", made.split("train").data_hash]
    assert not list((tmp_path / "data").glob("*.partial"))
    assert files_of(tmp_path / "data" / made.folder.name) == files_of(made.folder)


def test_lock_of_a_hanging_process_is_reported(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdlib, "WAIT_SECONDS", 0.2)
    with (
        stdlib._lock(tmp_path / ".lock"),
        pytest.raises(InputError, match=r"\.lock is held by another process"),
    ):
        ensure_stdlib(tmp_path, VOCAB_SIZE, root=root)


def test_emptied_generation_is_written_again(root: Path, tmp_path: Path) -> None:
    first = ensure_stdlib(tmp_path, 300, root=root)
    (first.folder / "manifest.json").unlink()
    assert ensure_stdlib(tmp_path, 300, root=root) == first
    assert verify_tokens(tmp_path, Progress.silent()) == read_manifest(tmp_path)


def test_unusable_folders_are_rejected(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no \.py files in"):
        ensure_stdlib(tmp_path / "data", VOCAB_SIZE, root=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"data\.path="):
        ensure_stdlib(tmp_path / "file", VOCAB_SIZE, root=root)


def test_transformers_opens_the_tokenizer(made: DataManifest) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(made.tokenizer_folder)
    assert (len(theirs), theirs.eos_token_id, theirs.eos_token) == (
        VOCAB_SIZE,
        made.tokenizer.end_of_text,
        bpe.END_OF_TEXT,
    )
    text = "def function_1(value):\n    return naïve + 数\n"
    ours = bpe.read_tokenizer(made.tokenizer_folder)
    assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert theirs.decode(theirs(text)["input_ids"]) == ours.decode(ours.encode(text).ids) == text


def test_end_of_text_string_does_not_end_a_document(made: DataManifest) -> None:
    (tokens,) = bpe.encode_texts(
        bpe.read_tokenizer(made.tokenizer_folder), [f"a {bpe.END_OF_TEXT} b"], made.tokenizer.end_of_text
    )
    assert (tokens == made.tokenizer.end_of_text).sum() == 1


@pytest.mark.full
def test_whole_library_is_tokenised_in_seconds(tmp_path: Path) -> None:
    begin = time.monotonic()
    manifest = ensure_stdlib(tmp_path, 4096)
    seconds = time.monotonic() - begin
    assert 8e6 < manifest.origin.bytes < 20e6
    assert manifest.tokenizer.size == 4096
    assert manifest.dtype == "uint16"
    share = manifest.split("validation").tokens / sum(split.tokens for split in manifest.splits.values())
    assert 0.04 < share < 0.12
    begin = time.monotonic()
    ensure_stdlib(tmp_path, 4096)
    assert time.monotonic() - begin < 1.0
    assert seconds < 60  # about 7 s of CPU; the bound leaves room for a busy machine
