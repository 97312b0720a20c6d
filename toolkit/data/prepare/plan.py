"""The input cut into work units; and the recipe: every setting that determines the bytes of the result."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.config.prepare import InputFormat, PrepareConfig
from toolkit.data.digest import hash_file
from toolkit.data.prepare.hf_dataset import row_ranges
from toolkit.data.prepare.input_file import detect_format, is_hidden, is_splittable
from toolkit.errors import InputError, Problem
from toolkit.files import write_whole
from toolkit.progress import Progress

VERSION = 2  # of the recipe: increase it if the same settings and input would give other bytes
PLAN_NAME = "plan.json"
# Units are small enough to occupy every process to the end and large enough to be few. They do not affect the
# bytes.
MIN_UNIT_BYTES, MAX_UNIT_BYTES, UNITS = 1 << 20, 32 << 20, 64


@dataclass(frozen=True, slots=True)
class InputSource:
    """A file of the input, or a dataset that is not a local file.

    Attributes:
        name: path below the input's folder; a dataset's id.
        modified: modification time in nanoseconds; 0 if it is not a file.
        xxh3_128: hash of all its bytes; empty if it is not a file.
        gone: it was removed from the input after the preparation began. Other sources keep their numbers.
    """

    name: str
    format: str
    bytes: int
    modified: int
    xxh3_128: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Input that one process reads at a time: sources ``first`` to ``last`` - 1, or a range of one source.

    ``start`` and ``end`` count bytes of lines and jsonl, row groups of parquet, rows or shards of a dataset.
    ``end`` is 0 for whole files.
    """

    first: int
    last: int
    start: int
    end: int
    bytes: int  # of the input, for progress reports

    @property
    def whole(self) -> bool:
        return self.end == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationPlan:
    """The sources, units and recipe of a preparation.

    Attributes:
        root: folder of the sources; a dataset's id.
        seen: the input as the user wrote it.
        validation_below: documents with a smaller ``split_hash`` are for validation.
    """

    root: str
    seen: str
    sources: tuple[InputSource, ...]
    units: tuple[WorkUnit, ...]
    recipe: dict[str, Any]
    validation_below: int = 0

    def path(self, source: int) -> Path:
        return Path(self.root, self.sources[source].name)

    @property
    def bytes(self) -> int:
        return sum(source.bytes for source in self.present)

    @property
    def present(self) -> list[InputSource]:
        """Sources that still exist, by name."""
        return sorted((source for source in self.sources if not source.gone), key=lambda source: source.name)

    def write(self, folder: Path) -> None:
        write_whole(folder / PLAN_NAME, json.dumps(asdict(self)))


def read_plan(folder: Path) -> PreparationPlan | None:
    """Read the plan of an unfinished preparation; None if there is none."""
    if not (folder / PLAN_NAME).is_file():
        return None
    content = json.loads((folder / PLAN_NAME).read_bytes())
    content["sources"] = tuple(InputSource(**source) for source in content["sources"])
    content["units"] = tuple(WorkUnit(**unit) for unit in content["units"])
    return PreparationPlan(**content)


def make_plan(config: PrepareConfig, listed: InputListing, progress: Progress) -> PreparationPlan:
    """Make the plan. Reads every byte of the input once, for its hashes.

    Raises:
        InputError: a file does not have the format of its suffix.
    """
    plan = draft_plan(config, listed)
    sources = hash_sources(listed.root, plan.sources, progress)
    return replace(
        plan,
        sources=sources,
        units=tuple(cut_units(config, listed.root, list(enumerate(sources)), plan.bytes)),
    )


def draft_plan(config: PrepareConfig, listed: InputListing) -> PreparationPlan:
    """Make a plan without hashes and units."""
    assert config.input is not None
    sources = tuple(
        InputSource(name, kind.name, size, modified, "") for name, kind, size, modified in listed.files
    )
    return PreparationPlan(
        root=listed.root, seen=config.input, sources=sources, units=(), recipe=build_recipe(config)
    )


def hash_sources(root: str, sources: Sequence[InputSource], progress: Progress) -> tuple[InputSource, ...]:
    """Add the hashes of sources."""
    found = []
    with progress.task("hashing the input", total=sum(source.bytes for source in sources), unit="B") as task:
        for source in sources:
            found.append(
                replace(source, xxh3_128=hash_file(Path(root, source.name)).xxh3_128)
                if source.modified
                else source
            )
            task.advance(source.bytes)
    return tuple(found)


def build_recipe(config: PrepareConfig) -> dict[str, Any]:
    """Return the settings that, with the input, determine the bytes: key -> value as the user writes them."""
    tokenizer_path = config.tokenizer.path
    tokenizer: dict[str, Any] = {"tokenizer.end_of_text": config.tokenizer.end_of_text}
    if tokenizer_path is None:
        tokenizer |= {
            "tokenizer.vocab_size": config.tokenizer.vocab_size,
            "tokenizer.sample_mib": config.tokenizer.sample_mib,
        }
    else:
        file = (
            Path(tokenizer_path) / "tokenizer.json" if Path(tokenizer_path).is_dir() else Path(tokenizer_path)
        )
        tokenizer["tokenizer.path"] = (
            f"tokenizer.json of xxh3 {hash_file(file).xxh3_128}" if file.is_file() else tokenizer_path
        )
    return {
        "version": VERSION,
        "format": config.format.name,
        "text": config.text,
        "dataset.name": config.dataset.name,
        "dataset.split": config.dataset.split,
        "dataset.revision": config.dataset.revision,
        **tokenizer,
        "validation": config.validation,
        "special_tokens": config.special_tokens.name,
        "on_bad_row": config.on_bad_row.name,
        "deduplicate": config.deduplicate,
        "seed": config.seed,
        "shard_mib": config.shard_mib,
        "licence": config.licence,
    }


def format_value(value: Any) -> str:
    """Format a value of the recipe as the user writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# -- listing


@dataclass(frozen=True, slots=True)
class InputListing:
    """The files of the input.

    Attributes:
        files: by name: name below ``root``, format, bytes, modification time in nanoseconds (0: not a file).
        url: the store's folder of which ``root`` is a copy.
    """

    root: str
    files: tuple[tuple[str, InputFormat, int, int], ...]
    url: str | None = None


def list_input(config: PrepareConfig) -> InputListing:
    """List the files of the input by name. Raises InputError if there are none."""
    pattern = config.input
    assert pattern is not None
    path = Path(pattern).expanduser()
    if config.format is InputFormat.dataset and not path.is_dir():
        return InputListing(pattern, ((pattern, InputFormat.dataset, 0, 0),))
    if path.is_file():
        root, found = path.parent, [path]
    elif path.is_dir():
        root, found = (
            path,
            sorted(
                file for file in path.rglob("*") if file.is_file() and not is_hidden(file.relative_to(path))
            ),
        )
    else:
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())  # noqa: PTH207 - Path.glob takes no absolute pattern
        root = Path(*_without_pattern(path))
    if not found:
        rule = "the input is a file, a folder with files, a pattern that matches some, or stdlib"
        remedy = "correct the path; for a dataset of the hub write format=dataset as well"
        raise InputError(Problem("input", f"input={pattern}", rule, remedy))
    files = []
    for file in found:
        stat = file.stat()
        files.append(
            (
                file.relative_to(root).as_posix(),
                detect_format(file, config.format),
                stat.st_size,
                stat.st_mtime_ns,
            )
        )
    return InputListing(str(root), tuple(sorted(files, key=lambda entry: entry[0])))


def _without_pattern(path: Path) -> Iterator[str]:
    """Return the folders before the first one with a wildcard."""
    for part in path.parts[:-1]:
        if glob.has_magic(part):
            return
        yield part


# -- units


def cut_units(
    config: PrepareConfig, root: str, numbered: Sequence[tuple[int, InputSource]], total: int
) -> Iterator[WorkUnit]:
    """Cut some of the sources, given with their numbers, into units; the whole input has ``total`` bytes."""
    target_bytes = max(MIN_UNIT_BYTES, min(MAX_UNIT_BYTES, total // UNITS))
    if numbered and numbered[0][1].format == InputFormat.dataset.name:
        first, last = numbered[0][0], numbered[-1][0] + 1
        yield from (
            WorkUnit(first, last, start, end, size)
            for start, end, size in row_ranges(root, config.dataset, target_bytes)
        )
        return
    neighbours: list[int] = []  # consecutive whole files, up to ``target_bytes`` together
    size = 0

    def flush() -> Iterator[WorkUnit]:
        if neighbours:
            yield WorkUnit(neighbours[0], neighbours[-1] + 1, 0, 0, size)
            neighbours.clear()

    for number, source in numbered:
        parquet = source.format == InputFormat.parquet.name
        if parquet or is_splittable(source.name, source.format):
            yield from flush()
            cuts = (
                row_group_ranges(Path(root, source.name), target_bytes)
                if parquet
                else _byte_ranges(source.bytes, target_bytes)
            )
            yield from (WorkUnit(number, number + 1, start, end, part) for start, end, part in cuts)
            continue
        if neighbours and neighbours[-1] != number - 1:
            yield from flush()
        size = source.bytes + (size if neighbours else 0)
        neighbours.append(number)
        if size >= target_bytes:
            yield from flush()
    yield from flush()


def _byte_ranges(size: int, target_bytes: int) -> Iterator[tuple[int, int, int]]:
    for start in range(0, size, target_bytes):
        end = min(start + target_bytes, size)
        yield start, end, end - start


def row_group_ranges(path: Path, target_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Return ranges of row groups, each with its share of the file's bytes."""
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except pyarrow.ArrowInvalid as error:
        raise InputError(
            Problem("input", f"{path}: {error}", "a .parquet file is Parquet", "restore or remove the file")
        ) from error
    yield from group_neighbours(
        [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)],
        path.stat().st_size,
        target_bytes,
    )


def group_neighbours(sizes: Sequence[int], total: int, target_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield ranges [start, end) of about ``target_bytes`` of neighbours with sizes in the ratio ``sizes``."""
    scale = total / max(1, sum(sizes))
    start, size = 0, 0.0
    for number, group_size in enumerate(sizes):
        size += group_size * scale
        if size >= target_bytes or number == len(sizes) - 1:
            yield start, number + 1, int(size)
            start, size = number + 1, 0.0
