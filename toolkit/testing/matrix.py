"""The cells of the parity matrix: layouts of each family and engine, compared with the local engine.

Every cell runs with two optimizers, since each hides what the other shows: Adam and clipping hide a wrong
scale of all gradients, SGD without clipping hides a wrong norm and weight decay of wrong parameters. Samples
of a micro-batch always have different numbers of unmasked tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from toolkit.commands import command_line
from toolkit.config.data import DocumentMasking
from toolkit.config.kernels import LossKernel
from toolkit.config.schema import EngineName
from toolkit.engine.build import open_initial_weights
from toolkit.errors import InputError, Problem
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.testing.idle_experts import open_biased_initial_weights
from toolkit.testing.measure import Differences, OpenInitialWeights
from toolkit.testing.tiny import GLOBAL_BATCH, VOCABULARY, tiny_config

TOLERANCE = Differences(loss=1e-5, norm=1e-4, gradient=1e-5, weight=1e-5, evaluation=1e-5)
EPS = 1e-4  # of Adam in most cells
FUSED_CHUNK = 24  # tokens, so that a micro-batch has several chunks of unequal sizes
DEFAULT_EPS = 1e-8  # the default of optim.eps


class OptimizerCase(StrEnum):
    ADAM = "adam"  # AdamW, lr 2e-3, decay 0.1, clipped at 1
    SGD = "sgd"  # lr 0.1, no momentum, no decay, no clipping

    @property
    def settings(self) -> dict[str, Any]:
        if self is OptimizerCase.ADAM:
            return {"optim__lr": 2e-3}
        return {"optim__name": "sgd", "optim__clip": 0.0, "optim__lr": 0.1, "optim__weight_decay": 0.0}


@dataclass(frozen=True)
class Excess:
    """The differences beyond TOLERANCE that a cell may have, and their measured cause."""

    allowed: Differences
    cause: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layout of a family on an engine.

    Attributes:
        expert: ranks of the expert axis, which regroups data ranks.
        experts: experts per layer; 0: those of the family's tiny model.
        idle: bias the routers so that most experts, and whole ranks of the expert axis, get no token.
        documents: separate documents, in samples that consist of several.
        fused: compute the loss by the fused kernel, in several chunks, rather than by the plain one.
        own: settings of the engine.
        transformer_engine: the installed version, for Megatron-core on GPUs; None: its own layers.
        label: the part of the name that describes the settings above.
    """

    engine: EngineName
    family: str
    data: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    zero: int = 0
    layers: int = 2
    vocabulary: int = VOCABULARY
    experts: int = 0
    batch: int = GLOBAL_BATCH
    idle: bool = False
    recompute: bool = False
    documents: bool = False
    fused: bool = False
    eps: float = EPS
    own: tuple[tuple[str, Any], ...] = ()
    transformer_engine: str | None = None
    label: str = ""
    excess: Excess | None = field(default=None, compare=False)

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.context * self.pipeline

    @property
    def layout(self) -> str:
        """The layout's name, such as ``tp2-pp2-dp2-zero1``; ``one`` for a single rank."""
        sizes = (
            ("tp", self.tensor),
            ("cp", self.context),
            ("ep", self.expert),
            ("pp", self.pipeline),
            ("dp", self.data),
        )
        parts = [f"{short}{size}" for short, size in sizes if size > 1]
        if self.engine is EngineName.deepspeed or self.zero:
            parts.append(f"zero{self.zero}")
        labels = [self.label] if self.label else []
        labels += [f"eps{self.eps:.0e}"] if self.eps != EPS else []
        labels += [name for name in ("idle", "documents", "fused") if getattr(self, name)]
        return "-".join([*(parts or ["one"]), *labels])

    @property
    def name(self) -> str:
        return f"{self.engine.value}/{self.family}/{self.layout}"

    def __str__(self) -> str:
        return self.name

    def plan(self, case: OptimizerCase, device: Device = Device.CPU, **more: Any) -> RunPlan:
        """Return the cell's plan; ``more`` are changes as in ``testing/tiny.py``.

        Raises:
            PlanError: the engine does not support this cell.
        """
        changes: dict[str, Any] = {
            "engine__name": self.engine,
            "zero__stage": self.zero,
            "parallel__tensor": self.tensor,
            "parallel__pipeline": self.pipeline,
            "parallel__context": self.context,
            "parallel__expert": self.expert,
            "model__num_hidden_layers": self.layers,
            "model__vocab_size": self.vocabulary,
            "train__global_batch": self.batch,
            "train__activation_checkpointing": "full" if self.recompute else "none",
            "data__documents": DocumentMasking.separate if self.documents else DocumentMasking.joined,
            "optim__eps": self.eps,
            **case.settings,
            **more,
        }
        if self.engine is EngineName.local:  # the reference has the plain loss, on GPUs too
            changes.setdefault("train__loss_kernel", LossKernel.plain)
        if self.fused:
            changes |= {"train__loss_kernel": LossKernel.fused, "train__loss_chunk": FUSED_CHUNK}
        if self.experts:
            changes["model__num_local_experts"] = self.experts
        if self.own:
            changes[f"engine__{self.engine.value}"] = dict(self.own)
        world = World(
            ranks=self.ranks,
            ranks_per_node=self.ranks,
            device=device,
            has_compiler=True,
            transformer_engine=self.transformer_engine,
        )
        return make_plan(tiny_config(self.family, **changes), world)

    def reference(self) -> Cell:
        """Return the cell of the local engine with the same model, samples and first weights."""
        return Cell(
            engine=EngineName.local,
            family=self.family,
            layers=self.layers,
            vocabulary=self.vocabulary,
            experts=self.experts,
            batch=self.batch,
            idle=self.idle,
            documents=self.documents,
            eps=self.eps,
        )

    @property
    def cases(self) -> tuple[OptimizerCase, ...]:
        """The optimizer cases; eps does not concern SGD."""
        return tuple(OptimizerCase) if self.eps == EPS else (OptimizerCase.ADAM,)

    @property
    def open_initial_weights(self) -> OpenInitialWeights:
        return open_biased_initial_weights if self.idle else open_initial_weights

    @property
    def allowed(self) -> Differences:
        return self.excess.allowed if self.excess else TOLERANCE


ROUNDING = Excess(
    replace(TOLERANCE, weight=1e-3),
    "with eps 1e-8 a weight whose gradient is only rounding noise moves by a part of the learning rate, "
    "2e-3, in any direction",
)


def default_eps(cell: Cell) -> Cell:
    """Return ``cell`` with the default eps of runs."""
    return replace(cell, eps=DEFAULT_EPS, excess=ROUNDING)


ODD = 263  # a vocabulary that no tensor axis divides, so that rows are padded
UNEVEN = (("num_layers_in_first_pipeline_stage", 1),)  # four layers on two stages: 1 and 3


def megatron(family: str, label: str = "", own: Sequence[tuple[str, Any]] = (), **sizes: Any) -> Cell:
    return Cell(engine=EngineName.megatron, family=family, label=label, own=tuple(own), **sizes)


def deepspeed(
    family: str, zero: int, label: str = "", own: Sequence[tuple[str, Any]] = (), **sizes: Any
) -> Cell:
    return Cell(engine=EngineName.deepspeed, family=family, zero=zero, label=label, own=tuple(own), **sizes)


NO_SP = (("sequence_parallel", False),)  # on by default with tensor parallelism
VPP = (("virtual_pipeline_model_parallel_size", 2),)
OVERLAP = (("overlap_grad_reduce", True), ("overlap_param_gather", True))
SELECTIVE = (("recompute_granularity", "selective"),)

# Cells with idle experts; three ranks divide neither four experts nor a batch of eight.
THREE: Mapping[str, Any] = {"data": 3, "experts": 6, "batch": 12}
IDLE: tuple[Cell, ...] = (
    deepspeed("mixtral", 2, data=2, expert=2, idle=True),
    *(deepspeed("mixtral", stage, data=4, expert=2, idle=True) for stage in (1, 2)),
    *(deepspeed("mixtral", stage, expert=3, idle=True, **THREE) for stage in (1, 2)),
    *(deepspeed("mixtral", stage, data=4, expert=4, idle=True) for stage in (1, 2)),
    deepspeed("mixtral", 2, data=4, expert=4, label="full", recompute=True, idle=True),
    *(deepspeed("mixtral", stage, data=2, idle=True) for stage in range(4)),
    *(megatron("mixtral", data=2, expert=2, zero=stage, idle=True) for stage in range(3)),
    *(megatron("mixtral", expert=3, zero=stage, idle=True, **THREE) for stage in range(3)),
    *(megatron("mixtral", data=4, expert=4, zero=stage, idle=True) for stage in range(3)),
    megatron("mixtral", pipeline=2, data=2, expert=2, idle=True),
)

# The first check on a new machine: every axis of both engines, in at most ten minutes.
CORE: tuple[Cell, ...] = (
    megatron("llama"),
    megatron("llama", tensor=2, label="nosp", own=NO_SP),
    megatron("llama", tensor=2, label="sp"),
    megatron("llama", tensor=4, label="sp"),  # two kv heads: two ranks share one
    megatron("llama", pipeline=2),
    megatron("llama", pipeline=4, layers=4),
    megatron("llama", pipeline=2, layers=4, label="vpp2", own=VPP),
    megatron("llama", context=2),
    megatron("llama", tensor=2, pipeline=2, label="sp"),
    megatron("llama", tensor=2, context=2, label="sp"),
    megatron("llama", data=2, zero=1),
    megatron("llama", tensor=2, data=2, label="sp"),
    megatron("llama", tensor=2, label="sp-padded", vocabulary=ODD),
    megatron("llama", pipeline=2, layers=4, label="uneven", own=UNEVEN),
    megatron("gpt2", tensor=2, pipeline=2, label="sp"),  # tied embeddings over stages
    megatron("qwen2", tensor=2, pipeline=2, label="sp"),
    megatron("qwen3", tensor=2, label="sp"),
    megatron("mixtral", data=2, expert=2),
    megatron("mixtral", pipeline=2, data=2, expert=2),
    *(deepspeed("llama", stage) for stage in (1, 3)),  # for a machine with one GPU
    *(deepspeed("llama", stage, data=2) for stage in range(4)),
    deepspeed("llama", 1, tensor=2),
    deepspeed("llama", 1, tensor=2, data=2),
    deepspeed("llama", 3, tensor=2, data=2),
    deepspeed("llama", 1, pipeline=2),
    deepspeed("llama", 1, pipeline=2, data=2),
    deepspeed("llama", 1, context=2),
    deepspeed("gpt2", 1, pipeline=2),
    deepspeed("qwen2", 1, tensor=2),
    deepspeed("qwen3", 3, data=2),
    deepspeed("mixtral", 1, data=2, expert=2),
    deepspeed("mixtral", 1, data=2, expert=2, idle=True),
    *(megatron(family, documents=True) for family in ("llama", "gpt2")),
    megatron("llama", tensor=2, label="sp", documents=True),
    megatron("llama", pipeline=2, documents=True),
    megatron("llama", context=2, documents=True),
    deepspeed("llama", 2, data=2, documents=True),
    deepspeed("llama", 1, pipeline=2, documents=True),
    deepspeed("llama", 1, context=2, documents=True),
    megatron("llama", tensor=2, label="sp-padded", vocabulary=ODD, fused=True),
    deepspeed("llama", 3, data=2, fused=True),
    deepspeed("llama", 1, tensor=2, fused=True),  # AutoTP divides the vocabulary
    default_eps(megatron("llama", tensor=2, label="sp")),
    default_eps(megatron("mixtral", data=2, expert=2)),
    default_eps(deepspeed("llama", 3, data=2)),
    default_eps(deepspeed("llama", 1, pipeline=2)),
)

FURTHER: tuple[Cell, ...] = (
    megatron("gpt2", tensor=2, pipeline=2, label="sp", fused=True),
    megatron("llama", context=2, fused=True),
    megatron("mixtral", data=2, expert=2, fused=True),
    deepspeed("gpt2", 1, pipeline=2, fused=True),
    deepspeed("llama", 2, context=2, documents=True, fused=True),
    deepspeed("qwen3_moe", 2, data=2, expert=2, fused=True),
    megatron("llama", data=2),
    megatron("llama", data=2, zero=2),
    megatron("llama", data=2, zero=1, label="overlap", own=OVERLAP),
    megatron("llama", data=4, zero=1),
    megatron("llama", tensor=2, data=2, zero=1, label="sp"),
    megatron("llama", pipeline=2, data=2, zero=1),
    megatron("llama", context=2, data=2, zero=1),
    megatron("llama", context=2, pipeline=2),
    megatron("llama", context=4),
    megatron("llama", tensor=2, pipeline=2, layers=4, label="sp-vpp2", own=VPP),
    megatron("llama", tensor=2, pipeline=2, label="sp-padded", vocabulary=ODD),
    megatron("llama", tensor=2, label="sp-full", recompute=True),
    megatron("llama", tensor=2, label="sp-selective", own=SELECTIVE),
    megatron("llama", pipeline=2, layers=4, label="full", recompute=True),
    megatron("gpt2"),
    megatron("gpt2", tensor=2, label="sp"),
    megatron("gpt2", tensor=4, label="sp-padded", vocabulary=ODD),
    megatron("gpt2", pipeline=2),
    megatron("gpt2", pipeline=2, layers=4, label="vpp2", own=VPP),
    megatron("gpt2", context=2),
    megatron("gpt2", data=2, zero=1),
    megatron("qwen2", tensor=2, label="sp"),
    megatron("qwen2", tensor=4, label="sp"),
    megatron("qwen2", pipeline=2, layers=4, label="uneven", own=UNEVEN),
    megatron("qwen2", context=2),
    megatron("qwen2", data=2, zero=1),
    megatron("qwen3", tensor=2, pipeline=2, label="sp"),
    megatron("qwen3", pipeline=2),
    megatron("qwen3", context=2),
    megatron("qwen3", data=2, zero=1),
    megatron("mixtral", tensor=2, label="sp"),
    megatron("mixtral", pipeline=2),
    megatron("mixtral", data=2, zero=1),
    megatron("mixtral", data=2, expert=2, zero=1),
    megatron(
        "mixtral", data=2, expert=2, label="allgather", own=(("moe_token_dispatcher_type", "allgather"),)
    ),
    megatron("qwen3_moe", tensor=2, label="sp"),
    megatron("qwen3_moe", tensor=2, pipeline=2, label="sp"),
    megatron("qwen3_moe", context=2),
    megatron("qwen3_moe", data=2, zero=1),
    megatron("qwen3_moe", pipeline=2, data=2, expert=2),
    *(
        deepspeed(family, stage, data=2)
        for family in ("gpt2", "qwen2", "mixtral", "qwen3_moe")
        for stage in range(4)
    ),
    *(deepspeed("qwen3", stage, data=2) for stage in range(3)),
    deepspeed("llama", 3, data=4),
    deepspeed("llama", 3, data=2, label="full", recompute=True),
    deepspeed("llama", 2, tensor=2, data=2),
    deepspeed("llama", 3, tensor=2),
    deepspeed("llama", 1, pipeline=4, layers=4),
    deepspeed("llama", 1, pipeline=2, layers=3, label="uneven"),
    deepspeed("llama", 3, context=2),
    deepspeed("llama", 2, context=2, data=2),
    deepspeed("llama", 2, data=2, label="odd", vocabulary=ODD),
    deepspeed("gpt2", 2, context=2),
    deepspeed("qwen2", 1, pipeline=2),
    deepspeed("qwen2", 2, context=2),
    deepspeed("qwen3", 1, tensor=2),
    deepspeed("qwen3", 1, pipeline=2),
    deepspeed("qwen3", 2, context=2),
    deepspeed("mixtral", 2, data=2, expert=2),
    deepspeed("qwen3_moe", 1, pipeline=2),
    deepspeed("qwen3_moe", 2, context=2),
    deepspeed("qwen3_moe", 2, data=2, expert=2),
    *(megatron(family, documents=True) for family in ("qwen2", "qwen3", "mixtral")),
    megatron("gpt2", tensor=2, pipeline=2, label="sp", documents=True),  # learned positions
    megatron("gpt2", context=2, documents=True),
    megatron("llama", pipeline=2, layers=4, label="vpp2", own=VPP, documents=True),
    megatron("llama", tensor=2, context=2, label="sp", documents=True),
    megatron("llama", tensor=2, label="sp-full", recompute=True, documents=True),
    megatron("llama", tensor=2, label="sp-selective", own=SELECTIVE, documents=True),
    deepspeed("llama", 3, data=2, label="full", recompute=True, documents=True),
    deepspeed("llama", 1, tensor=2, documents=True),
    deepspeed("llama", 1, pipeline=2, label="full", recompute=True, documents=True),
    deepspeed("gpt2", 1, pipeline=2, documents=True),
    deepspeed("gpt2", 2, context=2, documents=True),
    deepspeed("qwen3", 2, context=2, label="full", recompute=True, documents=True),
    deepspeed("mixtral", 2, data=2, expert=2, documents=True),
    *(
        default_eps(cell)
        for cell in (
            megatron("llama"),
            megatron("llama", pipeline=2),
            megatron("llama", data=2, zero=1),
            megatron("qwen3", context=2),
            megatron("gpt2", tensor=2, pipeline=2, label="sp"),
            *(deepspeed("llama", stage, data=2) for stage in range(3)),
            deepspeed("llama", 1, tensor=2),
            deepspeed("qwen2", 2, context=2),
            deepspeed("gpt2", 3, data=2),
            deepspeed("mixtral", 1, data=2, expert=2),
        )
    ),
    *IDLE,
)

ALL: tuple[Cell, ...] = CORE + FURTHER


def select_cells(patterns: Iterable[str]) -> tuple[Cell, ...]:
    """Select cells by ``core``, ``all``, a name, or a pattern of names (``megatron/*/tp2*``).

    Raises:
        InputError: a pattern matches no cell.
    """
    chosen: list[Cell] = []
    for pattern in patterns:
        found = {"core": CORE, "all": ALL}.get(pattern) or tuple(
            cell for cell in ALL if fnmatchcase(cell.name, pattern)
        )
        if not found:
            raise InputError(
                Problem(
                    "--cells",
                    f"--cells {pattern}",
                    "cells are core, all, a name, or a pattern of names with *",
                    f"{command_line('verify', '--list')} shows the names",
                )
            )
        chosen += found
    return tuple(dict.fromkeys(chosen))
