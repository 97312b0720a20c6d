"""Plans for GPUs on a fake device: every engine and family, and mistakes that must be found."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.hops import EACH, TOLERANCE, stretch
from toolkit import families
from toolkit.config.data import DocumentMasking
from toolkit.config.kernels import AttentionKernel
from toolkit.config.optim import OptimizerKernel
from toolkit.config.schema import EngineName, OffloadDevice, Precision
from toolkit.engine.protocol import MicroBatch
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.testing.dist import RankPool, RanksFailed, rank_pool
from toolkit.testing.fake_cuda import WrongDevice
from toolkit.testing.matrix import Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.rehearsal import Rehearsed, prepare_process, rehearse
from toolkit.testing.tiny import tiny_config
from toolkit.train.micro_batches import move_batch
from toolkit.train.task import NextTokenTask, Task

full = pytest.mark.full
# bf16 rounds to 8 bits; fp32 engines differ in the order of sums.
LOSS = {Precision.fp32: 1e-5, Precision.bf16: 2e-3}


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankPool]:
    """Ranks with a fake GPU each."""
    with rank_pool(4) as pool:
        yield pool


def local(family: str) -> Cell:
    return Cell(engine=EngineName.local, family=family)


def plan(cell: Cell, precision: Precision = Precision.fp32, **more: Any) -> RunPlan:
    """The plan for GPUs, with an attention kernel that the fake device can run."""
    settings = {"precision__name": precision, **more}
    chosen = cell.plan(OptimizerCase.ADAM, Device.CUDA, **settings)
    if chosen.kernels.attention.name == AttentionKernel.sdpa.value:
        return chosen
    return cell.plan(OptimizerCase.ADAM, Device.CUDA, **settings, model__attention=AttentionKernel.sdpa)


QUICK = ((deepspeed("llama", 3), Precision.bf16), (megatron("mixtral"), Precision.bf16))


def single_gpus() -> Iterator[tuple[Cell, Precision]]:
    """Every family on every engine, and every stage in both precisions; a rule refuses ZeRO 0 in 16 bits."""
    for number, family in enumerate(families.FAMILIES):
        now, other = (list(LOSS)[(number + turn) % 2] for turn in (0, 1))
        yield local(family), now
        yield deepspeed(family, 1 + number % 3), now
        yield megatron(family, zero=number // 2 % 2), other
    yield deepspeed("llama", 0), Precision.fp32
    yield from ((deepspeed("llama", stage), precision) for stage in (1, 2, 3) for precision in LOSS)
    yield from ((megatron("llama", zero=stage), precision) for stage in (0, 1) for precision in LOSS)
    yield from ((megatron("mixtral", zero=1), precision) for precision in LOSS)


LAYOUTS = (
    deepspeed("llama", 2, data=2),
    deepspeed("llama", 3, data=2),
    deepspeed("llama", 1, tensor=2),
    deepspeed("llama", 1, pipeline=2),
    deepspeed("llama", 1, context=2),
    deepspeed("mixtral", 1, data=2, expert=2),
    megatron("llama", tensor=2),
    megatron("gpt2", pipeline=2),
    megatron("llama", context=2),
    megatron("llama", data=2, zero=1),
    megatron("mixtral", data=2, expert=2),
)


@pytest.mark.parametrize(
    ("cell", "precision"),
    [
        *(pytest.param(*case, id=f"{case[0]}-{case[1].name}") for case in QUICK),
        *(
            pytest.param(*case, id=f"{case[0]}-{case[1].name}", marks=full)
            for case in dict.fromkeys(
                [*single_gpus(), *((cell, list(LOSS)[number % 2]) for number, cell in enumerate(LAYOUTS))]
            )
            if case not in QUICK
        ),
    ],
)
def test_plans_for_gpus_keep_every_tensor_on_the_gpu(
    cell: Cell, precision: Precision, gpus: RankPool, tmp_path: Path
) -> None:
    found: list[Rehearsed] = gpus.run(
        rehearse, plan(cell, precision), tmp_path, ranks=cell.ranks, timeout=300
    )
    expected: Rehearsed = gpus.run(rehearse, plan(cell.reference()), ranks=1, timeout=300)[0]
    for ours, theirs in zip(found[0].steps, expected.steps, strict=True):
        assert abs(ours.loss - theirs.loss) <= LOSS[precision]


# Options that put tensors elsewhere or take other ways through the engines.
OPTIONS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": Precision.fp16},
    "recompute": {"train__activation_checkpointing": True},
    "dropout": {"model__dropout": 0.1},
    "muon": {"optim__name": "muon", "optim__momentum": 0.95, "optim__clip": 0.0},
    "documents": {"data__documents": DocumentMasking.separate},
    "offload": {"offload__optimizer": OffloadDevice.cpu, "optim__kernel": OptimizerKernel.torch},
}


ENGINES = (local, partial(deepspeed, zero=2), partial(deepspeed, zero=3), megatron, partial(megatron, zero=1))


def cells_of(option: str) -> list[Cell]:
    """The cells that support an option. Only DeepSpeed offloads; Muon runs on local and DeepSpeed."""
    chosen = {"offload": ENGINES[1:3], "muon": ENGINES[:3]}.get(option, ENGINES)
    return [engine("llama" if option == "muon" else "gpt2") for engine in chosen]


@full
@pytest.mark.parametrize(
    ("cell", "option"), [(cell, option) for option in OPTIONS for cell in cells_of(option)], ids=str
)
def test_options_keep_every_tensor_on_the_gpu(
    cell: Cell, option: str, gpus: RankPool, tmp_path: Path
) -> None:
    found: Rehearsed = gpus.run(rehearse, plan(cell, **OPTIONS[option]), tmp_path, ranks=1, timeout=300)[0]
    assert all(math.isfinite(step.loss) for step in found.steps)


def on_fake_gpu(rank: int, ranks: int, function: Any, *arguments: Any) -> Any:
    prepare_process(rank)
    return function(rank, ranks, *arguments)


@full
def test_training_on_gpus_resumes_between_engines(gpus: RankPool, tmp_path: Path) -> None:
    """As tests/gpu/test_gpu.py does on a GPU."""
    source, losses = None, []
    for number, cell in enumerate((deepspeed("llama", 2), megatron("llama", zero=1), local("llama"))):
        target = tmp_path / str(number)
        arguments = (cell, number * EACH, source, target, False, Device.CUDA)
        losses += [step.loss for step in gpus.run(on_fake_gpu, stretch, *arguments, ranks=1)[0]]
        source = target
    right = gpus.run(on_fake_gpu, stretch, local("llama"), 0, None, tmp_path / "right", False, ranks=1)[0]
    assert max(abs(a - b.loss) for a, b in zip(losses, right, strict=False)) <= TOLERANCE


# ---- mistakes that a GPU would refuse


def error_of(rank: int, ranks: int, function: Any, *arguments: Any) -> str:
    """The error that the function raises on a rank; empty if it succeeds."""
    try:
        function(rank, ranks, *arguments)
    except WrongDevice as error:
        return f"{type(error).__name__}: {error}"
    return ""


def leave_modules(rank: int, ranks: int, plan: RunPlan) -> None:
    """Build Megatron-core's modules where it puts them by itself."""
    from toolkit.engine.megatron.model import PaddedVocabularyGPT

    PaddedVocabularyGPT.to = lambda self, *_: self  # type: ignore[method-assign, assignment]
    try:
        rehearse(rank, ranks, plan)
    finally:
        del PaddedVocabularyGPT.to


@pytest.mark.parametrize(
    ("family", "precision", "error"),
    [
        (
            "gpt2",
            Precision.fp32,
            r"WrongDevice: aten::embedding got \S*embedding.position_embeddings.weight, float32 \[.* on cpu",
        ),
        # The router's weight, which Megatron-core moves only in its first forward.
        ("mixtral", Precision.bf16, r"Wrapped parameters must be .* Received torch.BFloat16Tensor"),
    ],
    ids=["positions", "router"],
)
def test_parameter_left_on_the_cpu_by_megatron_is_found(
    family: str, precision: Precision, error: str, gpus: RankPool
) -> None:
    # The rank is not used again: Megatron-core's groups exist, and there is no engine to close.
    with pytest.raises(RanksFailed, match=error):
        gpus.run(leave_modules, plan(megatron(family), precision), ranks=1)


class ForgottenTensor(nn.Module):
    """Has a tensor that is no buffer, so that ``Module.to`` does not move it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(264, 16)
        self.output = nn.Linear(16, 264)
        self.scale = torch.ones(16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = self.output(self.embedding(input_ids) * self.scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_tensor_of_a_module_left_on_the_cpu_is_found(gpus: RankPool) -> None:
    config = tiny_config(None, model__target="tests.testing.test_rehearsal.ForgottenTensor")
    chosen = make_plan(config, World(ranks=1, ranks_per_node=1, device=Device.CUDA))
    found = gpus.run(error_of, rehearse, chosen, ranks=1)[0]
    assert re.search(r"aten::mul.Tensor got float32 \[16\] on cpu.*test_rehearsal.py", found), found


class WeightsFromCollation(NextTokenTask):
    """Keeps a tensor of ``collate`` for ``loss_sum`` instead of returning it."""

    def collate(self, samples: Any) -> Mapping[str, torch.Tensor]:
        batch = super().collate(samples)
        self.weights = torch.ones(batch["labels"].shape)
        return batch

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        return super().loss_sum(model, {**batch, "loss_weights": self.weights})


def test_tensor_made_by_collation_is_found(gpus: RankPool) -> None:
    found = gpus.run(error_of, rehearse, plan(local("llama")), None, WeightsFromCollation(), ranks=1)[0]
    assert re.search(r"WrongDevice: aten::\S+ got float32 \[[\d, ]+\] on cpu", found), found


def move_all_but_labels(task: Task, batch: MicroBatch, device: torch.device) -> MicroBatch:
    moved = move_batch(task, batch, device)
    moved["labels"] = batch["labels"]
    return moved


@pytest.mark.parametrize("cell", [deepspeed("llama", 1), megatron("llama")], ids=str)
def test_labels_left_on_the_cpu_are_found(cell: Cell, gpus: RankPool) -> None:
    found = gpus.run(error_of, rehearse, plan(cell), None, None, move_all_but_labels, ranks=1)[0]
    assert re.match(r"WrongDevice: aten::\S+ got (int64|bool) \[[\d, ]+\] on cpu", found), found


def collectives(rank: int, ranks: int) -> list[str]:
    """Which collectives of a tensor on the CPU are refused: NCCL's; a group of gloo's takes it."""
    prepare_process(rank)
    refused = []
    for name, group in (("nccl", None), ("gloo", dist.new_group(backend="gloo"))):
        try:
            dist.all_reduce(torch.zeros(2), group=group)
        except WrongDevice:
            refused.append(name)
    dist.all_reduce(torch.zeros(2, device="cuda"))
    return refused


def test_nccl_refuses_tensors_on_the_cpu(gpus: RankPool) -> None:
    assert gpus.run(collectives, ranks=1) == [["nccl"]]


def operators(rank: int, ranks: int) -> dict[str, bool]:
    """Whether operators of a GPU's and a CPU's tensor are refused."""
    prepare_process(rank)
    device, number = torch.ones(2, 3, device="cuda"), torch.tensor(2.0)
    calls = {
        "add": lambda: device + torch.ones(2, 3),
        "add a number": lambda: device + number,
        "add to a number": lambda: number.add_(device.sum()),
        "index by the CPU": lambda: device[torch.tensor([0])],
        "index the CPU": lambda: torch.ones(3)[torch.tensor([0], device="cuda")],
        "copy": lambda: torch.ones(2, 3).copy_(device),
        "numpy": device.numpy,
    }
    refused = {}
    for name, call in calls.items():
        try:
            call()
            refused[name] = False
        except WrongDevice:
            refused[name] = True
    return refused


def test_operators_mix_devices_as_on_a_gpu(gpus: RankPool) -> None:
    assert gpus.run(operators, ranks=1) == [
        {
            "add": True,
            "add a number": False,
            "add to a number": True,
            "index by the CPU": False,
            "index the CPU": True,
            "copy": False,
            "numpy": True,
        }
    ]
