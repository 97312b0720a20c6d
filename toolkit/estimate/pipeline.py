"""Simulation of the pipeline schedules of both engines.

All schedules are 1F1B: a stage computes some forward passes, then a forward and a backward pass in turn, then
the backward passes that are left. They differ in the number of forward passes before 1F1B starts
(one less than ``plan.activations_megatron.in_flight``), and in how stages exchange activations and gradients:

- Megatron-core without virtual stages: neighbours wait for each other after every pass, and send both ways at
  once (``send_forward_recv_backward``, megatron/core/pipeline_parallel/schedules.py).
- DeepSpeed: the same order, but the gradient is sent first, then the activation (``TrainSchedule``,
  deepspeed/runtime/pipe/schedule.py).
- Megatron-core with virtual stages: messages are sent while stages compute (``overlap_p2p_comm``). Its
  messages during warm-up and cooldown block, but are simulated like the others.

The simulation advances all stages one pass at a time, in an order in which whatever a pass needs was computed
before. Clocks are whole picoseconds, so that a repeated state is recognised exactly. After warm-up the state
of such a schedule repeats (it is a linear recurrence in max-plus algebra: Baccelli et al., "Synchronization
and Linearity", 1992, section 3.7), and all repetitions are skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from enum import StrEnum

PICOSECONDS = 1e12


class PipelineSchedule(StrEnum):
    MEGATRON = "megatron"  # Megatron-core without virtual stages
    INTERLEAVED = "interleaved"  # Megatron-core with virtual stages
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """Seconds of a pipeline's forward and backward passes in one optimizer step.

    Attributes:
        total: from the first pass of any stage to the last.
        busy: of each stage, in passes.
        communication: of each stage, in which it sends or waits for a message in transfer.
        bubble: of each stage, in which it waits for another stage's pass. The three add up to ``total``.
    """

    total: float
    busy: tuple[float, ...]
    communication: tuple[float, ...]
    bubble: tuple[float, ...]


def simulate(
    micro_batches: int,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    send: float,
    schedule: PipelineSchedule,
    group: int | None = None,
) -> PipelineTimes:
    """Return the times of a step.

    Args:
        micro_batches: of the step, on each data-parallel rank.
        forward: seconds of a micro-batch's forward pass, ``[stage][chunk]``. Virtual stages are the chunks;
            otherwise each stage has one.
        backward: of its backward pass, including recomputation.
        send: seconds of a message between neighbouring stages.
        group: micro-batches that virtual stages process before the next chunk
            (``microbatch_group_size_per_vp_stage``); None: as many as stages. Megatron-core accepts it if at
            least as many are left over, or none.
    """
    stages, virtual = len(forward), len(forward[0])
    assert (virtual > 1) == (schedule is PipelineSchedule.INTERLEAVED), f"{virtual} chunks in {schedule}"
    clocks = _Clocks(
        micro_batches,
        [[round(chunk * PICOSECONDS) for chunk in stage] for stage in forward],
        [[round(chunk * PICOSECONDS) for chunk in stage] for stage in backward],
        round(send * PICOSECONDS),
    )
    if virtual > 1:
        _interleaved(clocks, group or stages)
    else:
        _blocking(clocks, both_ways=schedule is PipelineSchedule.MEGATRON)
    total = max(clocks.now)
    busy = [
        micro_batches * (sum(ahead) + sum(back))
        for ahead, back in zip(clocks.forward, clocks.backward, strict=True)
    ]
    return PipelineTimes(
        total=total / PICOSECONDS,
        busy=tuple(value / PICOSECONDS for value in busy),
        communication=tuple(value / PICOSECONDS for value in clocks.waits),
        bubble=tuple(
            (total - used - wait) / PICOSECONDS for used, wait in zip(busy, clocks.waits, strict=True)
        ),
    )


class _Clocks:
    """Durations, and the time up to which each stage has worked, in picoseconds."""

    def __init__(
        self, micro_batches: int, forward: list[list[int]], backward: list[list[int]], send: int
    ) -> None:
        self.micro_batches = micro_batches
        self.forward, self.backward, self.send = forward, backward, send
        self.now = [0] * len(forward)
        self.waits = [0] * len(forward)  # for messages in transfer


def _blocking(clocks: _Clocks, *, both_ways: bool) -> None:
    """Schedules of one chunk. In pass t, stage s computes forward pass (t - s) / 2 or, if that is not whole,
    backward pass (t + s + 1) / 2 - p; DeepSpeed's ``TrainSchedule`` numbers its steps so.
    """
    micro_batches, send, now, waits = clocks.micro_batches, clocks.send, clocks.now, clocks.waits
    forward = [stage[0] for stage in clocks.forward]
    backward = [stage[0] for stage in clocks.backward]
    stages = len(now)

    def advance(t: int) -> None:
        parity = t & 1
        for stage in range(parity, stages, 2):
            if 0 <= t - stage < 2 * micro_batches:
                now[stage] += forward[stage]
        for stage in range(1 - parity, stages, 2):
            if 0 <= t + stage + 1 - 2 * stages < 2 * micro_batches:
                now[stage] += backward[stage]
        # A stage that computed a forward pass and the next one, which computed a backward pass.
        for stage in range(parity, stages - 1, 2):
            messages = (0 <= t - stage < 2 * micro_batches) + (
                0 <= t + stage + 2 - 2 * stages < 2 * micro_batches
            )
            if messages:
                seconds = send if both_ways else messages * send
                now[stage] = now[stage + 1] = max(now[stage], now[stage + 1]) + seconds
                waits[stage] += seconds
                waits[stage + 1] += seconds

    steady = range(2 * stages - 1, 2 * micro_batches - 1)
    _run(advance, 2 * (micro_batches + stages - 1), steady, 2, [now], waits)


def _interleaved(clocks: _Clocks, group: int) -> None:
    """Megatron-core's schedule of several chunks. Stages process ``group`` micro-batches of the first chunk,
    then of the second, and so on; backward passes go through the chunks in reverse.

    In pass u, stage s computes the forward pass number u - s and then the backward pass number u - s -
    (the forward passes before its first backward pass).
    """
    micro_batches, send, now, waits = clocks.micro_batches, clocks.send, clocks.now, clocks.waits
    stages, chunks = len(now), len(clocks.forward[0])
    passes, last = micro_batches * chunks, len(now) - 1
    whole = micro_batches // group * group * chunks  # passes of complete groups
    before = [2 * (last - stage) + (chunks - 1) * group for stage in range(stages)]
    # When stage s sent its last activation to stage s + 1, and that one its last gradient back. Messages from
    # the last stage to the first one (activations), and back (gradients), wait in a queue for the next chunk.
    forward_sent, backward_sent = [0] * last, [0] * last
    forward_queue, backward_queue = deque[int](), deque[int]()

    def chunk_of(number: int) -> int:
        if number < whole:
            return number % (group * chunks) // group
        return (number - whole) // (micro_batches - whole // chunks)

    def compute(stage: int, seconds: int, sent: int | None) -> int:
        start = now[stage]
        if sent is not None and sent + send > start:
            waits[stage] += min(send, sent + send - start)
            start = sent + send
        now[stage] = start + seconds
        return now[stage]

    def advance(u: int) -> None:
        # From the last stage, so that a message sent in this pass does not replace one that is needed.
        for stage in range(min(last, u), max(0, u - passes + 1) - 1, -1):
            chunk = chunk_of(u - stage)
            sent = forward_sent[stage - 1] if stage else forward_queue.popleft() if chunk else None
            done = compute(stage, clocks.forward[stage][chunk], sent)
            if stage < last:
                forward_sent[stage] = done
            elif chunk < chunks - 1:
                forward_queue.append(done)
        for stage in range(stages):
            number = u - stage - before[stage]
            if 0 <= number < passes:
                chunk = chunks - 1 - chunk_of(number)
                of_last = backward_queue.popleft() if stage == last and chunk < chunks - 1 else None
                sent = backward_sent[stage] if stage < last else of_last
                done = compute(stage, clocks.backward[stage][chunk], sent)
                if stage:
                    backward_sent[stage - 1] = done
                elif chunk:
                    backward_queue.append(done)

    state: list[list[int] | deque[int]] = [now, forward_sent, backward_sent, forward_queue, backward_queue]
    steady = range(before[0] + last, whole)
    _run(advance, passes + before[0] + last, steady, group * chunks, state, waits)


def _run(
    advance: Callable[[int], None],
    passes: int,
    steady: range,
    period: int,
    state: Sequence[MutableSequence[int]],
    counters: list[int],
) -> None:
    """Call ``advance(pass)`` for every pass, or have the same effect.

    Args:
        steady: the passes in which ``advance`` does the same in every ``period``.
        state: all times on which ``advance`` depends, and only by their differences.
        counters: to which ``advance`` adds.
    """
    seen: dict[tuple[int, ...], tuple[int, int, list[int]]] = {}
    at = 0
    while at < passes:
        if at in steady and (at - steady.start) % period == 0:
            base = state[0][0]
            key = tuple(time - base for row in state for time in row)
            if key in seen:
                earlier, earlier_base, earlier_counters = seen[key]
                repeats = (steady.stop - at) // (at - earlier)
                for row in state:
                    for index in range(len(row)):
                        row[index] += repeats * (base - earlier_base)
                for index, earlier_counter in enumerate(earlier_counters):
                    counters[index] += repeats * (counters[index] - earlier_counter)
                at += repeats * (at - earlier)
                steady = range(0)
                continue
            seen[key] = at, base, counters.copy()
        advance(at)
        at += 1
