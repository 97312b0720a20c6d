"""The stream of an iterable-style dataset of the user's own code, and its evaluation batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from toolkit.data.custom.map_style import DEFAULT_REMEDY
from toolkit.data.custom.samples import (
    Gather,
    Samples,
    dataset_code,
    pad_samples,
    preserved_generators,
    seed_generators,
)
from toolkit.data.order.skipped import SkippedSamples
from toolkit.data.order.stream import FORK, Remedy, compare_fingerprints, rank_batch_indices
from toolkit.errors import CheckpointError, ConfigError, Problem
from toolkit.plan.types import BatchPlan
from toolkit.user_code import UserObject

_REMEDIES: dict[str, Remedy] = {
    "seed": ("data.shuffle_seed", f"write data.shuffle_seed={{saved}}, {FORK}"),
    "shares": (
        "data.target",
        "start with {saved} data ranks; or let the dataset yield all samples on every rank, without the "
        f"arguments rank and world_size, {FORK}",
    ),
}


class IterableStream:
    """Samples in the order of the dataset, epoch after epoch, read when they are needed.

    A dataset yields all samples on every rank, and this rank uses those at its positions of the global
    batch, so a run may continue on any number of ranks. A dataset that takes ``rank`` and ``world_size``
    yields the share of one data rank, and a run continues on the same number of data ranks.

    Args:
        shared: whether the dataset yields a share.
        gather: returns the states of all ranks.
    """

    prefetchable = False
    skipped = SkippedSamples()  # it cannot skip

    def __init__(
        self,
        dataset: Any,
        given: UserObject,
        identity: Mapping[str, str | int],
        *,
        shared: bool,
        seed: int,
        batch: BatchPlan,
        data_rank: int,
        gather: Gather,
    ) -> None:
        self._dataset, self._given, self._identity = dataset, given, dict(identity)
        self._shared, self._seed, self._batch, self._rank = shared, seed, batch, data_rank
        self._gather = gather
        self._restored: Mapping[str, Any] = {}
        self._reader = _EpochReader(dataset, given, self._seed_for)

    def _seed_for(self, taken: int) -> None:
        position = taken * self._batch.data_parallel + self._rank if self._shared else taken
        seed_generators(self._seed, position)

    def steps(self, first_step: int) -> Iterator[list[Samples]]:
        batch, step = self._batch, first_step
        with preserved_generators():
            self._reader.restore(self._restored, self._taken(first_step))
        while True:
            stage = batch.at(step)
            indices = rank_batch_indices(
                stage.accumulation, batch.data_parallel, batch.micro_batch, self._rank
            )
            with preserved_generators():
                if self._shared:
                    own = [self._reader.take() for _ in range(indices.size)]
                else:
                    everyone = [self._reader.take() for _ in range(stage.size)]
                    own = [everyone[index] for index in indices.ravel().tolist()]
            size = batch.micro_batch
            yield [Samples(own[first : first + size]) for first in range(0, len(own), size)]
            step += 1

    def _taken(self, step: int) -> int:
        """Return the number of samples that ``step`` steps have taken from the dataset."""
        first = self._batch.at(step).first_sample
        return first // self._batch.data_parallel if self._shared else first

    def consumed(self, step: int) -> dict[str, tuple[int, float]]:
        return {"train": (self._batch.at(step).first_sample, float(self._reader.epoch))}

    def fingerprint(self) -> dict[str, str | int]:
        shares = {"shares": self._batch.data_parallel} if self._shared else {}
        return {"order": "iterable", "seed": self._seed, **shares, **self._identity}

    def check_fingerprint(self, saved: Mapping[str, object]) -> None:
        compare_fingerprints(self.fingerprint(), saved, _REMEDIES, default=DEFAULT_REMEDY)

    def state(self, step: int) -> dict[str, Any]:
        own = {"rank": self._rank, **self._reader.state()}
        if not self._shared:
            return own
        shares = {state["rank"]: state for state in self._gather(own)}
        return {"shares": [shares[rank] for rank in sorted(shares)]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._restored = state["shares"][self._rank] if "shares" in state else state

    def fork(self, fingerprint: Mapping[str, object], state: Mapping[str, Any]) -> None:
        """Continue where the parent stopped if it read the same dataset, else from the beginning."""
        if fingerprint == self.fingerprint():
            self.restore(state)

    def close(self) -> None:
        self._reader.close()


class _EpochReader:
    """Iterates over the dataset again and again. ``seed_for(n)`` is called before sample ``n`` is taken."""

    def __init__(self, dataset: Any, given: UserObject, seed_for: Callable[[int], None]) -> None:
        self._dataset, self._given, self._seed_for = dataset, given, seed_for
        self._iterator: Iterator[Any] | None = None
        self.epoch, self._offset, self._taken = 0, 0, 0  # offset: samples taken in this epoch

    def take(self) -> Any:
        """Return the next sample. Raises DatasetError with the line of the user's code."""
        for _ in range(2):
            if self._iterator is None:
                self._begin()
                assert self._iterator is not None
            self._seed_for(self._taken)
            with dataset_code(self._given, self._dataset, f"reading sample {self._offset} of an epoch"):
                try:
                    sample = next(self._iterator)
                except StopIteration:
                    if not self._offset:
                        break
                    self.epoch, self._offset, self._iterator = self.epoch + 1, 0, None
                    continue
            self._offset, self._taken = self._offset + 1, self._taken + 1
            return sample
        raise self._given.problem(
            f"it yields no sample in epoch {self.epoch}",
            "an epoch of a dataset has samples",
            "yield samples on every rank: a dataset with rank and world_size gives each of them a share",
        )

    def _begin(self) -> None:
        with dataset_code(self._given, self._dataset, "starting an epoch"):
            if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
                set_epoch(self.epoch)
            self._iterator = iter(self._dataset)

    def state(self) -> dict[str, Any]:
        """Return the position, with the dataset's ``state_dict()`` if it has one, in JSON types."""
        state: dict[str, Any] = {"epoch": self.epoch, "offset": self._offset, "taken": self._taken}
        if not self._offset or not callable(get_state := getattr(self._dataset, "state_dict", None)):
            return state
        with dataset_code(self._given, self._dataset, "asked for its state_dict"):
            found = get_state()
        try:
            return {**state, "dataset": json.loads(json.dumps(found))}
        except (TypeError, ValueError) as error:
            raise self._given.problem(
                f"state_dict() returns what JSON cannot store: {error}",
                "the state of a dataset has dictionaries, lists, numbers, text, true, false and null",
                "return such a state, or leave out state_dict: then the dataset is read again up to the "
                "same sample",
            ) from error

    def restore(self, state: Mapping[str, Any], taken: int) -> None:
        """Continue from ``state``; without the dataset's own state, skip the samples of this epoch.

        Args:
            taken: the number of samples taken before; for a fork, or a run that begins, which have no state.
        """
        if not state:
            return
        if state["taken"] != taken:
            raise CheckpointError(
                Problem(
                    "train.global_batch",
                    f"the checkpoint has taken {state['taken']} samples, and its step begins at {taken}",
                    "a run continues with the global batch with which it began",
                    "restore the global batch and its ramp",
                )
            )
        self.epoch, offset = state["epoch"], state["offset"]
        if not offset:
            self._taken = taken
            return
        if "dataset" in state:
            if not callable(load := getattr(self._dataset, "load_state_dict", None)):
                raise self._given.problem(
                    "the checkpoint has its state_dict, and it has no load_state_dict",
                    "a dataset with state_dict has load_state_dict too",
                    "define load_state_dict(state)",
                )
            with dataset_code(self._given, self._dataset, "restoring its state"):
                load(state["dataset"])
            self._begin()
            self._offset, self._taken = offset, taken
            return
        self._taken = taken - offset
        for _ in range(offset):
            self.take()
        if self._offset != offset:
            raise ConfigError(
                Problem(
                    f"{self._given.key}.target",
                    f"{self._given.key}.target={self._given.target} ended before sample {offset}",
                    "a run continues on the samples with which it began",
                    f"restore the dataset with which the run began, {FORK}",
                )
            )

    def close(self) -> None:
        if callable(close := getattr(self._iterator, "close", None)):  # a generator may hold files
            close()
        self._iterator = None


def iterable_eval_batches(
    dataset: Any, given: UserObject, seed: int, batches: int, batch: BatchPlan, data_rank: int
) -> Iterator[list[Samples]]:
    """Yield global batches of the dataset's first samples; every rank reads all of them."""
    indices = rank_batch_indices(batch.accumulation, batch.data_parallel, batch.micro_batch, data_rank)
    with dataset_code(given, dataset, "starting an evaluation"):
        iterator = iter(dataset)
    position = 0
    for _ in range(batches):
        samples: list[Any] = []
        with preserved_generators():
            for _ in range(batch.global_batch):
                seed_generators(seed, -1 - position)
                with dataset_code(given, dataset, f"reading sample {position} of an evaluation"):
                    try:
                        samples.append(next(iterator))
                    except StopIteration:
                        break
                position += 1
        if not samples:
            break
        yield [
            pad_samples(
                [samples[index] for index in numbers if index < len(samples)], batch.micro_batch, samples[-1]
            )
            for numbers in indices.tolist()
        ]
        if len(samples) < batch.global_batch:
            break
    if not position:
        raise given.problem(
            "it yields no sample for an evaluation",
            "an evaluation set has samples",
            "yield samples, or write eval.every=0",
        )
