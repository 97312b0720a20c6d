"""The numbers of nodes that an elastic run may have: ``torchrun --nnodes=MIN:MAX``, or a job with
``cluster.min_nodes``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from toolkit.config.cluster import ClusterConfig
from toolkit.config.monitor import OnWrongComputation
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, PlanError, Problem
from toolkit.plan.types import World

NNODES = "torchrun --nnodes"
NO_AGENT_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
# A lost node is noticed after three missed heartbeats; then the others wait for more nodes (--rdzv-conf).
RENDEZVOUS_TIMES = "keep_alive_interval=2,last_call_timeout=10"


@dataclass(frozen=True, slots=True)
class NodeRange:
    min_nodes: int
    max_nodes: int

    def __contains__(self, nodes: object) -> bool:
        return nodes in range(self.min_nodes, self.max_nodes + 1)

    def __str__(self) -> str:
        return (
            f"{self.min_nodes}:{self.max_nodes}" if self.min_nodes < self.max_nodes else f"{self.min_nodes}"
        )


def parse_node_range(environ: Mapping[str, str], agent_arguments: Sequence[str]) -> NodeRange | None:
    """Return the range of ``--nnodes=MIN:MAX``; None if the number of nodes is fixed.

    The agent does not pass this setting to its ranks, so read it from the two sources that torchrun itself
    uses (torch 2.13, ``distributed/run.py``): the agent's command line, or else the variable ``PET_NNODES``.
    """
    value = environ.get("PET_NNODES", "")
    for index, word in enumerate(agent_arguments):
        name, _, attached = word.partition("=")
        if name == "--nnodes":
            value = attached or "".join(agent_arguments[index + 1 : index + 2])
            break
    low, _, high = value.partition(":")
    return NodeRange(int(low), int(high)) if high and low != high else None


def check_node_range(config: RunConfig, nodes: NodeRange, world: World, *, agent_store: bool) -> None:
    """Check that a run can have every number of nodes of its range, and can take a node back.

    Args:
        world: of this start; it has a plan.
        agent_store: torchrun's agent serves the store of the ranks: ``Launch.agent_store``.

    Raises:
        ConfigError: with the numbers of nodes that the rules refuse.
    """
    if agent_store:
        # The agent does not publish its address again when a node joins later (torch 2.13,
        # DynamicRendezvousHandler.next_rendezvous), so both sides time out after a minute.
        problem = Problem(
            NNODES,
            f"--nnodes={nodes} without {NO_AGENT_STORE}",
            "with a range of nodes, torchrun (PyTorch 2.13) ends the run when a node joins it later",
            f"export {NO_AGENT_STORE} on every node before torchrun",
        )
        raise ConfigError(problem)
    _check_every_number(
        config,
        nodes,
        world,
        key=NNODES,
        written=f"--nnodes={nodes}",
        remedy=lambda accepted: f"start torchrun with --nnodes={accepted}",
    )


def check_departures(config: RunConfig, nodes: NodeRange | None, *, restarts: int) -> None:
    """Check that nodes can leave a run that ``monitor.on_wrong_computation=leave`` asks to do so.

    Args:
        nodes: None: the number of nodes is fixed.
        restarts: how often the agents may start the ranks again, including earlier restarts.

    Raises:
        ConfigError: they cannot.
    """
    if config.monitor.on_wrong_computation is not OnWrongComputation.leave or (nodes and restarts):
        return
    key = "monitor.on_wrong_computation"
    lacking = "a fixed number of nodes" if nodes is None else "torchrun without --max-restarts"
    raise ConfigError(
        Problem(
            key,
            f"{key}=leave, and {lacking}",
            "a node can leave a run of which torchrun may restart the ranks on fewer nodes",
            f"start torchrun with --nnodes=MIN:MAX --max-restarts=3, or write {key}=stop",
        )
    )


def job_node_range(cluster: ClusterConfig) -> NodeRange | None:
    """Return the numbers of nodes that a job may have; None if ``cluster.min_nodes`` is not set."""
    return None if cluster.min_nodes is None else NodeRange(cluster.min_nodes, cluster.nodes or 1)


def requested_nodes(cluster: ClusterConfig) -> int:
    """Return how many nodes a job asks for: ``cluster.nodes``, and the spare nodes of an elastic job."""
    return (cluster.nodes or 1) + (cluster.spare_nodes if cluster.min_nodes is not None else 0)


def agent_restarts(cluster: ClusterConfig) -> int:
    """Return ``--max-restarts`` of a job's agents, which count every loss of a node as a restart."""
    spare = 0 if cluster.min_nodes is None else requested_nodes(cluster) - cluster.min_nodes
    return cluster.restarts + spare


def check_job_node_range(config: RunConfig, world: World) -> None:
    """Check that a job can run on every number of nodes from ``cluster.min_nodes`` to ``cluster.nodes``.

    Args:
        world: of all nodes without spares; it has a plan.

    Raises:
        ConfigError: with the numbers of nodes that the rules refuse.
    """
    nodes = job_node_range(config.cluster)
    if nodes is None:
        return
    _check_every_number(
        config,
        nodes,
        world,
        key="cluster.min_nodes",
        written=f"cluster.min_nodes={nodes.min_nodes} cluster.nodes={nodes.max_nodes}",
        remedy=lambda accepted: (
            f"write cluster.min_nodes={accepted.min_nodes}"
            if accepted.min_nodes < accepted.max_nodes
            else "leave out cluster.min_nodes"
        ),
    )


def _check_every_number(
    config: RunConfig,
    nodes: NodeRange,
    world: World,
    *,
    key: str,
    written: str,
    remedy: Callable[[NodeRange], str],
) -> None:
    """Raise ConfigError if the rules refuse some numbers of nodes.

    Args:
        written: how the user wrote the range.
        remedy: how to write the accepted numbers around the present one instead.
    """
    refused = {number: found for number in _numbers(nodes) if (found := _refusal(config, world, number))}
    if not refused:
        return
    number = min(refused)
    numbers = ", ".join(map(str, refused))
    remedies = [remedy(_accepted_around(world.nodes, nodes, refused))]
    if (batch := _larger_batch(config, world, nodes)) is not None:
        remedies.append(f"write train.global_batch={batch}")
    raise ConfigError(
        Problem(
            key,
            f"{written}, and on {number} node{'s' * (number > 1)}: {refused[number].seen}",
            f"the run must be possible on every number of nodes in the range, but not on {numbers}: "
            f"{refused[number].rule}",
            " or ".join(remedies),
        )
    )


def _numbers(nodes: NodeRange) -> range:
    return range(nodes.min_nodes, nodes.max_nodes + 1)


def _refusal(config: RunConfig, world: World, nodes: int) -> Problem | None:
    from toolkit.plan import make_plan

    try:
        make_plan(config, replace(world, ranks=nodes * world.ranks_per_node))
    except PlanError as error:
        return error.problems[0]
    return None


def _accepted_around(number: int, nodes: NodeRange, refused: Collection[int]) -> NodeRange:
    """Return the largest range around ``number`` without a refused number."""
    below = max((other for other in refused if other < number), default=nodes.min_nodes - 1)
    above = min((other for other in refused if other > number), default=nodes.max_nodes + 1)
    return NodeRange(below + 1, above - 1)


def _larger_batch(config: RunConfig, world: World, nodes: NodeRange) -> int | None:
    """Return the next larger global batch with which every number of nodes has a plan, unless it is more than
    twice as large, which would be another run.
    """
    unit = math.lcm(*_numbers(nodes)) * world.ranks_per_node * (config.train.micro_batch or 1)
    batch = -(-config.train.global_batch // unit) * unit
    if batch > 2 * config.train.global_batch:
        return None
    changed = replace(config, train=replace(config.train, global_batch=batch))
    return None if any(_refusal(changed, world, number) for number in _numbers(nodes)) else batch
