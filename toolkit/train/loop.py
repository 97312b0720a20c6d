"""Training, top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from toolkit.engine.protocol import Engine, StepResult, StepSettings
from toolkit.engine.rank_sync import StepConsensus
from toolkit.errors import ExitCode
from toolkit.hooks import Hook, StepDone
from toolkit.monitor.step_parts import DATA, TRANSFER, UNRECORDED, Recorder
from toolkit.plan.schedule import learning_rate
from toolkit.plan.types import RunPlan
from toolkit.train.nonfinite import Diverged
from toolkit.train.state import TrainState
from toolkit.train.task import Task


def train(
    plan: RunPlan,
    engine: Engine,
    task: Task,
    stream: Iterable[Sequence[np.ndarray]],
    state: TrainState,
    hooks: Hook,
    agree: Callable[[float, StepResult], StepConsensus],
    clock: Callable[[], float] = time.perf_counter,
    recorder: Recorder = UNRECORDED,
) -> ExitCode:
    """From ``state`` to the plan's last step, or to an agreed stop.

    A step's ``seconds`` run from when it begins to wait for its samples to when its result is known and the ranks have agreed;
    evaluation, saving and logging lie between steps. The first step has the engine's compilation and warm-up in it.

    Args:
        stream: this rank's micro-batches of the step that ``state`` is at, then of each following one.
        agree: exchanges with the other ranks, once a step; it gets the seconds that this rank waited for its samples,
            and the step's result.
        recorder: is told where the time goes; its steps end where the next one begins to wait for samples.

    Raises:
        Diverged: a hook ends training because something is not finite. The hooks have seen ``on_end`` by then.
    """
    hooks.on_start(state.step)
    steps = range(state.step, plan.config.train.steps)
    recorder.next_step(state.step + 1)
    began = clock()
    diverged: Diverged | None = None
    for step, samples in zip(steps, _waited_for(stream, recorder), strict=False):
        waited = clock() - began
        lr = learning_rate(plan, step)
        with recorder.part(TRANSFER):
            batches = [task.collate(micro_batch, engine.device) for micro_batch in samples]
        result = engine.train_step(batches, StepSettings(step=step, lr=lr))
        state.step = step + 1
        agreed = agree(waited, result)
        last = state.step == plan.config.train.steps
        try:
            hooks.on_step(StepDone(state.step, lr, result, clock() - began, agreed, last))
        except Diverged as found:
            diverged = found
            break
        recorder.next_step(state.step + 1)
        if agreed.stop and not last:
            break
        began = clock()
    hooks.on_end(state.step)
    if diverged is not None:
        raise diverged
    return ExitCode.DONE if state.step >= plan.config.train.steps else ExitCode.STOPPED


def _waited_for(stream: Iterable[Sequence[np.ndarray]], recorder: Recorder) -> Iterator[Sequence[np.ndarray]]:
    samples = iter(stream)
    while True:
        with recorder.part(DATA):
            found = next(samples, None)
        if found is None:
            return
        yield found
