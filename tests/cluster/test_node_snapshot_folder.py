"""When the folder for snapshots of a node is removed.

pytest tests/cluster/test_node_snapshot_folder.py
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.cluster.attempt import node_snapshot_folder as module
from toolkit.cluster.attempt.node_snapshot_folder import (
    agent_restarts_after_error,
    agent_restarts_after_stop,
    agent_snapshot_folder,
    launcher_restarts_ranks,
    supervised_snapshot_folder,
)
from toolkit.cluster.stop.elastic_stop import StopDecision
from toolkit.cluster.stop.stop_request import ProcessHandle
from toolkit.cluster.world.environment import Launch, Launcher
from toolkit.cluster.world.node_range import NodeRange
from toolkit.cluster.world.rendezvous import PeerExited
from toolkit.errors import ConfigError, ExitCode, Problem
from toolkit.testing.tiny import tiny_plan

TORCHRUN = Launch(
    launcher=Launcher.TORCHELASTIC,
    rank=1,
    local_rank=0,
    ranks=2,
    ranks_per_node=1,
    restart=1,
    restarts_left=2,
)
ELASTIC = replace(TORCHRUN, node_range=NodeRange(1, 2), restart=0, restarts_left=0)
MISTAKE = ConfigError(Problem("key", "seen", "rule", "remedy"))


def test_torchrun_with_restarts_or_a_range_of_nodes_restarts_ranks() -> None:
    assert launcher_restarts_ranks(TORCHRUN)
    assert launcher_restarts_ranks(ELASTIC)
    assert launcher_restarts_ranks(replace(TORCHRUN, restart=3, restarts_left=0)), "its last attempt"
    assert not launcher_restarts_ranks(replace(TORCHRUN, restart=0, restarts_left=0))
    assert not launcher_restarts_ranks(replace(TORCHRUN, launcher=Launcher.DEEPSPEED))


def test_snapshots_are_kept_only_for_ranks_that_start_again() -> None:
    continues = StopDecision(continues=True, leaving=(0,), reason=None)
    assert not agent_restarts_after_stop(TORCHRUN, ExitCode.DONE, None)
    assert not agent_restarts_after_stop(TORCHRUN, ExitCode.STOPPED, None)
    assert agent_restarts_after_stop(ELASTIC, ExitCode.STOPPED, continues)
    assert not agent_restarts_after_stop(replace(ELASTIC, rank=0), ExitCode.STOPPED, continues), (
        "this node leaves"
    )
    assert not agent_restarts_after_stop(
        ELASTIC, ExitCode.STOPPED, StopDecision(continues=False, leaving=(), reason=None)
    )
    assert agent_restarts_after_error(TORCHRUN, RuntimeError())
    assert agent_restarts_after_error(TORCHRUN, PeerExited(ExitCode.FAILURE))
    assert not agent_restarts_after_error(replace(TORCHRUN, restarts_left=0), RuntimeError())
    assert not agent_restarts_after_error(TORCHRUN, MISTAKE)
    assert not agent_restarts_after_error(TORCHRUN, PeerExited(ExitCode.USER))


@pytest.mark.parametrize(
    ("error", "local_rank", "kept"),
    [(None, 0, False), (None, 1, True), (RuntimeError(), 0, True), (MISTAKE, 0, False)],
    ids=["done", "another local rank", "failed", "mistake"],
)
def test_first_rank_of_a_node_removes_the_folder(
    error: Exception | None, local_rank: int, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_launchers", lambda launch: [ProcessHandle(7, "8")])
    plan = tiny_plan(checkpoint__memory_every=2, checkpoint__memory_folder=str(tmp_path))
    launch = replace(TORCHRUN, local_rank=local_rank)
    folder = None
    try:
        with agent_snapshot_folder(plan, launch, lambda: (ExitCode.DONE, None)) as folder:
            assert folder is not None
            (folder / "step-00000002").mkdir()
            if error is not None:
                raise error
    except (RuntimeError, ConfigError):
        pass
    assert folder is not None
    assert folder.exists() is kept


@pytest.mark.parametrize("error", [None, RuntimeError()], ids=["done", "failed"])
@pytest.mark.parametrize(
    ("alive", "local_rank", "kept"),
    [(True, 0, True), (False, 0, False), (False, 1, True)],
    ids=["supervisor lives", "supervisor died", "another local rank"],
)
def test_ranks_remove_the_folder_of_a_supervisor_that_died(
    alive: bool,
    local_rank: int,
    kept: bool,
    error: Exception | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor = subprocess.Popen(["sleep", "60"])
    handle = ProcessHandle.read(supervisor.pid)
    assert handle is not None
    monkeypatch.setattr(module, "find_launchers", lambda launch: [handle])
    (tmp_path / "step-00000002").mkdir()
    launch = Launch(launcher=Launcher.SUPERVISOR, rank=local_rank, local_rank=local_rank, ranks=2)
    try:
        with suppress(RuntimeError), supervised_snapshot_folder(launch, str(tmp_path)):
            if not alive:
                supervisor.kill()
                supervisor.wait()
            if error is not None:
                raise error
    finally:
        supervisor.kill()
        supervisor.wait()
    assert tmp_path.exists() is kept
