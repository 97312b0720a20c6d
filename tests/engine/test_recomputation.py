"""Recomputed and offloaded activations change no loss, norm or weight on any engine: to the bit, with
dropout."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils import checkpoint

from toolkit.config.kernels import CompileBackend, CompileMode
from toolkit.config.schema import EngineName, OffloadDevice
from toolkit.models import activation_offload
from toolkit.plan.types import RunPlan
from toolkit.testing import parity
from toolkit.testing.dist import RankPool
from toolkit.testing.tiny import FAMILIES, tiny_plan

EQUAL = parity.Distance(0, 0, 0)
STEPS = 2
MODES: dict[str, dict[str, Any]] = {
    "selective": {"train__activation_checkpointing": "selective"},
    "full": {"train__activation_checkpointing": "full"},
    "every-second": {"train__activation_checkpointing": "2"},
    "offload": {"train__activation_checkpointing": "full", "offload__activations": OffloadDevice.cpu},
}
MEGATRON: dict[str, Any] = {"engine__name": EngineName.megatron}
# Layout -> (family, ranks, keys, modes); those of QUICK run in the quick suite.
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], tuple[str, ...]]] = {
    "zero3": ("llama", 2, {"zero__stage": 3}, tuple(MODES)),
    "zero3-gpt2": ("gpt2", 2, {"zero__stage": 3}, ("selective", "offload")),
    "zero3-mixtral": ("mixtral", 2, {"zero__stage": 3}, ("full",)),
    "zero2-qwen2": ("qwen2", 2, {"zero__stage": 2}, ("selective", "every-second")),
    "ulysses": ("qwen3", 2, {"zero__stage": 2, "parallel__context": 2}, ("selective", "offload")),
    "autotp": ("llama", 2, {"zero__stage": 1, "parallel__tensor": 2}, ("full", "offload")),
    "autoep": ("mixtral", 2, {"zero__stage": 2, "parallel__expert": 2}, ("selective", "full")),
    "pipeline": (
        "llama",
        2,
        {"zero__stage": 1, "parallel__pipeline": 2, "model__num_hidden_layers": 4},
        tuple(MODES),
    ),
    "megatron": ("llama", 1, {**MEGATRON, "model__num_hidden_layers": 4}, ("selective", "full", "offload")),
    "megatron-gpt2": ("gpt2", 1, MEGATRON, ("selective", "full")),
    "megatron-qwen3": ("qwen3", 1, MEGATRON, ("selective",)),
    "megatron-mixtral": ("mixtral", 1, MEGATRON, ("selective", "full")),
    "megatron-sp": ("llama", 2, {**MEGATRON, "parallel__tensor": 2}, ("selective", "full", "offload")),
    "megatron-cp": ("llama", 2, {**MEGATRON, "parallel__context": 2}, ("selective", "full")),
    "megatron-pp": (
        "llama",
        2,
        {**MEGATRON, "parallel__pipeline": 2, "model__num_hidden_layers": 4},
        tuple(MODES),
    ),
}
QUICK = {("zero3", "offload"), ("megatron-sp", "selective"), ("megatron-pp", "every-second")}
CASES = [
    pytest.param(
        layout, mode, id=f"{layout}-{mode}", marks=() if (layout, mode) in QUICK else pytest.mark.full
    )
    for layout, (*_, modes) in LAYOUTS.items()
    for mode in modes
]


def plan_of(layout: str, **changes: Any) -> RunPlan:
    family, ranks, keys, _ = LAYOUTS[layout]
    return tiny_plan(family, ranks=ranks, model__dropout=0.1, **{"zero__stage": 0, **keys, **changes})


class OneNodeNorm(torch.autograd.Function):
    """RMSNorm as one node of the autograd graph, as in the kernels of GPUs.

    On CPUs it is several nodes, two of which use the input. Autograd adds the gradients of the input's uses
    one by one; if the norm is recomputed apart from them, the sum has another order and rounds differently.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(value, weight)
        ctx.eps = eps
        return functional.rms_norm(value, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            result = functional.rms_norm(value, weight.shape, weight, ctx.eps)
        return (*torch.autograd.grad(result, (value, weight), gradient), None)


def trace(rank: int, ranks: int, plan: RunPlan, one_node: bool) -> parity.RunTrace:
    with pytest.MonkeyPatch.context() as patch:
        if one_node:
            patch.setattr(
                torch.nn.RMSNorm,
                "forward",
                lambda norm, value: OneNodeNorm.apply(value, norm.weight, norm.eps),
            )
        return parity.run_trace(plan, rank=rank, steps=STEPS)


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, bool], parity.RunTrace]:
    """Traces without recomputation, of layouts, by whether norms are one node."""
    return {}


@pytest.mark.parametrize(("layout", "mode"), CASES)
def test_no_result_changes_on_ranks(
    layout: str, mode: str, pool: RankPool, plain: dict[tuple[str, bool], parity.RunTrace]
) -> None:
    ranks, one_node = LAYOUTS[layout][1], layout.startswith("megatron") and mode == "selective"
    if (layout, one_node) not in plain:
        plain[layout, one_node] = pool.run(trace, plan_of(layout), one_node, ranks=ranks)[0]
    found = pool.run(trace, plan_of(layout, **MODES[mode]), one_node, ranks=ranks)[0]
    assert found.distance(plain[layout, one_node]) == EQUAL


@pytest.mark.full
def test_recomputed_norms_of_several_nodes_differ_by_rounding_only(
    pool: RankPool, plain: dict[tuple[str, bool], parity.RunTrace]
) -> None:
    whole, norms = (
        pool.run(trace, plan_of("megatron", **changes), False, ranks=1)[0]
        for changes in ({}, MODES["selective"])
    )
    distance = norms.distance(whole)
    assert max(distance.norm, distance.weight) > 0
    assert max(distance.loss, distance.norm, distance.weight) < 2e-6


@pytest.fixture(scope="module")
def local() -> dict[str, parity.RunTrace]:
    """Traces of the local engine without recomputation, by family."""
    return {}


def local_trace(family: str, found: dict[str, parity.RunTrace]) -> parity.RunTrace:
    if family not in found:
        found[family] = parity.run_trace(tiny_plan(family, model__dropout=0.1), steps=STEPS)
    return found[family]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "family", [name if name == "mixtral" else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]
)
def test_no_result_changes_locally(family: str, mode: str, local: dict[str, parity.RunTrace]) -> None:
    found = parity.run_trace(tiny_plan(family, model__dropout=0.1, **MODES[mode]), steps=STEPS)
    assert found.distance(local_trace(family, local)) == EQUAL


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("mode", MODES)
def test_compiled_layers_recompute_inside_their_graph(
    family: str, mode: str, local: dict[str, parity.RunTrace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph a layer, whose results are those without recomputation; inputs still move to the host."""
    stored: list[torch.Tensor] = []
    create = activation_offload._Stored.__init__

    def record(self: Any, tensor: torch.Tensor, previous: Any) -> None:
        create(self, tensor, previous)
        stored.append(tensor)

    monkeypatch.setattr(activation_offload._Stored, "__init__", record)
    torch._dynamo.reset()
    layers = {"compile__mode": CompileMode.layers, "compile__backend": CompileBackend.aot_eager}
    plan = tiny_plan(family, model__dropout=0.1, **layers, **MODES[mode])
    found = parity.run_trace(plan, steps=STEPS)
    torch._dynamo.reset()
    assert found.distance(local_trace(family, local)) == EQUAL
    inputs = STEPS * plan.batch.at(0).accumulation * plan.config.model.num_hidden_layers
    assert len(stored) == (inputs if mode == "offload" else 0)


def compiled_trace(rank: int, ranks: int, plan: RunPlan) -> parity.RunTrace:
    disabled = os.environ.pop("TORCHDYNAMO_DISABLE", None)  # set by testing/dist.py
    torch._dynamo.reset()
    try:
        return parity.run_trace(plan, rank=rank, steps=STEPS)
    finally:
        if disabled is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = disabled


@pytest.mark.full
@pytest.mark.parametrize("mode", ["selective", "offload"])
def test_compiled_layers_recompute_with_gathered_parameters(
    mode: str, pool: RankPool, plain: dict[tuple[str, bool], parity.RunTrace]
) -> None:
    """ZeRO 3 reduces the gradients of a compiled layer in another order, so results agree up to rounding."""
    if ("zero3", False) not in plain:
        plain["zero3", False] = pool.run(trace, plan_of("zero3"), False, ranks=2)[0]
    layers = {"compile__mode": CompileMode.layers, "compile__backend": CompileBackend.aot_eager}
    found = pool.run(compiled_trace, plan_of("zero3", **layers, **MODES[mode]), ranks=2, timeout=400)[0]
    distance = found.distance(plain["zero3", False])
    assert max(distance.loss, distance.norm, distance.weight) < 2e-6


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_control_other_dropout_masks_change_results(
    mode: str, local: dict[str, parity.RunTrace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the random state of the forward pass, recomputation draws other masks, and the tests above
    fail."""
    monkeypatch.setattr(checkpoint.torch, "set_rng_state", lambda state: None)
    found = parity.run_trace(tiny_plan("gpt2", model__dropout=0.1, **MODES[mode]), steps=STEPS)
    assert found.distance(local_trace("gpt2", local)).loss > 1e-5


def test_control_wrong_stored_input_changes_results(
    local: dict[str, parity.RunTrace], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = activation_offload._Stored.take
    monkeypatch.setattr(activation_offload._Stored, "take", lambda stored: take(stored) * 1.1)
    found = parity.run_trace(tiny_plan("gpt2", model__dropout=0.1, **MODES["offload"]), steps=STEPS)
    assert found.distance(local_trace("gpt2", local)).loss > 1e-5
