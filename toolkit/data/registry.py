"""What a kind of data is to the rest: made ready before ranks start, then opened by each rank. ``open.py`` has them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from toolkit.config.schema import RunConfig
from toolkit.data.evaluation import EvalSet
from toolkit.data.records.reader import RecordManifest
from toolkit.data.tokens.documents import Waste
from toolkit.plan.types import BatchPlan
from toolkit.progress import Progress


class SampleStream(Protocol):
    """One data rank's samples. Whatever the number of ranks, the global batch of a step is the same."""

    def steps(self, first_step: int) -> Iterator[list[np.ndarray]]:
        """This rank's micro-batches [micro_batch, ...], one list a step from ``first_step`` on, without end."""

    def consumed(self, step: int) -> dict[str, tuple[int, float]]:
        """Samples and epochs that the first ``step`` steps take of each source, by its name."""

    def fingerprint(self) -> dict[str, str | int]:
        """What decides the samples beside the step: equal on all ranks, plain JSON types, kept in checkpoints."""

    def check_fingerprint(self, saved: Mapping[str, object]) -> None:
        """Raises CheckpointError naming everything in which the stream that was saved differs from this one."""

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after ``step`` steps keeps beside the fingerprint: plain JSON types, empty where the step decides.
        Called on all ranks at the same step; that of rank 0 is kept."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Before the first ``steps``, with what ``state`` gave at the step that a run continues from."""

    def fork(self, fingerprint: Mapping[str, object], state: Mapping[str, Any]) -> None:
        """As ``restore``, with the fingerprint and state of another run, whose batch and data may differ."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunData:
    """
    Attributes:
        sets: of ``eval.sets``, empty where the run does not evaluate.
        tokenizer: the folder that goes with exported weights; None where samples are not text.
        unigram: the loss of the unigram model on the first evaluation set, in nats a token; None without one. Takes a while.
        records: what the samples are where they are no text.
        end_of_text: the token that ends every document, and stands nowhere else; None where samples are no text.
        waste: what cutting windows costs the documents of each source, where its documents are known beforehand.
    """

    stream: SampleStream
    sets: Mapping[str, EvalSet]
    tokenizer: Path | None
    unigram: Callable[[], float | None]
    records: RecordManifest | None = None
    end_of_text: int | None = None
    waste: Callable[[], Mapping[str, Waste]] = dict


@dataclass(frozen=True, slots=True)
class DataKind:
    """
    Attributes:
        ready: (configuration, rows of the embedding where the plan knows them, progress) -> the folder to open. By one process a
            machine, before ranks start: makes the data where that is needed, and raises InputError with everything that the run
            asks of them and does not find.
        open: (configuration, batch, data rank, that folder) -> what the run reads. By every rank. Raises InputError where a file
            is absent or is not what its manifest says.
    """

    ready: Callable[[RunConfig, int | None, Progress], str]
    open: Callable[[RunConfig, BatchPlan, int, str], RunData]
