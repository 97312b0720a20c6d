"""Compiled layers compute what eager ones do, in one graph without breaks.

pytest tests/engine/test_compile.py
pytest tests/engine/test_compile.py -m 'full or not full'  # every family and axis, and Inductor; needs g++

The backend aot_eager traces and differentiates graphs as Inductor does, and runs them with torch's own
kernels, so its results are equal to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.attention_kernels import flex_attention_with_gradients, with_attention
from tests.engine.cases import BF16
from toolkit.checkpoint.shard import EXP_AVG
from toolkit.config.data import DocumentMasking
from toolkit.config.kernels import AttentionKernel, CompileBackend, CompileMode
from toolkit.config.schema import BatchRampConfig, OffloadDevice
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.deepspeed.engine import DeepSpeedEngine
from toolkit.engine.local import LocalEngine
from toolkit.engine.protocol import StepResult
from toolkit.errors import ConfigError
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.memory_reader import MemoryReader
from toolkit.testing.parity import gather_tensors, rank_samples, train_steps
from toolkit.testing.tiny import FAMILIES, tiny_plan
from toolkit.train.task import NextTokenTask, text_task

LAYERS = {"compile__mode": CompileMode.layers, "compile__backend": CompileBackend.aot_eager}
FULL = LAYERS | {"compile__mode": CompileMode.full}
RAMP = {"train__batch_ramp": BatchRampConfig(start=2, increment=2, samples=6)}  # 1, 2 and 4 micro-batches
STEPS = 4


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(plan: RunPlan, rank: int = 0) -> tuple[list[StepResult], float, dict[Any, torch.Tensor]]:
    """The results of STEPS steps with an evaluation in between, its loss, and the final state. Collective."""
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    results = train_steps(engine, plan, range(2), rank=rank)
    evaluated = engine.eval_step(rank_samples(engine, plan, 100, rank))
    results += train_steps(engine, plan, range(2, STEPS), rank=rank)
    state = gather_tensors(engine.shards(), rank, plan.axes.size)
    engine.close()
    return results, evaluated.loss_sum, {key: value.clone() for key, value in state.items()}


def train_and_count(plan: RunPlan, rank: int = 0) -> tuple[Any, int, int]:
    """:func:`train`, the number of graphs and the number of graph breaks."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    trained = train(plan, rank)
    return trained, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def on_rank(rank: int, ranks: int, plan: RunPlan) -> tuple[Any, int, int]:
    disabled = os.environ.pop("TORCHDYNAMO_DISABLE", None)  # set by testing/dist.py
    try:
        return train_and_count(plan, rank)
    finally:
        if disabled is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = disabled


def assert_equal(ours: Any, theirs: Any) -> None:
    assert ours[:2] == theirs[:2]
    assert ours[2].keys() == theirs[2].keys(), "names have no prefix of torch.compile"
    assert all(torch.equal(value, theirs[2][key]) for key, value in ours[2].items())


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "mixtral" else pytest.mark.full) for name in FAMILIES]
)
def test_compiled_layers_of_every_family_equal_eager_ones(family: str) -> None:
    """One graph for training and one for evaluation, although batches and learning rates change."""
    plan = tiny_plan(family, **LAYERS, **RAMP)
    assert [plan.batch.at(step).accumulation for step in range(STEPS)] == [1, 2, 4, 4]
    compiled, graphs, breaks = train_and_count(plan)
    assert (graphs, breaks) == (2, 0)
    assert_equal(compiled, train(tiny_plan(family, **RAMP)))


@pytest.mark.parametrize(
    "kernel",
    [
        AttentionKernel.sdpa,
        pytest.param(AttentionKernel.flex, marks=pytest.mark.full),
        pytest.param(AttentionKernel.eager, marks=pytest.mark.full),
    ],
)
def test_documents_do_not_compile_again(kernel: AttentionKernel) -> None:
    """Every micro-batch has other documents, and so another mask."""
    separate = {"data__documents": DocumentMasking.separate}
    with flex_attention_with_gradients():
        compiled, graphs, breaks = train_and_count(with_attention(tiny_plan(**LAYERS, **separate), kernel))
        eager = train(with_attention(tiny_plan(**separate), kernel))
    assert (graphs, breaks) == (2, 0)
    assert_equal(compiled, eager)


@pytest.mark.full
def test_flash_attention_is_part_of_the_graph() -> None:
    flash = {"model__attention": AttentionKernel.flash}
    compiled, graphs, breaks = train_and_count(tiny_plan(**LAYERS, **flash))
    assert (graphs, breaks) == (2, 0)
    assert_equal(compiled, train(tiny_plan(**flash)))


def test_planted_graph_break_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward

    def breaking(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        result: torch.Tensor = forward(self, hidden)
        return result

    monkeypatch.setattr(LlamaMLP, "forward", breaking)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        train(tiny_plan(**LAYERS))


def test_resume_between_compiled_and_eager_is_bitwise() -> None:
    """A checkpoint does not depend on compilation. The control loses a moment."""
    eager, compiled = tiny_plan(), tiny_plan(**LAYERS)
    expected, _, state = train(eager)
    for first, second in ((eager, compiled), (compiled, eager)):
        engine = build_engine(first, text_task(first), rank=0, local_rank=0)
        engine.load(open_initial_weights(first))
        assert train_steps(engine, first, range(2)) == expected[:2]
        saved = MemoryReader.from_engine(engine)
        resumed = build_engine(second, text_task(second), rank=0, local_rank=0)
        resumed.load(saved)
        assert train_steps(resumed, second, range(2, STEPS)) == expected[2:]
        after = MemoryReader.from_engine(resumed).state
        assert after.keys() == state.keys()
        assert all(torch.equal(after[key], value) for key, value in state.items())
        key = next(key for key in saved.state if key.state == EXP_AVG)
        resumed.load(MemoryReader({**saved.state, key: torch.zeros_like(saved.state[key])}, saved.scalars))
        assert train_steps(resumed, second, range(2, STEPS)) != expected[2:]


@pytest.mark.full
@pytest.mark.parametrize("mode", [LAYERS, FULL], ids=["layers", "full"])
def test_activation_checkpointing_is_part_of_the_graph(mode: dict[str, Any]) -> None:
    changes = {"train__activation_checkpointing": "full", "model__dropout": 0.1}
    compiled, _, breaks = train_and_count(tiny_plan("gpt2", **mode, **changes))
    assert breaks == 0
    assert_equal(compiled, train(tiny_plan("gpt2", **changes)))


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "gpt2" else pytest.mark.full) for name in FAMILIES]
)
def test_compiled_model_equals_the_eager_one(family: str) -> None:
    compiled, graphs, breaks = train_and_count(tiny_plan(family, **FULL))
    assert (graphs, breaks) == (2, 0)
    assert_equal(compiled, train(tiny_plan(family)))


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_inductor_on_a_cpu_agrees_with_eager(family: str) -> None:
    """Inductor fuses and reorders sums, so that results agree within rounding."""
    compiled, graphs, breaks = train_and_count(tiny_plan(family, compile__mode=CompileMode.layers))
    assert (graphs, breaks) == (2, 0)
    eager = train(tiny_plan(family))
    for ours, theirs in zip(compiled[0], eager[0], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, abs=1e-5)
    for key, value in compiled[2].items():
        torch.testing.assert_close(value, eager[2][key], atol=1e-6, rtol=0)


AXES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "zero1": (2, "llama", {"zero__stage": 1, **BF16}),
    "zero2": (2, "llama", {"zero__stage": 2}),
    "pipeline": (2, "gpt2", {"parallel__pipeline": 2}),
    "tensor": (2, "llama", {"parallel__tensor": 2, "zero__stage": 1}),
    "tensor-norms": (2, "qwen3", {"parallel__tensor": 2}),
    "context": (2, "llama", {"parallel__context": 2, "zero__stage": 1}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", AXES)
def test_compiled_layers_of_every_axis_equal_eager_ones(name: str, pool: RankPool) -> None:
    ranks, family, changes = AXES[name]
    changes = {**changes, "model__num_hidden_layers": 4}
    compiled, graphs, breaks = pool.run(
        on_rank, tiny_plan(family, ranks=ranks, **LAYERS, **changes), ranks=ranks, timeout=400
    )[0]
    assert (graphs, breaks) == (2, 0)
    eager = pool.run(on_rank, tiny_plan(family, ranks=ranks, **changes), ranks=ranks, timeout=400)[0][0]
    assert_equal(compiled, eager)


ZERO3: dict[str, Any] = {
    "zero__stage": 3,
    # Weights as small as these would otherwise stay gathered, and gathered weights are used again soon.
    "engine__deepspeed": {
        "zero_optimization": {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        }
    },
}


ZERO3_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mixtral": ("mixtral", {}),
    "recomputed": ("llama", {"train__activation_checkpointing": "full"}),
    "offloaded": ("llama", {f"offload__{part}": OffloadDevice.cpu for part in ("parameters", "optimizer")}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ZERO3_CASES)
def test_zero3_gathers_compiled_layers_as_a_whole(name: str, pool: RankPool) -> None:
    """ZeRO 3 reduces the gradients of a layer in another order than those of single weights."""
    family, changes = ZERO3_CASES[name]
    changes = {**ZERO3, **changes}
    compiled, graphs, breaks = pool.run(
        on_rank, tiny_plan(family, ranks=2, **LAYERS, **changes), ranks=2, timeout=300
    )[0]
    assert (graphs, breaks) == (2, 0)
    eager = pool.run(on_rank, tiny_plan(family, ranks=2, **changes), ranks=2)[0][0]
    for ours, theirs in zip(compiled[0], eager[0], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, abs=1e-6)
    for key, value in compiled[2].items():
        torch.testing.assert_close(value, eager[2][key], atol=1e-6, rtol=0)


def saved_copies_of_weights(rank: int, ranks: int, plan: RunPlan) -> list[str]:
    """The weights whose memory a forward pass of compiled layers saves other than as the parameter itself.

    ZeRO 3 could not free them between forward and backward.
    """
    disabled = os.environ.pop("TORCHDYNAMO_DISABLE", None)
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    assert isinstance(engine, DeepSpeedEngine)
    engine.load(open_initial_weights(plan))
    batch = rank_samples(engine, plan, 0, rank)[0]
    found: list[str] = []

    def inspect(tensor: torch.Tensor) -> torch.Tensor:
        for name, weight in engine._ds.module.named_parameters():
            if weight.numel() and tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr():
                found.append(f"{name} {'itself' if tensor is weight else 'as a view'}")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(inspect, lambda tensor: tensor):
        engine._ds.backward(NextTokenTask().loss_sum(engine._ds, batch))
    engine.close()
    if disabled is not None:
        os.environ["TORCHDYNAMO_DISABLE"] = disabled
    return found


@pytest.mark.full
def test_zero3_can_free_the_weights_of_compiled_layers(pool: RankPool) -> None:
    inductor = {"compile__mode": CompileMode.layers}
    found = pool.run(saved_copies_of_weights, tiny_plan(ranks=2, **inductor, **ZERO3), ranks=2, timeout=400)[
        0
    ]
    assert "model.layers.1.mlp.down_proj.weight itself" in found
    assert not [name for name in found if name.endswith("as a view")]


class OwnBlock(nn.Linear):
    """A layer of a user with a graph break."""

    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return hidden + super().forward(hidden)


class OwnModel(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(264, 16)
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(blocks))
        self.head = nn.Linear(16, 264)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.table(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def test_layers_of_a_users_model_may_have_graph_breaks() -> None:
    own = {"model__target": f"{__name__}.OwnModel"}
    compiled, graphs, breaks = train_and_count(tiny_plan(None, **LAYERS, **own))
    assert graphs > 0
    assert breaks > 0
    assert_equal(compiled, train(tiny_plan(None, **own)))


def test_disabled_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the run would be eager without a word."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    plan = tiny_plan(**LAYERS)
    with pytest.raises(ConfigError, match="unset TORCHDYNAMO_DISABLE, or write compile=none"):
        LocalEngine(plan, text_task(plan))
    plan = tiny_plan()
    LocalEngine(plan, text_task(plan)).close()


def test_a_users_model_without_layers_is_refused() -> None:
    plan = tiny_plan(None, model__target=f"{__name__}.OwnModel", model__arguments={"blocks": 0}, **LAYERS)
    with pytest.raises(ConfigError, match="ModuleList"):
        LocalEngine(plan, text_task(plan))
