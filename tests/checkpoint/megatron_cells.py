"""Layouts that tests of Megatron-core's files go through, and what each of them saved: made once, when first asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint import megatron_ranks as work
from tests.checkpoint.layouts import same_bits
from tests.checkpoint.megatron_ranks import Held, State
from toolkit.checkpoint.shard import Box, Shard
from toolkit.checkpoint.source import Source
from toolkit.config.schema import Precision
from toolkit.engine.protocol import StepResult
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import ODD, VPP, OptimizerCase, megatron
from toolkit.testing.matrix import Cell as Layout

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Cell:
    """A layout, the run's precision, and how Megatron-core is asked to save."""

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
    """What each cell saved: the folder, what the engine held then, and how it went on."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self._folder = pool, folder
        self.of = cache(self._make)

    def _make(self, case: Cell) -> tuple[Path, Held]:
        folder = self._folder / f"{len(list(self._folder.iterdir()))}"
        return folder, self.pool.run(
            work.train, case.plan, folder, {"singleton": case.singleton}, case.with_args, ranks=case.ranks
        )[0]


def differing(source: Source, state: State) -> list[str]:
    """Tensors of ``state`` that the source has otherwise, in their dtypes."""
    found = {key: torch.empty_like(tensor) for key, tensor in state.items()}
    source.reader().read(
        [Shard(key, tuple(tensor.shape), Box.whole(tensor.shape), tensor) for key, tensor in found.items()]
    )
    return [str(key) for key in state if not same_bits(found[key], state[key])]


def apart(ours: list[StepResult], theirs: list[StepResult]) -> float:
    """Of losses and gradient norms."""
    return max(
        max(abs(a.loss - b.loss), abs(a.grad_norm - b.grad_norm)) for a, b in zip(ours, theirs, strict=True)
    )


BF16 = Precision.bf16
LLAMA_TP = cell("llama", tensor=2, data=2, zero=1, label="padded", vocabulary=ODD, with_args=True)
GPT2_3D = cell("gpt2", tensor=2, pipeline=2, singleton=True)
MIXTRAL_EP = cell("mixtral", data=2, expert=2)
QWEN2_BF16 = cell("qwen2", data=2, zero=1, precision=BF16)
QUICK = (LLAMA_TP, GPT2_3D, MIXTRAL_EP, QWEN2_BF16)
FULL = (
    *(
        cell(family, singleton=singleton)
        for family in ("llama", "gpt2", "qwen2", "qwen3", "mixtral")
        for singleton in (False, True)
    ),
    *(
        cell(family, tensor=2, vocabulary=ODD, precision=precision)
        for family in ("llama", "gpt2", "qwen2")
        for precision in (Precision.fp32, BF16)
    ),
    *(
        cell("llama", tensor=2, pipeline=2, precision=precision, singleton=singleton)
        for precision in (Precision.fp32, BF16)
        for singleton in (False, True)
    ),
    *(
        cell("llama", pipeline=2, layers=4, label="vpp2", own=VPP, precision=precision)
        for precision in (Precision.fp32, BF16)
    ),
    *(
        cell("llama", data=2, zero=1, precision=precision, singleton=singleton)
        for precision in (Precision.fp32, BF16)
        for singleton in (False, True)
    ),
    cell("gpt2", tensor=2, pipeline=2, precision=BF16),
    cell("gpt2", pipeline=2),
    cell("qwen2", tensor=2, pipeline=2),
    cell("llama", tensor=2, data=2, zero=1, precision=BF16),
    cell("llama", context=2),
    cell("llama", tensor=4),
    *(
        cell("mixtral", data=2, expert=2, precision=precision, singleton=singleton)
        for precision in (Precision.fp32, BF16)
        for singleton in (False, True)
    ),
    cell("mixtral", data=2, expert=2, zero=1),
    cell("mixtral", data=2, expert=2, zero=1, precision=BF16),
    cell("mixtral", tensor=2),
    cell("mixtral", data=2, zero=1),
    cell("mixtral", pipeline=2, data=2, expert=2),
)
