"""Kernels and layers that Megatron-core uses on GPUs by default, compared on the CPU with the plain ones.

The fused functions of megatron/core/fusions are the same arithmetic with gradients written by hand; on GPUs
``torch.compile`` makes kernels of them, and on CPUs they run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.matrix_checks import CONTROL_STEPS, STEPS, References, changed, check, far, wrong_on_rank
from toolkit.config.optim import OptimizerKernel
from toolkit.engine.megatron import patches
from toolkit.plan.types import KernelChoice, RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import OVERLAP, VPP, Cell, OptimizerCase, megatron
from toolkit.testing.measure import Measured, measure

FUSED = (
    ("bias_activation_fusion", True),
    ("bias_dropout_fusion", True),
    ("gradient_accumulation_fusion", True),
)
ALIGNED = (*VPP, *OVERLAP, ("align_param_gather", True), ("deallocate_pipeline_outputs", True))
GPT2 = megatron(
    "gpt2", label="fused", own=FUSED
)  # a tied embedding, which also gets gradients without fusion
FULL = [
    megatron("llama", tensor=2, pipeline=2, label="sp-fused", own=FUSED),
    megatron("gpt2", pipeline=2, label="fused", own=FUSED),
    megatron("llama", pipeline=2, data=2, zero=1, layers=4, label="aligned", own=ALIGNED),
]


@pytest.mark.parametrize(
    "cell",
    [
        megatron("mixtral", data=2, expert=2, label="fused", own=FUSED),
        *(pytest.param(cell, marks=pytest.mark.full) for cell in (GPT2, *FULL)),
    ],
    ids=str,
)
def test_fused_kernels_match_local(cell: Cell, pool: RankPool, references: References) -> None:
    check(cell, OptimizerCase.ADAM, pool, references)


@contextmanager
def without_weight_gradients(plan: RunPlan) -> Iterator[None]:
    """A control: linear layers do not add their gradients to the buffer."""
    patches.apply()
    from megatron.core.tensor_parallel import layers

    with changed(layers.fused_weight_gradient_mlp_cuda, "wgrad_gemm_accum_fp32", lambda *_tensors: None):
        yield


@pytest.mark.full
def test_control_without_weight_gradients(pool: RankPool, references: References) -> None:
    plan = GPT2.plan(OptimizerCase.ADAM)
    found = pool.run(wrong_on_rank, plan, without_weight_gradients, {}, CONTROL_STEPS, ranks=1)[0]
    far(GPT2, OptimizerCase.ADAM, found, references)


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.full)])
def test_fused_adamw_matches_local(zero: int, pool: RankPool, references: References) -> None:
    cell = megatron("llama", zero=zero)
    plan = cell.plan(OptimizerCase.ADAM)
    fused = KernelChoice(OptimizerKernel.fused.value, "the plan of a GPU")
    plan = replace(plan, kernels=replace(plan.kernels, optimizer=fused))
    (found, fused_steps), *_ = pool.run(measure_and_count_fused_updates, plan, ranks=1)
    assert fused_steps >= STEPS
    assert found.differences(references.of(cell.reference(), OptimizerCase.ADAM)).over(cell.allowed) == []


def measure_and_count_fused_updates(rank: int, ranks: int, plan: RunPlan) -> tuple[Measured, int]:
    from torch.optim import adam

    calls: list[int] = []
    update = adam._fused_adam

    def counted(*args: Any, **settings: Any) -> None:
        calls.append(1)
        update(*args, **settings)

    with changed(adam, "_fused_adam", counted):
        return measure(rank, ranks, plan, steps=STEPS), len(calls)


def norm_and_clip(rank: int, ranks: int, upstream: bool) -> tuple[float, list[torch.Tensor], int]:
    """The norm of three tensors, the tensors times a quarter, and the number of values read on the host."""
    from toolkit.engine.megatron import cpu

    cpu.enable()
    patches.apply()
    from megatron.core.utils import local_multi_tensor_l2_norm

    tensors = three_tensors()
    compute = local_multi_tensor_l2_norm if upstream else patches._norm_of_tensors
    with torch.profiler.profile() as seen:
        norm, _ = compute(0, torch.zeros(1), [tensors], False)
        patches._scale_tensors(0, torch.zeros(1), [tensors, tensors], 0.25)
    reads = {event.key: event.count for event in seen.key_averages()}
    return float(norm), tensors, reads.get("aten::_local_scalar_dense", 0)


def three_tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in ((3, 4), (5,), (1,))]


def test_norm_and_clipping_read_nothing_on_the_host(pool: RankPool) -> None:
    norm, clipped, reads = pool.run(norm_and_clip, False, ranks=1)[0]
    upstream, _, upstream_reads = pool.run(norm_and_clip, True, ranks=1)[0]
    assert norm == upstream
    assert reads == 0
    assert upstream_reads >= 3, "the control: Megatron-core reads the norm of every tensor"
    for found, tensor in zip(clipped, three_tensors(), strict=True):
        assert torch.equal(found, tensor * 0.25)


# -- experts in one grouped product


class GroupedLinear(torch.nn.Module):
    """Stands in for Transformer Engine's grouped linear layer: its parameters, with torch's products."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", weight)

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, None]:
        parts = zip(tokens.split(counts), self.parameters(), strict=True)
        return torch.cat([part @ weight.T for part, weight in parts]), None


@contextmanager
def grouped_experts(plan: RunPlan) -> Iterator[None]:
    """Build the experts with Megatron-core's ``TEGroupedMLP``, which needs Transformer Engine only for the
    layers that :class:`GroupedLinear` replaces.
    """
    patches.apply()
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    from toolkit.engine.megatron import model

    layer_spec = model.layer_spec

    def with_grouped_experts(*arguments: Any) -> Any:
        spec = layer_spec(*arguments)
        for layer in spec.layer_specs:
            layer.submodules.mlp.submodules.experts = ModuleSpec(
                module=TEGroupedMLP,
                submodules=MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear),
            )
        return spec

    with changed(model, "layer_spec", with_grouped_experts):
        yield


@contextmanager
def shifted_experts(plan: RunPlan) -> Iterator[None]:
    """A control: the weights of a rank's experts are those of other experts."""
    from toolkit.engine.megatron import state

    right = state.global_name

    def wrong(chunk: Any, name: str) -> str:
        found = state.GROUPED_EXPERT.search(name)
        if found is None:
            return right(chunk, name)
        return right(chunk, name.removesuffix(found[2]) + str(1 - int(found[2])))

    with grouped_experts(plan), changed(state, "global_name", wrong):
        yield


MIXTRAL = megatron("mixtral", data=2, expert=2)


def test_grouped_experts_match_local(pool: RankPool, references: References) -> None:
    """A checkpoint is loaded into, and gathered from, tensors with other names, in both products."""
    plan = MIXTRAL.plan(OptimizerCase.ADAM)
    found = pool.run(wrong_on_rank, plan, grouped_experts, {}, STEPS, ranks=2)[0]
    assert (
        found.differences(references.of(MIXTRAL.reference(), OptimizerCase.ADAM)).over(MIXTRAL.allowed) == []
    )


def test_control_shifted_experts(pool: RankPool, references: References) -> None:
    found = pool.run(
        wrong_on_rank, MIXTRAL.plan(OptimizerCase.ADAM), shifted_experts, {}, CONTROL_STEPS, ranks=2
    )[0]
    far(MIXTRAL, OptimizerCase.ADAM, found, references)


def initial_state(rank: int, ranks: int, plan: RunPlan, grouped: bool) -> dict[str, torch.Tensor]:
    """What a checkpoint of an engine has that has just loaded the initial weights, whole and by name."""
    from contextlib import nullcontext

    from toolkit.engine.build import build_engine, open_initial_weights
    from toolkit.testing.parity import gather_weights
    from toolkit.train.task import text_task

    with grouped_experts(plan) if grouped else nullcontext():
        engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
        engine.load(open_initial_weights(plan))
        found = gather_weights(engine, plan, rank)
        engine.close()
    return found


def test_grouped_experts_have_the_same_checkpoint(pool: RankPool) -> None:
    plan = MIXTRAL.plan(OptimizerCase.ADAM)
    plain, grouped = (pool.run(initial_state, plan, kind, ranks=2)[0] for kind in (False, True))
    assert plain.keys() == grouped.keys()
    assert all(torch.equal(plain[name], grouped[name]) for name in plain)
