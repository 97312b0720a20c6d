"""Check that a machine can read the run's data. ``launch/doctor.py`` provides the reader,
``toolkit/data/registry.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from toolkit.cluster.doctor.types import CheckFinding, DoctorCheck, RunRequirements, fail, ok, warn
from toolkit.errors import Problem

SLOW_SECONDS = 5.0
HANGS_SECONDS = 45.0  # an object store retries for a while and then reports more than this timeout would


class DataReadResult(Protocol):
    """Result of reading the first samples; see toolkit/data/registry.py."""

    @property
    def problems(self) -> Sequence[Problem]: ...
    @property
    def open_seconds(self) -> float: ...
    @property
    def read_seconds(self) -> float | None: ...
    @property
    def note(self) -> str | None: ...


def assess(reading: DataReadResult, requirements: RunRequirements) -> Iterator[CheckFinding]:
    for problem in reading.problems:
        yield fail(f"{problem.seen}: {problem.rule}", problem.remedy)
    if reading.problems:
        return
    if reading.read_seconds is None:
        yield ok(reading.note or "the data exist")
    elif reading.read_seconds > SLOW_SECONDS:
        yield warn(
            f"the first samples took {reading.read_seconds:.1f} s",
            "check the network or disk; for data in an object store set data.cache.folder=FOLDER on a "
            "local disk, and use a store in this region",
        )
    else:
        yield ok(
            f"opened in {reading.open_seconds:.2f} s, first samples read in "
            f"{reading.read_seconds * 1000:,.0f} ms"
        )


def make_data_check(read: Callable[[], DataReadResult]) -> DoctorCheck:
    return DoctorCheck(
        name="data",
        how=(
            "open the data and read the samples of the first step, as the run will, with the same credentials"
        ),
        measure=lambda requirements: read(),
        assess=assess,
        seconds=HANGS_SECONDS,
        hang_remedy=(
            "the store or file system of data.path hangs: check the network, the credentials' server, "
            "or the mount"
        ),
    )
