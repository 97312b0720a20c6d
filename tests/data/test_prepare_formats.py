"""Every supported file format gives the same documents; every other format is refused by name."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.sample_texts import TEXTS, prepared, texts_of, use_small_units, write_zst
from toolkit.config.prepare import InputFormat, OnBadRow
from toolkit.data.prepare import read
from toolkit.data.prepare.input_file import convert_read_errors
from toolkit.errors import InputError

DOCUMENTS = [*TEXTS[:40], 'quotes "of" all, kinds\nand lines', "[brackets], {braces}"]
LINES = [text.replace("\n", " ") for text in DOCUMENTS]
JSONL = b"".join(
    json.dumps({"id": number, "text": text}).encode() + b"\n" for number, text in enumerate(DOCUMENTS)
)
BOM = b"\xef\xbb\xbf"


def array(indent: int | None = None, ascii_: bool = True) -> bytes:
    return json.dumps(
        [{"id": number, "text": text} for number, text in enumerate(DOCUMENTS)],
        indent=indent,
        ensure_ascii=ascii_,
    ).encode()


def separated(delimiter: str, ends: str = "\r\n") -> bytes:
    text = io.StringIO(newline="")
    rows = csv.writer(text, delimiter=delimiter, lineterminator=ends)
    rows.writerow(["id", "text", "date"])
    rows.writerows([number, document, "2026"] for number, document in enumerate(DOCUMENTS))
    return text.getvalue().encode()


def zipped(**files: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, one in files.items():
            archive.writestr(name, one)
    return content.getvalue()


def tarred(**files: bytes) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, one in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(one)
            archive.addfile(entry, io.BytesIO(one))
    return content.getvalue()


def zst(content: bytes, folder: Path) -> bytes:
    write_zst(folder / "scratch.zst", content)
    return (folder / "scratch.zst").read_bytes()


HALF = JSONL.index(b"\n", len(JSONL) // 2) + 1
PARTS = {
    "folder/a.jsonl": JSONL[:HALF],
    "b.jsonl.gz": gzip.compress(JSONL[HALF:]),
    "__MACOSX/._a.jsonl": b"\0" * 9,
}
FORMS: dict[str, Callable[[Path], bytes]] = {
    "bz2.jsonl.bz2": lambda _: bz2.compress(JSONL[:HALF]) + bz2.compress(JSONL[HALF:]),
    "xz.jsonl.xz": lambda _: lzma.compress(JSONL[:HALF]) + lzma.compress(JSONL[HALF:]),
    "array.json": lambda _: array(),
    "pretty.json.gz": lambda _: gzip.compress(array(indent=2)),
    "utf8.json": lambda _: b" \n" + array(ascii_=False),
    "lines.json": lambda _: JSONL,
    "comma.csv": lambda _: separated(","),
    "mark.csv.xz": lambda _: lzma.compress(BOM + separated(",", "\n")),
    "tab.tsv": lambda _: separated("\t"),
    "mark.jsonl": lambda _: BOM + JSONL,
    "mark.jsonl.gz": lambda _: gzip.compress(BOM + JSONL),
    "zip.zip": lambda _: zipped(**PARTS),
    "texts.zip": lambda _: zipped(
        **{
            f"{number}.txt": (BOM if number % 2 else b"") + text.encode()
            for number, text in enumerate(DOCUMENTS)
        }
    ),
    "tar.tar": lambda _: tarred(**PARTS),
    "tar.tar.gz": lambda _: gzip.compress(tarred(**PARTS)),
    "tgz.tgz": lambda _: gzip.compress(tarred(**PARTS)),
    "tar.tar.zst": lambda folder: zst(tarred(**PARTS), folder),
    "tar.tar.xz": lambda _: lzma.compress(tarred(**PARTS)),
    "tar.tbz2": lambda _: bz2.compress(tarred(**PARTS)),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_documents(
    name: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_units(monkeypatch, unit=1000, part=2000, batch=500)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(FORMS[name](tmp_path))
    manifest = prepared(tmp_path / "in", tmp_path / "data", tokenizer)
    assert sorted([*texts_of(manifest.folder, "train"), *texts_of(manifest.folder, "validation")]) == sorted(
        DOCUMENTS
    )


def test_a_byte_order_mark_is_no_part_of_a_document(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(BOM + b"one")
    (tmp_path / "in" / "b.txt").write_bytes(
        "two\N{ZERO WIDTH NO-BREAK SPACE}".encode()
    )  # the control: inside, it is a character
    prepared(tmp_path / "in", tmp_path / "data", tokenizer, validation=0.0)
    assert sorted(texts_of(tmp_path / "data", "train")) == ["one", "two\N{ZERO WIDTH NO-BREAK SPACE}"]
    (tmp_path / "lines.txt").write_bytes(BOM + b"one\ntwo\n")
    prepared(tmp_path / "lines.txt", tmp_path / "lines", tokenizer, validation=0.0, format=InputFormat.lines)
    assert sorted(texts_of(tmp_path / "lines", "train")) == ["one", "two"]


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "dataset"])
def test_a_nested_field_is_a_document(form: str, tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"meta": {"body": text, "other": 1}, "text": 3} for text in LINES] + [{"meta": None, "text": 3}]
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / f"a.{form}"
    options: dict[str, object] = {}
    if form == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "json":
        file.write_text(json.dumps(rows))
    elif form == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        from datasets import Dataset

        Dataset.from_list(rows).save_to_disk(tmp_path / "in")
        options["format"] = InputFormat.dataset
    manifest = prepared(tmp_path / "in", tmp_path / "data", tokenizer, text="meta.body", **options)
    assert sorted([*texts_of(manifest.folder, "train"), *texts_of(manifest.folder, "validation")]) == sorted(
        LINES
    )
    with pytest.raises(InputError, match=r"meta\.nothing"):
        prepared(tmp_path / "in", tmp_path / "other", tokenizer, text="meta.nothing", **options)


RUSSIAN = "Съешь же ещё этих мягких французских булок, да выпей чаю. " * 20
REFUSED = {
    "png": ("a.png", b"\x89PNG\r\n\x1a\n" + bytes(99), "a PNG image"),
    "gz of zst": ("a.jsonl.gz.zst", None, "compressed by gzip"),
    "gz without its ending": ("a.txt", gzip.compress(JSONL), "compressed by gzip"),
    "bz2 without its ending": ("a.txt", bz2.compress(JSONL), "compressed by bzip2"),
    "xz without its ending": ("a", lzma.compress(JSONL), "compressed by xz"),
    "warc": ("a.warc.gz", gzip.compress(b"WARC/1.0\r\nWARC-Type: warcinfo\r\n\r\n"), "a WARC web archive"),
    "utf-16": ("a.txt", "hello there".encode("utf-16"), "text in UTF-16"),
    "utf-16 without its mark": ("a.txt", "hello there".encode("utf-16-le"), "binary, or text in UTF-16"),
    "utf-16 as jsonl": ("a.jsonl", JSONL.decode().encode("utf-16"), "text in UTF-16"),
    "another encoding": ("a.txt", RUSSIAN.encode("cp1251"), "not in UTF-8"),
    "pdf": ("a.pdf", b"%PDF-1.7\n" + os.urandom(200), "a PDF document"),
    "office": ("a.docx", zipped(**{"word/document.xml": b"<x/>"}), "a ZIP archive"),
    "parquet in an archive": (
        "a.zip",
        zipped(**{"a.parquet": b"PAR1" + bytes(99)}),
        "its file a.parquet: it is a Parquet file",
    ),
    "image in an archive": (
        "a.tar.gz",
        gzip.compress(tarred(**{"a.txt": b"x", "b.txt": b"\xff\xd8\xff\xe0"})),
        "its file b.txt: it is a JPEG",
    ),
    "a cut archive": ("a.zip", zipped(**PARTS)[:-40], "a.zip: File is not a zip file"),
    "a cut tar": ("a.tar.gz", gzip.compress(tarred(**PARTS))[:300], "a.tar.gz: "),
    "a cut bz2": ("a.jsonl.bz2", bz2.compress(JSONL)[:-9], "a.jsonl.bz2: "),
    "a cut xz": ("a.jsonl.xz", lzma.compress(JSONL)[:-9], "a.jsonl.xz: "),
    "a cut array": ("a.json", array()[:-30], "a.json, json: element 41: "),
    "no comma in an array": ("a.json", b'[{"text": "a"} {"text": "b"}]', "element 1: '{' instead of a comma"),
    "one object": ("a.json", json.dumps({"text": "a"}, indent=1).encode(), "row 1: "),
    "too deep": ("a.json", b"[" * 100_000, "element 0: "),
    "no column": ("a.csv", b"id,body\n1,a\n", "text=text, no such column"),
    "fields": ("a.csv", b"id,text\n1,a\n2\n", "row 2: 1 fields"),
    "quotes": ("a.csv", b'id,text\n1,"a"b\n', "row 1: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_input_that_is_not_text_is_refused(name: str, tokenizer: Path, tmp_path: Path) -> None:
    file, content, seen = REFUSED[name]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / file).write_bytes(zst(gzip.compress(JSONL), tmp_path) if content is None else content)
    (tmp_path / "in" / "text.txt").write_text("a text next to it")
    with pytest.raises(InputError) as caught:
        prepared(tmp_path / "in", tmp_path / "data", tokenizer)
    (problem,) = caught.value.problems
    assert seen in problem.seen
    assert file in problem.seen
    (tmp_path / "in" / file).unlink()
    prepared(tmp_path / "in", tmp_path / "data", tokenizer, validation=0.0)  # the control


def test_bad_rows_of_csv_and_json_arrays_are_skipped(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_bytes(b'id,text\n1,one\n2\n3,"two"x\n4,three\n')
    (tmp_path / "in" / "b.json").write_text('[{"text": "four"}, {"body": "x"}, 7, {"text": "five"}]')
    manifest = prepared(
        tmp_path / "in", tmp_path / "data", tokenizer, validation=0.0, on_bad_row=OnBadRow.skip
    )
    assert sorted(texts_of(tmp_path / "data", "train")) == ["five", "four", "one", "three"]
    assert manifest.bad_rows["count"] == 4
    assert [line.partition(":")[0] for line in manifest.bad_rows["first"]] == [
        "a.csv, row 2",
        "a.csv, row 3",
        "b.json, row 2",
        "b.json, row 3",
    ]


def test_a_document_that_memory_cannot_hold_is_named_with_its_size(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is checked first, since the tokenizer's library would abort the process."""
    import psutil

    small = 1 << 20
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ["one", "two " * (small // 4), "three"])
    )
    free = psutil.virtual_memory()
    monkeypatch.setattr(read, "LARGE_BYTES", 1 << 19)
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: free._replace(available=read.TOKENISER_MEMORY * small - 1)
    )
    with pytest.raises(
        InputError, match=r"a\.jsonl, the line at byte 16: a document of 1 MiB(?s:.*)0\.1 GiB are available"
    ):
        prepared(tmp_path / "a.jsonl", tmp_path / "data", tokenizer, validation=0.0)
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: free._replace(available=read.TOKENISER_MEMORY * small)
    )
    assert (
        prepared(tmp_path / "a.jsonl", tmp_path / "data", tokenizer, validation=0.0).splits["train"].documents
        == 3
    )


def test_a_read_error_without_a_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.gz: EOFError"), convert_read_errors(tmp_path / "a.gz"):
        raise EOFError
