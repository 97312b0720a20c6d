"""Recording of calls to torch.distributed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.ledger_cases import Counted
from toolkit.engine import clock as clock_module
from toolkit.engine import collectives
from toolkit.engine.clock import CudaClock, SideStreams
from toolkit.layout.axes import Axes, Axis
from toolkit.monitor.recorder import HostClock, StepRecorder
from toolkit.step_parts import BACKWARD, UNEXPLAINED, communication
from toolkit.testing.dist import RankPool

AXES = Axes(tensor=2, data=2)


def call_all(rank: int, ranks: int) -> tuple[list[str], dict[str, float], dict[str, float]]:
    """Return the recorded calls, and the timed parts of the same calls on the recorder's thread and on
    another one.
    """
    tensor = next(
        groups for groups in map(dist.new_group, AXES.groups(Axis.TENSOR)) if dist.get_rank(groups) >= 0
    )
    mine, both, other = torch.ones(4), torch.ones(8), rank ^ 2

    def talk() -> None:
        dist.all_reduce(mine, group=tensor)
        dist.all_reduce(mine, group=tensor, async_op=True).wait()
        dist.broadcast(mine, src=rank & 2, group=tensor)
        dist.all_gather([mine.clone(), mine.clone()], mine, group=tensor)
        dist.all_gather_into_tensor(both, mine, group=tensor)
        dist.reduce_scatter_tensor(mine, both, group=tensor)
        dist.all_to_all_single(both, both.clone(), group=tensor)
        dist.all_gather_object([None, None], rank, group=tensor)
        dist.barrier(group=tensor)
        dist.all_reduce(mine)
        if rank < other:
            dist.send(mine, other)
        else:
            dist.recv(mine, other)
        for request in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, both[:4], other)]
        ):
            request.wait()

    recorder = StepRecorder(HostClock())
    with collectives.record_collectives(AXES, recorder):
        recorder.next_step(1)
        talk()
        found = [f"{call.axis}: {call.what}" for call in collectives.last_calls() if call.finished]
        recorder.next_step(2)
        thread = threading.Thread(target=talk)
        thread.start()
        thread.join()
        recorder.next_step(3)
        assert len(collectives.last_calls()) > len(
            found
        )  # calls of other threads are recorded too, since they can hang
    assert collectives.last_calls() == []
    first, second = recorder.take_steps()
    return found, dict(first.parts), dict(second.parts)


def test_calls_are_recorded_and_timed(pool: RankPool) -> None:
    """The last eight calls of each group are recorded; sends and receives separately."""
    for rank, (calls, parts, threads) in enumerate(pool.run(call_all, ranks=4)):
        there, back = (
            f"data: send to rank {rank ^ 2} [4] float32",
            f"data: recv from rank {rank ^ 2} [4] float32",
        )
        assert calls[:8] == [
            "tensor: broadcast [4] float32",
            "tensor: all_gather 2 x [4] float32, [4] float32",
            "tensor: all_gather_into_tensor [8] float32, [4] float32",
            "tensor: reduce_scatter_tensor [4] float32, [8] float32",
            "tensor: all_to_all_single [8] float32, [8] float32",
            *calls[5:7],
            "tensor: barrier",
        ]
        assert all(
            call.startswith("tensor: all_gather") for call in calls[5:7]
        )  # the size of a pickled object, then its bytes
        assert calls[8] == "all: all_reduce [4] float32"
        assert sorted(calls[9:]) == sorted([there, back, there if rank < rank ^ 2 else back])
        assert set(parts) == {UNEXPLAINED, *map(communication, ("tensor", "data", "all"))}
        assert set(threads) == {UNEXPLAINED}


@dataclass(frozen=True)
class Stream:
    cuda_stream: int


def test_waiting_for_a_side_stream_is_attributed_to_its_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses fake streams that only measure time."""
    hands, main, side, idle = Counted(), Stream(0), Stream(7), Stream(9)
    recorder: Any = StepRecorder(hands)
    clock = object.__new__(CudaClock)
    clock.stream = main  # type: ignore[assignment]
    recorder.clock = clock

    def waits(*streams: Any) -> None:
        hands.now += 1

    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", waits)
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", waits)
    current = main
    monkeypatch.setattr(clock_module.torch.cuda, "current_stream", lambda: current)
    streams = SideStreams(recorder)
    wait_stream: Any = torch.cuda.Stream.wait_stream
    synchronize: Any = torch.cuda.Stream.synchronize
    recorder.clock = hands
    recorder.next_step(1)
    with recorder.part(BACKWARD):
        streams.carry(
            recorder.part(communication("tensor"))
        )  # on the compute stream, which does not wait for itself
        current = side
        streams.carry(recorder.part(communication("data")))
        current = main
        wait_stream(side, main)
        wait_stream(main, idle)
        wait_stream(main, side)
        synchronize(side)
        synchronize(main)
    recorder.next_step(2)
    streams.close()
    assert torch.cuda.Stream.wait_stream is waits
    assert recorder.take_steps()[0].parts == {UNEXPLAINED: 0, BACKWARD: 3, communication("data"): 2}
