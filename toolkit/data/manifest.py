"""``manifest.json`` of a data folder: what it holds, where it came from, and what each file must be."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from toolkit.data.digest import Digest
from toolkit.data.remote.storage import Place, Url, open_folder, place_of
from toolkit.errors import InputError, Problem
from toolkit.files import user_cache, write_whole
from toolkit.paths import UnsafePath, inside, relative_name

FORMAT_VERSION = 3
# Format 1 had no recipe, no versions and no other files; each of its documents ends with end_of_text, as that field said.
# Format 2 had no sums of blocks and no hash of the manifest itself.
READABLE = (1, 2, FORMAT_VERSION)
NAME = "manifest.json"
OWN_HASH = "manifest_xxh3_128"
TOKENIZER = "tokenizer.json"
KIND = "tokens"  # of a manifest that names none
# What a folder holds -> the option that reads it.
REMEDIES = {KIND: "data=prepared data.path=FOLDER", "records": "data=arrays data.path=FOLDER"}
# What makes a folder of it.
MADE_BY = {
    KIND: "write data=stdlib, or make a data folder with launch/prepare.py (input=TEXTS, or import=FOLDER for Megatron's files) "
    "and name it with data.path=FOLDER",
    "records": "make one: python -m toolkit.data.tiles FOLDER, or your own with toolkit.data.records.writer (docs/data.md)",
}


@dataclass(frozen=True, slots=True)
class Shard:
    """The files ``<name>.bin``, ``<name>.idx`` and, unless they were made before format 3, ``<name>.sums`` (toolkit/data/sums.py)."""

    name: str
    documents: int
    tokens: int
    bin: Digest
    idx: Digest
    sums: Digest | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """Shards in the order in which their tokens follow one another."""

    shards: tuple[Shard, ...]

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def data_hash(self) -> str:
        """Of the tokens in their order: 32 hex digits."""
        parts = [(shard.tokens, shard.bin.xxh3_128) for shard in self.shards]
        return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())

    @property
    def files(self) -> dict[str, Digest]:
        """What each file of the shards must be, by name."""
        found: dict[str, Digest] = {}
        for shard in self.shards:
            found |= {f"{shard.name}.bin": shard.bin, f"{shard.name}.idx": shard.idx}
            if shard.sums is not None:
                found[f"{shard.name}.sums"] = shard.sums
        return found


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """The tokenizer that made the tokens. Its folder lies beside the shards and opens with transformers' AutoTokenizer."""

    folder: str
    hash: str  # xxh3-128 of tokenizer.json
    size: int  # of the vocabulary, special tokens included
    end_of_text: int
    ends_documents: bool = True  # end_of_text is the last token of every document, and stands nowhere else


@dataclass(frozen=True, slots=True)
class Origin:
    """The text that the tokens were made from."""

    description: str
    licence: str
    files: int
    bytes: int
    xxh3_128: str  # of the texts, names and recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class DataManifest:
    folder: Path  # where the files lie; not written. Of data in a store: where their tokenizer lies on this machine
    url: Url | None = None  # of the folder, for data in a store; not written
    dtype: str  # of a token in .bin: uint16 or int32
    origin: Origin
    tokenizer: TokenizerInfo
    splits: Mapping[str, Split]
    files: Mapping[str, Digest] = field(
        default_factory=dict
    )  # beside the shards: path below the folder -> what it must be
    recipe: Mapping[str, Any] = field(
        default_factory=dict
    )  # the settings that decided the bytes, where launch/prepare.py made them
    versions: Mapping[str, str] = field(default_factory=dict)  # packages that made them
    # String of a special token of the tokenizer -> how often the documents contained it, where launch/prepare.py counted them.
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    bad_rows: Mapping[str, Any] = field(
        default_factory=dict
    )  # left out of it: how many, "count", and the "first" ones in words

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / self.tokenizer.folder

    def file(self, name: str) -> Path:
        """Where the file ``name`` of this folder lies on this machine. Raises InputError if a link leads out of the folder."""
        return file_in(self.folder, name)

    @property
    def place(self) -> str:
        """The folder, as ``data.path`` names it."""
        return str(self.url or self.folder)

    def split(self, name: str) -> Split:
        """Raises InputError naming the splits that there are."""
        if name not in self.splits:
            remedy = f"use one of: {', '.join(sorted(self.splits))}"
            raise InputError(
                Problem(
                    "data.path", f"split {name} of {self.place}", "the data folder holds the split", remedy
                )
            )
        return self.splits[name]


def write_manifest(manifest: DataManifest, folder: Path) -> None:
    """Into ``folder``, which is ``manifest.folder`` or above it."""
    fields = {name: value for name, value in asdict(manifest).items() if name not in ("folder", "url")}
    root = manifest.folder.relative_to(folder).as_posix()
    content = {"format_version": FORMAT_VERSION, "root": root, **fields}
    write_content(folder, content)


def write_content(folder: Path, content: Mapping[str, Any]) -> None:
    """The manifest file of a data folder, with its hash of itself."""
    write_whole(folder / NAME, json.dumps({**content, OWN_HASH: own_hash(content)}, indent=1) + "\n")


def own_hash(content: Mapping[str, Any]) -> str:
    """Of everything that a manifest says but its hash."""
    said = {name: value for name, value in content.items() if name != OWN_HASH}
    return xxhash.xxh3_128_hexdigest(json.dumps(said, sort_keys=True).encode())


def file_in(folder: Path, name: str) -> Path:
    """The file ``name`` of a data folder. Raises InputError if its name or a link leads out of the folder."""
    try:
        return inside(folder, name)
    except UnsafePath as error:
        raise InputError(
            Problem(
                "data.path",
                f"{folder}: {error}",
                "the files of a data folder lie in it",
                "put the file itself there, or prepare the data again",
            )
        ) from error


def kind_of(path: str | Path) -> str:
    """What the data folder ``path`` holds. Raises InputError where it has no manifest that can be read."""
    return str(_content(path)[1].get("kind", KIND))


def read_content(path: str | Path, kind: str, readable: tuple[int, ...]) -> tuple[Place, dict[str, Any]]:
    """The manifest file of the data folder ``path`` and what it says, which is of ``kind`` and of one of the format versions ``readable``.

    Raises:
        InputError: there is none, it is of another kind or format version, or it cannot be read.
    """
    file, content = _content(path, MADE_BY[kind])
    found = content.get("kind", KIND)
    if found != kind:
        seen, rule = f"data.path={path} holds {found}", f"the kind of data chosen reads {kind}"
        raise InputError(
            Problem(
                "data.path",
                seen,
                rule,
                f"write {REMEDIES.get(str(found), 'the option of data= that reads it')}",
            )
        )
    version = content.get("format_version")
    if version not in readable:
        known = " and ".join(map(str, readable))
        seen, rule = (
            f"format_version={version} in {file}",
            f"this toolkit reads data of format versions {known}",
        )
        raise InputError(Problem("data.path", seen, rule, "prepare the data again"))
    if version == readable[-1] or OWN_HASH in content:  # the formats before had none
        expected, seen = content.get(OWN_HASH), own_hash(content)
        if seen != expected:
            raise InputError(
                Problem(
                    "data.path",
                    f"{file}: its content has xxh3 {seen}",
                    f"it says of itself: {OWN_HASH} {expected}",
                    f"restore {NAME} as it was written, or prepare the data again",
                )
            )
    return file, content


def _content(path: str | Path, remedy: str = MADE_BY[KIND]) -> tuple[Place, dict[str, Any]]:
    place = place_of(path)
    file = place / NAME
    try:
        text = open_folder(path).read_bytes(NAME) if isinstance(file, Url) else file.read_bytes()
    except OSError as error:
        raise InputError(
            Problem("data.path", f"data.path={path}: {error}", f"a data folder holds {NAME}", remedy)
        ) from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            Problem("data.path", f"{file}: {error}", "the manifest is JSON", "prepare the data again")
        ) from error
    if not isinstance(content, dict):
        raise incomplete(file, TypeError(type(content).__name__))
    return file, content


def incomplete(file: Place, error: Exception) -> InputError:
    """Of a manifest that lacks a field, or has one that cannot be."""
    seen = f"{file}: {type(error).__name__} {error}"
    return InputError(
        Problem("data.path", seen, "the manifest has every field of its format", "prepare the data again")
    )


def read_manifest(path: str | Path) -> DataManifest:
    """The manifest of the data folder ``path``, which may be a URL: then its tokenizer is copied to this machine.

    Raises:
        InputError: there is none, it is of another format version, or it cannot be read.
    """
    file, content = read_content(path, KIND, READABLE)
    try:
        manifest = _manifest(content, _root(place_of(path), content["root"]))
        if manifest.dtype not in ("uint16", "int32"):
            raise TypeError(f"dtype {manifest.dtype}")
    except (KeyError, TypeError, AttributeError, UnsafePath) as error:
        raise incomplete(file, error) from error
    if manifest.url is not None:
        _fetch_tokenizer(manifest)
    return manifest


def _root(place: Place, root: object) -> Place:
    """The folder ``root`` of ``place``; ``.`` is ``place`` itself."""
    if root == ".":
        return place
    return place / relative_name(root) if isinstance(place, Url) else file_in(place, relative_name(root))


def _fetch_tokenizer(manifest: DataManifest) -> None:
    """Copy the tokenizer's files from the store to ``manifest.folder``, which is named after their hash, unless they are there.

    Raises InputError where one is absent or differs, or the copy cannot be written.
    """
    assert manifest.url is not None, "a folder on this machine is read where it lies"
    below = f"{manifest.tokenizer.folder}/"
    # Before format 2 the manifest named none of them.
    others = [name for name in manifest.files if name.startswith(below) and name != below + TOKENIZER] or [
        f"{below}tokenizer_config.json"
    ]
    names = [*others, below + TOKENIZER]  # the last one written says that all are there
    if all((manifest.folder / name).is_file() for name in names):
        return
    contents = dict(zip(names, open_folder(manifest.url).read_files(names), strict=True))
    for name, content in contents.items():
        seen = xxhash.xxh3_128_hexdigest(content)
        expected = manifest.tokenizer.hash if name == below + TOKENIZER else None
        expected = manifest.files[name].xxh3_128 if name in manifest.files else expected
        if expected not in (None, seen):
            rule = f"the tokenizer beside the tokens made them: xxh3 {expected}"
            remedy = "put back the tokenizer that made the tokens, or prepare the data again"
            raise InputError(Problem("data.path", f"{manifest.url / name}: xxh3 {seen}", rule, remedy))
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


def generation_with(path: str | Path, tokenizer: str) -> DataManifest:
    """The generation of the data folder ``path`` whose tokenizer has the hash ``tokenizer``; the folder may point to a newer one.

    Raises:
        InputError: there is none, or ``path`` is no data folder.
    """
    newest = read_manifest(path)
    if newest.tokenizer.hash == tokenizer:
        return newest
    generations = [] if newest.url else Path(path).glob(f"*/{NAME}")  # a store is not listed
    for folder in sorted(file.parent for file in generations):
        with suppress(InputError):  # of another format version: not the one that is looked for
            manifest = read_manifest(folder)
            if manifest.tokenizer.hash == tokenizer:
                return manifest
    raise InputError(
        Problem(
            "data.path",
            f"data.path={path} has no tokenizer of hash {tokenizer}",
            "text is made with the tokenizer that the model was trained with",
            "name the folder that has it",
        )
    )


def _manifest(content: dict[str, Any], place: Place) -> DataManifest:
    splits = {
        name: Split(tuple(shard_of(shard) for shard in split["shards"]))
        for name, split in content["splits"].items()
    }
    origin, tokenizer = Origin(**content["origin"]), TokenizerInfo(**content["tokenizer"])
    relative_name(tokenizer.folder)
    if not re.fullmatch("[0-9a-f]{32}", tokenizer.hash):  # it names a folder of the cache
        raise TypeError(f"the tokenizer's hash is {tokenizer.hash!r:.80}, not 32 hexadecimal digits")
    files = {relative_name(name): Digest(**seen) for name, seen in content.get("files", {}).items()}
    url = place if isinstance(place, Url) else None
    folder = place if isinstance(place, Path) else user_cache() / "tokenizers" / tokenizer.hash
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


def shard_of(content: Mapping[str, Any]) -> Shard:
    """From its fields as JSON. Raises UnsafePath if its name leads out of the folder, KeyError or TypeError if a field cannot be."""
    relative_name(content["name"])
    sums = Digest(**content["sums"]) if content.get("sums") is not None else None
    return Shard(
        **{**content, "bin": Digest(**content["bin"]), "idx": Digest(**content["idx"]), "sums": sums}
    )


def describe(manifest: DataManifest) -> list[str]:
    """Lines for people: text, tokenizer, splits, place."""
    origin, tokenizer = manifest.origin, manifest.tokenizer
    lines = [
        f"text       {origin.description}: {origin.files:,} files, {origin.bytes:,} bytes, xxh3 {origin.xxh3_128} ({origin.licence})"
    ]
    lines.append(f"tokenizer  {tokenizer.size:,} tokens, xxh3 {tokenizer.hash}, {manifest.tokenizer_folder}")
    for name, split in manifest.splits.items():
        size = f"{sum(shard.bin.bytes for shard in split.shards):,} bytes of {manifest.dtype}"
        lines.append(
            f"{name:<10} {split.documents:,} documents, {split.tokens:,} tokens, {size}, xxh3 {split.data_hash}"
        )
    if manifest.special_tokens:
        counts = ", ".join(f"{content} {count:,} times" for content, count in manifest.special_tokens.items())
        lines.append(
            f"special    the documents contain {counts} (special_tokens={manifest.recipe.get('special_tokens')})"
        )
    if manifest.bad_rows:
        lines.append(
            f"bad rows   {manifest.bad_rows['count']:,} were left out (on_bad_row=skip), the first of them:"
        )
        lines += [f"           {seen}" for seen in manifest.bad_rows["first"]]
    return lines
