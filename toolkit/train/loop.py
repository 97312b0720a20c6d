"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from toolkit.engine.protocol import Engine, StepResult, StepSettings
from toolkit.engine.rank_sync import StepConsensus
from toolkit.errors import ExitCode
from toolkit.hooks import CompletedStep, Hook
from toolkit.plan.schedule import learning_rate
from toolkit.plan.types import RunPlan
from toolkit.step_parts import DATA, NULL_RECORDER, TRANSFER, Recorder
from toolkit.train.micro_batches import PendingStep, pending_steps
from toolkit.train.nonfinite import Diverged
from toolkit.train.soundness import Fault, RollbackRequired
from toolkit.train.state import TrainState
from toolkit.train.task import Task


def train(
    plan: RunPlan,
    engine: Engine,
    task: Task,
    stream: Iterable[Sequence[np.ndarray]],
    state: TrainState,
    hooks: Hook,
    sync: Callable[[float, StepResult], StepConsensus],
    clock: Callable[[], float] = time.perf_counter,
    recorder: Recorder = NULL_RECORDER,
    *,
    data_rank: int = 0,
    prefetch: bool = False,
    roll_back: Callable[[Fault], Iterable[Sequence[np.ndarray]]] | None = None,
) -> ExitCode:
    """Train from ``state`` to the plan's last step, or until the ranks agree to stop or to end early.

    The seconds of a step run from the start of waiting for its samples until its result is known and the
    ranks have agreed. Evaluation, saving and logging happen between steps. The first step includes
    compilation and warm-up.

    Args:
        stream: the micro-batches of ``data_rank`` in each step, starting at ``state``.
        sync: exchanges information with the other ranks after each step. It receives the seconds that this
            rank waited for its samples, and the result of the step.
        recorder: records where time goes; its steps end when the next one begins to wait for samples.
        prefetch: prepare micro-batches in a thread: ``train/micro_batches.py``.
        roll_back: sets the run back to a checkpoint, changes ``state``, and returns the samples from there
            on. Called if a hook raises RollbackRequired.

    Raises:
        Diverged: a value is not finite, rollbacks have not helped, or a rank computes wrong values.
            ``on_end`` has been called.
    """
    hooks.on_start(state.step)
    recorder.next_step(state.step + 1)
    start = clock()
    diverged: Diverged | None = None
    fault: Fault | None = None
    last = False
    while True:
        with pending_steps(
            plan, task, stream, engine.device, first_step=state.step, data_rank=data_rank, prefetch=prefetch
        ) as steps:
            for pending in _record_waits(steps, recorder):
                data_seconds = clock() - start
                lr = learning_rate(plan, state.step)
                with recorder.part(TRANSFER):
                    batches = pending()
                result = engine.train_step(batches, StepSettings(step=state.step, lr=lr))
                state.step += 1
                consensus = sync(data_seconds, result)
                last = consensus.end_early or state.step == plan.config.train.steps
                try:
                    hooks.on_step(
                        CompletedStep(state.step, lr, result, clock() - start, consensus, last, batches)
                    )
                except Diverged as error:
                    diverged = error
                    break
                except RollbackRequired as required:
                    fault = required.fault
                    break
                recorder.next_step(state.step + 1)
                if last or consensus.stops:
                    break
                start = clock()
        if fault is None:
            break
        assert roll_back is not None, "a run whose hooks ask for rollbacks can roll back"
        try:
            stream = roll_back(fault)  # outside of the steps: no thread prepares a step of the old stream
        except Diverged as error:
            diverged = error
            break
        fault, last = None, False
        recorder.next_step(state.step + 1)
        start = clock()
    hooks.on_end(state.step)
    if diverged is not None:
        raise diverged
    return ExitCode.DONE if last or state.step >= plan.config.train.steps else ExitCode.STOPPED


def _record_waits(steps: Iterator[PendingStep], recorder: Recorder) -> Iterator[PendingStep]:
    while True:
        with recorder.part(DATA):
            pending = next(steps, None)
        if pending is None:
            return
        yield pending
