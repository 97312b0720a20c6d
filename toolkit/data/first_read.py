"""Whether a run's data can be read from here, found out by reading them as the run will."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from toolkit.config.schema import RunConfig
from toolkit.data.manifest import NAME
from toolkit.data.open import open_data, ready_for
from toolkit.errors import Problem, UserError
from toolkit.plan.types import BatchPlan
from toolkit.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRead:
    """
    Attributes:
        problems: why they cannot be read.
        open_seconds: until they were found fit for the run.
        read_seconds: of the first samples; None: they were not read.
        note: why they were not read, where nothing is wrong.
    """

    problems: tuple[Problem, ...] = ()
    open_seconds: float = 0.0
    read_seconds: float | None = None
    note: str | None = None


def first_read(config: RunConfig, vocab_size: int | None, batch: BatchPlan | None) -> FirstRead:
    """The first step's samples of data rank 0. Nothing is made and nothing is fetched that would have to be kept.

    Args:
        vocab_size: as ``ready_for`` has it.
        batch: None where there is no plan; then no samples are read.
    """
    name = config.data.name
    if name == "stdlib" and not (Path(config.data.path) / NAME).exists():
        return FirstRead(note=f"{config.data.path} is made when the first run starts")
    if name == "dataset":
        return FirstRead(
            note="a dataset's files are looked for, and fetched from the hub, when the run starts"
        )
    began = time.perf_counter()
    try:
        folder = ready_for(config, vocab_size, Progress.silent())
        opened = time.perf_counter()
        if batch is None:
            return FirstRead(open_seconds=opened - began, note="without a plan no samples are read")
        data = open_data(config, batch, 0, folder)
        try:
            next(iter(data.stream.steps(0)))
        finally:
            data.stream.close()
    except UserError as error:
        return FirstRead(problems=error.problems)
    except OSError as error:  # a store that does not answer any more: toolkit/data/remote/storage.py
        problem = Problem(
            "data.path",
            f"data.path: {error}",
            "the data can be read",
            "look at the network and the store, and try again",
        )
        return FirstRead(problems=(problem,))
    return FirstRead(open_seconds=opened - began, read_seconds=time.perf_counter() - opened)
