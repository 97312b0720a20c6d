"""What the ranks of a node do with its folder for snapshots in memory.

Under torchrun they make the folder, find it again in later attempts, and remove it at the end. The supervisor
makes and removes its folder itself (``cluster/supervisor.py``); its ranks remove it only if it has died.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.cluster.stop.elastic_stop import AfterStop, StopDecision
from toolkit.cluster.stop.stop_request import find_launchers
from toolkit.cluster.world.environment import Launch, Launcher
from toolkit.cluster.world.rendezvous import PeerExited
from toolkit.errors import ExitCode, UserError
from toolkit.plan.types import RunPlan
from toolkit.rundir.snapshot_folder import (
    open_agent_folder,
    remove_abandoned_folders,
    remove_snapshot_folder,
    snapshot_root,
)

log = logging.getLogger(__name__)


@contextmanager
def agent_snapshot_folder(
    plan: RunPlan, launch: Launch, ends: Callable[[], tuple[ExitCode, StopDecision | None]]
) -> Iterator[Path | None]:
    """Make or find the folder for snapshots, and remove it at the end unless the agent starts ranks again.

    The yielded path is None if no snapshots are taken or the folder cannot be made; the second is logged.

    Args:
        ends: returns the exit code of this rank, and what an elastic run has decided, if no error was raised.
    """
    folder = _open(plan, launch)
    try:
        yield folder
    except BaseException as error:
        if not agent_restarts_after_error(launch, error):
            _remove(folder, launch)
        raise
    if not agent_restarts_after_stop(launch, *ends()):
        _remove(folder, launch)


@contextmanager
def supervised_snapshot_folder(launch: Launch, folder: str | None) -> Iterator[None]:
    """Remove the supervisor's folder at the end if the supervisor, which would do that, has died.

    Its ranks then save on disk and end, or complete the run.

    Args:
        folder: the supervisor's; None: this process has no supervisor, or no snapshots are taken.
    """
    supervisor = find_launchers(launch)
    try:
        yield
    finally:
        if not any(process.is_alive() for process in supervisor):
            _remove(None if folder is None else Path(folder), launch)


def launcher_restarts_ranks(launch: Launch) -> bool:
    """Return whether the launcher restarts ranks that fail: torchrun with restarts or a range of nodes."""
    allowed = launch.restart + launch.restarts_left > 0 or launch.node_range is not None
    return launch.launcher is Launcher.TORCHELASTIC and allowed


def agent_restarts_after_stop(launch: Launch, code: ExitCode, decision: StopDecision | None) -> bool:
    """Return whether the agent of this node starts ranks again after they have ended with ``code``."""
    if code is not ExitCode.STOPPED or launch.node_range is None:
        return False
    return decision is None or decision.on_node(launch.node) is AfterStop.RESTART


def agent_restarts_after_error(launch: Launch, error: BaseException) -> bool:
    """Return whether the agent of this node starts ranks again after an error. Mistakes are not repeated."""
    repeated = error.code == ExitCode.FAILURE if isinstance(error, PeerExited) else True
    return repeated and not isinstance(error, UserError) and launch.restarts_left > 0


def _open(plan: RunPlan, launch: Launch) -> Path | None:
    if launch.launcher is not Launcher.TORCHELASTIC:
        return None
    root = snapshot_root(plan.config.checkpoint.memory_folder)
    if launch.local_rank == 0:
        remove_abandoned_folders(root)
    if not plan.config.checkpoint.memory_every or not launcher_restarts_ranks(launch):
        return None
    agent = find_launchers(launch)
    try:
        return open_agent_folder(Path(plan.run_dir), agent[0].pid, agent[0].started, root) if agent else None
    except OSError as error:
        log.warning("no snapshots in memory (checkpoint.memory_every): %s", error)
        return None


def _remove(folder: Path | None, launch: Launch) -> None:
    if folder is not None and launch.local_rank == 0:
        remove_snapshot_folder(folder)
