"""The kinds of data (``data.name``), and the interface between a run and its data.

    folder = prepare_data(config, None, progress)        # one process per node, before ranks start
    data = open_data(config, batch, data_rank, folder)   # every rank
    for micro_batches in data.stream.steps(first_step): ...

To add a kind, write a ``DataKind`` in a module of ``toolkit/data/kinds`` and add it to ``get_data_kind``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from toolkit.config.schema import RunConfig
from toolkit.data.evaluation import EvalSet
from toolkit.data.manifest_file import MANIFEST_NAME
from toolkit.data.order.skipped import SkippedSamples
from toolkit.data.records.reader import RecordManifest
from toolkit.data.tokens.documents import WindowWaste
from toolkit.errors import Problem, UserError
from toolkit.plan.types import BatchPlan
from toolkit.progress import Progress


class SampleStream(Protocol):
    """The samples of one data rank. The global batch of a step does not depend on the number of ranks.

    Attributes:
        prefetchable: whether a thread may take steps before the run needs them: taking a step changes no
            state, and draws no random numbers.
        skipped: the positions of the run's order that ``steps`` leaves out, of a stream that is a function of
            the position. Part of ``state``. Streams without positions skip nothing, and a run that needs it
            is refused before it starts (``train.on_nonfinite=rollback``).
    """

    prefetchable: bool
    skipped: SkippedSamples

    def steps(self, first_step: int) -> Iterator[list[Any]]:
        """Yield this rank's micro-batches, one list per step from ``first_step`` on: arrays [micro_batch,
        ...], or of ``data=custom`` lists (``toolkit.data.custom.samples.Samples``).

        A stream that can skip may be read again from another step, after ``close``.
        """

    def consumed(self, step: int) -> dict[str, tuple[int, float]]:
        """Return the samples and epochs that the first ``step`` steps use of each source, by its name."""

    def fingerprint(self) -> dict[str, str | int]:
        """Return what, apart from the step, determines the samples: plain JSON types, equal on all ranks."""

    def check_fingerprint(self, saved: Mapping[str, object]) -> None:
        """Raise CheckpointError naming every difference between the saved stream and this one."""

    def state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint after ``step`` steps stores besides the fingerprint: plain JSON types.

        Called on all ranks at the same step; the state of rank 0 is saved.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the ``state`` of the step at which the run resumes.

        Called before the first ``steps``.
        """

    def fork(self, fingerprint: Mapping[str, object], state: Mapping[str, Any]) -> None:
        """Continue like ``restore`` from another run, whose batch size and data may differ."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunData:
    """The opened data of a run on one rank.

    Attributes:
        sets: the evaluation sets of ``eval.sets``; empty if the run does not evaluate.
        tokenizer: the folder to store with exported weights; None if samples are not text.
        unigram: returns the unigram model's loss on the first evaluation set in nats per token, or None.
            Slow.
        records: the manifest of samples that are not text.
        end_of_text: the token that ends every document and occurs nowhere else; None if samples are not text.
        waste: returns how windows cut the documents of each source, if its documents are known in advance.
    """

    stream: SampleStream
    sets: Mapping[str, EvalSet]
    tokenizer: Path | None
    unigram: Callable[[], float | None]
    records: RecordManifest | None = None
    end_of_text: int | None = None
    waste: Callable[[], Mapping[str, WindowWaste]] = dict


@dataclass(frozen=True, slots=True)
class DataKind:
    """The functions that prepare and open one kind of data.

    Attributes:
        prepare: (configuration, embedding rows if the plan determines them, progress) -> the folder to open.
            Called by one process per machine before ranks start. Makes the data if needed. Raises InputError
            with everything that the run needs and the data lacks.
        open: (configuration, batch, data rank, folder) -> the run's data. Called by every rank. Raises
            InputError if a file is absent or does not match its manifest.
    """

    prepare: Callable[[RunConfig, int | None, Progress], str]
    open: Callable[[RunConfig, BatchPlan, int, str], RunData]


def get_data_kind(name: str) -> DataKind:
    """Look up the kind ``data.name``. The modules of kinds import this one, so they are imported here."""
    from toolkit.data.kinds.arrays import ARRAYS
    from toolkit.data.kinds.custom import CUSTOM
    from toolkit.data.kinds.dataset import DATASET
    from toolkit.data.kinds.mixture import MIXTURE
    from toolkit.data.kinds.text import TEXT

    kinds = {
        "stdlib": TEXT,
        "prepared": TEXT,
        "mixture": MIXTURE,
        "dataset": DATASET,
        "arrays": ARRAYS,
        "custom": CUSTOM,
    }
    return kinds[name]


def prepare_data(config: RunConfig, vocab_size: int | None, progress: Progress) -> str:
    """Make or find the data of a run and check that they fit it.

    Args:
        vocab_size: embedding rows, if the plan determines them rather than ``model.vocab_size``
            (``model.pretrained``).

    Returns:
        The folder to open. ``data.path`` itself may point to another generation of the data later.

    Raises:
        InputError: the data are absent, cannot be read, or lack something that the run needs.
    """
    return get_data_kind(config.data.name).prepare(config, vocab_size, progress)


def open_data(config: RunConfig, batch: BatchPlan, data_rank: int, folder: str) -> RunData:
    """Open the data of one rank.

    Args:
        folder: the result of ``prepare_data``.

    Raises:
        InputError: a file is absent or does not match its manifest.
    """
    return get_data_kind(config.data.name).open(config, batch, data_rank, folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReadCheck:
    """Whether this machine can read a run's data.

    Attributes:
        problems: why the data cannot be read.
        open_seconds: seconds until the data were found fit for the run.
        read_seconds: seconds for the first samples; None if they were not read.
        note: why samples were not read although nothing is wrong.
    """

    problems: tuple[Problem, ...] = ()
    open_seconds: float = 0.0
    read_seconds: float | None = None
    note: str | None = None


def check_data_read(config: RunConfig, vocab_size: int | None, batch: BatchPlan | None) -> DataReadCheck:
    """Read the first step's samples of data rank 0, without making or downloading data.

    Args:
        vocab_size: as for ``prepare_data``.
        batch: None if there is no plan; then no samples are read.
    """
    name = config.data.name
    if name == "stdlib" and not (Path(config.data.path) / MANIFEST_NAME).exists():
        return DataReadCheck(note=f"the first run makes {config.data.path} when it starts")
    if name == "dataset":
        return DataReadCheck(
            note="the run finds a dataset's files, or fetches them from the hub, when it starts"
        )
    start = time.perf_counter()
    try:
        folder = prepare_data(config, vocab_size, Progress.silent())
        opened = time.perf_counter()
        if batch is None:
            return DataReadCheck(open_seconds=opened - start, note="without a plan no samples are read")
        data = open_data(config, batch, 0, folder)
        try:
            next(iter(data.stream.steps(0)))
        finally:
            data.stream.close()
    except UserError as error:
        return DataReadCheck(problems=error.problems)
    except RuntimeError as error:
        if name != "custom":
            raise
        problem = Problem(
            "data.target", str(error), "the samples can be read", "correct the dataset at the line shown"
        )
        return DataReadCheck(problems=(problem,))
    except OSError as error:  # StorageError: a store stopped answering
        problem = Problem(
            "data.path",
            f"data.path: {error}",
            "the data can be read",
            "check the network and the store, and try again",
        )
        return DataReadCheck(problems=(problem,))
    return DataReadCheck(open_seconds=opened - start, read_seconds=time.perf_counter() - opened)
