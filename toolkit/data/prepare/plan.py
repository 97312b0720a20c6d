"""What there is to read, cut into units of work; and the recipe: every setting that decides the bytes of the result."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.config.prepare import InputFormat, PrepareConfig
from toolkit.data.digest import digest
from toolkit.data.prepare import datasource
from toolkit.data.prepare.formats import hidden, in_ranges, input_format
from toolkit.errors import InputError, Problem
from toolkit.files import write_whole
from toolkit.progress import Progress

VERSION = 2  # of the recipe: raise it when the same settings and input would give other bytes
NAME = "plan.json"
# Units are small enough to keep every process busy to the end, and large enough to be few. They do not decide the bytes.
LEAST_UNIT_BYTES, MOST_UNIT_BYTES, UNITS = 1 << 20, 32 << 20, 64


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the input, or a dataset that is no file here.

    Attributes:
        name: path below the input's folder; a dataset's id.
        modified: nanoseconds; 0 where it is no file.
        xxh3_128: of all its bytes; empty where it is no file.
        gone: it was removed from the input after the preparation began. Others keep their numbers.
    """

    name: str
    format: str
    bytes: int
    modified: int
    xxh3_128: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """What one process reads at a time: the whole sources ``first`` to ``last`` - 1, or a range of one of them.

    ``start`` and ``end`` count bytes of lines and jsonl, row groups of parquet, rows or shards of a dataset; ``end`` is 0 for whole files.
    """

    first: int
    last: int
    start: int
    end: int
    bytes: int  # of the input, for the progress

    @property
    def whole(self) -> bool:
        return self.end == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Attributes:
    root: folder below which sources lie; a dataset's id.
    seen: the input as it was typed.
    validation_below: documents whose ``keys.side`` is smaller go to validation.
    """

    root: str
    seen: str
    sources: tuple[Source, ...]
    units: tuple[Unit, ...]
    recipe: dict[str, Any]
    validation_below: int = 0

    def path(self, source: int) -> Path:
        return Path(self.root, self.sources[source].name)

    @property
    def bytes(self) -> int:
        return sum(source.bytes for source in self.present)

    @property
    def present(self) -> list[Source]:
        """By name."""
        return sorted((source for source in self.sources if not source.gone), key=lambda source: source.name)

    def write(self, folder: Path) -> None:
        write_whole(folder / NAME, json.dumps(asdict(self)))


def read_plan(folder: Path) -> Plan | None:
    """The plan of a preparation under way; None where there is none."""
    if not (folder / NAME).is_file():
        return None
    content = json.loads((folder / NAME).read_bytes())
    content["sources"] = tuple(Source(**source) for source in content["sources"])
    content["units"] = tuple(Unit(**unit) for unit in content["units"])
    return Plan(**content)


def make_plan(config: PrepareConfig, listed: Listing, progress: Progress) -> Plan:
    """Reads every byte of the input once, for its hashes.

    Raises:
        InputError: a file is not what its ending says.
    """
    plan = drafted(config, listed)
    sources = hashed(listed.root, plan.sources, progress)
    return replace(
        plan,
        sources=sources,
        units=tuple(units_of(config, listed.root, list(enumerate(sources)), plan.bytes)),
    )


def drafted(config: PrepareConfig, listed: Listing) -> Plan:
    """Without hashes and units."""
    assert config.input is not None
    sources = tuple(
        Source(name, kind.name, size, modified, "") for name, kind, size, modified in listed.files
    )
    return Plan(root=listed.root, seen=config.input, sources=sources, units=(), recipe=recipe(config))


def hashed(root: str, sources: Sequence[Source], progress: Progress) -> tuple[Source, ...]:
    """The same with their hashes."""
    found = []
    with progress.task("hashing the input", total=sum(source.bytes for source in sources), unit="B") as task:
        for source in sources:
            found.append(
                replace(source, xxh3_128=digest(Path(root, source.name)).xxh3_128)
                if source.modified
                else source
            )
            task.advance(source.bytes)
    return tuple(found)


def recipe(config: PrepareConfig) -> dict[str, Any]:
    """Key -> value, as a user types them, of everything but the input that decides the bytes."""
    given = config.tokenizer.path
    tokenizer: dict[str, Any] = {"tokenizer.end_of_text": config.tokenizer.end_of_text}
    if given is None:
        tokenizer |= {
            "tokenizer.vocab_size": config.tokenizer.vocab_size,
            "tokenizer.sample_mib": config.tokenizer.sample_mib,
        }
    else:
        file = Path(given) / "tokenizer.json" if Path(given).is_dir() else Path(given)
        tokenizer["tokenizer.path"] = (
            f"tokenizer.json of xxh3 {digest(file).xxh3_128}" if file.is_file() else given
        )
    return {
        "version": VERSION, "format": config.format.name, "text": config.text, "dataset.name": config.dataset.name,
        "dataset.split": config.dataset.split, "dataset.revision": config.dataset.revision, **tokenizer, "validation": config.validation,
        "special_tokens": config.special_tokens.name,
        "on_bad_row": config.on_bad_row.name,
        "deduplicate": config.deduplicate, "seed": config.seed, "shard_mib": config.shard_mib, "licence": config.licence,
    }  # fmt: skip


def as_typed(value: Any) -> str:
    """A value of the recipe in a user's words."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# -- listing


@dataclass(frozen=True, slots=True)
class Listing:
    """``files``: name below ``root``, format, bytes, time of change in ns (0: no file). By name. ``url``: of what ``root`` is a copy of."""

    root: str
    files: tuple[tuple[str, InputFormat, int, int], ...]
    url: str | None = None

    def shown(self, name: str) -> str:
        """A file as the user knows it."""
        return f"{self.url or self.root}/{name}"


def list_input(config: PrepareConfig) -> Listing:
    """The files of the input, by name. Raises InputError where there are none."""
    text = config.input
    assert text is not None
    path = Path(text).expanduser()
    if config.format is InputFormat.dataset and not path.is_dir():
        return Listing(text, ((text, InputFormat.dataset, 0, 0),))
    if path.is_file():
        root, found = path.parent, [path]
    elif path.is_dir():
        root, found = (
            path,
            sorted(file for file in path.rglob("*") if file.is_file() and not hidden(file.relative_to(path))),
        )
    else:
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())  # noqa: PTH207 - Path.glob takes no absolute pattern
        root = Path(*_without_pattern(path))
    if not found:
        rule = "the input is a file, a folder with files, a pattern that fits some, or stdlib"
        remedy = "mend the path; for a dataset of the hub write format=dataset as well"
        raise InputError(Problem("input", f"input={text}", rule, remedy))
    files = []
    for file in found:
        stat = file.stat()
        files.append(
            (
                file.relative_to(root).as_posix(),
                input_format(file, config.format),
                stat.st_size,
                stat.st_mtime_ns,
            )
        )
    return Listing(str(root), tuple(sorted(files, key=lambda entry: entry[0])))


def _without_pattern(path: Path) -> Iterator[str]:
    """The folders before the first one with a ``*``."""
    for part in path.parts[:-1]:
        if glob.has_magic(part):
            return
        yield part


# -- units


def units_of(
    config: PrepareConfig, root: str, numbered: Sequence[tuple[int, Source]], total: int
) -> Iterator[Unit]:
    """Units of some of the sources, with their numbers, of an input of ``total`` bytes."""
    aim = max(LEAST_UNIT_BYTES, min(MOST_UNIT_BYTES, total // UNITS))
    if numbered and numbered[0][1].format == InputFormat.dataset.name:
        first, last = numbered[0][0], numbered[-1][0] + 1
        yield from (
            Unit(first, last, start, end, size)
            for start, end, size in datasource.ranges(root, config.dataset, aim)
        )
        return
    gathered: list[int] = []  # whole neighbours are taken together up to ``aim``
    size = 0

    def together() -> Iterator[Unit]:
        if gathered:
            yield Unit(gathered[0], gathered[-1] + 1, 0, 0, size)
            gathered.clear()

    for number, source in numbered:
        parquet = source.format == InputFormat.parquet.name
        if parquet or in_ranges(source.name, source.format):
            yield from together()
            cuts = row_groups(Path(root, source.name), aim) if parquet else _byte_ranges(source.bytes, aim)
            yield from (Unit(number, number + 1, start, end, part) for start, end, part in cuts)
            continue
        if gathered and gathered[-1] != number - 1:
            yield from together()
        size = source.bytes + (size if gathered else 0)
        gathered.append(number)
        if size >= aim:
            yield from together()
    yield from together()


def _byte_ranges(size: int, aim: int) -> Iterator[tuple[int, int, int]]:
    for start in range(0, size, aim):
        end = min(start + aim, size)
        yield start, end, end - start


def row_groups(path: Path, aim: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of row groups, each range with its share of the file's bytes."""
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except pyarrow.ArrowInvalid as error:
        raise InputError(
            Problem("input", f"{path}: {error}", "a .parquet file is Parquet", "restore or remove the file")
        ) from error
    yield from gather(
        [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)],
        path.stat().st_size,
        aim,
    )


def gather(sizes: Sequence[int], total: int, aim: int) -> Iterator[tuple[int, int, int]]:
    """Ranges [start, end) of neighbours, of about ``aim`` of ``total`` bytes, in which the neighbours have shares as ``sizes``."""
    scale = total / max(1, sum(sizes))
    start, size = 0, 0.0
    for number, one in enumerate(sizes):
        size += one * scale
        if size >= aim or number == len(sizes) - 1:
            yield start, number + 1, int(size)
            start, size = number + 1, 0.0
