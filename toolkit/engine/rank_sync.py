"""Synchronize decisions of all ranks: to stop or save after a step, and to read the same data.

A rank that stopped or saved alone would leave the others waiting in the next collective.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from toolkit.errors import InputError, Problem
from toolkit.layout.axes import Axes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# This rank's small integers -> their elementwise maximum over ranks.
FlagReduce = Callable[[Sequence[int]], list[int]]
FINALIZE_SECONDS = 1800.0  # how long the other ranks wait for rank 0's work at the end of a run


@dataclass(frozen=True, slots=True)
class StepConsensus:
    """The report of one rank after a step, and the result of :func:`reach_consensus` for all ranks.

    The agreed figures are maxima over ranks, since the slowest rank delays the others.
    """

    stop: bool = False  # some rank received a request to stop
    end_early: bool = False  # a hook asked to end the run: ``HookContext.request_stop``
    budget_spent: bool = False  # rank 0 found that the budget allows no further step: ``train/budget.py``
    save_due: bool = False  # a checkpoint is due by rank 0's clock
    # a stopping rank has less time left than a save takes: ``train/save_deadline.py``
    too_late_to_save: bool = False
    data_seconds: float = 0.0  # time spent waiting for samples
    ledger_steps: int = 0  # the number of steps that each rank sends to the ledger now: ``observe/ledger.py``
    gc_seconds: float = 0.0  # time spent in garbage collection since the step before
    nonfinite: bool = False  # the loss or the gradient norm is infinite or NaN: ``StepResult.nonfinite``
    # the state of some rank is not finite; checked only if ``nonfinite`` is true
    nonfinite_state: bool = False
    host_bytes: int = 0  # memory of a process: ``observe/process_stats.py``
    device_bytes: int = 0  # memory that tensors occupy on a device; 0 on CPU
    device_peak_bytes: int = 0  # the most that they occupied at any moment

    @property
    def stops(self) -> bool:
        """Whether the run stops after this step, and may be continued later."""
        return self.stop or self.budget_spent


_MICROSECONDS = ("data_seconds", "gc_seconds")  # the exchange is of integers


def reach_consensus(own: StepConsensus, all_reduce_flags: FlagReduce) -> StepConsensus:
    """Replace every field by its largest value on any rank. Collective."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(own)}
    scales = {name: 1e6 if name in _MICROSECONDS else 1 for name in defaults}
    values = all_reduce_flags([round(getattr(own, name) * scales[name]) for name in defaults])
    agreed = dict(zip(defaults, values, strict=True))
    return StepConsensus(
        **{name: type(defaults[name])(value / scales[name]) for name, value in agreed.items()}
    )


def single_rank_reduce(values: Sequence[int]) -> list[int]:
    """Return the values unchanged, which is their reduction over a single rank."""
    return list(values)


class GlooFlagReduce:
    """Reduces flags in host memory over gloo, so no GPU is synchronized."""

    def __init__(self) -> None:
        whole = dist.get_backend() == "gloo"
        self._group: ProcessGroup | None = (
            None if whole else dist.new_group(backend="gloo", timeout=timedelta(seconds=FINALIZE_SECONDS))
        )

    def __call__(self, values: Sequence[int]) -> list[int]:
        flags = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return flags.tolist()


def make_flag_reduce(ranks: int) -> FlagReduce:
    return GlooFlagReduce() if ranks > 1 else single_rank_reduce


def broadcast_value(value: Any, source: int) -> Any:
    """Return ``value`` of rank ``source`` on every rank. Collective."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values[source]


def make_data_gather(axes: Axes) -> Callable[[Any], list[Any]] | None:
    """Return a function that gathers one object of each data rank; None if there is only one.

    The function is collective over all ranks. Ranks with the same data give the same object, which is taken
    once. Objects are in the order of the data ranks.
    """
    if axes.data == 1:
        return None
    first = {axes.coordinates(rank).data: rank for rank in reversed(range(axes.size))}

    def gather(value: Any) -> list[Any]:
        everyone = [value] * axes.size
        dist.all_gather_object(everyone, value)
        return [everyone[first[data]] for data in range(axes.data)]

    return gather


def check_same_data(fingerprint: Mapping[str, str | int], ranks: int) -> None:
    """Compare the data that ranks read: nodes with local disks may store different data under one path.

    Args:
        fingerprint: what identifies the data that this rank reads, by key.

    Raises:
        InputError: on every rank, if one reads other data than rank 0.
    """
    if ranks == 1:
        return
    mine = (socket.gethostname(), dict(fingerprint))
    everyone = [mine] * ranks
    dist.all_gather_object(everyone, mine)
    first_host, first = everyone[0]
    for rank, (host, found) in enumerate(everyone):
        differing = [key for key in first.keys() | found.keys() if found.get(key) != first.get(key)]
        if differing:
            seen = [
                f"rank {number} on {name} reads "
                + ", ".join(f"{key}={data.get(key)}" for key in sorted(differing))
                for number, name, data in ((0, first_host, first), (rank, host, found))
            ]
            if "dataset" in differing or "length" in differing:
                raise InputError(
                    Problem(
                        "data.target",
                        "; ".join(seen),
                        "every rank reads the same data",
                        "let data.target give the same samples on every machine, with data.arguments that do "
                        "not depend on the rank",
                    )
                )
            raise InputError(
                Problem(
                    "data.path",
                    "; ".join(seen),
                    "every rank reads the same data",
                    "copy one node's data folder to the others, or set data.path=FOLDER to one that all "
                    "nodes share (data=stdlib depends on the version of Python)",
                )
            )
