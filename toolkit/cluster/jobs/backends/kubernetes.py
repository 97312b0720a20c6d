"""Run jobs on Kubernetes: a JobSet with one pod per node and a ConfigMap with the frozen configuration.

JobSet (jobset.x-k8s.io/v1alpha2, 0.10 or newer) gives the pods stable names and restarts all of them when one
fails. Kueue, if ``cluster.kubernetes.queue`` names one of its queues, starts all pods together or none. A pod
runs ``toolkit.cluster.jobs.pod``, whose exit code is derived from status.json; the rules here act on it:

    0        done
    2        fails the JobSet: a restart would not help, as after a mistake in the configuration
    75       restarts it without counting: it was stopped, or failed with a newer checkpoint
    others   restart it, at most ``cluster.restarts`` times; a lost or evicted pod is not counted

With ``cluster.min_nodes`` Kubernetes replaces only the pod whose node is lost, while the others continue. The
whole JobSet restarts only if the run itself ends, or the rendezvous, which runs in a separate small pod.
Requires Kubernetes 1.31 or newer, for ``successPolicy``.

``kubectl`` applies the objects in its current context. Sources of the fields: the CRD of
kubernetes-sigs/jobset, kubernetes.io (Job, "Pod failure policy"), kueue.sigs.k8s.io ("Run A JobSet").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toolkit.cluster.jobs.backends.cluster_tool import ClusterTool
from toolkit.cluster.jobs.backends.kubernetes_manifests import object_name, render_manifests
from toolkit.cluster.jobs.backends.kubernetes_rules import find_problems
from toolkit.cluster.jobs.job import CONFIG_FILE, JobId, JobState, TrainingJob
from toolkit.config.cluster import ClusterBackend
from toolkit.errors import ConfigError

MANIFEST_FILE = "job.yaml"
KUBECTL = ClusterTool(
    rule="cluster=kubernetes uses kubectl",
    install="install it, or apply the files that dry_run=true shows from a machine that has it",
    ping="kubectl cluster-info",
    accepts="the cluster must accept the command and have JobSet 0.10 or newer",
    correct="correct the object, or the context (kubectl config current-context)",
)


def render(job: TrainingJob) -> dict[str, str]:
    problems = list(find_problems(job))
    if problems:
        raise ConfigError(*problems)
    return {CONFIG_FILE: job.yaml, MANIFEST_FILE: render_manifests(job)}


def argv(job: TrainingJob) -> list[str]:
    """Return the kubectl command. Server-side apply rejects fields that the cluster's JobSet does not
    know.
    """
    return [
        "kubectl",
        "apply",
        "--server-side",
        "--field-manager=deepspeed-megatron-toolkit",
        f"--filename={job.folder / MANIFEST_FILE}",
    ]


def submit(job: TrainingJob) -> JobId:
    KUBECTL.run(argv(job))
    return JobId(ClusterBackend.kubernetes, f"{job.config.cluster.kubernetes.namespace}/{object_name(job)}")


def state(id: JobId) -> JobState:
    namespace, _, name = id.id.partition("/")
    text = KUBECTL.run(
        ["kubectl", f"--namespace={namespace}", "get", "jobset", name, "--ignore-not-found", "--output=json"]
    )
    return read_state(json.loads(text) if text.strip() else None)


def read_state(job_set: Mapping[str, Any] | None) -> JobState:
    """Return the state of a JobSet.

    Args:
        job_set: the JobSet; None: it does not exist.
    """
    if job_set is None:
        return JobState.ENDED
    status = job_set.get("status", {})
    conditions = {
        condition["type"] for condition in status.get("conditions", ()) if condition.get("status") == "True"
    }
    if conditions & {"Completed", "Failed"}:
        return JobState.ENDED
    if job_set["spec"].get("suspend") or "Suspended" in conditions:
        return JobState.QUEUED
    ready = sum(jobs.get("ready", 0) for jobs in status.get("replicatedJobsStatus", ()))
    return JobState.RUNNING if ready else JobState.QUEUED


def cancel(id: JobId) -> None:
    """Delete the job; its pods receive SIGTERM and the grace period to save."""
    namespace, _, name = id.id.partition("/")
    KUBECTL.run(
        [
            "kubectl",
            f"--namespace={namespace}",
            "delete",
            f"jobset/{name}",
            f"configmap/{name}",
            "--ignore-not-found",
            "--wait=false",
        ]
    )
