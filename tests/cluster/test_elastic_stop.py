"""Whether an elastic run continues after its ranks have stopped. tests/launch/test_elastic.py has whole runs.

pytest tests/cluster/test_elastic_stop.py
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from toolkit.cluster.stop import elastic_stop
from toolkit.cluster.stop.elastic_stop import (
    AfterStop,
    AgentRendezvous,
    NodeStop,
    agent_arguments,
    agree_after_stop,
    decide_after_stop,
    serves_rendezvous,
)
from toolkit.cluster.stop.stop_request import StopRequest
from toolkit.testing.dist import find_free_port

TERM = NodeStop(reason="SIGTERM", leaves=False)
INTERRUPT = NodeStop(reason="SIGINT", leaves=False)
OTHER = NodeStop(reason=None, leaves=False)
PREEMPTED = NodeStop(reason="Google Cloud preempts this machine", leaves=True)
END, LEAVE, RESTART = AfterStop.END, AfterStop.LEAVE, AfterStop.RESTART


@pytest.mark.parametrize(
    ("stops", "waiting", "after"),
    [
        pytest.param([TERM, TERM], 1, [RESTART, RESTART], id="a node joins"),
        pytest.param([TERM, OTHER], 1, [RESTART, RESTART], id="one agent is first to see a node that joins"),
        pytest.param([OTHER, OTHER], 2, [RESTART, RESTART], id="the signal reached other ranks of the nodes"),
        pytest.param([TERM, OTHER], 0, [END, END], id="a stop of one agent"),
        pytest.param([TERM], 0, [END], id="a stop of the only agent"),
        pytest.param([INTERRUPT, OTHER], 1, [END, END], id="agents restart ranks with no other signal"),
        pytest.param([OTHER, PREEMPTED], 0, [RESTART, LEAVE], id="a notice for one machine"),
        pytest.param([PREEMPTED, TERM], 1, [LEAVE, RESTART], id="a notice while a node joins"),
        pytest.param([PREEMPTED, INTERRUPT], 0, [END, END], id="a notice while the user stops the run"),
        pytest.param([TERM, OTHER], None, [RESTART, RESTART], id="unknown: the agents decide"),
    ],
)
def test_elastic_run_continues_unless_it_was_asked_to_stop(
    stops: list[NodeStop], waiting: int | None, after: list[AfterStop]
) -> None:
    decision = decide_after_stop(stops, waiting)
    assert [decision.on_node(node) for node in range(len(stops))] == after


@pytest.mark.parametrize(
    ("stops", "waiting", "after"),
    [
        pytest.param([OTHER, TERM], 0, [RESTART, LEAVE], id="a pod is evicted"),
        pytest.param([TERM, OTHER], None, [LEAVE, RESTART], id="a pod is evicted with its server"),
        pytest.param([TERM, TERM], 0, [END, END], id="the job is deleted"),
        pytest.param([TERM], 0, [END], id="the only pod is evicted"),
        pytest.param([TERM, OTHER], 1, [RESTART, RESTART], id="a pod joins"),
        pytest.param([INTERRUPT, OTHER], 0, [END, END], id="the user stops the run"),
        pytest.param([INTERRUPT, TERM], 0, [END, END], id="the user stops the run, and a pod is evicted"),
        pytest.param([OTHER, OTHER], 0, [END, END], id="another reason"),
    ],
)
def test_pods_that_are_evicted_leave_the_run(
    stops: list[NodeStop], waiting: int | None, after: list[AfterStop]
) -> None:
    decision = decide_after_stop(stops, waiting, evictions=True)
    assert [decision.on_node(node) for node in range(len(stops))] == after


@pytest.mark.parametrize(
    ("stops", "waiting", "reason"),
    [
        ([TERM, TERM], 1, "1 node joined the run: torchrun restarts the ranks with more nodes"),
        ([OTHER, TERM], 0, "SIGTERM (on node 1)"),
        ([TERM, INTERRUPT], 0, "SIGINT (on node 1)"),
        ([TERM], 0, "SIGTERM"),
        ([OTHER], 0, None),
        (
            [OTHER, PREEMPTED],
            0,
            "node 1 left the run, which continues on the others: Google Cloud preempts this machine "
            "(on node 1)",
        ),
    ],
)
def test_reason_of_a_stop_names_its_node(stops: list[NodeStop], waiting: int, reason: str | None) -> None:
    assert decide_after_stop(stops, waiting).reason == reason


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["python", "/bin/torchrun", "--nnodes=1:2", "train.py"], ["--nnodes=1:2", "train.py"]),
        (["python", "-u", "-m", "torch.distributed.run", "train.py"], ["train.py"]),
        (["python", "agent.py", "train.py"], None),
    ],
)
def test_agent_arguments_follow_the_name_of_torchrun(words: list[str], arguments: list[str] | None) -> None:
    assert agent_arguments(words) == arguments


def test_rank_reads_torchruns_rendezvous_and_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that waits is entered as an agent would; nothing answers on the other port."""
    port = find_free_port()
    agent = get_rendezvous_handler(
        RendezvousParameters("c10d", f"127.0.0.1:{port}", "one", 1, 2, is_host="1")
    )
    words = "python torchrun --nnodes=1:2 --rdzv-backend=c10d --rdzv-id=one --rdzv-conf=is_host=1 train.py"
    monkeypatch.setattr(
        elastic_stop,
        "agent_command_line",
        lambda pid: [*words.split()[:-1], f"--rdzv-endpoint=127.0.0.1:{port}", "train.py"],
    )
    assert serves_rendezvous(os.getpid())
    assert not serves_rendezvous(os.getppid()), "another process listens on the port"
    seen = AgentRendezvous(os.getppid())
    assert seen.count_waiting_nodes() == 0
    holder = agent._state_holder
    holder.sync()
    holder.state.wait_list.add(agent._this_node)
    holder.mark_dirty()
    holder.sync()
    assert seen.count_waiting_nodes() == 1
    seen.close()
    time.sleep(1.1)  # handlers cache the state for a second
    assert agent.is_closed()
    monkeypatch.setattr(elastic_stop, "QUERY_SECONDS", 1)
    monkeypatch.setattr(
        elastic_stop,
        "agent_command_line",
        lambda pid: [*words.split()[:-1], f"--rdzv-endpoint=127.0.0.1:{find_free_port()}", "train.py"],
    )
    assert AgentRendezvous(os.getppid()).count_waiting_nodes() is None


class UnconfirmedRendezvous:
    """The rendezvous of rank 0 of two nodes, of which the other does not confirm what it receives."""

    def __init__(self) -> None:
        self.published: dict[str, Any] = {}

    def publish(self, name: str, message: dict[str, Any]) -> None:
        self.published[name] = message

    def receive(self, *names: str, seconds: float) -> list[dict[str, Any]]:
        return [self.published["stopped/0"], asdict(OTHER)]

    def wait_for_confirmations(self, name: str, count: int, seconds: float) -> None:
        raise TimeoutError(f"{count} nodes have not confirmed {name}")


def test_rank_0_keeps_a_published_decision_that_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other node may have read it. Without it, the agent of a leaving node would restart its ranks."""
    monkeypatch.setattr(AgentRendezvous, "count_waiting_nodes", lambda self: 0)
    launch = SimpleNamespace(rank=0, local_rank=0, node=0, nodes=2, launcher_pid=os.getppid())
    stop = StopRequest()
    stop.request("Google Cloud preempts this machine", leaves=True)
    rendezvous = UnconfirmedRendezvous()
    decision = agree_after_stop(cast("Any", launch), cast("Any", rendezvous), stop, evictions=False)
    assert decision is not None
    assert asdict(decision) == rendezvous.published["after-stop"]
    assert [decision.on_node(node) for node in (0, 1)] == [LEAVE, RESTART]


class LostRendezvous:
    """The rendezvous of the second of two nodes, whose store goes when it has received the decision."""

    def publish(self, name: str, message: dict[str, Any]) -> None:
        pass

    def receive(self, *names: str, seconds: float) -> list[dict[str, Any]]:
        return [{"continues": True, "leaving": [1], "reason": "node 1 left the run"}]

    def confirm(self, name: str) -> None:
        raise RuntimeError("Connection reset by peer")


def test_node_keeps_a_decision_that_it_cannot_confirm() -> None:
    """Otherwise the agent of a leaving node would restart its ranks."""
    launch = SimpleNamespace(rank=1, local_rank=0, node=1, nodes=2, launcher_pid=os.getppid())
    decision = agree_after_stop(
        cast("Any", launch), cast("Any", LostRendezvous()), StopRequest(), evictions=False
    )
    assert decision is not None
    assert decision.on_node(1) is LEAVE


def test_waiting_nodes_are_unknown_if_the_agent_has_ended() -> None:
    assert AgentRendezvous(2**22 + 1).count_waiting_nodes() is None
