"""A stream as PyTorch's data sets, for a loop of one's own: ``docs/data.md`` shows one whole.

    loader = DataLoader(Steps(stream, steps=1000), batch_size=None, num_workers=2)              # iterable-style
    loader = DataLoader(Positions(stream, count), batch_size=8)                                  # map-style, not to be shuffled

Worker processes are forked: they share the mapped files. With the threads that a stream reads with, text needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from toolkit.data.order.stream import Stream
from toolkit.errors import CheckpointError, Problem

Array = npt.NDArray[Any]


class SampleDataset(Dataset[Array]):
    """The first ``count`` samples of the run's order, over all ranks: sample ``i`` is the one at position ``i``. They come shuffled
    and mixed already, so a sampler takes them in their order; any subset of positions is as quick."""

    def __init__(self, stream: Stream, count: int) -> None:
        self._stream, self._count = stream, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> Array:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Array]:
        """A whole batch at once, as PyTorch asks where a data set can."""
        asked = np.array(positions, dtype=np.int64)
        if asked.size and not (-self._count <= asked.min() and asked.max() < self._count):
            raise IndexError(f"positions {asked.min()} .. {asked.max()} of {self._count} samples")
        return list(self._stream.samples(np.where(asked < 0, asked + self._count, asked)))


class StepDataset(IterableDataset[Array]):
    """One item a step: this rank's micro-batches as one array [accumulation, micro_batch, ...].

    Of ``n`` workers each makes every ``n``-th step, and PyTorch puts them in order. The state is the step that comes next (in a
    worker: the next of that worker, as ``torchdata.stateful_dataloader`` keeps it). It fits any number of ranks and micro-batches.
    Where workers read ahead, the object in the main process does not know what was used: take ``state_at(step)`` there, which fits
    any number of workers too.
    """

    def __init__(self, stream: Stream, steps: int, first_step: int = 0) -> None:
        self._stream, self._end = stream, steps
        self._next = first_step
        self._resumed = False

    def __iter__(self) -> Iterator[Array]:
        worker = get_worker_info()
        # A worker's own state is a step of its own; any other says where all of them begin.
        number, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        if not self._resumed:
            self._next += number
        self._resumed = False
        return self._items(self._next, stride)

    def _items(self, first: int, stride: int) -> Iterator[Array]:
        steps = self._stream.steps(first, stride)
        try:
            for step in range(first, self._end, stride):
                item = np.stack(next(steps))
                self._next = step + stride
                yield item
        finally:
            steps.close()

    def state_at(self, step: int) -> dict[str, Any]:
        """After ``step`` steps. Plain JSON types, below 1 KB for a dozen sources."""
        return {
            "step": step,
            "samples": self._stream.first_sample(step),
            "fingerprint": self._stream.fingerprint(),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state_at(self._next)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError where it is of other data, another order or another global batch."""
        self._stream.check_fingerprint(state["fingerprint"])
        step, samples = state["step"], self._stream.first_sample(state["step"])
        if samples != state["samples"]:
            raise CheckpointError(
                Problem(
                    "train.global_batch",
                    f"step {step} begins at sample {samples}, the state's at {state['samples']}",
                    "a run continues with the global batch that it began with",
                    "bring the global batch and its ramp back",
                )
            )
        self._next, self._resumed = step, get_worker_info() is not None
