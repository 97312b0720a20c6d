"""Decide whether an elastic run (``torchrun --nnodes=MIN:MAX``) continues after its ranks have stopped.

torchrun's agents end and restart the ranks of all nodes when a node joins (torch 2.13, ``_invoke_run`` in
``elastic/agent/server/api.py``): each sends its ranks SIGTERM, waits 30 s, sends SIGKILL, and meets the other
agents at the rendezvous. An agent that is itself asked to stop does the same to its ranks, and then exits. A
rank cannot distinguish the two signals. But the rendezvous lists the nodes that wait to join until all agents
have left the old round, which they do only after their ranks have ended. So rank 0 reads that list before it
exits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cluster.stop.stop_request import StopRequest
from toolkit.cluster.world.environment import Launch, agent_command_line
from toolkit.cluster.world.rendezvous import Rendezvous

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

log = logging.getLogger(__name__)

# The agent kills ranks 30 s after the SIGTERM of a restart, whatever its --shutdown-timeout is (torch 2.13,
# LocalElasticAgent._stop_workers). 5 s of them are left for the end of the processes.
SAVE_SECONDS = 25.0
REPORT_SECONDS = 10.0  # how long rank 0 waits for the other nodes, which have stopped after the same step
QUERY_SECONDS = 5  # how long rank 0 waits for torchrun's rendezvous
RENDEZVOUS_PORT = 29400  # if --rdzv-endpoint names none (torch 2.13, c10d_rendezvous_backend.py)
AGENT_SIGNAL = "SIGTERM"  # sent by an agent that restarts its ranks


class AfterStop(StrEnum):
    """What torchrun's agent of a node does after the ranks have stopped."""

    RESTART = "restart"  # it restarts them, with the other nodes that are there
    LEAVE = "leave"  # it ends, and the other nodes continue
    END = "end"  # it ends, and so do all others


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStop:
    """What the first rank of a node reports when the ranks have stopped.

    Attributes:
        reason: the request that this node received; None: another node received it.
        leaves: the request concerns this node only: :attr:`StopRequest.leaves`.
    """

    reason: str | None
    leaves: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StopDecision:
    """Whether and where an elastic run continues after its ranks have stopped.

    Attributes:
        continues: the run continues on the nodes that are not in ``leaving``, and on those that join.
        leaving: nodes whose agents end while the run continues.
        reason: for ``status.json``; None: no node reported one.
    """

    continues: bool
    leaving: tuple[int, ...]
    reason: str | None

    def on_node(self, node: int) -> AfterStop:
        if not self.continues:
            return AfterStop.END
        return AfterStop.LEAVE if node in self.leaving else AfterStop.RESTART


def decide_after_stop(
    stops: Sequence[NodeStop], nodes_waiting: int | None, *, evictions: bool = False
) -> StopDecision:
    """Decide whether an elastic run continues after its ranks have stopped.

    Args:
        stops: the reports of all nodes, in the order of nodes.
        nodes_waiting: how many nodes wait to join; None: unknown, and then the agents decide.
        evictions: a SIGTERM may mean that only this node is taken away, as when a pod is evicted. Then the
            nodes that received one leave, unless all nodes did. Without it, a SIGTERM stops the whole run.
    """
    leaving = tuple(node for node, stop in enumerate(stops) if stop.leaves)
    if evictions and not nodes_waiting:
        signalled = {node for node, stop in enumerate(stops) if stop.reason == AGENT_SIGNAL}
        if len(signalled) < len(stops):
            leaving = tuple(sorted(signalled.union(leaving)))
    asked = [(node, stop.reason) for node, stop in enumerate(stops) if stop.reason is not None]
    reason = None
    if asked:
        node, text = next(((node, text) for node, text in asked if text != AGENT_SIGNAL), asked[0])
        reason = f"{text} (on node {node})" if len(stops) > 1 else text
    if any(text != AGENT_SIGNAL and node not in leaving for node, text in asked):
        return StopDecision(continues=False, leaving=(), reason=reason)
    if leaving:
        nodes = f"node{'s' * (len(leaving) > 1)} {', '.join(map(str, leaving))}"
        others = "the others" if len(leaving) < len(stops) else "the nodes that join"
        reason = f"{nodes} left the run, which continues on {others}: {reason}"
        return StopDecision(continues=True, leaving=leaving, reason=reason)
    if nodes_waiting:
        joined = "1 node joined" if nodes_waiting == 1 else f"{nodes_waiting} nodes joined"
        return StopDecision(
            continues=True,
            leaving=(),
            reason=f"{joined} the run: torchrun restarts the ranks with more nodes",
        )
    return StopDecision(continues=nodes_waiting is None, leaving=(), reason=reason)


def agree_after_stop(
    launch: Launch, rendezvous: Rendezvous, stop: StopRequest, *, evictions: bool
) -> StopDecision | None:
    """Return rank 0's decision on the first rank of every node; None on other ranks, which do not need it,
    and on a rank that cannot reach rank 0.

    Args:
        evictions: as in :func:`decide_after_stop`.
    """
    if launch.local_rank != 0:
        return None
    try:
        rendezvous.publish(f"stopped/{launch.node}", asdict(NodeStop(reason=stop(), leaves=stop.leaves)))
        if launch.rank != 0:
            (message,) = rendezvous.receive("after-stop", seconds=2 * REPORT_SECONDS + QUERY_SECONDS)
            with suppress(RuntimeError):  # rank 0 has gone, and the others have the same decision
                rendezvous.confirm("after-stop")
            return StopDecision(**{**message, "leaving": tuple(message["leaving"])})  # JSON has lists only
        names = [f"stopped/{node}" for node in range(launch.nodes)]
        stops = [NodeStop(**message) for message in rendezvous.receive(*names, seconds=REPORT_SECONDS)]
        agents = AgentRendezvous(launch.launcher_pid)
        decision = decide_after_stop(stops, agents.count_waiting_nodes(), evictions=evictions)
        if not decision.continues:
            agents.close()
        rendezvous.publish("after-stop", asdict(decision))
    except (RuntimeError, TimeoutError) as error:  # the first by torch.distributed: a rank has gone
        log.warning("the nodes have not agreed whether the run continues: %s", error)
        return None
    try:
        rendezvous.wait_for_confirmations("after-stop", launch.nodes - 1, REPORT_SECONDS)
    except (RuntimeError, TimeoutError) as error:  # the others may have read the decision, so it stays
        log.warning("not every node has confirmed whether the run continues: %s", error)
    return decision


class AgentRendezvous:
    """The rendezvous of torchrun's agents, as a rank sees it. Its state is read by torch, as the agents read
    it.

    Args:
        agent: PID of this rank's agent.
    """

    def __init__(self, agent: int) -> None:
        self._agent = agent
        self._handler: RendezvousHandler | None = None

    def count_waiting_nodes(self) -> int | None:
        """Return how many nodes wait to join; None if the rendezvous does not answer, or the agent has
        ended.
        """
        import psutil
        from torch.distributed.elastic.rendezvous import RendezvousError

        try:
            self._handler = _connect(self._agent)
            return None if self._handler is None else self._handler.num_nodes_waiting()
        except (RendezvousError, RuntimeError, psutil.NoSuchProcess) as error:
            log.warning("torchrun's rendezvous does not answer: %s", error)
            return None

    def close(self) -> None:
        """Prevent all agents, also those of spare nodes, from starting ranks again.

        Call :meth:`count_waiting_nodes` before.
        """
        from torch.distributed.elastic.rendezvous import RendezvousError

        if self._handler is not None:
            with suppress(RendezvousError, RuntimeError):  # the node that serves it has gone
                self._handler.set_closed()


def _connect(pid: int) -> RendezvousHandler | None:
    """Connect to the rendezvous that the command line of an agent names; None if it is not torchrun's."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
    from torch.distributed.run import parse_args, parse_min_max_nnodes

    arguments = agent_arguments(agent_command_line(pid))
    if arguments is None:
        return None
    agent = parse_args(arguments)
    least, most = parse_min_max_nnodes(agent.nnodes)
    settings = dict(option.strip().split("=", 1) for option in agent.rdzv_conf.split(",") if option)
    settings |= {"is_host": "0", "read_timeout": str(QUERY_SECONDS)}
    return get_rendezvous_handler(
        RendezvousParameters(agent.rdzv_backend, agent.rdzv_endpoint, agent.rdzv_id, least, most, **settings)
    )


def serves_rendezvous(agent: int) -> bool:
    """Return whether an agent serves torchrun's rendezvous, which then ends with it.

    Args:
        agent: PID of the agent.
    """
    import psutil
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import parse_args

    arguments = agent_arguments(agent_command_line(agent))
    if arguments is None:
        return False
    _, port = parse_rendezvous_endpoint(parse_args(arguments).rdzv_endpoint, RENDEZVOUS_PORT)
    connections = psutil.Process(agent).net_connections("tcp")
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)


def agent_arguments(command_line: Sequence[str]) -> list[str] | None:
    """Return torchrun's arguments in the command line of an agent; None if it is another program's."""
    for index, part in enumerate(command_line):
        if part == "torch.distributed.run" or Path(part).name == "torchrun":
            return list(command_line[index + 1 :])
    return None
