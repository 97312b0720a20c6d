"""Step times by the GPU's clock: events on the compute stream, read once they have passed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.engine.ledger_cases import Delays, agreeing, stream
from toolkit.config.schema import EngineName
from toolkit.engine import collectives
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.clock import CudaClock
from toolkit.hooks import Hooks
from toolkit.monitor.recorder import StepRecorder, StepTime
from toolkit.plan.types import Device
from toolkit.step_parts import BACKWARD, COMMUNICATION, DATA, FORWARD, OPTIMIZER, UNEXPLAINED, communication
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import Cell, OptimizerCase, deepspeed, megatron
from toolkit.train.loop import train
from toolkit.train.state import TrainState
from toolkit.train.task import text_task

pytestmark = pytest.mark.gpu

STEPS = 8
CELLS = {
    "local": Cell(engine=EngineName.local, family="llama"),
    "deepspeed-zero2": deepspeed("llama", 2),
    "deepspeed-zero3": deepspeed("llama", 3),
    "megatron": megatron("llama"),
}


def timed(
    rank: int, ranks: int, cell: Cell, recorded: bool
) -> tuple[list[StepTime], list[float], list[float]]:
    """Steps by the GPU's clock, by the host's, and losses."""
    plan = cell.plan(OptimizerCase.ADAM, Device.CUDA, train__global_batch=16)
    plan.config.train.steps = STEPS
    recorder: Any = StepRecorder(CudaClock())
    recording = {"recorder": recorder} if recorded else {}
    losses: list[float] = []
    with collectives.record_collectives(plan.axes, recorder):
        task = text_task(plan)
        engine = build_engine(plan, task, rank=rank, local_rank=rank, **recording)
        engine.load(open_initial_weights(plan))
        delays = Delays([None] * STEPS)
        walls: list[float] = []
        step, began = engine.train_step, time.perf_counter()

        def train_step(*arguments: Any) -> Any:
            nonlocal began
            result = step(*arguments)
            losses.append(result.loss)
            walls.append(time.perf_counter() - began)
            began = time.perf_counter()
            return result

        engine.train_step = train_step  # type: ignore[method-assign]
        train(
            plan,
            engine,
            task,
            stream(plan, 0, delays),
            TrainState(),
            Hooks(**recording),
            agreeing(ranks, delays),
            **recording,
        )
        engine.close()
    torch.cuda.synchronize()
    return recorder.take_steps(), walls, losses


@pytest.mark.parametrize("name", CELLS)
def test_event_times_add_up_to_the_step(name: str, gpu: RankPool) -> None:
    steps, walls, losses = gpu.run(timed, CELLS[name], True, timeout=300)[0]
    assert [found.step for found in steps] == list(range(1, STEPS + 1))
    for found, wall in list(zip(steps, walls, strict=True))[2:]:
        assert sum(found.parts.values()) == pytest.approx(found.wall, rel=1e-3)
        assert found.wall == pytest.approx(wall, rel=0.05, abs=2e-3)
        assert all(seconds >= -1e-5 for seconds in found.parts.values()), found.parts
        assert all(found.parts[part] > 0 for part in (DATA, FORWARD, BACKWARD, OPTIMIZER))
        assert found.parts[UNEXPLAINED] <= 0.1 * found.wall
        assert not any(part.startswith(COMMUNICATION) for part in found.parts), (
            "a single rank does not communicate"
        )
    assert gpu.run(timed, CELLS[name], False, timeout=300)[0][2] == losses


def asleep(rank: int, ranks: int) -> dict[str, float]:
    """The GPU works in forward, the host sleeps in data, and a backward hook on autograd's thread works."""
    recorder = StepRecorder(CudaClock())
    weights = torch.randn(2048, 2048, device="cuda", requires_grad=True)

    def work(times: int) -> None:
        for _ in range(times):
            torch.mm(weights.detach(), weights.detach())

    def hook(gradient: torch.Tensor) -> None:
        with recorder.part(communication("data")):
            work(200)

    for step in range(3):
        recorder.next_step(step)
        with recorder.part(DATA):
            time.sleep(0.02)
        with recorder.part(FORWARD):
            work(100)
            loss = (weights @ weights).sum()
        loss.register_hook(hook)
        with recorder.part(BACKWARD):
            loss.backward()
    recorder.next_step(3)
    early = len(recorder.take_steps())
    torch.cuda.synchronize()
    late = recorder.take_steps()
    return {**late[-1].parts, "early": early, "late": len(late)}


def test_work_is_attributed_to_the_part_that_runs_it(gpu: RankPool) -> None:
    found = gpu.run(asleep)[0]
    assert found["early"] < 3, "a step was read that the device had not finished"
    assert found["early"] + found["late"] == 3
    assert found[communication("data")] == pytest.approx(2 * found[FORWARD], rel=0.1)
    assert found[BACKWARD] < 0.1 * found[FORWARD]


def aside(rank: int, ranks: int) -> dict[str, float]:
    """A side stream has work, and the compute stream waits for it."""
    import torch.distributed as dist

    from toolkit.layout.axes import Axes

    recorder = StepRecorder(CudaClock())
    with collectives.record_collectives(Axes(data=2), recorder):
        side = torch.cuda.Stream()
        matrix = torch.randn(4096, 4096, device="cuda")
        recorder.next_step(1)
        with recorder.part(BACKWARD):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                collectives._recorder.streams.carry(recorder.part(communication("data")))  # type: ignore[union-attr]
                for _ in range(50):
                    torch.mm(matrix, matrix)
            torch.cuda.current_stream().wait_stream(side)
        recorder.next_step(2)
        torch.cuda.synchronize()
        assert dist.get_world_size() == 1
        return dict(recorder.take_steps()[0].parts)


def test_waiting_for_a_side_stream_is_attributed_to_its_collective(gpu: RankPool) -> None:
    found = gpu.run(aside)[0]
    assert found[communication("data")] > 10 * found[BACKWARD]
