"""The measurements of a calibration: every figure, on one device and between ranks.

pytest tests/observe/test_calibration_benchmarks.py
"""

from __future__ import annotations

import time
from dataclasses import asdict, fields
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from toolkit.estimate.measurements import CollectiveTiming, measurements_from_json, slowest
from toolkit.estimate.measurements import MachineTimings as Timings
from toolkit.observe import collective_benchmark, device_benchmark
from toolkit.observe.collective_benchmark import groups_to_measure, measure_collectives
from toolkit.observe.device_benchmark import measure_device, stages, typical_seconds
from toolkit.testing.dist import RankPool

CPU = torch.device("cpu")
SMALL = {
    "SECONDS": {"cpu": 0.001},
    "TOKENS": {"cpu": (8, 16)},
    "FEATURES": {"cpu": ((8, 16),)},
    "ATTENTION": {"cpu": ((1, 2, 8, 8),)},
    "LARGE_BYTES": {"cpu": 2**16},
    "OPTIMIZER_ELEMENTS": {"cpu": 2**10},
}


def test_every_figure_of_a_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(device_benchmark, name, value)
    advanced: list[int] = []
    timings = measure_device(CPU, lambda: advanced.append(1))
    assert len(advanced) == stages(CPU)
    assert [(one.dtype, one.m, one.n, one.k) for one in timings.gemms] == [
        (dtype, tokens, 16, 8) for dtype in ("fp32", "bf16") for tokens in (8, 16)
    ]
    assert len(timings.attentions) == 2
    assert (timings.to_device, timings.to_host) == (None, None)  # a CPU has no host to copy to
    measured = Timings(ranks_per_node=1, device=timings)
    assert measurements_from_json(asdict(measured)) == measured  # which checks that all are positive


def test_slow_operation_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_benchmark, "SECONDS", {"cpu": 0.01})
    assert typical_seconds(lambda: time.sleep(0.005), CPU) > 0.005 > typical_seconds(lambda: None, CPU)


def test_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(device_benchmark, name, value)
    own = measure_device(CPU)
    later = type(own)(
        **{
            **{field.name: getattr(own, field.name) for field in fields(own)},
            "memory_bandwidth": own.memory_bandwidth / 2,
            "operator_seconds": own.operator_seconds * 2,
        }
    )
    combined = slowest([own, later])
    assert combined.memory_bandwidth == own.memory_bandwidth / 2
    assert combined.operator_seconds == own.operator_seconds * 2
    assert combined.gemms == own.gemms


@pytest.mark.parametrize(
    ("ranks", "per_node", "groups"),
    [(2, 2, [[(0, 1)]]), (4, 2, [[(0, 1), (2, 3)], [(0, 2)], [(0, 1, 2, 3)]]), (2, 1, [[(0, 1)]])],
)
def test_groups_within_and_between_nodes(ranks: int, per_node: int, groups: list[object]) -> None:
    assert list(groups_to_measure(ranks, per_node)) == groups


def measure(rank: int, ranks: int, per_node: int, delay: float) -> list[CollectiveTiming]:
    real = dist.all_gather_into_tensor

    def slow_gather(*arguments: object, **named: object) -> object:
        time.sleep(delay if rank == 1 else 0.0)
        return real(*arguments, **named)

    with (
        patch.dict(collective_benchmark.SIZES, cpu=(2**10, 2**12)),
        patch.object(collective_benchmark, "SECONDS", 0.001),
        patch.object(collective_benchmark.dist, "all_gather_into_tensor", slow_gather),
    ):
        return list(measure_collectives(CPU, rank, ranks, per_node))


def test_collectives_are_those_of_the_slowest_rank(pool: RankPool) -> None:
    """Rank 1 enters each all-gather 20 ms late; control: without the delay."""
    delayed, plain = (pool.run(measure, 2, delay, ranks=4) for delay in (0.02, 0.0))
    assert all(one == delayed[0] for one in delayed), "all ranks know the same"
    found = delayed[0]
    assert [(one.operation, one.ranks, one.per_node) for one in found[::2]] == [
        (operation, ranks, per_node)
        for ranks, per_node in ((2, 2), (2, 1), (4, 2))
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "send")
    ]
    assert {one.size for one in found} == {2**10, 2**12}
    with_rank_1 = [one.seconds for one in found if one.operation == "all_gather" and one.per_node == 2]
    assert min(with_rank_1) > 0.02
    control = [one.seconds for one in plain[0] if one.operation == "all_gather" and one.per_node == 2]
    assert min(control) < 0.02
