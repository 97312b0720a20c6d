"""The verdict on memory, what only GPUs need, and the nearest change with which a run fits.

pytest tests/plan/test_memory_verdict.py
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.plan.cases import CPU, h100s, run_config
from toolkit.config.compose import compose
from toolkit.config.schema import EngineName, Precision, RunConfig
from toolkit.errors import PlanError, Severity
from toolkit.estimate.plan_report import to_json
from toolkit.families import PUBLISHED
from toolkit.layout.axes import Axes
from toolkit.plan import make_plan
from toolkit.plan.device_overhead import ALL_TO_ALL, PAIR, RING, nccl_bytes
from toolkit.plan.kernels import FUSED, PLAIN
from toolkit.plan.memory_verdict import Fit, MemoryVerdict, judge_memory, least_bytes, most_bytes
from toolkit.plan.types import MemoryPlan, RunPlan

GB = 10**9
LLAMA = {
    "model": PUBLISHED["llama-3-8b"],
    "data__name": "prepared",
    "precision__name": Precision.bf16,
    "train__sequence_length": 4096,
    "train__micro_batch": 1,
    "train__global_batch": 64,
}
MEMORY = MemoryPlan(
    parameters=10 * GB,
    gradients=10 * GB,
    optimizer=20 * GB,
    activations=25 * GB,
    buffers=5 * GB,
    host=0,
    nvme=0,
    cuda_context=GB,
    nccl=2 * GB,
    fragmentation=2 * GB,
)


def llama(world: Any = None, **changes: Any) -> RunPlan:
    return make_plan(run_config(**{**LLAMA, **changes}), world or h100s(8))


def planned(**changes: Any) -> MemoryPlan:
    memory = llama(**changes).memory
    assert memory is not None
    return memory


def test_total_is_the_sum_of_all_lines() -> None:
    assert MEMORY.allocated == 70 * GB
    assert MEMORY.device_total == 75 * GB
    assert (least_bytes(MEMORY), most_bytes(MEMORY)) == (70 * GB, 78 * GB)


@pytest.mark.parametrize(
    ("device", "fit", "words"),
    [
        (100, Fit.yes, "fits with 24.0 GB to spare"),
        (79, Fit.yes, "fits with 3.2 GB to spare"),
        (78, Fit.unsure, "may not fit: only 2.2 GB to spare"),
        (71, Fit.unsure, "may not fit: 4.7 GB too much"),
        (70, Fit.no, "does not fit: 5.7 GB too much"),
    ],
)
def test_verdict_depends_on_the_range_of_the_plan(device: int, fit: Fit, words: str) -> None:
    world = replace(h100s(1), device_memory_bytes=device * GB)
    verdict = judge_memory(MEMORY, world)
    assert isinstance(verdict, MemoryVerdict)
    assert (verdict.fit, str(verdict)) == (fit, words)


def test_there_is_no_verdict_without_a_known_gpu() -> None:
    assert judge_memory(MEMORY, CPU) is None
    assert judge_memory(None, h100s(1)) is None
    assert judge_memory(MEMORY, replace(h100s(1), gpu=None)) is None


def test_unknown_activations_have_a_verdict_only_if_the_rest_does_not_fit() -> None:
    unknown = replace(MEMORY, activations=None)
    assert judge_memory(unknown, h100s(1)) is None
    small = judge_memory(unknown, replace(h100s(1), device_memory_bytes=30 * GB))
    assert small is not None
    assert small.fit is Fit.no


def test_cpu_plans_count_tensors_only() -> None:
    memory = make_plan(run_config(zero__stage=2), CPU).memory
    assert memory is not None
    assert memory.device_total == memory.states + memory.buffers + (memory.activations or 0)


def test_json_has_the_verdict_and_every_line() -> None:
    plan = llama(zero__stage=3)
    found = to_json(plan)
    assert found["verdict"].startswith("fits with ")
    assert plan.memory is not None
    assert found["memory"]["device_total"] == plan.memory.device_total
    names = ("nccl", "cuda_context", "cublas", "fragmentation")
    assert all(found["memory"][name] > 0 for name in names)
    assert found["memory"]["messages"] == 0
    assert found["memory"]["device_least"] < found["memory"]["device_total"] < found["memory"]["device_most"]


def test_nccl_has_buffers_for_each_communicator() -> None:
    deepspeed, megatron = run_config(), run_config(engine__name=EngineName.megatron)
    assert nccl_bytes(deepspeed, Axes(data=1)) == 0
    assert nccl_bytes(deepspeed, Axes(data=2)) == PAIR
    assert nccl_bytes(deepspeed, Axes(data=8)) == RING
    assert nccl_bytes(deepspeed, Axes(data=4, pipeline=2)) == 2 * RING + PAIR  # world, data, pipeline
    # world, tensor, pipeline, data, tensor x pipeline
    assert nccl_bytes(megatron, Axes(data=4, tensor=4, pipeline=2)) == 4 * RING + PAIR
    experts = nccl_bytes(deepspeed, Axes(data=8, expert=8))
    assert experts == RING + ALL_TO_ALL


def test_registered_buffers_fragment_more() -> None:
    own = {"nccl_ub": True}
    segments = planned(engine__name=EngineName.megatron, zero__stage=1)
    blocks = planned(engine__name=EngineName.megatron, zero__stage=1, engine__megatron=own)
    assert blocks.fragmentation == pytest.approx(2.5 * segments.fragmentation, rel=0.01)


def test_stages_of_a_pipeline_exchange_messages() -> None:
    run = {"engine__name": EngineName.megatron, "zero__stage": 1}
    one, two = (planned(**run, parallel__pipeline=size) for size in (1, 2))
    assert one.messages == 0
    assert two.messages == 3 * 2 * 4096 * 4096


def test_optimizer_step_counts_only_if_it_needs_more_than_activations() -> None:
    few = planned(zero__stage=1, train__sequence_length=128, train__activation_checkpointing="full")
    many = planned(zero__stage=1)
    group = 8_030_261_248 // 8
    assert few.activations is not None
    assert few.temporaries + few.activations == pytest.approx((2 + 4) * group, rel=0.01)
    assert many.temporaries < GB


def test_few_tokens_have_the_plain_loss() -> None:
    """Their logits need less than the gradient of the output layer's weight in fp32."""
    assert llama(train__sequence_length=1024, zero__stage=3).kernels.loss.name == PLAIN
    assert llama(train__sequence_length=2048, zero__stage=3).kernels.loss.name == FUSED


def remedy_of(words: list[str]) -> str:
    with pytest.raises(PlanError) as refused:
        plan_words(words)
    (error,) = [problem for problem in refused.value.problems if problem.severity is Severity.ERROR]
    assert "fit on its device" in error.rule
    return error.remedy.removeprefix("write ")


def plan_words(words: list[str]) -> RunPlan:
    config: RunConfig = compose(words)
    return make_plan(config, h100s(8))


NONE = "train.activation_checkpointing=none"
LLAMA_8B = ["model=llama", "+exp=llama_8b_zero3_offload", "offload=none"]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["engine=megatron", "zero=stage0"], "zero=stage1"),
        (["zero=stage3", NONE, "train.micro_batch=2"], "train.micro_batch=1"),
        (["zero=stage1", NONE, "train.micro_batch=2"], "train.activation_checkpointing=full"),
    ],
)
def test_typed_remedy_makes_the_run_fit(words: list[str], remedy: str) -> None:
    base = [*LLAMA_8B, *words]
    found = remedy_of(base)
    assert re.match(r"[a-z]+[.=]", found)
    assert found == remedy
    plan = plan_words([*base, *found.split()])
    verdict = judge_memory(plan.memory, plan.world)
    assert verdict is not None
    assert verdict.fit is Fit.yes
