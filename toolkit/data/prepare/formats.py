"""What a file of the input is, by its name: compression, archive, and how documents lie in it."""

from __future__ import annotations

from pathlib import PurePath

from toolkit.config.prepare import InputFormat

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
ARCHIVES = (".zip", ".tar", ".tgz", ".tbz2", ".txz")
ENDINGS = {
    ".jsonl": InputFormat.jsonl, ".ndjson": InputFormat.jsonl, ".json": InputFormat.json, ".parquet": InputFormat.parquet,
    ".csv": InputFormat.csv, ".tsv": InputFormat.tsv,
}  # fmt: skip
# Lines of these begin at any byte, so one file is read in ranges by several processes.
BY_LINES = (InputFormat.lines.name, InputFormat.jsonl.name)


def compression(name: str | PurePath) -> str | None:
    """One of COMPRESSED, or None."""
    suffix = PurePath(name).suffix
    short = {".tgz": ".gz", ".tbz2": ".bz2", ".txz": ".xz"}.get(suffix, suffix)
    return short if short in COMPRESSED else None


def is_archive(name: str | PurePath) -> bool:
    """Its files are read as files of the input are."""
    file = PurePath(name)
    return (file.with_suffix("") if file.suffix in COMPRESSED else file).suffix in ARCHIVES


def input_format(name: str | PurePath, asked: InputFormat) -> InputFormat:
    """``auto`` for an archive: each of its files has a format of its own."""
    if asked is not InputFormat.auto or is_archive(name):
        return asked
    file = PurePath(name)
    plain = file.with_suffix("") if file.suffix in COMPRESSED else file
    return ENDINGS.get(plain.suffix, InputFormat.text)


def in_ranges(name: str | PurePath, kind: str) -> bool:
    """Whether the file is read in ranges of its bytes."""
    return kind in BY_LINES and compression(name) is None and not is_archive(name)


def hidden(path: PurePath) -> bool:
    return any(part.startswith((".", "__pycache__", "__MACOSX")) for part in path.parts)
