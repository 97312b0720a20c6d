"""Files of the input: format by name, and content as uncompressed UTF-8 without byte-order mark."""

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

from toolkit.config.prepare import InputFormat
from toolkit.errors import InputError, Problem

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
ARCHIVES = (".zip", ".tar", ".tgz", ".tbz2", ".txz")
FORMATS = {
    ".jsonl": InputFormat.jsonl,
    ".ndjson": InputFormat.jsonl,
    ".json": InputFormat.json,
    ".parquet": InputFormat.parquet,
    ".csv": InputFormat.csv,
    ".tsv": InputFormat.tsv,
}
# Formats of lines: several processes can read ranges of one file.
BY_LINES = (InputFormat.lines.name, InputFormat.jsonl.name)


def compression(name: str | PurePath) -> str | None:
    """Return the compression suffix, one of COMPRESSED, or None."""
    suffix = PurePath(name).suffix
    compression_suffix = {".tgz": ".gz", ".tbz2": ".bz2", ".txz": ".xz"}.get(suffix, suffix)
    return compression_suffix if compression_suffix in COMPRESSED else None


def is_archive(name: str | PurePath) -> bool:
    """Return whether the file is an archive, whose members are read like files of the input."""
    file = PurePath(name)
    return (file.with_suffix("") if file.suffix in COMPRESSED else file).suffix in ARCHIVES


def detect_format(name: str | PurePath, requested: InputFormat) -> InputFormat:
    """Return the format of a file; ``auto`` for an archive, whose files have formats of their own."""
    if requested is not InputFormat.auto or is_archive(name):
        return requested
    file = PurePath(name)
    uncompressed_name = file.with_suffix("") if file.suffix in COMPRESSED else file
    return FORMATS.get(uncompressed_name.suffix, InputFormat.text)


def is_splittable(name: str | PurePath, kind: str) -> bool:
    """Return whether ranges of the file's bytes can be read separately."""
    return kind in BY_LINES and compression(name) is None and not is_archive(name)


def is_hidden(path: PurePath) -> bool:
    return any(part.startswith((".", "__pycache__", "__MACOSX")) for part in path.parts)


BUFFER_BYTES = 1 << 20
HEAD_BYTES = 4096
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# More invalid UTF-8 than this share and number of the first bytes means another encoding.
MAX_INVALID, MIN_INVALID = 0.3, 16
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

# First bytes of files that are not text -> their kind.
FILE_SIGNATURES = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF87a", "a GIF image"),
    (b"GIF89a", "a GIF image"),
    (b"%PDF-", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive, or a document in ZIP format"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\xfd7zXZ\x00", "compressed by xz"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"WARC/", "a WARC web archive"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"MMIDIDX", "a Megatron index: write import=PATH instead of input="),
    (b"\xff\xfe\x00\x00", "text in UTF-32"),
    (b"\xff\xfe", "text in UTF-16"),
    (b"\xfe\xff", "text in UTF-16"),
)


class InputReader:
    """An opened file of the input. ``bytes_read`` is the number of its own bytes read so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw = path.open("rb")

    @property
    def bytes_read(self) -> int:
        return self._raw.tell()

    def text(self) -> IO[bytes]:
        """Return its uncompressed bytes. Raises InputError if they are not text."""
        return skip_byte_order_mark(decompress(self._raw, self._path), str(self._path))

    def members(self) -> Iterator[tuple[str, IO[bytes]]]:
        """Yield (name, bytes) of each file of an archive, in order. Raises InputError if one is not text."""
        members = (
            _zipped(self._raw, self._path)
            if self._path.suffix == ".zip"
            else _tarred(decompress(self._raw, self._path))
        )
        for name, file in members:
            if not is_hidden(PurePath(name)):
                yield name, skip_byte_order_mark(decompress(file, name), f"{self._path}, its file {name}")

    def __enter__(self) -> InputReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._raw.close()


@contextmanager
def convert_read_errors(path: Path) -> Iterator[None]:
    """Convert the exceptions of a damaged file to an InputError that names it."""
    try:
        yield
    except UNREADABLE as error:
        description = f"{path}: {str(error) or type(error).__name__}"
        raise InputError(
            Problem(
                "input",
                description,
                "every file of the input must be readable to its end",
                "restore or remove the file",
            )
        ) from error


def decompress(file: IO[bytes], name: str | PurePath) -> IO[bytes]:
    """Decompress ``file`` according to the suffix of ``name``."""
    method = compression(name)
    if method in (".bz2", ".xz"):
        import bz2

        return cast(IO[bytes], bz2.BZ2File(file) if method == ".bz2" else lzma.LZMAFile(file))
    if method is None:
        return file
    import pyarrow

    return cast(
        IO[bytes],
        pyarrow.CompressedInputStream(
            pyarrow.PythonFile(file, mode="r"), "gzip" if method == ".gz" else "zstd"
        ),
    )


def skip_byte_order_mark(file: IO[bytes], description: str) -> IO[bytes]:
    """Skip the byte-order mark of ``file``. Raises InputError if its first bytes are not UTF-8 text."""
    buffered = io.BufferedReader(cast(Any, file), BUFFER_BYTES)
    head = buffered.peek(HEAD_BYTES)[:HEAD_BYTES]
    check_text(head, description)
    if head.startswith(BYTE_ORDER_MARK):
        buffered.read(len(BYTE_ORDER_MARK))
    return cast(IO[bytes], buffered)


def check_text(head: bytes, description: str) -> None:
    """Raise InputError if a file that begins with ``head`` is not UTF-8 text."""
    kind = detect_non_text(head)
    if kind is not None:
        rule = "a document is text in UTF-8, in files with the suffix of their compression"
        remedy = "convert it, or remove it from the input: input='FOLDER/*.txt' names some files of a folder"
        raise InputError(Problem("input", f"{description}: it is {kind}", rule, remedy))


def detect_non_text(head: bytes) -> str | None:
    """Return the kind of a file that begins with ``head`` if it is not UTF-8 text, else None."""
    for start, kind in FILE_SIGNATURES:
        if head.startswith(start):
            return kind
    if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
        return "compressed by bzip2"
    if head[257:262] == b"ustar":
        return "a tar archive"
    if b"\0" in head:
        return "binary, or text in UTF-16"
    invalid = len(head) - len(head.decode(errors="ignore").encode())
    if invalid >= MIN_INVALID and invalid > MAX_INVALID * len(head):
        return "not in UTF-8"
    return None


def _zipped(file: IO[bytes], path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.flag_bits & 1:
                description = f"{path}, its file {entry.filename}: it is encrypted"
                raise InputError(
                    Problem(
                        "input",
                        description,
                        "every file of the input must be readable",
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
