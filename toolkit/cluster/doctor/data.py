"""Whether the run's data can be read from a machine. Reading itself is ``toolkit/data/registry.py``, which ``launch/`` brings along."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from toolkit.cluster.doctor.types import Check, Finding, Need, fail, ok, warn
from toolkit.errors import Problem

SLOW_SECONDS = 5.0
HANGS_SECONDS = (
    45.0  # a store that does not answer is asked again for a while, and then says more than this does
)


class FirstRead(Protocol):
    """See toolkit/data/registry.py."""

    @property
    def problems(self) -> Sequence[Problem]: ...
    @property
    def open_seconds(self) -> float: ...
    @property
    def read_seconds(self) -> float | None: ...
    @property
    def note(self) -> str | None: ...


def judge(found: FirstRead, need: Need) -> Iterator[Finding]:
    for problem in found.problems:
        yield fail(f"{problem.seen}: {problem.rule}", problem.remedy)
    if found.problems:
        return
    if found.read_seconds is None:
        yield ok(found.note or "they are there")
    elif found.read_seconds > SLOW_SECONDS:
        yield warn(
            f"the first samples took {found.read_seconds:.1f} s",
            "look at the network or disk between; data in a store: "
            "data.cache.folder=FOLDER on a local disk, and a store in this region",
        )
    else:
        yield ok(
            f"opened in {found.open_seconds:.2f} s, the first samples read in {found.read_seconds * 1000:,.0f} ms"
        )


def data_check(read: Callable[[], FirstRead]) -> Check:
    return Check(
        name="data",
        how="they are opened and the first step's samples read, as the run will, with the same credentials",
        measure=lambda need: read(),
        judge=judge,
        seconds=HANGS_SECONDS,
        stuck="the store or file system of data.path hangs: look at the network, its credentials' server, or the mount",
    )
