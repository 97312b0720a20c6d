"""MFU of a bf16 run on one GPU of a known kind."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from tests.gpu.runs import sized, text
from toolkit.cluster.world.machine_info import detect_machine
from toolkit.config.schema import EngineName
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.monitor.throughput import Throughput
from toolkit.plan.devices import normalise_gpu_name
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import train_steps
from toolkit.train.task import text_task

pytestmark = pytest.mark.gpu

STEPS = 10


def step_seconds(rank: int, ranks: int, plan: RunPlan) -> float:
    """Mean seconds of a step, after three others."""
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    train_steps(engine, plan, range(3), rank=rank, batches=text)
    torch.cuda.synchronize()
    began = time.perf_counter()
    train_steps(engine, plan, range(3, 3 + STEPS), rank=rank, batches=text)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / STEPS
    engine.close()
    return seconds


@pytest.mark.parametrize(
    ("engine", "stage"), [(EngineName.local, 0), (EngineName.deepspeed, 2), (EngineName.megatron, 1)]
)
def test_bf16_run_has_plausible_mfu(engine: EngineName, stage: int, gpu: RankPool) -> None:
    """More than 2% although the model is small, and less than 90%, which nothing reaches."""
    kind = normalise_gpu_name(detect_machine().gpus[0].product)
    assert kind is not None, f"toolkit/plan/devices.py does not know {detect_machine().gpus[0].product}"
    plan = sized(engine, stage)
    plan = replace(plan, world=replace(plan.world, gpu=kind))
    seconds = gpu.run(step_seconds, plan, timeout=300)[0]
    samples = plan.batch.global_batch
    row = Throughput.from_plan(plan).row(
        samples=samples, units=plan.units_per_step, computed=plan.units_per_step, seconds=seconds
    )
    assert 0.02 < row["mfu"] < 0.9, row
