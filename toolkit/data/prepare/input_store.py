"""An input in a store (``input=s3://bucket/texts``), copied to this machine and read locally.

    OUTPUT/.work/input/    the copies with their names and the store's modification times; removed with .work

A copy gets its name only when it is complete, so a killed preparation fetches only the missing files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

import xxhash

from toolkit.config.prepare import PrepareConfig
from toolkit.data.prepare.input_file import detect_format, is_hidden
from toolkit.data.prepare.plan import InputListing
from toolkit.errors import InputError, Problem
from toolkit.paths import UnsafePath, Url, relative_name
from toolkit.progress import Progress
from toolkit.remote.storage import Buffer, ByteRange, StoreFolder, open_folder, parse_location

INPUT = "input"
BATCH_BYTES = 32 << 20
LISTED = ("s3", "gs", "az")  # other stores cannot list their files


def list_store(config: PrepareConfig, work: Path) -> InputListing:
    """List the files below the URL by name; their copies will be in ``work``.

    Raises:
        InputError: the store does not answer, or there are no files.
    """
    assert config.input is not None
    location = parse_location(config.input, "input")
    assert isinstance(location, Url)
    if location.partition("://")[0] not in LISTED:
        schemes = ", ".join(f"{kind}://" for kind in LISTED)
        raise InputError(
            Problem(
                "input",
                f"input={location}",
                f"an input in a store is a folder of {schemes}: other stores cannot list their files",
                "copy its files to this machine, and name their folder",
            )
        )
    with _errors_about_input():
        stored = [file for file in _folder(location).listing() if not is_hidden(PurePosixPath(file.name))]
    if not stored:
        raise InputError(
            Problem(
                "input",
                f"input={location}: no file below it",
                "an input in a store is a folder with files",
                "correct the URL: it names a folder, not a file or a pattern",
            )
        )
    for file in stored:
        try:
            relative_name(file.name)
        except UnsafePath as error:
            rule = "the name of a file in a store becomes the name of its copy on this machine"
            raise InputError(
                Problem("input", f"{location}: {error}", rule, "rename it in the store")
            ) from error
    files = tuple(
        (file.name, detect_format(file.name, config.format), file.bytes, file.modified) for file in stored
    )
    return InputListing(str(work / INPUT), files, url=location)


def fetch_input(listed: InputListing, progress: Progress) -> None:
    """Copy every file of ``listed`` whose copy is missing or outdated. Raises InputError, StorageError."""
    root = Path(listed.root)
    outdated = [
        (name, size, modified)
        for name, _, size, modified in listed.files
        if not _is_current(root / name, size, modified)
    ]
    total, outdated_bytes = sum(size for *_, size, _ in listed.files), sum(size for _, size, _ in outdated)
    times = {name: modified for name, _, modified in outdated}
    sizes = {name: size for name, size, _ in outdated}
    with (
        _errors_about_input(),
        progress.task("fetching the input", total=total, unit="B", done=total - outdated_bytes) as task,
    ):
        for name in sizes:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            _partial_path(root / name).write_bytes(b"")
            if not sizes[name]:
                _finish_copy(root / name, times[name])
        for chunk, content in _contents(listed, sizes):
            with _partial_path(root / chunk.name).open("ab") as file:
                file.write(content)
            if chunk.end == sizes[chunk.name]:
                _finish_copy(root / chunk.name, times[chunk.name])
            task.advance(len(content))


def hash_stored_files(listed: InputListing, names: Sequence[str]) -> dict[str, str]:
    """Hash the current content of these files in the store. Raises InputError, StorageError."""
    hashers = {name: xxhash.xxh3_128() for name in names}
    with _errors_about_input():
        for chunk, content in _contents(
            listed, {name: size for name, _, size, _ in listed.files if name in hashers}
        ):
            hashers[chunk.name].update(content)
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}


def _contents(listed: InputListing, sizes: dict[str, int]) -> Iterator[tuple[ByteRange, Buffer]]:
    """Yield all bytes of these files in order."""
    assert listed.url is not None
    folder = _folder(Url(listed.url)).for_reading(sizes)
    batch: list[ByteRange] = []
    batch_bytes = 0
    for name, size in sizes.items():
        for start in range(0, size, BATCH_BYTES):
            chunk = ByteRange(name, start, min(start + BATCH_BYTES, size))
            if batch_bytes + chunk.end - chunk.start > BATCH_BYTES:
                yield from zip(batch, folder.read_ranges(batch), strict=True)
                batch, batch_bytes = [], 0
            batch.append(chunk)
            batch_bytes += chunk.end - chunk.start
    if batch:
        yield from zip(batch, folder.read_ranges(batch), strict=True)


def _folder(location: Url) -> StoreFolder:
    folder = open_folder(location)
    assert isinstance(folder, StoreFolder)
    return folder


def _is_current(file: Path, size: int, modified: int) -> bool:
    if not file.is_file():
        return False
    stat = file.stat()
    return (stat.st_size, stat.st_mtime_ns) == (size, modified)


def _partial_path(file: Path) -> Path:
    return file.with_name(f".{file.name}.fetching")


def _finish_copy(file: Path, modified: int) -> None:
    os.utime(_partial_path(file), ns=(modified, modified))
    _partial_path(file).replace(file)


@contextmanager
def _errors_about_input() -> Iterator[None]:
    """Change errors about data.path, which is what a run reads from a store, to errors about input."""
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
