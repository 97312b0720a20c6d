"""Layouts of the Megatron-core tests, and their checkpoints, created on demand."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint import megatron_ranks as work
from tests.checkpoint.layouts import same_bits
from tests.checkpoint.megatron_ranks import RankOutcome, State
from toolkit.checkpoint.shard import Box, Shard
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.config.schema import Precision
from toolkit.engine.protocol import StepResult
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import ODD, VPP, OptimizerCase, megatron
from toolkit.testing.matrix import Cell as Layout

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Cell:
    """A layout, the run's precision, and how Megatron-core saves."""

    layout: Layout
    precision: Precision = Precision.fp32
    singleton: bool = False
    with_args: bool = False
    more: tuple[tuple[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        words = [
            self.layout.family,
            self.layout.layout,
            self.precision.value,
            "singleton" if self.singleton else "stacked",
        ]
        return "-".join(words + [name.split("__")[1] for name, _ in self.more])

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def plan(self) -> RunPlan:
        return self.layout.plan(OptimizerCase.ADAM, **{"precision__name": self.precision, **dict(self.more)})


def cell(
    family: str,
    *,
    precision: Precision = Precision.fp32,
    singleton: bool = False,
    with_args: bool = False,
    **layout: Any,
) -> Cell:
    return Cell(megatron(family, **layout), precision, singleton, with_args)


class Saves:
    """Checkpoints of each cell: the folder, the engine's state, and the steps that follow."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self._folder = pool, folder
        self.get = cache(self._make)

    def _make(self, case: Cell) -> tuple[Path, RankOutcome]:
        folder = self._folder / f"{len(list(self._folder.iterdir()))}"
        return folder, self.pool.run(
            work.train, case.plan, folder, {"singleton": case.singleton}, case.with_args, ranks=case.ranks
        )[0]


def differing(source: CheckpointSource, state: State) -> list[str]:
    """Return the tensors of ``state`` that differ in the source."""
    found = {key: torch.empty_like(tensor) for key, tensor in state.items()}
    source.reader().read(
        [Shard(key, tuple(tensor.shape), Box.whole(tensor.shape), tensor) for key, tensor in found.items()]
    )
    return [str(key) for key in state if not same_bits(found[key], state[key])]


def max_difference(ours: list[StepResult], theirs: list[StepResult]) -> float:
    """Return the largest difference of losses and gradient norms."""
    return max(
        max(abs(a.loss - b.loss), abs(a.grad_norm - b.grad_norm)) for a, b in zip(ours, theirs, strict=True)
    )


BF16 = Precision.bf16
LLAMA_TP = cell("llama", tensor=2, data=2, zero=1, label="padded", vocabulary=ODD, with_args=True)
GPT2_3D = cell("gpt2", tensor=2, pipeline=2, singleton=True)
MIXTRAL_EP = cell("mixtral", data=2, expert=2)
QWEN2_BF16 = cell(
    "qwen2", data=2, zero=1, precision=BF16, singleton=True
)  # with separate keys of gate and up
QUICK = (LLAMA_TP, GPT2_3D, MIXTRAL_EP, QWEN2_BF16)
# Every family, axis and precision, and both kinds of keys; each pair of them that shares code.
FULL = (
    *(
        cell(family, singleton=number % 2 == 0)
        for number, family in enumerate(("llama", "gpt2", "qwen2", "qwen3", "mixtral", "qwen3_moe"))
    ),
    cell("llama", tensor=2, vocabulary=ODD, precision=BF16),
    cell("gpt2", tensor=2, vocabulary=ODD),
    cell("qwen2", tensor=2, vocabulary=ODD, precision=BF16),
    cell("llama", tensor=2, pipeline=2),
    cell("llama", tensor=2, pipeline=2, precision=BF16, singleton=True),
    cell("llama", pipeline=2, layers=4, label="vpp2", own=VPP, precision=BF16),
    cell("llama", data=2, zero=1, singleton=True),
    cell("llama", data=2, zero=1, precision=BF16),
    cell("gpt2", tensor=2, pipeline=2, precision=BF16),
    cell("qwen2", tensor=2, pipeline=2),
    cell("llama", tensor=2, data=2, zero=1, precision=BF16),
    cell("llama", context=2),
    cell("llama", tensor=4),
    cell("mixtral", data=2, expert=2, singleton=True),
    cell("mixtral", data=2, expert=2, precision=BF16),
    cell("mixtral", data=2, expert=2, zero=1),
    cell("mixtral", data=2, expert=2, zero=1, precision=BF16),
    cell("mixtral", tensor=2),
    cell("mixtral", data=2, zero=1),
    cell("mixtral", pipeline=2, data=2, expert=2),
)


def opened(case: Cell, folder: Path) -> CheckpointSource:
    return open_source(folder, case.plan.shape)


def read_with_pytorch(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    about = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(of.size, dtype=of.properties.dtype)
        for key, of in about.items()
        if isinstance(of, TensorStorageMetadata)
    }
    checkpoint.load(
        found,
        storage_reader=FileSystemReader(str(folder)),
        planner=DefaultLoadPlanner(flatten_state_dict=False),
        no_dist=True,
    )
    return found
