"""Messages between ranks without collectives, and what ranks know of each other's processes.

pytest tests/observe/test_rank_messages.py
"""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.monitor.calls import Call, from_flight_recorder
from toolkit.monitor.hangs.stacks import read_process_state
from toolkit.observe import last_collective, rank_messages
from toolkit.observe.rank_messages import RankMessages
from toolkit.testing.dist import run_ranks


def test_message_is_a_file_on_a_shared_disk(tmp_path: Path) -> None:
    one, other = (
        RankMessages(tmp_path / "deep" / "hang", None),
        RankMessages(tmp_path / "deep" / "hang", None),
    )
    assert other.read("rank-1") is None
    one.post("rank-1", "first")
    one.post("rank-1", "second")
    assert other.read("rank-1") == other.poll("rank-1") == "second"


def test_message_is_a_store_key_without_a_shared_disk(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    one, other = (
        RankMessages(tmp_path / "a", dist.PrefixStore("x", server)),
        RankMessages(tmp_path / "b", dist.PrefixStore("x", client)),
    )
    assert other.poll("rank-1") is None
    one.post("rank-1", "text")
    assert other.read("rank-1") == other.poll("rank-1") == "text"
    assert not (tmp_path / "b").exists()


class SilentStore:
    """A store whose server is stopped: calls do not return."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: time.sleep(5)


def test_silent_store_is_called_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_messages, "STORE_SECONDS", 0.2)
    messages = RankMessages(tmp_path, SilentStore())  # type: ignore[arg-type]
    began = time.monotonic()
    messages.post("a", "text")
    assert messages.poll("b") is None
    assert messages.read("a") == "text", "the file exists all the same"
    assert time.monotonic() - began < 1


def examine_ranks(rank: int, ranks: int) -> dict[str, Any]:
    everyone = last_collective.gather_process_ids(ranks, stacks_fd=7, last_call_fd=8)
    store = last_collective.clone_store()
    store.set(f"rank-{rank}", str(os.getpid()))
    dist.barrier()
    found = [int(store.get(f"rank-{other}")) for other in range(ranks)]
    group = dist.new_group(timeout=timedelta(seconds=60))
    long = dist.new_group(timeout=timedelta(hours=5))
    last_collective.extend_group_timeouts(3600)
    for _ in range(3):
        dist.all_reduce(torch.ones(4, 2), group=group)
    timeouts = {
        name: one._get_backend(torch.device("cpu")).options._timeout
        for name, one in (("short", group), ("long", long))
    }
    trace = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
    known = Call(
        group=group.group_name,
        ranks=(0, 1),
        axis="data",
        number=1,
        operation="",
        tensors="",
        begun=0.0,
        finished=True,
    )
    calls = from_flight_recorder(trace, [known])
    return {
        "pids": [one.pid for one in everyone],
        "stored": found,
        "states": [read_process_state(one) for one in everyone],
        "hosts": {one.host for one in everyone},
        "timeouts": timeouts,
        "calls": calls,
    }


def test_ranks_know_each_others_processes_and_group_timeouts_exceed_the_limit() -> None:
    """PyTorch's recording of gloo calls has the same form as NCCL's, but lacks the end of calls."""
    answers = run_ranks(examine_ranks, 2)
    for answer in answers:
        assert answer["pids"] == answer["stored"] == answers[0]["pids"]
        assert set(answer["states"]) <= {"R", "S", "D"}
        assert answer["hosts"] == {socket.gethostname()}
        assert answer["timeouts"] == {
            "short": timedelta(seconds=3600 + last_collective.MARGIN_SECONDS),
            "long": timedelta(hours=5),
        }
        assert [(call.number, call.operation, call.tensors, call.ranks) for call in answer["calls"]] == [
            (number, "all_reduce", "[4, 2] Float", (0, 1)) for number in (1, 2, 3)
        ]
    assert len(set(answers[0]["pids"])) == 2


def test_single_rank_needs_no_process_group() -> None:
    assert [one.pid for one in last_collective.gather_process_ids(1, 3, 4)] == [os.getpid()]
    assert not dist.is_initialized()
    last_collective.extend_group_timeouts(600)


def test_last_call_of_an_ended_process_can_be_read() -> None:
    record = last_collective.LastCollective()
    descriptor = os.open(f"/proc/self/fd/{record.descriptor}", os.O_RDONLY)
    assert last_collective.read_last_collective(descriptor) is None
    record.record("4", "data", 1000, "all_reduce", None, 1.0, "[1, 2, 3, 4, 5, 6] float32")
    record.record("4", "data", 7, "all_reduce", None, 1.5, "[512] float32")
    record.close()
    assert last_collective.read_last_collective(descriptor) == Call(
        group="4",
        ranks=(),
        axis="data",
        number=7,
        operation="all_reduce",
        tensors="[512] float32",
        begun=1.5,
        finished=False,
    )
    os.close(descriptor)
