"""Existing Megatron files get a manifest and are used in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launch.prepare import main
from tests.data.sample_texts import TEXTS
from toolkit.config.prepare import PrepareConfig, TokenizerConfig
from toolkit.data.manifest import read_manifest
from toolkit.data.prepare.import_megatron import import_megatron
from toolkit.data.tokens import tokenizer as bpe
from toolkit.data.tokens.index import DTYPE_CODES, HEADER, MAGIC
from toolkit.data.tokens.token_array import open_split, verify_tokens
from toolkit.errors import InputError
from toolkit.progress import Progress


def write_megatron(
    folder: Path, name: str, documents: list[list[list[int]]], dtype: str = "<u2"
) -> list[int]:
    """As Megatron's preprocess_data.py writes documents of several sentences: a sequence each.

    Returns all tokens.
    """
    folder.mkdir(exist_ok=True, parents=True)
    sequences = [sequence for document in documents for sequence in document]
    tokens = [token for sequence in sequences for token in sequence]
    np.array(tokens, dtype).tofile(folder / f"{name}.bin")
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(dtype).itemsize
    ends = np.cumsum([0, *map(len, documents)], dtype="<i8")
    code = next(code for code, known in DTYPE_CODES.items() if known == np.dtype(dtype))
    (folder / f"{name}.idx").write_bytes(
        HEADER.pack(MAGIC, 1, code, len(lengths), len(ends))
        + lengths.tobytes()
        + pointers.astype("<i8").tobytes()
        + ends.tobytes()
    )
    return tokens


def encoded(tokenizer: Path, texts: list[str], *, ends: bool = True) -> list[list[list[int]]]:
    """Return each text as two sequences."""
    opened = bpe.read_tokenizer(tokenizer.parent)
    opened.encode_special_tokens = True
    found = [opened.encode(text, add_special_tokens=False).ids + [0] * ends for text in texts]
    return [[ids[:2], ids[2:]] for ids in found]


def config(path: object, tokenizer: Path, **changes: object) -> PrepareConfig:
    options: dict[str, object] = {
        "tokenizer": TokenizerConfig(path=str(tokenizer), end_of_text=bpe.END_OF_TEXT),
        **changes,
    }
    return PrepareConfig(import_path=str(path), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
@pytest.mark.parametrize(
    "named", ["", "train_text_document", "train_text_document.bin", "train_text_document.idx", "train*"]
)
def test_imported_files_are_trained_on(named: str, dtype: str, tokenizer: Path, tmp_path: Path) -> None:
    tokens = write_megatron(tmp_path, "train_text_document", encoded(tokenizer, TEXTS[:30]), dtype)
    before = (tmp_path / "train_text_document.bin").stat().st_mtime_ns
    manifest = import_megatron(config(tmp_path / named if named else tmp_path, tokenizer), Progress.silent())
    assert read_manifest(tmp_path) == manifest == verify_tokens(tmp_path, Progress.silent())
    assert (manifest.splits["train"].documents, manifest.splits["train"].tokens) == (30, len(tokens))
    assert manifest.tokenizer.ends_documents
    assert (tmp_path / "train_text_document.bin").stat().st_mtime_ns == before
    read = np.empty((1, len(tokens)), dtype=np.int64)
    open_split(tmp_path, "train").read(np.zeros(1, dtype=np.int64), read)
    assert read[0].tolist() == tokens


def test_several_files_and_a_validation_split(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the command as its help shows it."""
    tokens = write_megatron(tmp_path, "train-0", encoded(tokenizer, TEXTS[:9]))
    tokens += write_megatron(tmp_path, "train-1", encoded(tokenizer, TEXTS[9:30]))
    write_megatron(tmp_path, "held-out", encoded(tokenizer, TEXTS[30:35]))
    words = [
        f"import='{tmp_path}/train-*'",
        f"import_validation={tmp_path}/held-out",
        f"tokenizer.path={tokenizer}",
        "tokenizer.end_of_text='<|endoftext|>'",
    ]
    assert main(words) == 0, capsys.readouterr().err
    manifest = read_manifest(tmp_path)
    assert [shard.name for shard in manifest.splits["train"].shards] == ["train-0", "train-1"]
    assert (manifest.splits["train"].tokens, manifest.splits["validation"].documents) == (len(tokens), 5)
    assert main([f"inspect={tmp_path}"]) == 0
    assert "every file matches the manifest" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"has a manifest\.json"):
        import_megatron(config(tmp_path, tokenizer), Progress.silent())


def test_manifest_records_missing_document_ends(tokenizer: Path, tmp_path: Path) -> None:
    write_megatron(tmp_path, "a", encoded(tokenizer, TEXTS[:9], ends=False))
    assert not import_megatron(config(tmp_path, tokenizer), Progress.silent()).tokenizer.ends_documents


def test_invalid_import_is_refused_without_writing(tokenizer: Path, tmp_path: Path) -> None:
    documents = encoded(tokenizer, TEXTS[:9])
    write_megatron(tmp_path / "large", "a", [[[5, 400, 0]]])
    write_megatron(tmp_path / "wide", "a", documents, "<i8")
    write_megatron(tmp_path / "two", "a", documents)
    write_megatron(tmp_path / "two", "b", documents, "<i4")
    write_megatron(tmp_path / "cut", "a", documents)
    (tmp_path / "cut" / "a.bin").write_bytes((tmp_path / "cut" / "a.bin").read_bytes()[:-2])
    write_megatron(tmp_path / "alone", "a", documents)
    (tmp_path / "alone" / "a.bin").unlink()
    write_megatron(tmp_path / "none", "a", [])
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.idx").write_text("no index")
    (tmp_path / "text" / "a.bin").write_text("no tokens")
    for name, seen in (
        ("large", "token 400, a tokenizer of 400 tokens"),
        ("wide", "tokens of int64"),
        ("two", "b.idx: tokens of int32"),
        ("cut", "the index declares"),
        ("alone", "a.bin: absent"),
        ("absent", "no .idx file"),
        ("none", "no tokens"),
        ("text", "starting with b'no index'"),
    ):
        before = sorted((tmp_path / name).rglob("*"))
        with pytest.raises(InputError) as caught:
            import_megatron(config(tmp_path / name, tokenizer), Progress.silent())
        assert seen in str(caught.value)
        assert sorted((tmp_path / name).rglob("*")) == before
    write_megatron(tmp_path / "good", "a", documents)
    with pytest.raises(InputError, match=r"import without tokenizer\.path"):
        import_megatron(PrepareConfig(import_path=str(tmp_path / "good")), Progress.silent())
    (tmp_path / "good" / "tokenizer").mkdir()
    with pytest.raises(InputError, match="contains another tokenizer"):
        import_megatron(config(tmp_path / "good", tokenizer), Progress.silent())
    (tmp_path / "good" / "tokenizer").rmdir()
    import_megatron(config(tmp_path / "good", tokenizer), Progress.silent())  # the control
