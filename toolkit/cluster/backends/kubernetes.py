"""Jobs of Kubernetes: a JobSet with one pod a node, and a ConfigMap with the frozen configuration.

JobSet (jobset.x-k8s.io/v1alpha2, 0.10 or newer) gives the pods stable names, and starts all of them again when one fails; Kueue, where
``cluster.kubernetes.queue`` names one of its queues, starts all of them together or none. What a pod runs is ``toolkit.cluster.pod``,
which ends with a code taken from status.json; the rules here only carry that code out:

    0        done
    2        fails the JobSet at once: another start would not help, as with a mistake in the configuration
    75       starts it again, which is not counted: it was stopped, or failed with a newer checkpoint than it began with
    others   start it again, at most ``cluster.restarts`` times; a pod that its node lost, or that was evicted, is not counted

``kubectl`` hands the objects over, in its current context. Sources of the fields: the CRD of kubernetes-sigs/jobset, kubernetes.io
(Job, "Pod failure policy"), kueue.sigs.k8s.io ("Run A JobSet").
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from toolkit.cluster.backends.kubernetes_checks import CONFIG_FOLDER, WORKING_DIR, problems_of
from toolkit.cluster.job import CONFIG_FILE, Job, JobId, JobState
from toolkit.config.cluster import ClusterBackend, KubernetesConfig
from toolkit.errors import ConfigError, ExitCode, InputError, Problem

MANIFEST_FILE = "job.yaml"
COMMAND_SECONDS = 120.0

USER = 1000  # of the image, as Dockerfile makes it
CONTAINER = "trainer"
NODES = "node"  # the replicated job: pods are called NAME-node-0-INDEX
PORT = 29400  # of the rendezvous; a pod has all ports to itself
END_SECONDS = (
    30  # besides cluster.grace_seconds: launchers end after their ranks, and the pod reads status.json
)
GIB = "Gi"

# 63 characters are a pod's host name at most (RFC 1123); JobSet adds "-node-0-", the pod's index and five characters of its own.
MOST_NAME = 40


def render(job: Job) -> dict[str, str]:
    problems = list(problems_of(job))
    if problems:
        raise ConfigError(*problems)
    return {CONFIG_FILE: job.yaml, MANIFEST_FILE: manifests(job)}


def argv(job: Job) -> list[str]:
    """Server-side, so that the cluster itself refuses a field that its JobSet does not know."""
    return [
        "kubectl",
        "apply",
        "--server-side",
        "--field-manager=deepspeed-megatron-toolkit",
        f"--filename={job.folder / MANIFEST_FILE}",
    ]


def manifests(job: Job) -> str:
    """Both objects, as YAML. Golden files: tests/golden/kubernetes."""
    head = f"# {job.name}, job {job.number}: one distributed training, one pod a node ({job.world.nodes}). Made by launch/submit.py.\n"
    documents = (config_map(job), job_set(job))
    return head + yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, width=140, allow_unicode=True, explicit_start=True
    )


def object_name(job: Job) -> str:
    """Of both objects: a DNS label, its own for each job of each run directory."""
    readable = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    own = hashlib.sha256(f"{job.run_dir}\0{job.number}".encode()).hexdigest()[:8]
    readable = (readable if readable[:1].isalpha() else f"run-{readable}")[: MOST_NAME - len(own) - 1].rstrip(
        "-"
    )
    return f"{readable}-{own}"


def metadata(job: Job) -> dict[str, Any]:
    return {
        "name": object_name(job),
        "namespace": job.config.cluster.kubernetes.namespace,
        "labels": {"app.kubernetes.io/managed-by": "deepspeed-megatron-toolkit"},
        "annotations": {
            **job.config.cluster.kubernetes.annotations,
            "toolkit/run": job.name,
            "toolkit/run-dir": job.run_dir,
            "toolkit/job": str(job.number),
        },
    }


def config_map(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job),
        "immutable": True,
        "data": {CONFIG_FILE: job.yaml},
    }


def job_set(job: Job) -> dict[str, Any]:
    cluster, kubernetes = job.config.cluster, job.config.cluster.kubernetes
    meta = metadata(job)
    if kubernetes.queue is not None:  # Kueue itself holds the JobSet back until there is room for all of it
        meta["labels"]["kueue.x-k8s.io/queue-name"] = kubernetes.queue
        if kubernetes.priority_class is not None:
            meta["labels"]["kueue.x-k8s.io/priority-class"] = kubernetes.priority_class
    nodes = job.world.nodes
    pod_annotations = dict(meta["annotations"])
    if kubernetes.topology is not None and kubernetes.queue is not None:
        pod_annotations["kueue.x-k8s.io/podset-required-topology"] = kubernetes.topology
    expiry = {"ttlSecondsAfterFinished": kubernetes.ttl_seconds} if kubernetes.ttl_seconds is not None else {}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": meta,
        "spec": {
            **expiry,
            "network": {"enableDNSHostnames": True, "subdomain": meta["name"]},
            "failurePolicy": {
                "maxRestarts": cluster.restarts,
                # Pods that are still saving hold the run's directory.
                "restartStrategy": "BlockingRecreate",
                "rules": _job_set_rules(),
            },
            "replicatedJobs": [
                {
                    "name": NODES,
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "completionMode": "Indexed",
                            "completions": nodes,
                            "parallelism": nodes,
                            "backoffLimit": 0,  # a pod is never started again alone: its peers have lost it
                            "podReplacementPolicy": "Failed",
                            "podFailurePolicy": {"rules": _pod_rules()},
                            "template": {"metadata": {"annotations": pod_annotations}, "spec": pod(job)},
                        }
                    },
                }
            ],
        },
    }


def pod(job: Job) -> dict[str, Any]:
    cluster, kubernetes = job.config.cluster, job.config.cluster.kubernetes
    claims = sorted(set(kubernetes.volumes.values()))
    extra = list(kubernetes.extra_volumes.items())
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cluster.grace_seconds + END_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # variables named after the namespace's Services, which could be torch's own
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",  # else a large volume is walked at every start
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": CONTAINER,
                "image": kubernetes.image,
                "command": command(job),
                "workingDir": WORKING_DIR,
                "env": _environment(kubernetes),
                "resources": _resources(job),
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [
                    {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                    *(
                        {"name": f"claim-{claims.index(claim)}", "mountPath": place}
                        for place, claim in kubernetes.volumes.items()
                    ),
                    *(
                        {"name": f"extra-{index}", "mountPath": place}
                        for index, (place, _) in enumerate(extra)
                    ),
                ],
            }
        ],
        "volumes": [
            {"name": "config", "configMap": {"name": object_name(job)}},
            {
                "name": "shared-memory",
                "emptyDir": {"medium": "Memory", "sizeLimit": f"{kubernetes.shared_memory_gib}{GIB}"},
            },
            *(
                {"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim}}
                for index, claim in enumerate(claims)
            ),
            *({"name": f"extra-{index}", **source} for index, (_, source) in enumerate(extra)),
        ],
    }
    if kubernetes.service_account is not None:
        spec["serviceAccountName"] = kubernetes.service_account
    if kubernetes.priority_class is not None and kubernetes.queue is None:
        spec["priorityClassName"] = kubernetes.priority_class
    if kubernetes.node_selector:
        spec["nodeSelector"] = dict(kubernetes.node_selector)
    if kubernetes.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in kubernetes.image_pull_secrets]
    # Nodes with GPUs are commonly kept from pods that do not ask for one.
    gpus = (
        [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        if cluster.gpus_per_node
        else []
    )
    if tolerations := [*gpus, *kubernetes.tolerations]:
        spec["tolerations"] = tolerations
    if affinity := _affinity(job):
        spec["affinity"] = affinity
    return spec


def _affinity(job: Job) -> dict[str, Any]:
    """What the user wrote; and, if nothing queues the job, that its pods share ``topology``."""
    kubernetes = job.config.cluster.kubernetes
    if kubernetes.topology is None or kubernetes.queue is not None:
        return kubernetes.affinity
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": object_name(job)}}
    together = {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": own, "topologyKey": kubernetes.topology}
        ]
    }
    return {**kubernetes.affinity, "podAffinity": together}


def command(job: Job) -> list[str]:
    """Of the container: an init, and the pod's own parent. No text of the user is in it: Kubernetes would expand $(NAME)."""
    words = [
        "tini",
        "--",
        "python",
        "-u",
        "-m",
        "toolkit.cluster.pod",
        f"--config={CONFIG_FOLDER}/{CONFIG_FILE}",
    ]
    if job.world.nodes > 1:
        name = object_name(job)
        words += [f"--meet={name}-{NODES}-0-0.{name}:{PORT}", f"--ranks={job.world.ranks_per_node}"]
    return words


def _pod_rules() -> list[dict[str, Any]]:
    """The first that fits ends the Job, with a message that _job_set_rules looks at; any other failure ends it by backoffLimit."""

    def code(value: ExitCode) -> dict[str, Any]:
        return {
            "action": "FailJob",
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [int(value)]},
        }

    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [code(ExitCode.USER), code(ExitCode.STOPPED), disrupted]


def _job_set_rules() -> list[dict[str, Any]]:
    """By the message that the Job's controller writes (kubernetes/pkg/controller/job/pod_failure_policy.go); what no rule fits is
    started again and counted."""

    def rule(name: str, action: str, *patterns: str) -> dict[str, Any]:
        return {
            "name": name,
            "action": action,
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": list(patterns),
        }

    return [
        rule("givenUp", "FailJobSet", f"failed with exit code {ExitCode.USER} "),
        rule(
            "goesOn",
            "RestartJobSetAndIgnoreMaxRestarts",
            f"failed with exit code {ExitCode.STOPPED} ",
            "has condition DisruptionTarget ",
        ),
    ]


def _environment(kubernetes: KubernetesConfig) -> list[dict[str, Any]]:
    """How often the set was restarted, as JobSet writes it on its pods; what the user set; and the secrets, by reference."""
    count = {"fieldRef": {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"}}
    found: list[dict[str, Any]] = [{"name": "JOBSET_RESTART", "valueFrom": count}]
    # Kubernetes would expand $(NAME); $$ stands for one dollar.
    found += [
        {"name": variable, "value": value.replace("$(", "$$(")}
        for variable, value in kubernetes.environment.items()
    ]
    for variable, reference in kubernetes.secrets.items():
        secret, _, key = reference.partition("/")
        found.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return found


def _resources(job: Job) -> dict[str, Any]:
    """Devices and memory are requested and bounded; cores are requested alone: a bound would throttle a pod that finds idle ones."""
    cluster, kubernetes = job.config.cluster, job.config.cluster.kubernetes
    exact: dict[str, Any] = {}
    if cluster.gpus_per_node:
        exact["nvidia.com/gpu"] = cluster.gpus_per_node
    exact |= kubernetes.rdma
    if kubernetes.memory_gib is not None:
        exact["memory"] = f"{kubernetes.memory_gib}{GIB}"
    requests = exact | ({"cpu": kubernetes.cpus} if kubernetes.cpus is not None else {})
    return {name: value for name, value in (("requests", requests), ("limits", exact)) if value}


# Texts to PyYAML, and numbers or truth values to the parser of kubectl (gopkg.in/yaml.v2, resolve.go): 1e3, 0o17, y.
_READ_OTHERWISE = re.compile(r"[yYnN]|[-+]?[.0-9].*")


class _Dumper(yaml.SafeDumper):
    """Without anchors, and a text of several lines as it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if _READ_OTHERWISE.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


# ---- kubectl


def submit(job: Job) -> JobId:
    _kubectl(argv(job))
    return JobId(ClusterBackend.kubernetes, f"{job.config.cluster.kubernetes.namespace}/{object_name(job)}")


def state(id: JobId) -> JobState:
    namespace, _, name = id.id.partition("/")
    text = _kubectl(
        ["kubectl", f"--namespace={namespace}", "get", "jobset", name, "--ignore-not-found", "--output=json"]
    )
    return read_state(json.loads(text) if text.strip() else None)


def read_state(found: Mapping[str, Any] | None) -> JobState:
    """
    Args:
        found: the JobSet; None: there is none of that name.
    """
    if found is None:
        return JobState.ENDED
    status = found.get("status", {})
    held = {
        condition["type"] for condition in status.get("conditions", ()) if condition.get("status") == "True"
    }
    if held & {"Completed", "Failed"}:
        return JobState.ENDED
    if found["spec"].get("suspend") or "Suspended" in held:
        return JobState.QUEUED
    ready = sum(jobs.get("ready", 0) for jobs in status.get("replicatedJobsStatus", ()))
    return JobState.RUNNING if ready else JobState.QUEUED


def cancel(id: JobId) -> None:
    """Its pods get SIGTERM, and the grace period to save in."""
    namespace, _, name = id.id.partition("/")
    _kubectl(
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


def _kubectl(words: Sequence[str]) -> str:
    seen = shlex.join(words)
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise InputError(
            Problem(
                "cluster",
                "kubectl is not here",
                "cluster=kubernetes talks to the cluster by kubectl",
                "install it, or apply the files that dry_run=true shows from where it is",
            )
        ) from None
    except subprocess.TimeoutExpired:
        raise InputError(
            Problem(
                "cluster",
                f"{seen} took more than {COMMAND_SECONDS:g} s",
                "the cluster answers",
                "look at it with: kubectl cluster-info",
            )
        ) from None
    if done.returncode:
        raise InputError(
            Problem(
                "cluster",
                f"{seen}: {done.stderr.strip() or f'exit code {done.returncode}'}",
                "the cluster accepts the command, and has JobSet 0.10 or newer",
                "change what it names, or the context (kubectl config current-context)",
            )
        )
    return done.stdout
