"""Run the real loop over a real engine with delays in chosen parts of chosen steps, for test_ledger.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroup

from tests.train.fakes import context_of
from toolkit.checkpoint.online.store import PendingSave
from toolkit.checkpoint_folder import step_name
from toolkit.engine import collectives
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.protocol import Engine, StepResult
from toolkit.engine.rank_sync import StepConsensus, make_flag_reduce
from toolkit.hooks import CompletedStep, Hook, Hooks
from toolkit.layout.axes import Axes, axis_name
from toolkit.monitor.recorder import Clock, HostClock, StepRecorder, StepTime
from toolkit.plan.types import RunPlan
from toolkit.step_parts import (
    BACKWARD,
    BUBBLE,
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    LOGGING,
    OPTIMIZER,
    TRANSFER,
    UNEXPLAINED,
    communication,
)
from toolkit.train.evaluation import Evaluation
from toolkit.train.loop import train
from toolkit.train.saving import Checkpoints, SaveTimer
from toolkit.train.state import StateWriter, TrainState
from toolkit.train.task import Task, text_task

WARM_UP, CLEAN = 2, 6  # steps without delays at the start; the first of them are not measured
SHARE = 0.2  # a delay as a share of a step


@dataclass(frozen=True)
class Measured:
    """The measurements of one rank.

    ``delayed[step]``: the part that was delayed by ``seconds`` in that step, or None.
    """

    times: tuple[StepTime, ...]
    delayed: tuple[str | None, ...]
    seconds: float
    losses: tuple[float, ...]

    def values(self, part: str, delayed: str | None) -> list[float]:
        """Seconds of ``part`` in the steps of this delay, as many for each."""
        pairs = list(zip(self.times, self.delayed, strict=True))[CLEAN:]
        return [found.parts.get(part, 0.0) for found, name in pairs if name == delayed]

    def landed(self, part: str, delayed: str | None = None) -> float:
        """How much of the delay is in ``part``: the minimum over steps, as noise only adds time."""
        return (min(self.values(part, delayed or part)) - min(self.values(part, None))) / self.seconds

    def unexplained(self) -> float:
        """The unattributed share of a step: the median of steps without delays."""
        clean = [found for found, name in zip(self.times, self.delayed, strict=True) if name is None][
            WARM_UP:
        ]
        return statistics.median(found.parts.get(UNEXPLAINED, 0.0) / found.wall for found in clean)


class Delays:
    """Delays of ``seconds``, a share of the slowest rank's step and equal on all ranks; one second on the
    counted clock.
    """

    def __init__(
        self, script: Sequence[str | None], counted: Counted | None = None, asleep: float = 0.0
    ) -> None:
        self.script, self._counted, self._asleep = tuple(script), counted, asleep
        self.now: str | None = None
        self.seconds = 0.0
        self._struck = False
        self._slept: set[str] = set()
        self._walls: list[float] = []

    def begin(self, step: int) -> None:
        self.now, self._struck = self.script[step], False
        self._slept.clear()

    def over(self, wall: float) -> None:
        self._walls.append(wall)
        if len(self._walls) == CLEAN:
            self.seconds = 1.0 if self._counted else SHARE * statistics.median(self._walls[WARM_UP:])

    def sleep(self, name: str) -> None:
        """Delay once per step, in every step."""
        if self._asleep and name not in self._slept:
            self._slept.add(name)
            time.sleep(self._asleep)

    def strike(self, name: str) -> None:
        """Delay once per step at this part."""
        if self.now == name and not self._struck:
            self._struck = True
            if self._counted:
                self._counted.now += self.seconds
            else:
                time.sleep(self.seconds)


class Counted(Clock):
    """A clock that stands still except for delays, so that their attribution is exact on a busy machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def stamp(self) -> float:
        return self.now

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier

    def passed(self, stamp: float) -> bool:
        return True

    def release(self, stamps: Iterable[float]) -> None:
        pass

    def idle(self) -> bool:
        return False


class _Task:
    def __init__(self, task: Task, delays: Delays) -> None:
        self._task, self._delays = task, delays

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def collate(self, samples: Any) -> Mapping[str, torch.Tensor]:
        self._delays.strike(TRANSFER)
        return self._task.collate(samples)


class _Logging(Hook):
    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        self.losses: list[float] = []

    def on_step(self, completed: CompletedStep) -> None:
        self.losses.append(completed.result.loss)
        self._delays.strike(LOGGING)


class _Store:
    """Discards checkpoints after a delay."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays

    def save(self, step: int, *_: object, **__: object) -> PendingSave:
        self._delays.strike(CHECKPOINT)
        future: Future[None] = Future()
        future.set_result(None)
        return PendingSave(Path(step_name(step)), future)


def micro_batch(plan: RunPlan, number: int) -> np.ndarray:
    """int64 [micro-batch, sequence + 1], counting in steps of 1 to 3."""
    random, length = np.random.default_rng(number), plan.config.train.sequence_length + 1
    first, stride = (
        random.integers(0, 256, (plan.batch.micro_batch, 1)),
        random.integers(1, 4, (plan.batch.micro_batch, 1)),
    )
    return (first + stride * np.arange(length)) % 256


def stream(plan: RunPlan, data_rank: int, delays: Delays) -> Iterator[list[np.ndarray]]:
    for step, _ in enumerate(delays.script):
        delays.begin(step)
        delays.strike(DATA)
        count = plan.batch.at(step).accumulation
        yield [
            micro_batch(plan, (step * count + number) * plan.axes.data + data_rank) for number in range(count)
        ]


def measure(
    rank: int,
    ranks: int,
    plan: RunPlan,
    delayed: Sequence[str] = (),
    repeats: int = 0,
    *,
    recorded: bool = True,
    replaced: bool = True,
    around: bool = False,
    counted: bool = False,
    asleep: float = 0.0,
) -> Measured:
    """A run of ``CLEAN`` steps without delays, then ``repeats`` times one step without and one with each of
    ``delayed``.

    Args:
        recorded: record the parts of steps; False: measure the run alone.
        replaced: patch the methods of collectives; the control is False.
        around: evaluate and save after each step.
        counted: use a clock on which only delays take time.
        asleep: seconds of forward and of backward in each step, for long steps with little computation.
    """
    clock = Counted() if counted else None
    delays = Delays([*[None] * CLEAN, *[None, *delayed] * repeats], clock, asleep)
    plan.config.train.steps = len(delays.script)
    recorder = StepRecorder(clock or HostClock(), pipelined=plan.axes.pipeline > 1)
    recording = {"recorder": recorder} if recorded else {}
    with (
        slow_calls(delays, plan.axes),
        collectives.record_collectives(plan.axes, recorder) if recorded else nullcontext(),
    ):
        if not replaced:
            collectives.uninstall()
        task: Any = _Task(text_task(plan), delays)
        engine = build_engine(plan, task, rank=rank, local_rank=rank, **recording)
        engine.load(open_initial_weights(plan))
        slow_engine(engine, plan, rank, delays)
        logging = _Logging(delays)
        hooks = Hooks(logging, *(hooks_around(plan, engine, task, delays) if around else ()), **recording)
        train(
            plan,
            engine,
            task,
            stream(plan, plan.axes.coordinates(rank).data, delays),
            TrainState(),
            hooks,
            agreeing(ranks, delays),
            **recording,
        )
        engine.close()
    return Measured(tuple(recorder.take_steps()), delays.script, delays.seconds, tuple(logging.losses))


def agreeing(ranks: int, delays: Delays) -> Callable[[float, StepResult], StepConsensus]:
    all_reduce_flags = make_flag_reduce(ranks)
    began = time.perf_counter()

    def agree(waited: float, result: StepResult) -> StepConsensus:
        nonlocal began
        delays.strike(UNEXPLAINED)
        (slowest,) = all_reduce_flags([round(1e6 * (time.perf_counter() - began))])
        began = time.perf_counter()
        delays.over(slowest / 1e6)
        return StepConsensus()

    return agree


def hooks_around(plan: RunPlan, engine: Engine, task: Task, delays: Delays) -> list[Hook]:
    def samples() -> Iterator[list[np.ndarray]]:
        delays.strike(EVALUATION)
        yield [micro_batch(plan, 10**6)]

    plan.config.checkpoint.every = "1"
    nowhere: Any = SimpleNamespace(fingerprint=lambda: {}, state=lambda step: {})
    store: Any = _Store(delays)
    writer = StateWriter(context_of(plan, Path()), engine, nowhere, lambda: None)
    saving = Checkpoints(writer, store, SaveTimer(None), on_checkpoint=lambda path: None)
    plan.config.eval.every = 1
    evaluating = Evaluation(
        plan, engine, task, {"validation": samples}, missing=lambda step: False, on_eval=lambda row: None
    )
    return [evaluating, saving]


def slow_engine(engine: Any, plan: RunPlan, rank: int, delays: Delays) -> None:
    """Delays in forward, in backward and in the optimizer; and in forward of the last stage, for which the
    others wait.
    """
    slow_stage = plan.axes.coordinates(rank).pipeline == plan.axes.pipeline - 1 > 0

    def after(module: nn.Module, arguments: object, output: torch.Tensor) -> None:
        delays.sleep(FORWARD)
        delays.strike(FORWARD)
        if slow_stage:
            delays.strike(BUBBLE)
        if output.requires_grad:
            output.register_hook(backward)

    def backward(gradient: torch.Tensor) -> None:
        delays.sleep(BACKWARD)
        delays.strike(BACKWARD)

    first_norm(engine).register_forward_hook(after)
    optimizer = (
        engine._model.optimizer
        if hasattr(engine, "_model")
        else engine._ds.optimizer
        if hasattr(engine, "_ds")
        else engine._optimizers[0]
    )
    step = optimizer.step

    def slow_step(*arguments: Any, **named: Any) -> Any:
        delays.strike(OPTIMIZER)
        return step(*arguments, **named)

    optimizer.step = slow_step


def first_norm(engine: Any) -> nn.Module:
    """A module of this rank's model that returns a tensor, in every family and on every stage."""
    model = (
        engine._model.chunks[0]
        if hasattr(engine, "_model")
        else engine._ds.module
        if hasattr(engine, "_ds")
        else engine._module
    )
    return next(module for module in model.modules() if "Norm" in type(module).__name__)


@contextmanager
def slow_calls(delays: Delays, axes: Axes) -> Iterator[None]:
    """Delays in collectives, below the code that times them."""
    collectives.uninstall()
    kept = {
        name: vars(ProcessGroup)[name]
        for name, operation in collectives.OPERATIONS.items()
        if name in vars(ProcessGroup) and operation not in (collectives.START, collectives.END)
    }
    for name in kept:
        setattr(
            ProcessGroup, name, _slow(getattr(ProcessGroup, name), collectives.OPERATIONS[name], delays, axes)
        )
    try:
        yield
    finally:
        collectives.uninstall()
        for name, original in kept.items():
            setattr(ProcessGroup, name, original)


def _slow(original: Callable[..., Any], operation: str, delays: Delays, axes: Axes) -> Callable[..., Any]:
    def call(group: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        if delays.now is not None and delays.now.startswith("communication"):
            name = axis_name(
                dist.get_process_group_ranks(group), axes, exchange=operation in collectives.ALL_TO_ALL
            )
            delays.strike(communication(name))
        return original(group, *arguments, **named)

    return call


def bubble(rank: int, ranks: int, plan: RunPlan, seconds: float, steps: int) -> list[float]:
    """Bubble / (forward + backward) of each step after the first two, with stages that sleep equally long."""
    plan.config.train.steps = steps
    recorder = StepRecorder(HostClock(), pipelined=True)
    with collectives.record_collectives(plan.axes, recorder):
        task = text_task(plan)
        engine: Any = build_engine(plan, task, rank=rank, local_rank=rank, recorder=recorder)
        engine.load(open_initial_weights(plan))
        for model in engine._model.chunks if hasattr(engine, "_model") else [engine._ds.module]:
            norm = next(module for module in model.modules() if "Norm" in type(module).__name__)
            norm.register_forward_hook(_sleeping(seconds))
        delays = Delays([None] * steps)
        samples = stream(plan, plan.axes.coordinates(rank).data, delays)
        train(
            plan,
            engine,
            task,
            samples,
            TrainState(),
            Hooks(recorder=recorder),
            agreeing(ranks, delays),
            recorder=recorder,
        )
        engine.close()
    return [
        found.parts[BUBBLE] / (found.parts[FORWARD] + found.parts[BACKWARD])
        for found in recorder.take_steps()[2:]
    ]


def _sleeping(seconds: float) -> Callable[..., None]:
    def after(module: nn.Module, arguments: object, output: torch.Tensor) -> None:
        time.sleep(seconds)
        if output.requires_grad:
            output.register_hook(lambda gradient: time.sleep(seconds))

    return after


def calls_of(rank: int, ranks: int, plan: RunPlan) -> list[tuple[str, str, int, bool]]:
    """Axis, description, number and state of the last calls: after a step, with one more started, and after
    waiting for it.
    """
    with collectives.record_collectives(plan.axes, None):
        task = text_task(plan)
        engine = build_engine(plan, task, rank=rank, local_rank=rank)
        engine.load(open_initial_weights(plan))
        plan.config.train.steps = 1
        train(
            plan,
            engine,
            task,
            stream(plan, plan.axes.coordinates(rank).data, Delays([None])),
            TrainState(),
            Hooks(),
            lambda waited, result: StepConsensus(),
        )
        work = dist.all_reduce(torch.ones(3, 5), async_op=True)
        found = collectives.last_calls()
        work.wait()
        engine.close()
        return [
            (call.axis, call.what, call.number, call.finished) for call in (*found, *collectives.last_calls())
        ]
