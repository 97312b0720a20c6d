"""From ``data.name`` to what a run reads: its stream of samples, and its evaluation sets. The loop knows nothing else of data.

A kind of data is one function in ``KINDS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from toolkit.config.schema import RunConfig
from toolkit.data.evaluation import EvalSet, eval_batches, evaluation_targets, unigram_loss
from toolkit.data.index import TokenSource, open_split
from toolkit.data.manifest import read_manifest
from toolkit.data.samples import TokenWindows
from toolkit.data.stream import Stream
from toolkit.plan.types import BatchPlan


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

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunData:
    """
    Attributes:
        sets: of ``eval.sets``, empty where the run does not evaluate.
        tokenizer: the folder that goes with exported weights; None where samples are not text.
        unigram: the loss of the unigram model on the first evaluation set, in nats a token; None without one. Takes a while.
    """

    stream: SampleStream
    sets: Mapping[str, EvalSet]
    tokenizer: Path | None
    unigram: Callable[[], float | None]


def open_data(config: RunConfig, batch: BatchPlan, data_rank: int, folder: str) -> RunData:
    """
    Args:
        folder: of the data, as ``sources.ready_for`` found it ready: ``data.path`` may point to another generation by now.

    Raises:
        InputError: a file is absent or is not what its manifest says.
    """
    return KINDS[config.data.name](config, batch, data_rank, folder)


def _text(config: RunConfig, batch: BatchPlan, data_rank: int, folder: str) -> RunData:
    """One folder of tokens: stdlib and prepared."""
    manifest = read_manifest(folder)
    training = open_split(manifest.folder, "train")
    sets = {name: open_split(manifest.folder, name) for name in config.eval.sets} if config.eval.every else {}
    seed = config.data.shuffle_seed
    windows = TokenWindows(training, config.train.sequence_length, seed)
    stream = Stream({"train": windows}, None, seed=seed, batch=batch, data_rank=data_rank)
    return RunData(stream, text_sets(sets, config, batch, data_rank), manifest.tokenizer_folder,
                   cache(lambda: _unigram(config, batch, training, sets)))


def text_sets(sources: Mapping[str, TokenSource], config: RunConfig, batch: BatchPlan, data_rank: int) -> dict[str, EvalSet]:
    length, batches = config.train.sequence_length, config.eval.batches
    return {name: EvalSet(source.data_hash, partial(eval_batches, source, length, batches, batch, data_rank))
            for name, source in sources.items()}


def _unigram(config: RunConfig, batch: BatchPlan, training: TokenSource, sets: Mapping[str, TokenSource]) -> float | None:
    for source in sets.values():
        targets = evaluation_targets(source, config.train.sequence_length, config.eval.batches, batch.global_batch)
        return unigram_loss(training, targets)
    return None


Kind = Callable[[RunConfig, BatchPlan, int, str], RunData]
KINDS: dict[str, Kind] = {"stdlib": _text, "prepared": _text}
