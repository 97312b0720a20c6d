"""How often the host waits for the device in a step, counted on a fake device (``testing/host_reads.py``).

pytest tests/engine/test_host_reads.py
pytest tests/engine/test_host_reads.py -m full     # the other layouts and precisions
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from toolkit.config.schema import EngineName, Precision
from toolkit.engine.protocol import CountedBatch, MicroBatch, StepSettings
from toolkit.engine.step_read import StepRead, loss_weight
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.testing import rehearsal
from toolkit.testing.dist import RankPool, rank_pool, run_ranks
from toolkit.testing.host_reads import count_host_reads
from toolkit.testing.tiny import MICRO_BATCH, VOCABULARY, micro_batches, tiny_config, tiny_plan
from toolkit.train.micro_batches import move_batch, pending_steps, prefetches
from toolkit.train.task import NextTokenTask, text_task

DEEPSPEED, MEGATRON = {"engine__name": EngineName.deepspeed}, {"engine__name": EngineName.megatron}
ZERO3 = DEEPSPEED | {"zero__stage": 3}
READ = "toolkit/engine/step_read.py"
# DeepSpeed 0.19 copies a constant to the device for the norm of each parameter group, and waits for
# parameters that a single rank has whole.
ZERO3_WAITS = ("deepspeed/runtime/zero/stage3.py:2483", "deepspeed/runtime/zero/partition_parameters.py")

Waits = list[str]


def gpu_plan(family: str = "llama", ranks: int = 1, micro_batches: int = 1, **changes: Any) -> RunPlan:
    """A plan for GPUs with that many micro-batches per step and data rank."""
    axes = ranks // max(changes.get(f"parallel__{axis}", 1) for axis in ("tensor", "pipeline", "context"))
    changes = {"engine__name": EngineName.local, **changes}
    config = tiny_config(family, train__global_batch=MICRO_BATCH * micro_batches * axes, **changes)
    return make_plan(config, World(ranks=ranks, ranks_per_node=ranks, device=Device.CUDA, gpu="h100"))


def waits_of_a_step(
    rank: int, ranks: int, plan: RunPlan, task: NextTokenTask | None = None, counted: bool = True
) -> Waits:
    """The waits of the third step: the optimizer has its state, and ZeRO 3 knows the order of modules."""
    from toolkit.engine.build import build_engine, open_initial_weights

    rehearsal.prepare_process(rank)
    task = task or text_task(plan)
    engine = build_engine(plan, task, rank=rank, local_rank=rank)
    try:
        engine.load(open_initial_weights(plan))
        data_rank = plan.axes.coordinates(rank).data
        for step in range(3):
            batches: list[MicroBatch] = [
                move_batch(task, batch, engine.device) for batch in micro_batches(plan, step, data_rank)
            ]
            if not counted:
                batches = [dict(batch) for batch in batches]
            with count_host_reads() as found:
                engine.train_step(batches, StepSettings(step, 1e-3))
    finally:
        engine.close()
    return [str(wait) for wait in found.waits]


@pytest.fixture(scope="module")
def gpu() -> Iterator[RankPool]:
    """A process with a fake GPU."""
    with rank_pool(1) as pool:
        yield pool


def check(one: Waits, several: Waits, forced: tuple[str, ...]) -> None:
    """Assert that a step waits once, whatever the number of micro-batches, but for what DeepSpeed forces."""
    ours, others = (
        [wait for wait in found if not any(place in wait for place in forced)] for found in (one, several)
    )
    assert ours == others, f"waits in each micro-batch: {others}"
    assert len(ours) == 1, one
    assert READ in ours[0], one


@pytest.mark.parametrize(
    ("changes", "forced"),
    [
        pytest.param({}, (), id="local"),
        pytest.param(DEEPSPEED | {"zero__stage": 2}, (), id="zero2", marks=pytest.mark.full),
        pytest.param(ZERO3, ZERO3_WAITS, id="zero3"),
        pytest.param(MEGATRON | {"zero__stage": 1}, (), id="megatron"),
    ],
)
def test_a_step_waits_for_the_device_once(
    gpu: RankPool, changes: dict[str, Any], forced: tuple[str, ...]
) -> None:
    one, several = (gpu.run(waits_of_a_step, gpu_plan(micro_batches=count, **changes))[0] for count in (1, 3))
    check(one, several, forced)


class Reading(NextTokenTask):
    """A control: the loss is read in every micro-batch."""

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        loss = super().loss_sum(model, batch)
        assert loss.item() > 0
        return loss


def test_a_read_in_every_micro_batch_is_found(gpu: RankPool) -> None:
    found = gpu.run(waits_of_a_step, gpu_plan(micro_batches=3), Reading())[0]
    assert sum("test_host_reads.py" in wait for wait in found) == 3, found


def test_counting_units_on_the_device_is_found(gpu: RankPool) -> None:
    found = gpu.run(waits_of_a_step, gpu_plan(micro_batches=3), None, False)[0]
    assert sum("toolkit/train/task.py" in wait for wait in found) == 3, found


def transfers(rank: int, ranks: int, plan: RunPlan) -> tuple[Waits, Waits, list[str]]:
    rehearsal.prepare_process(rank)
    device, task = torch.device("cuda", rank), text_task(plan)
    samples = [[np.arange(MICRO_BATCH * 33).reshape(MICRO_BATCH, 33) % VOCABULARY]] * 2
    with (
        count_host_reads() as ours,
        pending_steps(plan, task, samples, device, first_step=19, data_rank=0, prefetch=True) as steps,
    ):
        (batch,) = next(steps)()
    with count_host_reads() as pageable:
        batch["labels"].cpu().to(device)
    on = [str(tensor.device) for tensor in batch.values()]
    return [str(wait) for wait in ours.waits], [str(wait) for wait in pageable.waits], on


def test_micro_batches_are_copied_from_pinned_memory_without_waiting(gpu: RankPool) -> None:
    ours, pageable, on = gpu.run(transfers, gpu_plan())[0]
    assert ours == []
    assert len(pageable) == 2, "the control: a copy to the host, and one from pageable memory"
    assert set(on) == {"cuda:0"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "ranks", "changes", "forced"),
    [
        pytest.param("llama", 1, DEEPSPEED | {"zero__stage": 0}, (), id="zero0"),
        pytest.param("llama", 1, DEEPSPEED | {"zero__stage": 1}, (), id="zero1"),
        *(
            pytest.param(
                "llama",
                1,
                changes | {"precision__name": precision},
                ZERO3_WAITS if changes is ZERO3 else (),
                id=f"{name}-{precision.value}",
            )
            for precision in (Precision.bf16, Precision.fp16)
            for name, changes in (
                ("local", {}),
                ("zero2", DEEPSPEED | {"zero__stage": 2}),
                ("zero3", ZERO3),
                ("megatron", MEGATRON | {"zero__stage": 1}),
            )
        ),
        pytest.param("llama", 2, DEEPSPEED | {"zero__stage": 2}, (), id="zero2-two-ranks"),
        pytest.param("llama", 2, ZERO3, ZERO3_WAITS, id="zero3-two-ranks"),
        pytest.param("mixtral", 1, {}, (), id="local-experts"),
        pytest.param(
            "llama", 2, DEEPSPEED | {"zero__stage": 1, "parallel__tensor": 2}, (), id="deepspeed-tensor"
        ),
        pytest.param(
            "llama", 2, DEEPSPEED | {"zero__stage": 1, "parallel__pipeline": 2}, (), id="deepspeed-pipeline"
        ),
        pytest.param(
            "llama", 2, MEGATRON | {"zero__stage": 0, "parallel__tensor": 2}, (), id="megatron-tensor"
        ),
        pytest.param(
            "llama", 2, MEGATRON | {"zero__stage": 1, "parallel__pipeline": 2}, (), id="megatron-pipeline"
        ),
    ],
)
def test_every_layout_waits_once(
    family: str, ranks: int, changes: dict[str, Any], forced: tuple[str, ...]
) -> None:
    one, several = (
        run_ranks(waits_of_a_step, ranks, gpu_plan(family, ranks, count, **changes))[0] for count in (1, 4)
    )
    check(one, several, forced)


@pytest.mark.full
def test_experts_on_several_ranks_wait_once_per_layer() -> None:
    """The host has to know the sizes of the all-to-all."""
    plan = gpu_plan("mixtral", 2, 3, **DEEPSPEED, zero__stage=1, parallel__expert=2)
    found = run_ranks(waits_of_a_step, 2, plan)[0]
    exchanges = [wait for wait in found if "toolkit/engine/deepspeed/expert_parallel.py" in wait]
    assert plan.shape is not None
    assert len(exchanges) == 3 * plan.shape.num_hidden_layers, found
    assert len(found) == len(exchanges) + 1, found


def test_the_plan_decides_whether_a_thread_prepares_micro_batches() -> None:
    assert prefetches(gpu_plan())
    assert not prefetches(tiny_plan()), "on CPUs"
    own = gpu_plan()
    own.config.task.target = "my.Task"
    assert not prefetches(own), "code of the user's own may have state or draw random numbers"


def test_a_thread_prepares_the_same_micro_batches_and_reads_no_further_step() -> None:
    plan, taken = tiny_plan(train__steps=5, train__global_batch=4), []

    def stream(first: int) -> Iterator[list[np.ndarray[Any, Any]]]:
        for step in range(first, 100):
            taken.append(step)
            yield [np.full((2, 5), step), np.full((2, 5), step + 1)]

    found = []
    for prefetch in (False, True):
        with pending_steps(
            plan,
            NextTokenTask(),
            stream(2),
            torch.device("cpu"),
            first_step=2,
            data_rank=0,
            prefetch=prefetch,
        ) as steps:
            found.append([pending() for pending in steps])
    plain, ahead = found
    assert len(plain) == len(ahead) == 3
    for ours, theirs in zip(chain(*plain), chain(*ahead), strict=True):
        assert isinstance(theirs, CountedBatch)
        assert ours.units == theirs.units == 8
        assert torch.equal(ours["input_ids"], theirs["input_ids"])
    assert taken == [2, 3, 4] * 2


def test_a_step_is_read_with_its_first_norms() -> None:
    read, calls = StepRead(), []

    def values() -> list[torch.Tensor]:
        calls.append("values")
        return [torch.tensor(3.0, dtype=torch.float64)]

    read.begin(values)
    assert read.norms(torch.tensor(1.5)) == [1.5]
    assert read.norms(torch.tensor(2.5), torch.tensor([4.0])) == [2.5, 4.0]
    assert (read.values(), calls) == ([3.0], ["values"])
    read.begin(values)
    assert (read.values(), calls) == ([3.0], ["values"] * 2), "an engine that needed no norm"


@pytest.mark.parametrize("units", [0, 1, 3, 1023, 4095 * 17])
def test_the_weight_of_the_loss_is_rounded_as_a_python_number(units: int) -> None:
    loss, numerator = torch.tensor(7.1234567), 3 * 7
    weight = loss_weight(numerator, torch.tensor(float(units), dtype=torch.float64))
    assert float(loss * weight) == float(loss * (numerator / max(units, 1)))
