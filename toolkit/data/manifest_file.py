"""The manifest file of a data folder of any kind: ``manifest.json``, which contains its own hash."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from toolkit.commands import command_line
from toolkit.errors import InputError
from toolkit.files import write_whole
from toolkit.paths import Location, UnsafePath, Url, inside
from toolkit.remote.errors import DATA
from toolkit.remote.storage import open_folder, parse_location

MANIFEST_NAME = "manifest.json"
MANIFEST_HASH_KEY = "manifest_xxh3_128"
TOKENS_KIND = "tokens"  # the kind of a manifest that has no "kind"
# Kind of a folder -> the option that reads it.
OPTION_THAT_READS = {TOKENS_KIND: "data=prepared data.path=FOLDER", "records": "data=arrays data.path=FOLDER"}
# Kind of a folder -> how to make such a folder.
HOW_TO_MAKE = {
    TOKENS_KIND: f"write data=stdlib, or make a data folder with {command_line('prepare')} (input=TEXTS, or "
    "import=FOLDER for Megatron's files) and name it with data.path=FOLDER",
    "records": "make a folder of records: python -m toolkit.data.tiles FOLDER, or your own with "
    "toolkit.data.records.writer (docs/data.md)",
}


def write_manifest_file(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest file of a data folder with its own hash."""
    write_whole(
        folder / MANIFEST_NAME,
        json.dumps({**content, MANIFEST_HASH_KEY: hash_manifest(content)}, indent=1) + "\n",
    )


def hash_manifest(content: Mapping[str, Any]) -> str:
    """Hash everything in a manifest except its hash."""
    fields = {name: value for name, value in content.items() if name != MANIFEST_HASH_KEY}
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())


def resolve_file(folder: Path, name: str) -> Path:
    """Return the path of a file of a data folder.

    Raises InputError if its name or a link leads out of the folder.
    """
    try:
        return inside(folder, name)
    except UnsafePath as error:
        raise DATA.error(
            f"{folder}: {error}",
            "the files of a data folder lie in it",
            "put the file itself there, or prepare the data again",
        ) from error


def read_kind(path: str | Path) -> str:
    """Return the kind of data in the folder ``path``. Raises InputError if it has no readable manifest."""
    return str(_read_json(path)[1].get("kind", TOKENS_KIND))


def read_manifest_file(
    path: str | Path, kind: str, readable: tuple[int, ...]
) -> tuple[Location, dict[str, Any]]:
    """Read and check the manifest file of the data folder ``path``.

    Args:
        kind: the expected kind of data.
        readable: the accepted format versions, the newest last.

    Returns:
        The manifest file's location and its content.

    Raises:
        InputError: the file is absent, has another kind or format version, or cannot be read.
    """
    file, content = _read_json(path, HOW_TO_MAKE[kind])
    found_kind = content.get("kind", TOKENS_KIND)
    if found_kind != kind:
        seen, rule = f"data.path={path} holds {found_kind}", f"the kind of data chosen reads {kind}"
        raise DATA.error(
            seen, rule, f"write {OPTION_THAT_READS.get(str(found_kind), 'the option of data= that reads it')}"
        )
    version = content.get("format_version")
    if version not in readable:
        versions = " and ".join(map(str, readable))
        seen, rule = (
            f"format_version={version} in {file}",
            f"this toolkit reads data of format versions {versions}",
        )
        raise DATA.error(seen, rule, "prepare the data again")
    if version == readable[-1] or MANIFEST_HASH_KEY in content:  # earlier formats have no hash
        expected, seen = content.get(MANIFEST_HASH_KEY), hash_manifest(content)
        if seen != expected:
            raise DATA.error(
                f"{file}: its content has xxh3 {seen}",
                f"its {MANIFEST_HASH_KEY} is {expected}",
                f"restore {MANIFEST_NAME} as it was written, or prepare the data again",
            )
    return file, content


def _read_json(path: str | Path, remedy: str = HOW_TO_MAKE[TOKENS_KIND]) -> tuple[Location, dict[str, Any]]:
    location = parse_location(path)
    file = location / MANIFEST_NAME
    try:
        text = open_folder(path).read_bytes(MANIFEST_NAME) if isinstance(file, Url) else file.read_bytes()
    except OSError as error:
        raise DATA.error(
            f"data.path={path}: {error}", f"a data folder holds {MANIFEST_NAME}", remedy
        ) from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DATA.error(f"{file}: {error}", "the manifest is JSON", "prepare the data again") from error
    if not isinstance(content, dict):
        raise incomplete_manifest(file, TypeError(type(content).__name__))
    return file, content


def incomplete_manifest(file: Location, error: Exception) -> InputError:
    """Return the error for a manifest with a missing or invalid field."""
    seen = f"{file}: {type(error).__name__} {error}"
    return DATA.error(seen, "the manifest has every field of its format", "prepare the data again")
