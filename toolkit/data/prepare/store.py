"""An input in a store: ``input=s3://bucket/texts``. Its files are brought here first, and then read as files of this machine.

    OUTPUT/.work/input/    the copies, each with its name, and with the store's time of change; removed with .work

A copy has its name only when it is whole, so a preparation that was killed fetches what is not here yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

import xxhash

from toolkit.config.prepare import PrepareConfig
from toolkit.data.prepare.formats import hidden, input_format
from toolkit.data.prepare.plan import Listing
from toolkit.data.remote.storage import Buffer, Range, StoreFolder, Url, open_folder, place_of
from toolkit.errors import InputError, Problem
from toolkit.paths import UnsafePath, relative_name
from toolkit.progress import Progress

INPUT = "input"
AT_ONCE_BYTES = 32 << 20
LISTED = ("s3", "gs", "az")  # the others cannot say which files they have


def list_store(config: PrepareConfig, work: Path) -> Listing:
    """The files below the URL, by name; their copies come to lie in ``work``.

    Raises:
        InputError: the store does not answer, or has none there.
    """
    assert config.input is not None
    place = place_of(config.input, "input")
    assert isinstance(place, Url)
    if place.partition("://")[0] not in LISTED:
        kinds = ", ".join(f"{kind}://" for kind in LISTED)
        raise InputError(
            Problem(
                "input",
                f"input={place}",
                f"an input in a store is a folder of {kinds}: others cannot be listed",
                "bring its files to this machine, and name their folder",
            )
        )
    with _of_input():
        found = [file for file in _folder(place).listing() if not hidden(PurePosixPath(file.name))]
    if not found:
        raise InputError(
            Problem(
                "input",
                f"input={place}: no file below it",
                "an input in a store is a folder with files",
                "mend the URL: it names a folder, not one file and not a pattern",
            )
        )
    for file in found:
        try:
            relative_name(file.name)
        except UnsafePath as error:
            rule = "the name of a file in a store becomes the name of its copy on this machine"
            raise InputError(Problem("input", f"{place}: {error}", rule, "rename it in the store")) from error
    files = tuple(
        (file.name, input_format(file.name, config.format), file.bytes, file.modified) for file in found
    )
    return Listing(str(work / INPUT), files, url=place)


def fetch(listed: Listing, progress: Progress) -> None:
    """Bring every file of ``listed`` here that is not here as the store has it. Raises InputError, StorageError."""
    root = Path(listed.root)
    left = [
        (name, size, modified)
        for name, _, size, modified in listed.files
        if not _is_here(root / name, size, modified)
    ]
    total, missing = sum(size for *_, size, _ in listed.files), sum(size for _, size, _ in left)
    times = {name: modified for name, _, modified in left}
    sizes = {name: size for name, size, _ in left}
    with (
        _of_input(),
        progress.task("fetching the input", total=total, unit="B", done=total - missing) as task,
    ):
        for name in sizes:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            _partial(root / name).write_bytes(b"")
            if not sizes[name]:
                _whole(root / name, times[name])
        for one, content in _contents(listed, sizes):
            with _partial(root / one.name).open("ab") as file:
                file.write(content)
            if one.end == sizes[one.name]:
                _whole(root / one.name, times[one.name])
            task.advance(len(content))


def xxh3_128(listed: Listing, names: Sequence[str]) -> dict[str, str]:
    """Of each of these files, as the store has it now. Raises InputError, StorageError."""
    hashers = {name: xxhash.xxh3_128() for name in names}
    with _of_input():
        for one, content in _contents(
            listed, {name: size for name, _, size, _ in listed.files if name in hashers}
        ):
            hashers[one.name].update(content)
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}


def _contents(listed: Listing, sizes: dict[str, int]) -> Iterator[tuple[Range, Buffer]]:
    """All bytes of these files, in order."""
    assert listed.url is not None
    folder = _folder(Url(listed.url)).for_reading(sizes)
    gathered: list[Range] = []
    held = 0
    for name, size in sizes.items():
        for start in range(0, size, AT_ONCE_BYTES):
            one = Range(name, start, min(start + AT_ONCE_BYTES, size))
            if held + one.end - one.start > AT_ONCE_BYTES:
                yield from zip(gathered, folder.read_ranges(gathered), strict=True)
                gathered, held = [], 0
            gathered.append(one)
            held += one.end - one.start
    if gathered:
        yield from zip(gathered, folder.read_ranges(gathered), strict=True)


def _folder(place: Url) -> StoreFolder:
    folder = open_folder(place)
    assert isinstance(folder, StoreFolder)
    return folder


def _is_here(file: Path, size: int, modified: int) -> bool:
    if not file.is_file():
        return False
    stat = file.stat()
    return (stat.st_size, stat.st_mtime_ns) == (size, modified)


def _partial(file: Path) -> Path:
    return file.with_name(f".{file.name}.fetching")


def _whole(file: Path, modified: int) -> None:
    os.utime(_partial(file), ns=(modified, modified))
    _partial(file).replace(file)


@contextmanager
def _of_input() -> Iterator[None]:
    """What a store answers is about data.path where a run reads; here it is about input."""
    try:
        yield
    except InputError as error:
        problems = [
            replace(
                problem,
                key="input",
                rule=problem.rule.replace("the data folder with every file of its manifest", "the input"),
                remedy=problem.remedy.replace("data.path", "input"),
            )
            for problem in error.problems
        ]
    else:
        return
    raise InputError(*problems)
