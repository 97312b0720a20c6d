"""The numbers of nodes that an elastic run may have.

pytest tests/cluster/test_node_range.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.cluster.jobs.job import plan_job
from toolkit.cluster.world.node_range import (
    NodeRange,
    agent_restarts,
    check_departures,
    check_node_range,
    parse_node_range,
    requested_nodes,
)
from toolkit.config.cluster import ClusterBackend, ClusterConfig
from toolkit.config.monitor import OnWrongComputation
from toolkit.config.schema import EngineName, ParallelConfig, RunConfig
from toolkit.errors import ConfigError, Problem
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.testing.tiny import tiny_config

WORLD = World(ranks=2, ranks_per_node=1, device=Device.CPU)


@pytest.mark.parametrize(
    ("environ", "words", "found"),
    [
        ({}, ["python", "torchrun", "--nnodes=1:2", "launch/train.py"], NodeRange(1, 2)),
        ({}, ["python", "-m", "torch.distributed.run", "--nnodes", "2:4", "train.py"], NodeRange(2, 4)),
        ({}, ["python", "torchrun", "--nnodes=2:2", "launch/train.py"], None),
        ({}, ["python", "torchrun", "--nnodes=2", "launch/train.py"], None),
        ({}, ["python", "torchrun", "launch/train.py"], None),
        ({"PET_NNODES": "1:8"}, ["python", "torchrun", "launch/train.py"], NodeRange(1, 8)),
        ({"PET_NNODES": "1:8"}, ["python", "torchrun", "--nnodes=2", "launch/train.py"], None),
    ],
)
def test_read_node_range_from_torchrun(
    environ: dict[str, str], words: list[str], found: NodeRange | None
) -> None:
    assert parse_node_range(environ, words) == found


def config(batch: int, micro: int | None = None, pipeline: int = 1) -> RunConfig:
    found = tiny_config()
    engine = replace(found.engine, name=EngineName.deepspeed if pipeline == 1 else EngineName.megatron)
    train = replace(found.train, global_batch=batch, micro_batch=micro)
    return replace(found, train=train, engine=engine, parallel=ParallelConfig(pipeline=pipeline))


def refusal(found: RunConfig, nodes: NodeRange) -> Problem | None:
    try:
        check_node_range(found, nodes, WORLD, agent_store=False)
    except ConfigError as error:
        return error.problems[0]
    return None


def test_every_number_of_nodes_must_divide_the_global_batch() -> None:
    assert refusal(config(16), NodeRange(1, 2)) is None
    assert refusal(config(24), NodeRange(1, 4)) is None
    problem = refusal(config(16), NodeRange(1, 4))
    assert problem is not None
    assert problem.seen.startswith("--nnodes=1:4, and on 3 nodes: train.global_batch=16")
    assert "not on 3:" in problem.rule
    assert problem.remedy == "start torchrun with --nnodes=1:2 or write train.global_batch=24"
    assert refusal(config(16), NodeRange(1, 2)) is None, "the first remedy"
    assert refusal(config(24), NodeRange(1, 4)) is None, "the second remedy"


def test_micro_batch_counts_in_the_larger_global_batch() -> None:
    problem = refusal(config(16, micro=4), NodeRange(1, 3))
    assert problem is not None
    assert problem.remedy.endswith("write train.global_batch=24")
    assert refusal(config(24, micro=4), NodeRange(1, 3)) is None


def test_axes_across_nodes_need_their_nodes() -> None:
    """No batch helps a pipeline of two nodes of which one is lost."""
    problem = refusal(config(16, pipeline=2), NodeRange(1, 2))
    assert problem is not None
    assert "--nnodes=1:2, and on 1 node: " in problem.seen
    assert problem.remedy == "start torchrun with --nnodes=2"


def test_range_of_many_nodes_is_checked_quickly() -> None:
    found = config(5040)
    check_node_range(found, NodeRange(1, 10), WORLD, agent_store=False)
    assert all(
        make_plan(found, replace(WORLD, ranks=number)).batch.global_batch == 5040 for number in range(1, 11)
    )


def test_store_of_the_agent_is_refused_because_no_node_can_return() -> None:
    with pytest.raises(ConfigError, match="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_node_range(config(16), NodeRange(1, 2), WORLD, agent_store=True)


def elastic(least: int, most: int, spares: int = 0) -> ClusterConfig:
    return ClusterConfig(
        where=ClusterBackend.slurm, gpus_per_node=0, nodes=most, min_nodes=least, spare_nodes=spares
    )


def test_jobs_take_spare_nodes_and_may_lose_all_but_the_least_number() -> None:
    assert requested_nodes(elastic(2, 4, 1)) == 5
    assert agent_restarts(elastic(2, 4, 1)) == ClusterConfig().restarts + 3
    fixed = ClusterConfig(where=ClusterBackend.slurm, nodes=4, spare_nodes=1, repair_hours=24)
    assert requested_nodes(fixed) == 4, "without cluster.min_nodes they are only part of the prediction"
    assert agent_restarts(fixed) == fixed.restarts


def job_refusal(found: RunConfig) -> Problem | None:
    try:
        plan_job(found)
    except ConfigError as error:
        return error.problems[0]
    return None


def test_job_must_be_possible_on_every_number_of_nodes() -> None:
    found = config(16)
    problem = job_refusal(replace(found, cluster=elastic(1, 4)))
    assert problem is not None
    assert problem.key == "cluster.min_nodes"
    assert problem.seen.startswith(
        "cluster.min_nodes=1 cluster.nodes=4, and on 3 nodes: train.global_batch=16"
    )
    assert problem.remedy == "leave out cluster.min_nodes or write train.global_batch=24"
    assert job_refusal(replace(config(24), cluster=elastic(1, 4))) is None
    problem = job_refusal(replace(config(40), cluster=elastic(2, 5)))
    assert problem is not None
    assert problem.remedy == "write cluster.min_nodes=4 or write train.global_batch=60"
    assert job_refusal(replace(config(40), cluster=elastic(4, 5))) is None
    assert job_refusal(replace(config(60), cluster=elastic(2, 5))) is None


@pytest.mark.parametrize(
    ("nodes", "restarts", "seen"),
    [
        (None, 3, "monitor.on_wrong_computation=leave, and a fixed number of nodes"),
        (NodeRange(1, 3), 0, "monitor.on_wrong_computation=leave, and torchrun without --max-restarts"),
    ],
)
def test_nodes_leave_only_runs_that_torchrun_can_restart_without_them(
    nodes: NodeRange | None, restarts: int, seen: str
) -> None:
    found = config(8)
    check_departures(found, nodes, restarts=restarts)
    found.monitor.on_wrong_computation = OnWrongComputation.leave
    check_departures(found, NodeRange(1, 3), restarts=3)
    with pytest.raises(ConfigError) as error:
        check_departures(found, nodes, restarts=restarts)
    (problem,) = error.value.problems
    assert problem.seen == seen
    assert "--nnodes=MIN:MAX --max-restarts=3" in problem.remedy
