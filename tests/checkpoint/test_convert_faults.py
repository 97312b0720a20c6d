"""Conversions that are killed, run out of disk space or lose their source resume or fail cleanly; a target is
never wrong.

pytest tests/checkpoint/test_convert_faults.py
CRASH_SEED=7 pytest tests/checkpoint/test_convert_faults.py      random kill times with another seed
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import converter
from tests.checkpoint.converter import RENAMED, REPLACE, TARGETS, WRITE, ConversionOutcome, conversion
from tests.checkpoint.layouts import LAYOUTS, save, shards_of
from toolkit.checkpoint.offline import convert, unit_writer
from toolkit.checkpoint.offline.convert import JOURNAL, Conversion, ConversionPhase
from toolkit.checkpoint.offline.journal import ConversionJournal
from toolkit.checkpoint.offline.output import TargetOutput
from toolkit.checkpoint.offline.unit_writer import WrittenPiece
from toolkit.checkpoint.shard import EXP_AVG_SQ, WEIGHT, TensorKey
from toolkit.checkpoint.source import open_source
from toolkit.checkpoint.verify import compute_digest
from toolkit.errors import CheckpointError

SEED = int(os.environ.get("CRASH_SEED", random.SystemRandom().randrange(10**6)))
SHAPES = ((101, 47), (7,), (211, 13), (60, 70), (3, 5, 11), (1, 900))
Files = dict[str, bytes]


def written(folder: Path, seed: int = 3) -> Path:
    """A native checkpoint of three ranks: each tensor is in three files."""
    generator = torch.Generator().manual_seed(seed)
    named = {
        TensorKey(state, f"t{number}"): torch.randn(shape, generator=generator).square()
        for state in (WEIGHT, EXP_AVG_SQ)
        for number, shape in enumerate(SHAPES)
    }
    return save(folder, 3, shards_of(named, LAYOUTS["flat"], 3))


def files_of(folder: Path) -> Files:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def unbroken(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """The files of each kind of target after an undisturbed conversion."""
    folder = tmp_path_factory.mktemp("unbroken")
    expected = compute_digest(open_source(source).reader())
    for kind in TARGETS:
        conversion(source, folder / kind, kind).run()
        assert compute_digest(open_source(folder / kind).reader()) == expected
    return {kind: files_of(folder / kind) for kind in TARGETS}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several syncs per conversion, in this process as in those that are killed."""
    monkeypatch.setattr(convert, "SYNC_BYTES", converter.SYNC_BYTES)
    monkeypatch.setattr(unit_writer, "TILE_BYTES", converter.TILE_BYTES)


class Attempt:
    """A conversion in a separate process."""

    def __init__(
        self,
        forks: ForkServerContext,
        source: Path,
        target: Path,
        kind: str,
        *,
        kill_at: tuple[str, int] | None = None,
        wait_at: str | None = None,
    ) -> None:
        self.pipe, theirs = forks.Pipe()
        self.process = forks.Process(
            target=converter.work, args=(source, target, kind, kill_at, wait_at, theirs)
        )
        self.process.start()
        theirs.close()

    def outcome(self) -> ConversionOutcome:
        assert self.pipe.poll(30), "no answer in 30 s"
        outcome: ConversionOutcome = self.pipe.recv()
        self.process.join(30)
        return outcome

    def die(self) -> None:
        self.process.join(30)
        assert self.process.exitcode == -9, f"it ended with {self.process.exitcode} instead of by our kill"


def recorded(made: Conversion) -> set[str]:
    """Return the source tensors that the journal of an attempt records as finished."""
    path = made.temporary / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)[1:] if path.exists() else []
    return {json.loads(line)["unit"] for line in lines if line.endswith(b"\n")}


# ---- kills

MOMENTS = [
    (ConversionPhase.PREPARE, 0),
    *((WRITE, nth) for nth in (0, 9, 20)),
    *((ConversionPhase.UNITS, nth) for nth in (0, 4, 8, 11)),
    *((ConversionPhase.SYNC, nth) for nth in (0, 1)),
    (ConversionPhase.SEAL, 0),
    (ConversionPhase.MANIFEST, 0),
    (REPLACE, 0),
    (ConversionPhase.RENAME, 0),
    (RENAMED, 0),
]
EACH_PHASE = [
    moment
    for moment in MOMENTS
    if moment not in ((WRITE, 0), (WRITE, 20), (ConversionPhase.SYNC, 0))
    and moment not in ((ConversionPhase.UNITS, nth) for nth in (0, 11))
]


@pytest.mark.parametrize(
    ("kind", "moments"),
    [("zips", EACH_PHASE), pytest.param("native", MOMENTS, marks=pytest.mark.full)],
    ids=["zips", "native"],
)
def test_killed_conversion_resumes_in_each_phase(
    kind: str,
    moments: list[tuple[str, int]],
    source: Path,
    unbroken: dict[str, Files],
    forks: ForkServerContext,
    tmp_path: Path,
) -> None:
    """The target is missing or complete. The same command resumes, does not rewrite durable bytes, and
    produces the same files as an undisturbed conversion.
    """
    went_on = 0
    for number, moment in enumerate(moments):
        target = tmp_path / str(number)
        Attempt(forks, source, target, kind, kill_at=moment).die()
        assert target.exists() == (moment[0] == RENAMED), moment
        if target.exists():
            assert {**files_of(target), JOURNAL: b""} == {**unbroken[kind], JOURNAL: b""}
        made = conversion(source, target, kind)
        done = recorded(made)
        pieces = {str(unit.source): unit.pieces(made.target) for unit in made.units}
        outcome = Attempt(forks, source, target, kind).outcome()
        assert outcome.refusal == ""
        assert outcome.resumed == (bool(done) or moment[0] == RENAMED), moment
        if moment[0] == RENAMED:
            done = set(pieces)
        left = {
            (piece.file, at)
            for unit, of_unit in pieces.items()
            if unit not in done
            for piece in of_unit
            for at in range(piece.begin, piece.end)
        }
        assert sum(length for _, _, length in outcome.writes) == len(left), moment
        assert {
            (file, at) for file, begin, length in outcome.writes for at in range(begin, begin + length)
        } == left, moment
        assert files_of(target) == unbroken[kind], moment
        assert not made.temporary.exists()
        went_on += 0 < len(done) < len(pieces)
    assert went_on >= 2, "attempts go on in the middle"


@pytest.mark.full
def test_killed_at_random_times_resumes(
    source: Path, unbroken: dict[str, Files], forks: ForkServerContext, tmp_path: Path
) -> None:
    print(f"CRASH_SEED={SEED}")
    moments = random.Random(SEED)
    killed = 0
    for number in range(6):
        target = tmp_path / str(number)
        for _ in range(8):
            attempt = Attempt(forks, source, target, "zips", wait_at=ConversionPhase.PREPARE)
            assert attempt.pipe.recv() == ConversionPhase.PREPARE
            attempt.pipe.send(None)
            attempt.process.join(moments.uniform(0, 0.02))
            attempt.process.kill()
            attempt.process.join(30)
            killed += not target.exists()
            if target.exists():
                assert {**files_of(target), JOURNAL: b""} == {**unbroken["zips"], JOURNAL: b""}
                break
        outcome = Attempt(forks, source, target, "zips").outcome()
        assert outcome.refusal == "" or "already exists" in outcome.refusal
        assert files_of(target) == unbroken["zips"]
    assert killed, f"no kill fell into a conversion: CRASH_SEED={SEED} proves nothing"


def test_finished_target_is_not_written_again(
    source: Path, unbroken: dict[str, Files], forks: ForkServerContext, tmp_path: Path
) -> None:
    Attempt(forks, source, tmp_path / "t", "zips", kill_at=(ConversionPhase.DONE, 0)).die()
    assert files_of(tmp_path / "t") == unbroken["zips"]
    assert "t already exists" in Attempt(forks, source, tmp_path / "t", "zips").outcome().refusal
    assert files_of(tmp_path / "t") == unbroken["zips"]


def test_second_process_on_one_target_is_rejected(
    source: Path, unbroken: dict[str, Files], forks: ForkServerContext, tmp_path: Path
) -> None:
    first = Attempt(forks, source, tmp_path / "t", "zips", wait_at=ConversionPhase.UNITS)
    assert first.pipe.poll(30)
    assert first.pipe.recv() == ConversionPhase.UNITS
    with pytest.raises(CheckpointError, match=r"another process is writing .*\.t\.resharding"):
        conversion(source, tmp_path / "t", "zips").run()
    first.pipe.send(None)
    assert first.outcome().refusal == ""
    assert files_of(tmp_path / "t") == unbroken["zips"]


OTHERS: dict[str, Callable[[Path, Path], Conversion]] = {
    "another target": lambda source, target: conversion(source, target, "native"),
    "looked at": lambda source, target: conversion(source, target, "zips", examine=False),
    "another source": lambda source, target: conversion(
        written(source.parents[1] / "other", 4), target, "zips"
    ),
    "a changed source": lambda source, target: (
        shutil.rmtree(source),
        written(source.parent, 4),
        conversion(source, target, "zips"),
    )[2],
    "a file gone": lambda source, target: (
        (target.with_name(".t.resharding") / "part-0" / "of" / "0.pt").unlink(),
        conversion(source, target, "zips"),
    )[1],
    "a file cut": lambda source, target: (
        os.truncate(target.with_name(".t.resharding") / "part-1" / "of" / "3.pt", 300),
        conversion(source, target, "zips"),
    )[1],
}


@pytest.mark.parametrize("other", OTHERS)
def test_leftovers_of_another_conversion_are_discarded(
    other: str, forks: ForkServerContext, tmp_path: Path
) -> None:
    source = written(tmp_path / "sources" / "first")
    Attempt(forks, source, tmp_path / "t", "zips", kill_at=(ConversionPhase.SEAL, 0)).die()
    assert recorded(conversion(source, tmp_path / "t", "zips")), "there was something to take"
    made = OTHERS[other](source, tmp_path / "t")
    assert made.run() is False
    again = Conversion(made.source, made.target, tmp_path / "again")
    again.run()
    assert files_of(tmp_path / "t") == files_of(tmp_path / "again")


# ---- no room, no access


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A disk of 512 KB, or None if mounting is not permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        yield None
        return
    yield folder
    subprocess.run(["umount", folder], check=True)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, nth: int, code: int) -> None:
    """Make ``TargetOutput.name`` fail from its n-th call."""
    method, calls = getattr(TargetOutput, name), iter(range(10**6))

    def fail(output: TargetOutput, *arguments: Any) -> Any:
        if next(calls) >= nth:
            raise OSError(code, os.strerror(code))
        return method(output, *arguments)

    monkeypatch.setattr(TargetOutput, name, fail)


@pytest.mark.parametrize("where", ["disk", "write", "sync"])
def test_full_disk_is_reported_and_resumable(
    where: str,
    source: Path,
    unbroken: dict[str, Files],
    small: None,
    small_disk: Path | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without permission to mount a small disk, failing writes stand in for it."""
    target = (small_disk if where == "disk" and small_disk else tmp_path) / "t"
    ballast = target.parent / "ballast"
    with monkeypatch.context() as patch:
        if where == "disk" and small_disk:
            ballast.write_bytes(bytes(420_000))
        elif where == "sync":
            failing(patch, "sync", 1, errno.ENOSPC)
        else:
            failing(patch, "write", 14, errno.ENOSPC)
        made = conversion(source, target, "native", workers=1)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            made.run()
    [problem] = caught.value.problems
    assert "free disk space there (the whole target takes 0.00010" in problem.remedy
    assert str(made.temporary) in problem.remedy
    assert not target.exists()
    done = recorded(made)
    assert 0 < len(done) < len(made.units)
    ballast.unlink(missing_ok=True)
    assert conversion(source, target, "native").run() is True
    assert files_of(target) == unbroken["native"]


def test_failed_sync_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports a failed page write only once, possibly to another thread's sync."""
    journal, output = ConversionJournal(tmp_path / JOURNAL, "x"), TargetOutput(tmp_path, [])
    journal.start()
    made = conversion(written(tmp_path / "source"), tmp_path / "t", "zips")
    done = convert._WrittenUnits(journal)
    with monkeypatch.context() as patch:
        failing(patch, "sync", 0, errno.EIO)
        done.add(made.units[0], [WrittenPiece((), ())], [])
        with pytest.raises(OSError, match="Input/output"):
            done.sync(output, lambda phase: None)
    done.add(made.units[1], [WrittenPiece((), ())], [])
    done.sync(output, lambda phase: None)
    assert len((tmp_path / JOURNAL).read_bytes().splitlines()) == 1
    journal.close()


TAKEN: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_text("mine"),
    "a folder": lambda path: (path.mkdir(), (path / "mine").touch()),
    "a link": lambda path: path.symlink_to(path.with_name("elsewhere")),
    "another journal": lambda path: (path.mkdir(), (path / JOURNAL).write_text('{"identity": "mine"}\n')),
}


@pytest.mark.parametrize("what", TAKEN)
def test_existing_target_is_rejected(
    what: str, source: Path, unbroken: dict[str, Files], tmp_path: Path
) -> None:
    """The other folder appears before anything is written, or after everything is."""
    target = tmp_path / "t"
    TAKEN[what](target)
    with pytest.raises(CheckpointError, match="t already exists"):
        conversion(source, target, "zips").run()
    assert not (tmp_path / ".t.resharding").exists()
    other = tmp_path / "u"
    made = conversion(
        source,
        other,
        "zips",
        on_phase=lambda phase: TAKEN[what](other) if phase is ConversionPhase.RENAME else None,
    )
    with pytest.raises(CheckpointError, match="u already exists"):
        made.run()
    if other.is_dir() and not other.is_symlink():
        shutil.rmtree(other)
    else:
        other.unlink()
    assert conversion(source, other, "zips").run() is True
    assert files_of(other) == unbroken["zips"]


def test_empty_folder_is_accepted_as_target(source: Path, unbroken: dict[str, Files], tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    conversion(source, tmp_path / "t", "zips").run()
    assert files_of(tmp_path / "t") == unbroken["zips"]


def test_unwritable_target_folder_is_rejected(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file.*: Not a directory[\s\S]*make it readable and writable"):
        conversion(source, tmp_path / "file" / "t", "zips").run()


# ---- sources


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def swap_for_folder(path: Path, at: int) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path, int], object], str]] = {
    "flipped": (flip, "differs from what was written: exp_avg_sq:t3 in bytes"),
    "truncated": (lambda path, at: os.truncate(path, at), "before its tensors do"),
    "missing": (lambda path, at: path.unlink(), "is missing"),
    "unreadable": (swap_for_folder, r"cannot be read \(Is a directory\)"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_source_is_rejected(damage: str, tmp_path: Path) -> None:
    """The source is damaged after it was opened, so that only reading detects it."""
    source = written(tmp_path / "source")
    piece = open_source(source).catalog.pieces[TensorKey(EXP_AVG_SQ, "t3")][1]
    made = conversion(source, tmp_path / "t", "zips")
    spoil, seen = DAMAGES[damage]
    spoil(source / piece.file, piece.begin + 5)
    with pytest.raises(CheckpointError, match=seen) as caught:
        made.run()
    assert caught.value.problems[0].key == str(source / piece.file)
    assert not (tmp_path / "t").exists()


def without_hashes(source: Path, target: Path, **more: Any) -> Conversion:
    """Open a checkpoint without hashes, as vendors write them."""
    found = open_source(source)
    pieces = {
        key: tuple(replace(piece, hashes=()) for piece in of_key)
        for key, of_key in found.catalog.pieces.items()
    }
    return Conversion(
        replace(found, catalog=replace(found.catalog, pieces=pieces)), TARGETS["zips"](found), target, **more
    )


def rewritten(path: Path) -> None:
    """Rewrite in place, as a run that saves again."""
    flip(path, -1)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**6))


def replaced(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize(
    ("change", "at"),
    [
        (rewritten, ConversionPhase.UNITS),
        (rewritten, ConversionPhase.PREPARE),
        (replaced, ConversionPhase.PREPARE),
    ],
)
def test_source_changed_during_conversion_is_rejected(
    change: Callable[[Path], None], at: ConversionPhase, tmp_path: Path
) -> None:
    source = written(tmp_path / "source")
    part = source / "part-00001.safetensors"
    made = without_hashes(
        source, tmp_path / "t", on_phase=lambda phase: change(part) if phase is at else None
    )
    with pytest.raises(CheckpointError, match=r"part-00001\.safetensors changed while it was read"):
        made.run()
    assert not (tmp_path / "t").exists()
    assert without_hashes(source, tmp_path / "t").run() is False, "what was read of the other is not taken"


def test_unrelated_changes_next_to_source_are_ignored(tmp_path: Path) -> None:
    """A run may save its next checkpoint into the same folder, and the target itself may be there."""
    source = written(tmp_path / "source")
    made = without_hashes(source, source / "t", on_phase=lambda phase: (source / f"new-{phase}").touch())
    made.run()
    assert (source / "t" / "latest").exists()


# ---- the order of what becomes durable


class Watch:
    """The system calls of a conversion, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, made: Conversion) -> None:
        self.made, self.wrong = made, set[str]()
        self._written: dict[str, list[tuple[int, int]]] = {}  # since the file was synced
        self._names: set[str] = set()  # folders with names that are not
        self._synced: set[str] = set()
        self._pieces = {str(unit.source): unit.pieces(made.target) for unit in made.units}
        pwrite, ftruncate, fsync, write = os.pwrite, os.ftruncate, os.fsync, os.write
        rename, into = Path.rename, Path.replace

        def name(descriptor: int) -> str:
            return str(Path(f"/proc/self/fd/{descriptor}").readlink())

        def watch_pwrite(descriptor: int, data: memoryview, begin: int) -> int:
            count = pwrite(descriptor, data, begin)
            self._written.setdefault(name(descriptor), []).append((begin, begin + count))
            return count

        def watch_ftruncate(descriptor: int, length: int) -> None:
            path = Path(name(descriptor))
            if path.name != JOURNAL:
                self._written.setdefault(str(path), []).append((0, 0))
                self._names |= {
                    str(folder) for folder in path.parents if folder.is_relative_to(made.temporary)
                }
            ftruncate(descriptor, length)

        def watch_fsync(descriptor: int) -> None:
            self._written.pop(name(descriptor), None)  # what is written from here on may miss it
            fsync(descriptor)
            self._synced.add(name(descriptor))
            self._names.discard(name(descriptor))

        def watch_write(descriptor: int, data: bytes) -> int:
            if name(descriptor).endswith(JOURNAL):
                for line in data.splitlines():
                    self._record(json.loads(line))
            return write(descriptor, data)

        def watch_replace(path: Path, to: Path) -> Path:
            if str(path) not in self._synced:
                self.wrong.add(f"{to.name} has its name before its bytes are durable")
            self._names.add(str(to.parent))
            return into(path, to)

        def watch_rename(path: Path, to: Path) -> Path:
            self.wrong |= {f"{Path(one).name} is not durable" for one in self._written}
            self.wrong |= {f"names in {Path(one).name} are not durable" for one in self._names}
            self._names.add(str(to.parent))
            return rename(path, to)

        for owner, attribute, watching in (
            (os, "pwrite", watch_pwrite),
            (os, "ftruncate", watch_ftruncate),
            (os, "fsync", watch_fsync),
            (os, "write", watch_write),
            (Path, "rename", watch_rename),
            (Path, "replace", watch_replace),
        ):
            monkeypatch.setattr(owner, attribute, watching)

    def run(self) -> set[str]:
        self.made.run()
        self.wrong |= {f"names in {Path(one).name} are not durable in the end" for one in self._names}
        return self.wrong

    def _record(self, line: dict[str, Any]) -> None:
        for piece in self._pieces.get(line.get("unit", ""), ()):
            path = str(self.made.temporary / piece.file)
            if any(begin < piece.end and end > piece.begin for begin, end in self._written.get(path, ())):
                self.wrong.add(f"{line['unit']} is recorded before it is durable")


@pytest.mark.parametrize("kind", TARGETS)
def test_rename_follows_sync(
    kind: str, source: Path, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Watch(monkeypatch, conversion(source, tmp_path / "t", kind)).run() == set()


def test_control_detects_missing_sync(
    source: Path, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(TargetOutput, "sync", lambda output, names: None)
        wrong = Watch(patch, conversion(source, tmp_path / "t", "zips")).run()
    assert {
        "weight:t0 is recorded before it is durable",
        "0.pt is not durable",
        "latest is not durable",
    } <= wrong
    with monkeypatch.context() as patch:
        for module in ("convert", "output"):
            patch.setattr(f"toolkit.checkpoint.offline.{module}.sync_folder", lambda folder: None)
        wrong = Watch(patch, conversion(source, tmp_path / "u", "zips")).run()
    assert {"names in of are not durable", "names in part-0 are not durable"} <= wrong
    assert any(each.endswith("are not durable in the end") for each in wrong)
