"""Format of an input file by its name: compression, archive, and how documents are stored."""

from __future__ import annotations

from pathlib import PurePath

from toolkit.config.prepare import InputFormat

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
ARCHIVES = (".zip", ".tar", ".tgz", ".tbz2", ".txz")
ENDINGS = {
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
    suffix_ = {".tgz": ".gz", ".tbz2": ".bz2", ".txz": ".xz"}.get(suffix, suffix)
    return suffix_ if suffix_ in COMPRESSED else None


def is_archive(name: str | PurePath) -> bool:
    """Return whether the file is an archive, whose members are read like files of the input."""
    file = PurePath(name)
    return (file.with_suffix("") if file.suffix in COMPRESSED else file).suffix in ARCHIVES


def input_format(name: str | PurePath, requested: InputFormat) -> InputFormat:
    """Return the format of a file; ``auto`` for an archive, whose files have formats of their own."""
    if requested is not InputFormat.auto or is_archive(name):
        return requested
    file = PurePath(name)
    uncompressed_name = file.with_suffix("") if file.suffix in COMPRESSED else file
    return ENDINGS.get(uncompressed_name.suffix, InputFormat.text)


def in_ranges(name: str | PurePath, kind: str) -> bool:
    """Return whether ranges of the file's bytes can be read separately."""
    return kind in BY_LINES and compression(name) is None and not is_archive(name)


def hidden(path: PurePath) -> bool:
    return any(part.startswith((".", "__pycache__", "__MACOSX")) for part in path.parts)
