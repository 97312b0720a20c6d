"""What all ranks must do alike: read the same data, and stop and save at the same step, which one small exchange a step decides.

A rank that left or saved alone would leave the others waiting in the next collective.
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

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FlagReduce = Callable[
    [Sequence[int]], list[int]
]  # this rank's small integers -> the largest of all ranks, place by place
FINALIZE_SECONDS = 1800.0  # how long the other ranks wait for what rank 0 does alone at the end


@dataclass(frozen=True, slots=True)
class StepConsensus:
    """What one rank reports after a step, and after :func:`reach_consensus` what all ranks agree on."""

    stop: bool = False  # some rank was asked to stop
    save: bool = False  # by rank 0's clock a checkpoint is due
    no_time: bool = (
        False  # a rank that was asked to stop has less time than a save takes: ``train/save_deadline.py``
    )
    data_seconds: float = (
        0.0  # that the rank which waited longest for its samples waited: the others wait for it
    )
    ledger: int = 0  # how many steps each rank sends to the ledger now: ``observe/ledger.py``
    gc_seconds: float = 0.0  # that the rank which collected garbage longest since the step before did so: the others wait for it
    nonfinite: bool = False  # the loss or the gradient norm is infinite or NaN: ``StepResult.nonfinite``
    bad_weights: bool = False  # so is the state of some rank; it is checked only if ``nonfinite`` is true
    host_bytes: int = 0  # of the fullest process: ``observe/process_stats.py``
    device_bytes: int = 0  # that tensors hold on the fullest device; 0 on CPU


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
    """The exchange of one rank."""
    return list(values)


class GlooFlagReduce:
    """The exchange of several ranks, over gloo: the flags lie in host memory, and no GPU queue is waited for."""

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


def check_same_data(fingerprint: Mapping[str, str | int], ranks: int) -> None:
    """Nodes with disks of their own may hold different data under one name: each would train well, on other samples than planned.

    Args:
        fingerprint: of what this rank reads, by key.

    Raises:
        InputError: on every rank, where one reads other data than rank 0.
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
                f"rank {number} on {name} reads {', '.join(f'{key}={data.get(key)}' for key in sorted(differing))}"
                for number, name, data in ((0, first_host, first), (rank, host, found))
            ]
            raise InputError(
                Problem(
                    "data.path",
                    "; ".join(seen),
                    "every rank reads the same data",
                    "copy one node's data folder to the others, or name one that all nodes see: data.path=FOLDER (data=stdlib differs with "
                    "the version of Python)",
                )
            )
