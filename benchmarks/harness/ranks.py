"""Functions that planner_cpu.py calls on the ranks of a pool (toolkit/testing/dist.py)."""

from __future__ import annotations

import torch

from toolkit.cluster.jobs.job import resolve_world
from toolkit.config.schema import RunConfig
from toolkit.estimate.measurements import MachineTimings
from toolkit.observe.collective_benchmark import measure_machine
from toolkit.plan import make_plan
from toolkit.train.run import run


def train_rank(rank: int, ranks: int, config: RunConfig, attempt: int, data: str) -> int:
    """Train a run that was begun as ``attempt``, on the data in the folder ``data``."""
    plan = make_plan(config, resolve_world(config.cluster))
    return int(run(plan, rank=rank, local_rank=rank, stop=lambda: None, attempt=attempt, data=data))


def measure_rank(rank: int, ranks: int) -> MachineTimings:
    """Measure this machine, with ``ranks`` ranks on it."""
    return measure_machine(torch.device("cpu"), rank, ranks, ranks)
