"""``inspect=PATH`` describes a local or remote data folder and names damaged files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.damage import flip_byte
from tests.data.data_folders import make_folder
from tests.data.local_stores import served, set_environment
from tests.data.sample_texts import files_of, make_texts, prepared, small_tokenizer, texts_of, write_jsonl
from toolkit.config.prepare import PrepareConfig
from toolkit.data.manifest import DataManifest, TokenSplit
from toolkit.data.prepare.inspect import inspect, read_document_lengths, shuffle_quality
from toolkit.data.tokens.index import encode_index
from toolkit.errors import InputError
from toolkit.progress import Progress
from toolkit.remote.storage import open_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DataManifest:
    folder = tmp_path_factory.mktemp("made")
    source = write_jsonl(folder / "in" / "books.jsonl", make_texts(400))
    return prepared(
        source, folder / "data", small_tokenizer(folder / "tokenizer"), licence="CC0-1.0", deduplicate=True
    )


def shown(path: object, **options: int) -> str:
    return "\n".join(inspect(PrepareConfig(inspect=str(path), **options), Progress.silent()))


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "launch" / "prepare.py"), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def test_inspect_describes_a_folder(made: DataManifest) -> None:
    text = shown(made.folder, sequence_length=32, samples=2)
    train = made.split("train")
    for message in (
        "every file matches the manifest",
        f"{train.documents:,} documents, {train.tokens:,} tokens",
        "CC0-1.0",
        "deduplicate=true",
        "400 read, 400 kept",
        "books.jsonl: 400 documents",
        "in windows of 32:",
        "of documents are cut",
        "chi2/df",
        "tokenizers 0.",
    ):
        assert message in text, message
    samples = [line for line in text.splitlines() if line.startswith("sample ")]
    texts = texts_of(made.folder, "train")
    assert len(samples) == 2
    assert f"document {train.documents // 4} of" in samples[0]
    assert texts[train.documents // 4][:20].split("\n")[0] in samples[0]


def test_inspect_command_describes_and_rejects_folders(tmp_path: Path) -> None:
    """The command also describes a folder that other tools wrote."""
    folder = make_folder(tmp_path / "data", {"train": [np.arange(100)], "validation": [np.arange(3)]}).folder
    done = command(f"inspect={folder}", "samples=0")
    assert done.returncode == 0, done.stderr
    assert "1 documents, 100 tokens" in done.stdout
    assert "verifying data" in done.stderr
    content = bytearray((folder / "train-00000.bin").read_bytes())
    content[50] ^= 4
    (folder / "train-00000.bin").write_bytes(content)
    refused = command(f"inspect={folder}", "samples=0")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "train-00000.bin" in refused.stderr
    assert "Traceback" not in refused.stderr


def flip(file: Path) -> None:
    flip_byte(file, file.stat().st_size // 2)


# The tokens' own files, on this machine: tests/data/test_index.py.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "sources.json": lambda folder: flip(folder / "sources.json"),
    "report.json": lambda folder: (folder / "report.json").unlink(),
    "lengths.png": lambda folder: (folder / "lengths.png").write_bytes(b""),
    "tokenizer/tokenizer_config.json": lambda folder: flip(folder / "tokenizer" / "tokenizer_config.json"),
}


def copied(made: DataManifest, folder: Path) -> Path:
    for name, content in files_of(made.folder).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", DAMAGE)
def test_every_other_file_is_verified(name: str, made: DataManifest, tmp_path: Path) -> None:
    folder = copied(made, tmp_path / "data")
    DAMAGE[name](folder)
    with pytest.raises(InputError, match=name):
        shown(folder)


def test_a_folder_in_a_store_is_the_same(
    made: DataManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(made, tmp_path / "data")
    here = shown(tmp_path / "data").replace(str(tmp_path / "data"), "PLACE")
    with served(tmp_path) as store:
        set_environment(monkeypatch, store, tmp_path / "cache")
        there = shown(f"{store.http}/data")
        assert (
            there.splitlines()[5:] == here.splitlines()[5:]
        )  # the lines above name the folder and its tokenizer
        assert shown(f"{store.s3}/data").splitlines()[5:] == here.splitlines()[5:]
        for name in ("train-00000.bin", "validation-00000.idx"):
            original = (tmp_path / "data" / name).read_bytes()
            flip(tmp_path / "data" / name)
            with pytest.raises(InputError, match=name):
                shown(f"{store.http}/data")
            (tmp_path / "data" / name).write_bytes(original[:-2])
            with pytest.raises(InputError, match=name):
                shown(f"{store.http}/data")
            (tmp_path / "data" / name).write_bytes(original)
        assert "every file" in shown(f"{store.http}/data")


def test_documents_of_several_sequences(made: DataManifest, tmp_path: Path) -> None:
    """Megatron's own tools may write such files."""
    lengths = np.array([3, 1, 2, 5], dtype=np.int32)
    content = bytearray(encode_index(np.dtype("<u2"), lengths))
    kept = (
        content[: -5 * 8] + np.array([0, 2, 2, 4], dtype="<i8").tobytes()
    )  # three documents, the second empty
    kept[26:34] = np.array(
        [4], dtype="<u8"
    ).tobytes()  # length of the document index, after magic, version, dtype, sequences
    (tmp_path / "a-00000.idx").write_bytes(kept)
    shard = made.split("train").shards[0]
    split = TokenSplit((type(shard)("a-00000", 3, 11, shard.bin, shard.idx),))
    assert read_document_lengths(open_folder(tmp_path), split).tolist() == [4, 0, 7]


@given(seed=st.integers(0, 10**6), kinds=st.integers(2, 6))
@settings(max_examples=25, deadline=None)
def test_shuffle_quality_separates_shuffled_from_sorted(seed: int, kinds: int) -> None:
    """Documents of several kinds, each four times as long on average as the one before, sorted by kind."""
    random = np.random.default_rng(seed)
    lengths = np.concatenate([random.geometric(0.1 / 4**kind, 400) for kind in range(kinds)]).astype(np.int32)
    by_kind, shuffled = shuffle_quality(lengths), shuffle_quality(random.permutation(lengths))
    assert by_kind is not None
    assert shuffled is not None
    assert 0.3 < shuffled < 2  # 800 documents: 77 degrees of freedom
    assert by_kind > 2 * shuffled


def test_shuffle_quality_is_one_on_average_and_unknown_for_few() -> None:
    random = np.random.default_rng(0)
    lengths = random.geometric(0.01, 20_000).astype(np.int32)
    found = [shuffle_quality(random.permutation(lengths)) for _ in range(30)]
    assert 0.97 < np.mean([quality for quality in found if quality is not None]) < 1.03
    assert (shuffle_quality(np.sort(lengths)) or 0) > 100
    assert shuffle_quality(lengths[:5]) is None
    assert shuffle_quality(np.full(1000, 7, dtype=np.int32)) is None
    assert shuffle_quality(lengths[:0]) is None
