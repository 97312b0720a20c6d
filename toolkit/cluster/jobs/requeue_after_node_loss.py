"""Requeue an elastic job of Slurm that has lost the node of its batch script.

    python -m toolkit.cluster.jobs.requeue_after_node_loss HOST:PORT   on each node, after its agent has ended

With ``--no-kill`` Slurm removes the node from the job and keeps the job until its time limit, but the script
that would requeue it was lost with the node (slurmctld, ``kill_running_job_by_node_name``). The agents of the
other nodes end when the rendezvous, which the script served, no longer answers. Then each node runs this
module.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from toolkit.cluster.jobs.rendezvous_server import is_open
from toolkit.cluster.jobs.slurm_controller import call_controller

# Slurm removes a node that does not respond after SlurmdTimeout, which is 300 s by default.
WAIT_SECONDS = 1800.0
POLL_SECONDS = 10.0


class BatchNodeState(StrEnum):
    """State of the node that runs a job's batch script, as far as Slurm knows it."""

    KEPT = "kept"  # or not yet known to be lost
    LOST = "lost"
    ENDED = "ended"  # the job itself does not run any more


def parse_fields(description: str) -> dict[str, str]:
    """Parse the output of ``scontrol --oneliner show job``."""
    return dict(word.partition("=")[::2] for word in description.split())


def parse_batch_node_state(
    fields: Mapping[str, str], hostnames: Callable[[str], Sequence[str]]
) -> BatchNodeState:
    """Parse whether a job still has the node of its batch script.

    Args:
        fields: of the job.
        hostnames: expands a list of nodes, such as node[1-3]; returns an empty list if it cannot.
    """
    if fields.get("JobState") != "RUNNING":
        return BatchNodeState.ENDED
    names = hostnames(fields["NodeList"])
    lost = names and fields["BatchHost"] not in names
    return BatchNodeState.LOST if lost else BatchNodeState.KEPT


def wait_until_removed(job: str) -> dict[str, str] | None:
    """Wait until Slurm has removed the node of the job's batch script, and return the fields of the job.
    Return None if the job ends instead, or if Slurm still has the node after ``WAIT_SECONDS``.

    A controller that does not answer is asked again: the lost node may be the one that it ran on.
    """
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        result = call_controller("scontrol", "--oneliner", "show", "job", job)
        if result.returncode == 0:
            fields = parse_fields(result.stdout)
            match parse_batch_node_state(fields, _hostnames):
                case BatchNodeState.LOST:
                    return fields
                case BatchNodeState.ENDED:
                    return None
        time.sleep(POLL_SECONDS)
    return None


def _hostnames(nodes: str) -> list[str]:
    result = call_controller("scontrol", "show", "hostnames", nodes)
    return result.stdout.split() if result.returncode == 0 else []


def main(arguments: Sequence[str]) -> int:
    (endpoint,) = arguments
    job = os.environ["SLURM_JOB_ID"]
    if is_open(endpoint, job) is not None:
        return 0
    # Until a request succeeds, the job keeps its nodes idle. If another node's request does, the job ends.
    while (fields := wait_until_removed(job)) is not None:
        if fields.get("Requeue") == "0":  # cluster.slurm.requeue=false: free its nodes
            result, what = call_controller("scancel", job), "cancelled"
        else:
            result, what = call_controller("scontrol", "requeue", job), "requeued"
        if result.returncode == 0:
            print(f"job {job} lost the node of its script and was {what}", flush=True)
            break
        error = result.stderr.strip()
        print(f"job {job} lost the node of its script and is not yet {what}: {error}", flush=True)
        time.sleep(POLL_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
