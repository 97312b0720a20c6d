"""How often the host waits for a real GPU in a step, as torch reports it; transfers from pinned memory.

``tests/engine/test_host_reads.py`` counts the same on a fake device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.runs import sized, text
from toolkit.config.schema import EngineName
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.protocol import StepSettings
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.train.micro_batches import move_batch, pending_steps
from toolkit.train.task import NextTokenTask, text_task

pytestmark = pytest.mark.gpu

ZERO3_NORMS = 2  # constants that DeepSpeed copies to the device: one for each parameter group


def synchronizing_calls(rank: int, ranks: int, plan: RunPlan) -> list[str]:
    """What torch reports about the fourth step."""
    task = text_task(plan)
    engine = build_engine(plan, task, rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    for step in range(4):
        batches = [move_batch(task, batch, engine.device) for batch in text(plan, step, 0)]
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            engine.train_step(batches, StepSettings(step, 1e-3))
            torch.cuda.set_sync_debug_mode("default")
    engine.close()
    return [f"{each.filename}:{each.lineno}" for each in caught if "synchronizing" in str(each.message)]


@pytest.mark.parametrize(
    ("engine", "stage", "forced"),
    [
        (EngineName.local, 0, 0),
        (EngineName.deepspeed, 2, 0),
        (EngineName.deepspeed, 3, ZERO3_NORMS),
        (EngineName.megatron, 1, 0),
    ],
)
def test_a_step_waits_for_the_gpu_once(engine: EngineName, stage: int, forced: int, gpu: RankPool) -> None:
    found = gpu.run(synchronizing_calls, sized(engine, stage), timeout=300)[0]
    assert len(found) == 1 + forced, found


def prepared_steps(rank: int, ranks: int, plan: RunPlan, prefetch: bool) -> list[Any]:
    def samples() -> Iterator[list[np.ndarray[Any, Any]]]:
        for step in range(100):
            generator = np.random.default_rng(step)
            yield [generator.integers(0, 16384, (4, 1025)) for _ in range(2)]

    device = torch.device("cuda", rank)
    found = []
    with pending_steps(
        plan, NextTokenTask(), samples(), device, first_step=0, data_rank=0, prefetch=prefetch
    ) as steps:
        for pending in steps:
            batches = pending()
            torch.cuda._sleep(10_000_000)  # the next steps are copied while this one computes
            found += [
                (batch.units, batch["labels"].sum().item(), str(batch["labels"].device)) for batch in batches
            ]
    return found


def test_a_thread_copies_the_same_micro_batches(gpu: RankPool) -> None:
    plan = sized(EngineName.local, 0)
    plain, ahead = (gpu.run(prepared_steps, plan, prefetch)[0] for prefetch in (False, True))
    assert plain == ahead
    assert len(plain) == 2 * plan.config.train.steps
