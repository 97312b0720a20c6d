"""NCCL's flight recorder for a rank's calls."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.engine import collectives
from toolkit.layout.axes import Axes
from toolkit.monitor.calls import from_flight_recorder
from toolkit.observe import last_collective
from toolkit.testing.dist import RankPool

pytestmark = pytest.mark.gpu

SECONDS = 3


def calls_of_a_gpu(rank: int, ranks: int) -> dict[str, Any]:
    """Three calls that finish, then one behind a kernel that takes SECONDS."""
    group = dist.new_group(backend="nccl")
    last_collective.extend_group_timeouts(7200)
    with collectives.record_collectives(Axes(), None):
        for _ in range(3):
            dist.all_reduce(torch.ones(1024, device="cuda"), group=group)
        torch.cuda.synchronize()
        torch.cuda._sleep(int(SECONDS * 1.5e9))
        dist.all_reduce(torch.ones(8, device="cuda"), group=group)
        own = [call for call in collectives.last_calls() if call.group == group.group_name]
        trace = from_flight_recorder(json.loads(last_collective.dump_nccl_trace()), own)
        torch.cuda.synchronize()
    timeout = group._get_backend(torch.device("cuda")).options._timeout
    return {"own": own, "trace": trace, "timeout": timeout}


def test_flight_recorder_reports_the_unfinished_call(gpu: RankPool) -> None:
    (found,) = gpu.run(calls_of_a_gpu)
    assert [call.number for call in found["trace"]] == [call.number for call in found["own"]] == [1, 2, 3, 4]
    assert {call.operation for call in found["trace"]} == {"all_reduce"}
    assert not found["trace"][-1].finished
    assert "[8]" in found["trace"][-1].tensors
    assert found["timeout"] == timedelta(seconds=7200 + last_collective.MARGIN_SECONDS)
