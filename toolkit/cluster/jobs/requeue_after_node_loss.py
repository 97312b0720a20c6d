"""Requeue an elastic job of Slurm that has lost the node of its batch script.

    python -m toolkit.cluster.jobs.requeue_after_node_loss HOST:PORT   on each node, after its agent has ended

With ``--no-kill`` Slurm removes the node from the job and keeps the job until its time limit, but the script
that would requeue it was lost with the node (slurmctld, ``kill_running_job_by_node_name``). The agents of the
other nodes end when the rendezvous, which the script served, no longer answers. Then each node runs this
module.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

from toolkit.cluster.jobs.rendezvous_server import is_open
from toolkit.cluster.jobs.requeue import scontrol

# Slurm removes a node that does not respond after SlurmdTimeout, which is 300 s by default.
WAIT_SECONDS = 1800.0
POLL_SECONDS = 10.0


class BatchNodeState(StrEnum):
    """State of the node that runs a job's batch script, as far as Slurm knows it."""

    KEPT = "kept"  # or not yet known to be lost
    LOST = "lost"
    ENDED = "ended"  # the job itself does not run any more


def parse_batch_node_state(description: str, hostnames: Callable[[str], Sequence[str]]) -> BatchNodeState:
    """Parse whether a job still has the node of its batch script.

    Args:
        description: the output of ``scontrol --oneliner show job``.
        hostnames: expands a list of nodes, such as node[1-3]; returns an empty list if it cannot.
    """
    fields = dict(word.partition("=")[::2] for word in description.split())
    if fields.get("JobState") != "RUNNING":
        return BatchNodeState.ENDED
    names = hostnames(fields["NodeList"])
    lost = names and fields["BatchHost"] not in names
    return BatchNodeState.LOST if lost else BatchNodeState.KEPT


def wait_until_removed(job: str) -> bool:
    """Wait until Slurm has removed the node of the job's batch script. Return False if the job ends instead,
    or if Slurm still has the node after ``WAIT_SECONDS``.

    A controller that does not answer is asked again: the lost node may be the one that it ran on.
    """
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        description = _answer("--oneliner", "show", "job", job)
        if description is not None:
            match parse_batch_node_state(description, _hostnames):
                case BatchNodeState.LOST:
                    return True
                case BatchNodeState.ENDED:
                    return False
        time.sleep(POLL_SECONDS)
    return False


def _hostnames(nodes: str) -> list[str]:
    return (_answer("show", "hostnames", nodes) or "").split()


def _answer(*words: str) -> str | None:
    """Return the output of ``scontrol``; None if it fails or does not answer in time."""
    try:
        result = scontrol(*words)
    except subprocess.TimeoutExpired:
        return None
    return result.stdout if result.returncode == 0 else None


def main(arguments: Sequence[str]) -> int:
    (endpoint,) = arguments
    job = os.environ["SLURM_JOB_ID"]
    if is_open(endpoint, job) is not None or not wait_until_removed(job):
        return 0
    result = scontrol("requeue", job)
    if result.returncode == 0:
        print(f"job {job} lost the node of its script and was requeued", flush=True)
    elif not wait_until_removed(job):
        return 0  # another node requeued it
    else:  # cluster.slurm.requeue=false: free its nodes
        print(f"job {job} lost the node of its script and is cancelled: {result.stderr.strip()}", flush=True)
        subprocess.run(["scancel", job], check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
