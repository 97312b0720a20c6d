"""Pipeline schedules: textbook bubbles, and the engines' own schedules simulated message by message.

pytest tests/estimate/test_pipeline.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.estimate.pipeline import PipelineSchedule, simulate
from toolkit.plan.activations_megatron import in_flight

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Pass:
    """Compute ``kind`` of ``number``, the position in the order of all stages' passes of that kind."""

    kind: str
    number: int


@dataclass(frozen=True)
class Message:
    """The output of a pass between stage ``lower`` and the next one."""

    kind: str
    lower: int
    number: int


Program = list[Pass | tuple[Message, ...]]  # messages of a tuple are exchanged at the same time


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Program:
    """``forward_backward_pipelining_without_interleaving`` of Megatron-core."""

    def activation(lower: int, number: int) -> list[Message]:
        return [Message(FORWARD, lower, number)] if 0 <= lower < stages - 1 else []

    def gradient(lower: int, number: int) -> list[Message]:
        return [Message(BACKWARD, lower, number)] if 0 <= lower < stages - 1 else []

    warm_up = min(stages - stage - 1, micro_batches)
    program: Program = []
    for number in range(warm_up):
        program += [
            tuple(activation(stage - 1, number)),
            Pass(FORWARD, number),
            tuple(activation(stage, number)),
        ]
    if warm_up < micro_batches:
        program.append(tuple(activation(stage - 1, warm_up)))
    for number in range(micro_batches - warm_up):
        ahead = number + warm_up
        program += [Pass(FORWARD, ahead), (*activation(stage, ahead), *gradient(stage, number))]
        next_input = activation(stage - 1, ahead + 1) if ahead + 1 < micro_batches else []
        program += [Pass(BACKWARD, number), (*gradient(stage - 1, number), *next_input)]
    for number in range(micro_batches - warm_up, micro_batches):
        program += [
            tuple(gradient(stage, number)),
            Pass(BACKWARD, number),
            tuple(gradient(stage - 1, number)),
        ]
    return program


def train_schedule(stage: int, stages: int, micro_batches: int) -> Program:
    """``TrainSchedule`` of DeepSpeed, whose messages block one after the other."""
    program: Program = []
    for part in one_f_one_b(stage, stages, micro_batches):
        if isinstance(part, Pass):
            program.append(part)
        else:
            program += [(message,) for message in sorted(part, key=lambda message: message.kind != BACKWARD)]
    return program


def run_blocking(
    program_of: Callable[[int, int, int], Program],
    micro_batches: int,
    forward: list[float],
    backward: list[float],
    send: float,
) -> tuple[float, list[float]]:
    """Total and seconds of messages of each stage: a message starts when both stages have arrived at it."""
    stages = len(forward)
    programs = [deque(program_of(stage, stages, micro_batches)) for stage in range(stages)]
    now, communication = [0.0] * stages, [0.0] * stages
    posted: dict[Message, dict[int, float]] = {}
    progress = True
    while progress:
        progress = False
        for stage, program in enumerate(programs):
            while program:
                part = program[0]
                if isinstance(part, Pass):
                    now[stage] += forward[stage] if part.kind == FORWARD else backward[stage]
                else:
                    for message in part:
                        posted.setdefault(message, {})[stage] = now[stage]
                    if any(len(posted[message]) < 2 for message in part):
                        break
                    if part:
                        communication[stage] += send
                        now[stage] = max(max(posted[message].values()) for message in part) + send
                program.popleft()
                progress = True
    assert not any(programs), "the programs wait for each other"
    return max(now), communication


def interleaved_order(stage: int, stages: int, micro_batches: int, chunks: int, group: int) -> list[Pass]:
    """``forward_backward_pipelining_with_interleaving`` of Megatron-core."""
    passes = micro_batches * chunks
    warm_up = min(2 * (stages - stage - 1) + (chunks - 1) * group, passes)
    order = [Pass(FORWARD, number) for number in range(warm_up)]
    for number in range(passes - warm_up):
        order += [Pass(FORWARD, warm_up + number), Pass(BACKWARD, number)]
    return order + [Pass(BACKWARD, number) for number in range(passes - warm_up, passes)]


def schedule_table(micro_batches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    return [
        (micro_batch, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]


def run_interleaved(
    micro_batches: int, forward: list[list[float]], backward: list[list[float]], send: float, group: int
) -> tuple[float, list[float]]:
    """Total and seconds of each stage in which it waits for messages in transfer."""
    stages, chunks = len(forward), len(forward[0])
    table = schedule_table(micro_batches, chunks, group)
    orders = [
        deque(interleaved_order(stage, stages, micro_batches, chunks, group)) for stage in range(stages)
    ]
    done: dict[tuple[str, int, int, int], float] = {}  # kind, stage, chunk, micro-batch
    now, communication = [0.0] * stages, [0.0] * stages
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            while order:
                part = order[0]
                micro_batch, chunk = table[part.number]
                if part.kind == BACKWARD:
                    chunk = chunks - 1 - chunk
                step = -1 if part.kind == FORWARD else 1
                position = chunk * stages + stage + step
                if 0 <= position < chunks * stages:
                    source = (part.kind, position % stages, position // stages, micro_batch)
                    if source not in done:
                        break
                    arrival = done[source] + send
                    communication[stage] += max(0.0, min(send, arrival - now[stage]))
                    now[stage] = max(now[stage], arrival)
                now[stage] += (forward if part.kind == FORWARD else backward)[stage][chunk]
                done[part.kind, stage, chunk, micro_batch] = now[stage]
                order.popleft()
                progress = True
    assert not any(orders), "the stages wait for each other"
    return max(now), communication


@st.composite
def blocking_cases(draw: st.DrawFn) -> tuple[int, list[float], list[float], float]:
    stages = draw(st.integers(1, 6))
    seconds = st.integers(1, 9).map(float)
    forward, backward = (draw(st.lists(seconds, min_size=stages, max_size=stages)) for _ in range(2))
    return draw(st.integers(1, 40)), forward, backward, draw(st.sampled_from([0.0, 0.5, 3.0]))


@settings(max_examples=60, deadline=None)
@given(blocking_cases(), st.booleans())
def test_blocking_schedules_equal_their_programs(
    case: tuple[int, list[float], list[float], float], deepspeed: bool
) -> None:
    micro_batches, forward, backward, send = case
    total, communication = run_blocking(
        train_schedule if deepspeed else one_f_one_b, micro_batches, forward, backward, send
    )
    times = simulate(
        micro_batches,
        [[seconds] for seconds in forward],
        [[seconds] for seconds in backward],
        send,
        PipelineSchedule.DEEPSPEED if deepspeed else PipelineSchedule.MEGATRON,
    )
    assert times.total == pytest.approx(total, rel=1e-9)
    assert times.communication == pytest.approx(communication, rel=1e-9)
    slowest = max(map(sum, zip(forward, backward, strict=True)))
    assert times.total >= micro_batches * slowest * (1 - 1e-9)
    if send == 0:
        assert times.total <= (micro_batches + len(forward) - 1) * slowest * (1 + 1e-9)


@st.composite
def interleaved_cases(draw: st.DrawFn) -> tuple[int, list[list[float]], list[list[float]], float, int]:
    stages, chunks = draw(st.integers(2, 4)), draw(st.integers(2, 3))
    group = draw(st.integers(stages, stages + 2))
    left = draw(st.sampled_from([0, *range(stages, group)]))
    micro_batches = group * draw(st.integers(1, 8)) + left
    row = st.lists(st.integers(1, 9).map(float), min_size=chunks, max_size=chunks)
    forward, backward = (draw(st.lists(row, min_size=stages, max_size=stages)) for _ in range(2))
    return micro_batches, forward, backward, draw(st.sampled_from([0.0, 0.5, 3.0])), group


@settings(max_examples=40, deadline=None)
@given(interleaved_cases())
def test_virtual_stages_equal_their_order(
    case: tuple[int, list[list[float]], list[list[float]], float, int],
) -> None:
    micro_batches, forward, backward, send, group = case
    total, communication = run_interleaved(micro_batches, forward, backward, send, group)
    times = simulate(micro_batches, forward, backward, send, PipelineSchedule.INTERLEAVED, group)
    assert times.total == pytest.approx(total, rel=1e-9)
    assert times.communication == pytest.approx(communication, rel=1e-9)


@pytest.mark.parametrize("stages", [2, 4, 16])
@pytest.mark.parametrize("rounds", [1, 3, 2000])
@pytest.mark.parametrize("virtual", [1, 2, 6])
def test_bubble_of_equal_stages(stages: int, rounds: int, virtual: int) -> None:
    """(p - 1) / (m v) of the time of the passes (Narayanan et al., 2104.04473, section 2.2)."""
    micro_batches = stages * rounds
    schedules = (
        (PipelineSchedule.MEGATRON, PipelineSchedule.DEEPSPEED)
        if virtual == 1
        else (PipelineSchedule.INTERLEAVED,)
    )
    for schedule in schedules:
        forward, backward = [[1.0] * virtual] * stages, [[2.0] * virtual] * stages
        times = simulate(micro_batches, forward, backward, 0.0, schedule)
        fraction = (stages - 1) / (micro_batches * virtual)
        for bubble, busy in zip(times.bubble, times.busy, strict=True):
            assert bubble / busy == pytest.approx(fraction, rel=1e-9)


def test_fewer_micro_batches_than_stages() -> None:
    times = simulate(2, [[1.0]] * 4, [[2.0]] * 4, 0.0, PipelineSchedule.MEGATRON)
    assert times.total == 3 * (2 + 3)


@pytest.mark.parametrize(("schedule", "messages"), [("megatron", 2), ("deepspeed", 4)])
def test_messages_of_a_micro_batch(schedule: str, messages: int) -> None:
    """Megatron-core exchanges an activation and a gradient at once, DeepSpeed one after the other. In steady
    state a stage between two others so waits for two or four messages in every micro-batch.
    """
    totals = [
        simulate(count, [[1.0]] * 4, [[2.0]] * 4, 0.125, PipelineSchedule(schedule)).total
        for count in (1000, 1001)
    ]
    assert totals[1] - totals[0] == pytest.approx(3 + messages * 0.125, rel=1e-9)


def test_a_million_micro_batches_take_no_longer() -> None:
    times = simulate(10**6, [[1.0]] * 4, [[2.0]] * 4, 0.0, PipelineSchedule.DEEPSPEED)
    assert times.total == 3.0 * (10**6 + 3)


@pytest.mark.parametrize(("chunks", "micro_batches"), [(1, 2), (1, 16), (3, 8), (2, 4)])
def test_passes_in_flight_are_those_of_the_memory_plan(chunks: int, micro_batches: int) -> None:
    stages = 4
    for stage in range(stages):
        if chunks == 1:
            order = [part for part in one_f_one_b(stage, stages, micro_batches) if isinstance(part, Pass)]
        else:
            order = interleaved_order(stage, stages, micro_batches, chunks, stages)
        stored = peak = 0
        for part in order:
            stored += 1 if part.kind == FORWARD else -1
            peak = max(peak, stored)
        assert peak == in_flight(stage, stages, chunks, micro_batches)


@pytest.mark.full
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (3, 2), (4, 4), (4, 9), (5, 12)])
def test_programs_are_those_of_deepspeed(stages: int, micro_batches: int) -> None:
    from deepspeed.runtime.pipe import schedule as pipe

    names = {
        pipe.SendActivation: lambda stage: (FORWARD, stage),
        pipe.RecvActivation: lambda stage: (FORWARD, stage - 1),
        pipe.SendGrad: lambda stage: (BACKWARD, stage - 1),
        pipe.RecvGrad: lambda stage: (BACKWARD, stage),
    }
    for stage in range(stages):
        found: list[object] = []
        for commands in pipe.TrainSchedule(micro_batches, stages, stage).steps():
            for command in commands:
                if type(command) in names:
                    found.append(names[type(command)](stage))
                elif isinstance(command, pipe.ForwardPass | pipe.BackwardPass):
                    found.append(FORWARD if isinstance(command, pipe.ForwardPass) else BACKWARD)
        expected = [
            part.kind if isinstance(part, Pass) else (part[0].kind, part[0].lower)
            for part in train_schedule(stage, stages, micro_batches)
        ]
        assert found == expected


@pytest.mark.full
@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks", "group"), [(4, 8, 2, 4), (3, 10, 3, 4), (4, 4, 2, 4)]
)
def test_orders_are_those_of_megatron(stages: int, micro_batches: int, chunks: int, group: int) -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    assert schedule_table(micro_batches, chunks, group) == schedules.get_schedule_table(
        micro_batches, chunks, group
    )
    for stage in range(stages):
        communicator = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: stages, rank=lambda stage=stage: stage),
            virtual_pipeline_model_parallel_size=chunks,
        )
        _, _, warm_up, _ = schedules.get_pp_rank_microbatches(
            micro_batches, chunks, group, p2p_communicator=communicator
        )
        kinds = [part.kind for part in interleaved_order(stage, stages, micro_batches, chunks, group)]
        runs = [(kind, len(list(parts))) for kind, parts in groupby(kinds)]
        assert runs[0] == (FORWARD, warm_up + (1 if warm_up < micro_batches * chunks else 0))
