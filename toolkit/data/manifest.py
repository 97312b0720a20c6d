"""``manifest.json`` of a data folder: its contents, their origin, and size and hash of every file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from toolkit.data.digest import FileDigest
from toolkit.data.manifest_file import (
    MANIFEST_NAME,
    TOKENS_KIND,
    incomplete_manifest,
    read_manifest_file,
    resolve_file,
    write_manifest_file,
)
from toolkit.errors import InputError, Problem
from toolkit.files import user_cache, write_whole
from toolkit.paths import Location, UnsafePath, Url, relative_name
from toolkit.remote.errors import DATA
from toolkit.remote.storage import open_folder, parse_location

FORMAT_VERSION = 3
# Format 1 has no recipe, no versions and no other files, and each document ends with end_of_text.
# Format 2 has no block checksums and no hash of the manifest itself.
READABLE_VERSIONS = (1, 2, FORMAT_VERSION)
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TokenShard:
    """The files ``<name>.bin``, ``<name>.idx`` and, from format 3 on, ``<name>.sums`` (checksums.py)."""

    name: str
    documents: int
    tokens: int
    bin: FileDigest
    idx: FileDigest
    sums: FileDigest | None = None


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """The shards of a split in the order of their tokens."""

    shards: tuple[TokenShard, ...]

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def data_hash(self) -> str:
        """Hash of the tokens in their order, 32 hex digits."""
        parts = [(shard.tokens, shard.bin.xxh3_128) for shard in self.shards]
        return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())

    @property
    def files(self) -> dict[str, FileDigest]:
        """Size and hash of each file of the shards, by file name."""
        files: dict[str, FileDigest] = {}
        for shard in self.shards:
            files |= {f"{shard.name}.bin": shard.bin, f"{shard.name}.idx": shard.idx}
            if shard.sums is not None:
                files[f"{shard.name}.sums"] = shard.sums
        return files


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """The tokenizer that encoded the text.

    Its folder is stored with the shards; transformers' AutoTokenizer opens it.
    """

    folder: str
    hash: str  # xxh3-128 of tokenizer.json
    size: int  # of the vocabulary, special tokens included
    end_of_text: int
    ends_documents: bool = True  # end_of_text is the last token of every document and occurs nowhere else


@dataclass(frozen=True, slots=True)
class DataOrigin:
    """The text from which the tokens were encoded."""

    description: str
    licence: str
    files: int
    bytes: int
    xxh3_128: str  # hash of the texts, their names and the recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class DataManifest:
    # Local folder of the files (not written); for data in a store, the local copy of their tokenizer.
    folder: Path
    url: Url | None = None  # the folder's URL for data in a store (not written)
    dtype: str  # dtype of a token in .bin: uint16 or int32
    origin: DataOrigin
    tokenizer: TokenizerInfo
    splits: Mapping[str, TokenSplit]
    # Files other than the shards: path below the folder -> size and hash.
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    # The settings of launch/prepare.py that determine the bytes.
    recipe: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)  # of the packages that wrote the data
    # String of a special token -> its number of occurrences in the documents, as counted by
    # launch/prepare.py.
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    # Rows that were skipped: their number "count", and descriptions of the "first" of them.
    bad_rows: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / self.tokenizer.folder

    def file(self, name: str) -> Path:
        """Return the local path of the file ``name``. Raises InputError if a link leads out of the folder."""
        return resolve_file(self.folder, name)

    @property
    def location(self) -> str:
        """The folder as ``data.path`` names it."""
        return str(self.url or self.folder)

    def split(self, name: str) -> TokenSplit:
        """Return the split ``name``. Raises InputError naming the available splits if there is none of this
        name.
        """
        if name not in self.splits:
            remedy = f"use one of: {', '.join(sorted(self.splits))}"
            raise DATA.error(f"split {name} of {self.location}", "the data folder holds the split", remedy)
        return self.splits[name]


def write_manifest(manifest: DataManifest, folder: Path) -> None:
    """Write the manifest into ``folder``, which is ``manifest.folder`` or a parent of it."""
    fields = {name: value for name, value in asdict(manifest).items() if name not in ("folder", "url")}
    root = manifest.folder.relative_to(folder).as_posix()
    content = {"format_version": FORMAT_VERSION, "root": root, **fields}
    write_manifest_file(folder, content)


def read_manifest(path: str | Path) -> DataManifest:
    """Read the manifest of the data folder ``path``. If it is a URL, copy its tokenizer to this machine.

    Raises:
        InputError: the manifest is absent, has another format version, or cannot be read.
    """
    file, content = read_manifest_file(path, TOKENS_KIND, READABLE_VERSIONS)
    try:
        manifest = _parse_manifest(content, _root(parse_location(path), content["root"]))
        if manifest.dtype not in ("uint16", "int32"):
            raise TypeError(f"dtype {manifest.dtype}")
    except (KeyError, TypeError, AttributeError, UnsafePath) as error:
        raise incomplete_manifest(file, error) from error
    if manifest.url is not None:
        _fetch_tokenizer(manifest)
    return manifest


def _root(location: Location, root: object) -> Location:
    """Resolve the manifest's ``root`` relative to ``location``; ``.`` is ``location`` itself."""
    if root == ".":
        return location
    return (
        location / relative_name(root)
        if isinstance(location, Url)
        else resolve_file(location, relative_name(root))
    )


def _fetch_tokenizer(manifest: DataManifest) -> None:
    """Copy the tokenizer's files from the store to ``manifest.folder``, unless they are there.

    Raises InputError if a file is absent or differs, or if the copy cannot be written.
    """
    assert manifest.url is not None, "a local folder needs no copy of its tokenizer"
    below = f"{manifest.tokenizer.folder}/"
    # Manifests of format 1 do not list these files.
    others = [
        name for name in manifest.files if name.startswith(below) and name != below + TOKENIZER_FILE
    ] or [f"{below}tokenizer_config.json"]
    names = [*others, below + TOKENIZER_FILE]  # the last file is written last: if it exists, all do
    if all((manifest.folder / name).is_file() for name in names):
        return
    contents = dict(zip(names, open_folder(manifest.url).read_files(names), strict=True))
    for name, content in contents.items():
        seen = xxhash.xxh3_128_hexdigest(content)
        expected = manifest.tokenizer.hash if name == below + TOKENIZER_FILE else None
        expected = manifest.files[name].xxh3_128 if name in manifest.files else expected
        if expected not in (None, seen):
            rule = f"the stored tokenizer is the one that encoded the tokens: xxh3 {expected}"
            remedy = "put back the tokenizer that encoded the tokens, or prepare the data again"
            raise DATA.error(f"{manifest.url / name}: xxh3 {seen}", rule, remedy)
    try:
        for name, content in contents.items():
            manifest.file(name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(manifest.file(name), content, durable=False)
    except OSError as error:
        seen, remedy = (
            f"{manifest.folder}: {error.strerror or error}",
            "name a folder that can be written: XDG_CACHE_HOME=FOLDER",
        )
        raise InputError(
            Problem(
                "XDG_CACHE_HOME", seen, "the tokenizer of data in a store is copied to this machine", remedy
            )
        ) from error


def find_generation(path: str | Path, tokenizer: str) -> DataManifest:
    """Find the generation of the data folder ``path`` whose tokenizer has the hash ``tokenizer``.

    The folder's own manifest may point to a newer generation.

    Raises:
        InputError: there is no such generation, or ``path`` is not a data folder.
    """
    newest = read_manifest(path)
    if newest.tokenizer.hash == tokenizer:
        return newest
    generations = [] if newest.url else Path(path).glob(f"*/{MANIFEST_NAME}")  # stores are not listed
    for folder in sorted(file.parent for file in generations):
        with suppress(InputError):  # a generation of another format version
            manifest = read_manifest(folder)
            if manifest.tokenizer.hash == tokenizer:
                return manifest
    raise DATA.error(
        f"data.path={path} has no tokenizer of hash {tokenizer}",
        "text is encoded with the tokenizer that the model was trained with",
        "name the folder that has it",
    )


def _parse_manifest(content: dict[str, Any], location: Location) -> DataManifest:
    splits = {
        name: TokenSplit(tuple(parse_shard(shard) for shard in split["shards"]))
        for name, split in content["splits"].items()
    }
    origin, tokenizer = DataOrigin(**content["origin"]), TokenizerInfo(**content["tokenizer"])
    relative_name(tokenizer.folder)
    if not re.fullmatch("[0-9a-f]{32}", tokenizer.hash):  # the hash names a folder of the cache
        raise TypeError(f"the tokenizer's hash is {tokenizer.hash!r:.80}, not 32 hexadecimal digits")
    files = {relative_name(name): FileDigest(**seen) for name, seen in content.get("files", {}).items()}
    url = location if isinstance(location, Url) else None
    folder = location if isinstance(location, Path) else user_cache() / "tokenizers" / tokenizer.hash
    return DataManifest(
        folder=folder,
        url=url,
        dtype=content["dtype"],
        origin=origin,
        tokenizer=tokenizer,
        splits=splits,
        files=files,
        recipe=content.get("recipe", {}),
        versions=content.get("versions", {}),
        special_tokens=content.get("special_tokens", {}),
        bad_rows=content.get("bad_rows", {}),
    )


def parse_shard(content: Mapping[str, Any]) -> TokenShard:
    """Parse a shard's JSON fields.

    Raises UnsafePath if its name leads out of the folder, KeyError or TypeError if a field is invalid.
    """
    relative_name(content["name"])
    sums = FileDigest(**content["sums"]) if content.get("sums") is not None else None
    return TokenShard(
        **{**content, "bin": FileDigest(**content["bin"]), "idx": FileDigest(**content["idx"]), "sums": sums}
    )


def describe_manifest(manifest: DataManifest) -> list[str]:
    """Format the manifest for display: text, tokenizer, splits, and what was skipped."""
    origin, tokenizer = manifest.origin, manifest.tokenizer
    lines = [
        f"text       {origin.description}: {origin.files:,} files, {origin.bytes:,} bytes, "
        f"xxh3 {origin.xxh3_128} ({origin.licence})"
    ]
    lines.append(f"tokenizer  {tokenizer.size:,} tokens, xxh3 {tokenizer.hash}, {manifest.tokenizer_folder}")
    for name, split in manifest.splits.items():
        size = f"{sum(shard.bin.bytes for shard in split.shards):,} bytes of {manifest.dtype}"
        lines.append(
            f"{name:<10} {split.documents:,} documents, {split.tokens:,} tokens, {size}, "
            f"xxh3 {split.data_hash}"
        )
    if manifest.special_tokens:
        counts = ", ".join(f"{content} {count:,} times" for content, count in manifest.special_tokens.items())
        lines.append(
            f"special    the documents contain {counts} "
            f"(special_tokens={manifest.recipe.get('special_tokens')})"
        )
    if manifest.bad_rows:
        lines.append(
            f"bad rows   {manifest.bad_rows['count']:,} were skipped (on_bad_row=skip), the first of them:"
        )
        lines += [f"           {seen}" for seen in manifest.bad_rows["first"]]
    return lines
