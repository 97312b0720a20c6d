"""A file of the input as bytes of text: uncompressed, without a byte-order mark, and refused by name if it is no UTF-8 text."""

from __future__ import annotations

import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, Any, cast

from toolkit.data.prepare.formats import compression, hidden
from toolkit.errors import InputError, Problem

BUFFER_BYTES = 1 << 20
HEAD_BYTES = 4096
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MOST_INVALID, LEAST_INVALID = (
    0.3,
    16,
)  # share and number of bytes of the head that are not UTF-8: more is another encoding
UNREADABLE = (
    OSError,
    EOFError,
    lzma.LZMAError,
    zlib.error,
    zipfile.BadZipFile,
    tarfile.TarError,
    NotImplementedError,
    RuntimeError,
)

# First bytes of files that are not text -> what they are.
KINDS = (
    (b"\x89PNG", "a PNG image"), (b"\xff\xd8\xff", "a JPEG image"), (b"GIF87a", "a GIF image"), (b"GIF89a", "a GIF image"),
    (b"%PDF-", "a PDF document"), (b"PK\x03\x04", "a ZIP archive, or a document that is one"), (b"\x1f\x8b", "compressed by gzip"),
    (b"\xfd7zXZ\x00", "compressed by xz"), (b"\x28\xb5\x2f\xfd", "compressed by zstd"), (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!", "a RAR archive"), (b"WARC/", "a WARC web archive"), (b"PAR1", "a Parquet file"), (b"ARROW1", "an Arrow file"),
    (b"\x93NUMPY", "a NumPy array"), (b"\x89HDF", "an HDF5 file"), (b"SQLite format 3\x00", "an SQLite database"),
    (b"MMIDIDX", "a Megatron index: write import=PATH in place of input="),
    (b"\xff\xfe\x00\x00", "text in UTF-32"), (b"\xff\xfe", "text in UTF-16"), (b"\xfe\xff", "text in UTF-16"),
)  # fmt: skip


class Opened:
    """A file of the input. ``read``: how many of the file's own bytes are read by now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw = path.open("rb")

    @property
    def read(self) -> int:
        return self._raw.tell()

    def text(self) -> IO[bytes]:
        """Its bytes. Raises InputError if they are no text."""
        return as_text(uncompressed(self._raw, self._path), str(self._path))

    def members(self) -> Iterator[tuple[str, IO[bytes]]]:
        """(name, bytes) of each file of an archive, in its order. Raises InputError if one is no text."""
        members = (
            _zipped(self._raw, self._path)
            if self._path.suffix == ".zip"
            else _tarred(uncompressed(self._raw, self._path))
        )
        for name, file in members:
            if not hidden(PurePath(name)):
                yield name, as_text(uncompressed(file, name), f"{self._path}, its file {name}")

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self._raw.close()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What a damaged file raises, as an InputError that names it."""
    try:
        yield
    except UNREADABLE as error:
        seen = f"{path}: {error or type(error).__name__}"
        raise InputError(
            Problem(
                "input", seen, "every file of the input can be read to its end", "restore or remove the file"
            )
        ) from error


def uncompressed(file: IO[bytes], name: str | PurePath) -> IO[bytes]:
    """By the library of the compression that the ending names."""
    how = compression(name)
    if how in (".bz2", ".xz"):
        import bz2

        return cast(IO[bytes], bz2.BZ2File(file) if how == ".bz2" else lzma.LZMAFile(file))
    if how is None:
        return file
    import pyarrow

    return cast(
        IO[bytes],
        pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "gzip" if how == ".gz" else "zstd"),
    )


def as_text(file: IO[bytes], seen: str) -> IO[bytes]:
    """``file`` behind its byte-order mark. Raises InputError if it is no text in UTF-8, by its first bytes."""
    buffered = io.BufferedReader(cast(Any, file), BUFFER_BYTES)
    head = buffered.peek(HEAD_BYTES)[:HEAD_BYTES]
    check_text(head, seen)
    if head.startswith(BYTE_ORDER_MARK):
        buffered.read(len(BYTE_ORDER_MARK))
    return cast(IO[bytes], buffered)


def check_text(head: bytes, seen: str) -> None:
    """Raises InputError if a file that begins with ``head`` is no text in UTF-8."""
    kind = not_text(head)
    if kind is not None:
        rule = "a document is text in UTF-8, in files whose endings say how they are compressed"
        remedy = "convert it, or leave it out of the input: input='FOLDER/*.txt' names some files of a folder"
        raise InputError(Problem("input", f"{seen}: it is {kind}", rule, remedy))


def not_text(head: bytes) -> str | None:
    """What a file that begins with ``head`` is, if it is no text in UTF-8."""
    for start, kind in KINDS:
        if head.startswith(start):
            return kind
    if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
        return "compressed by bzip2"
    if head[257:262] == b"ustar":
        return "a tar archive"
    if b"\0" in head:
        return "binary, or text in UTF-16"
    invalid = len(head) - len(head.decode(errors="ignore").encode())
    if invalid >= LEAST_INVALID and invalid > MOST_INVALID * len(head):
        return "not in UTF-8"
    return None


def _zipped(file: IO[bytes], path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.flag_bits & 1:
                seen = f"{path}, its file {entry.filename}: it is encrypted"
                raise InputError(
                    Problem(
                        "input",
                        seen,
                        "every file of the input can be read",
                        "decrypt it, or remove it from the archive",
                    )
                )
            if not entry.is_dir():
                with archive.open(entry) as member:
                    yield entry.filename, member


def _tarred(file: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(fileobj=file, mode="r|") as archive:
        for entry in archive:
            member = archive.extractfile(entry) if entry.isfile() else None
            if member is not None:
                yield entry.name, member
