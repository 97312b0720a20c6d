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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from toolkit.cluster.job import CONFIG_FILE, Job, JobId, JobState
from toolkit.config.cluster import KubernetesConfig, Where
from toolkit.errors import ConfigError, ExitCode, InputError, Problem

MANIFEST_FILE = "job.yaml"
COMMAND_SECONDS = 120.0

# Of the image, as Dockerfile makes it.
WORKING_DIR = "/workspace"
USER = 1000

CONFIG_FOLDER = "/etc/toolkit"
OWN_FOLDERS = ("/dev/shm", CONFIG_FOLDER, "/opt/toolkit")  # that no volume may hide
CONTAINER = "trainer"
NODES = "node"  # the replicated job: pods are called NAME-node-0-INDEX
PORT = 29400  # of the rendezvous; a pod has all ports to itself
END_SECONDS = 30  # besides cluster.grace_seconds: launchers end after their ranks, and the pod reads status.json
GIB = "Gi"

# 63 characters are a pod's host name at most (RFC 1123); JobSet adds "-node-0-", the pod's index and five characters of its own.
MOST_NAME = 40
MOST_CONFIG_BYTES = 1_000_000  # a ConfigMap holds 1 MiB (kubernetes.io, ConfigMaps)

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"  # RFC 1123, what most names of Kubernetes are
_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"  # of a label
_RESOURCE = rf"{_SUBDOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"  # of a device, or key of a label
_SECRET = rf"(?P<secret>{_SUBDOMAIN})/(?P<key>[-._A-Za-z0-9]+)"


def render(job: Job) -> dict[str, str]:
    problems = list(_problems(job))
    if problems:
        raise ConfigError(*problems)
    return {CONFIG_FILE: job.yaml, MANIFEST_FILE: manifests(job)}


def argv(job: Job) -> list[str]:
    """Server-side, so that the cluster itself refuses a field that its JobSet does not know."""
    return ["kubectl", "apply", "--server-side", "--field-manager=deepspeed-megatron-toolkit", f"--filename={job.folder / MANIFEST_FILE}"]


def manifests(job: Job) -> str:
    """Both objects, as YAML. Golden files: tests/golden/kubernetes."""
    head = f"# {job.name}, job {job.number}: one distributed training, one pod a node ({job.world.nodes}). Made by launch/submit.py.\n"
    documents = (config_map(job), job_set(job))
    return head + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=140, allow_unicode=True, explicit_start=True)


def object_name(job: Job) -> str:
    """Of both objects: a DNS label, its own for each job of each run directory."""
    readable = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    own = hashlib.sha256(f"{job.run_dir}\0{job.number}".encode()).hexdigest()[:8]
    readable = (readable if readable[:1].isalpha() else f"run-{readable}")[: MOST_NAME - len(own) - 1].rstrip("-")
    return f"{readable}-{own}"


def metadata(job: Job) -> dict[str, Any]:
    return {
        "name": object_name(job),
        "namespace": job.config.cluster.kubernetes.namespace,
        "labels": {"app.kubernetes.io/managed-by": "deepspeed-megatron-toolkit"},
        "annotations": {"toolkit/run": job.name, "toolkit/run-dir": job.run_dir, "toolkit/job": str(job.number)},
    }


def config_map(job: Job) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job), "immutable": True, "data": {CONFIG_FILE: job.yaml}}


def job_set(job: Job) -> dict[str, Any]:
    cluster, kubernetes = job.config.cluster, job.config.cluster.kubernetes
    meta = metadata(job)
    if kubernetes.queue is not None:  # Kueue itself holds the JobSet back until there is room for all of it
        meta["labels"]["kueue.x-k8s.io/queue-name"] = kubernetes.queue
        if kubernetes.priority_class is not None:
            meta["labels"]["kueue.x-k8s.io/priority-class"] = kubernetes.priority_class
    nodes = job.world.nodes
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": meta,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": meta["name"]},
            "failurePolicy": {
                "maxRestarts": cluster.restarts,
                # Pods that are still saving hold the run's directory.
                "restartStrategy": "BlockingRecreate",
                "rules": _job_set_rules(),
            },
            "replicatedJobs": [{
                "name": NODES,
                "replicas": 1,
                "template": {"spec": {
                    "completionMode": "Indexed", "completions": nodes, "parallelism": nodes,
                    "backoffLimit": 0,  # a pod is never started again alone: its peers have lost it
                    "podReplacementPolicy": "Failed",
                    "podFailurePolicy": {"rules": _pod_rules()},
                    "template": {"metadata": {"annotations": meta["annotations"]}, "spec": pod(job)},
                }},
            }],
        },
    }


def pod(job: Job) -> dict[str, Any]:
    cluster, kubernetes = job.config.cluster, job.config.cluster.kubernetes
    claims = sorted(set(kubernetes.volumes.values()))
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cluster.grace_seconds + END_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # variables named after the namespace's Services, which could be torch's own
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER,
            "fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch",  # else a large volume is walked at every start
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [{
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
                *({"name": f"claim-{claims.index(claim)}", "mountPath": place} for place, claim in kubernetes.volumes.items()),
            ],
        }],
        "volumes": [
            {"name": "config", "configMap": {"name": object_name(job)}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{kubernetes.shared_memory_gib}{GIB}"}},
            *({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim}} for index, claim in enumerate(claims)),
        ],
    }
    if kubernetes.service_account is not None:
        spec["serviceAccountName"] = kubernetes.service_account
    if kubernetes.priority_class is not None and kubernetes.queue is None:
        spec["priorityClassName"] = kubernetes.priority_class
    if kubernetes.node_selector:
        spec["nodeSelector"] = dict(kubernetes.node_selector)
    if cluster.gpus_per_node:  # nodes with GPUs are commonly kept from pods that do not ask for one
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return spec


def command(job: Job) -> list[str]:
    """Of the container: an init, and the pod's own parent. No text of the user is in it: Kubernetes would expand $(NAME)."""
    words = ["tini", "--", "python", "-u", "-m", "toolkit.cluster.pod", f"--config={CONFIG_FOLDER}/{CONFIG_FILE}"]
    if job.world.nodes > 1:
        name = object_name(job)
        words += [f"--meet={name}-{NODES}-0-0.{name}:{PORT}", f"--ranks={job.world.ranks_per_node}"]
    return words


def _pod_rules() -> list[dict[str, Any]]:
    """The first that fits ends the Job, with a message that _job_set_rules looks at; any other failure ends it by backoffLimit."""
    def code(value: ExitCode) -> dict[str, Any]:
        return {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [int(value)]}}

    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [code(ExitCode.USER), code(ExitCode.STOPPED), disrupted]


def _job_set_rules() -> list[dict[str, Any]]:
    """By the message that the Job's controller writes (kubernetes/pkg/controller/job/pod_failure_policy.go); what no rule fits is
    started again and counted."""
    def rule(name: str, action: str, *patterns: str) -> dict[str, Any]:
        return {"name": name, "action": action, "onJobFailureReasons": ["PodFailurePolicy"], "onJobFailureMessagePatterns": list(patterns)}

    return [
        rule("givenUp", "FailJobSet", f"failed with exit code {ExitCode.USER} "),
        rule("goesOn", "RestartJobSetAndIgnoreMaxRestarts", f"failed with exit code {ExitCode.STOPPED} ",
             "has condition DisruptionTarget "),
    ]


def _environment(kubernetes: KubernetesConfig) -> list[dict[str, Any]]:
    """How often the set was started again, as JobSet writes it on its pods; and the secrets, by reference."""
    count = {"fieldRef": {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"}}
    found: list[dict[str, Any]] = [{"name": "JOBSET_RESTART", "valueFrom": count}]
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


# ---- what Kubernetes would refuse, or would take and never start

def _problems(job: Job) -> Iterator[Problem]:
    kubernetes = job.config.cluster.kubernetes
    if kubernetes.image is None:
        yield Problem("cluster.kubernetes.image", "cluster=kubernetes without cluster.kubernetes.image", "pods are started from an image",
                      "build one (the first lines of Dockerfile), and write cluster.kubernetes.image=REGISTRY/NAME:TAG")
    elif re.fullmatch(r"[^\s/][^\s]*", kubernetes.image) is None:
        yield _wrong("image", kubernetes.image, "an image is one word: REGISTRY/NAME:TAG")
    for name in ("namespace", "queue", "priority_class", "service_account"):
        value = getattr(kubernetes, name)
        if value is not None and re.fullmatch(_LABEL if name == "namespace" else _SUBDOMAIN, value) is None:
            yield _wrong(name, value, "names of Kubernetes are small letters, digits and dashes")
    yield from _numbers(kubernetes)
    for variable, reference in kubernetes.secrets.items():
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable) is None or re.fullmatch(_SECRET, reference) is None:
            # Not shown: who misunderstands this key writes the secret itself.
            yield Problem("cluster.kubernetes.secrets", f"cluster.kubernetes.secrets: {variable}", "a secret is named, and never written: "
                          "VARIABLE: SECRET/KEY of a Secret in the namespace",
                          "make one with kubectl create secret generic, and write {WANDB_API_KEY: wandb/api-key}")
    for label, value in kubernetes.node_selector.items():
        if re.fullmatch(f"{_RESOURCE}|{_VALUE}", label) is None or re.fullmatch(_VALUE, value) is None:
            yield _wrong("node_selector", f"{{{label}: {value}}}", "labels are letters, digits, dashes, dots, underscores: at most 63")
    yield from _places(job)
    size = len(job.yaml.encode())
    if size > MOST_CONFIG_BYTES:
        yield Problem("cluster", f"a configuration of {size} bytes", f"a ConfigMap holds {MOST_CONFIG_BYTES} of them",
                      "leave out what is long in it, for example lists of files")


def _numbers(kubernetes: KubernetesConfig) -> Iterator[Problem]:
    for name, least in (("shared_memory_gib", 1), ("cpus", 1), ("memory_gib", 1)):
        value = getattr(kubernetes, name)
        if value is not None and value < least:
            yield _wrong(name, value, f"{name} is at least {least}")
    if kubernetes.memory_gib is not None and kubernetes.memory_gib <= kubernetes.shared_memory_gib:
        yield Problem("cluster.kubernetes.memory_gib",
                      f"cluster.kubernetes.memory_gib={kubernetes.memory_gib} and shared_memory_gib={kubernetes.shared_memory_gib}",
                      "shared memory is part of the pod's memory", "ask for more memory_gib, or less shared_memory_gib")
    for device, count in kubernetes.rdma.items():
        if re.fullmatch(_RESOURCE, device) is None or count < 1:
            yield _wrong("rdma", f"{{{device}: {count}}}", "devices are counted by their resource's name: {rdma/hca_shared_devices: 8}")


def _places(job: Job) -> Iterator[Problem]:
    """Volumes, and that the run's directory outlasts its pods."""
    kubernetes = job.config.cluster.kubernetes
    for place, claim in kubernetes.volumes.items():
        path = PurePosixPath(place)
        if not path.is_absolute() or path == PurePosixPath("/") or ".." in path.parts or ":" in place or not place.isprintable():
            yield _wrong("volumes", f"{{{place}: {claim}}}", "a volume is mounted at an absolute path: {/workspace: training}")
        elif any(path == own or path in own.parents or own in path.parents for own in map(PurePosixPath, OWN_FOLDERS)):
            yield _wrong("volumes", f"{{{place}: {claim}}}", f"{', '.join(OWN_FOLDERS)} are the pod's own")
        if re.fullmatch(_SUBDOMAIN, claim) is None:
            yield _wrong("volumes", f"{{{place}: {claim}}}", "a PersistentVolumeClaim is named by small letters, digits and dashes")
    run_dir = PurePosixPath(WORKING_DIR) / job.run_dir
    mounts = [PurePosixPath(place) for place in kubernetes.volumes]
    if ".." in run_dir.parts or not any(mount == run_dir or mount in run_dir.parents for mount in mounts):
        yield Problem("cluster.kubernetes.volumes", f"run.dir={job.run_dir}, which is {run_dir} in the pods, on none of the volumes "
                      f"({', '.join(kubernetes.volumes) or 'there are none'})",
                      "what a pod writes elsewhere is lost with it, the checkpoints too",
                      f'write "cluster.kubernetes.volumes={{{WORKING_DIR}: CLAIM}}", or a run.dir that lies on a volume')


def _wrong(name: str, value: object, rule: str) -> Problem:
    return Problem(f"cluster.kubernetes.{name}", f"cluster.kubernetes.{name}={value}", rule, f"correct cluster.kubernetes.{name}")


# ---- kubectl

def submit(job: Job) -> JobId:
    _kubectl(argv(job))
    return JobId(Where.kubernetes, f"{job.config.cluster.kubernetes.namespace}/{object_name(job)}")


def state(id: JobId) -> JobState:
    namespace, _, name = id.id.partition("/")
    text = _kubectl(["kubectl", f"--namespace={namespace}", "get", "jobset", name, "--ignore-not-found", "--output=json"])
    return read_state(json.loads(text) if text.strip() else None)


def read_state(found: Mapping[str, Any] | None) -> JobState:
    """
    Args:
        found: the JobSet; None: there is none of that name.
    """
    if found is None:
        return JobState.ENDED
    status = found.get("status", {})
    held = {condition["type"] for condition in status.get("conditions", ()) if condition.get("status") == "True"}
    if held & {"Completed", "Failed"}:
        return JobState.ENDED
    if found["spec"].get("suspend") or "Suspended" in held:
        return JobState.QUEUED
    ready = sum(jobs.get("ready", 0) for jobs in status.get("replicatedJobsStatus", ()))
    return JobState.RUNNING if ready else JobState.QUEUED


def cancel(id: JobId) -> None:
    """Its pods get SIGTERM, and the grace period to save in."""
    namespace, _, name = id.id.partition("/")
    _kubectl(["kubectl", f"--namespace={namespace}", "delete", f"jobset/{name}", f"configmap/{name}", "--ignore-not-found", "--wait=false"])


def _kubectl(words: Sequence[str]) -> str:
    seen = shlex.join(words)
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except FileNotFoundError:
        raise InputError(Problem("cluster", "kubectl is not here", "cluster=kubernetes talks to the cluster by kubectl",
                                 "install it, or apply the files that dry_run=true shows from where it is")) from None
    except subprocess.TimeoutExpired:
        raise InputError(Problem("cluster", f"{seen} took more than {COMMAND_SECONDS:g} s", "the cluster answers",
                                 "look at it with: kubectl cluster-info")) from None
    if done.returncode:
        raise InputError(Problem("cluster", f"{seen}: {done.stderr.strip() or f'exit code {done.returncode}'}",
                                 "the cluster accepts the command, and has JobSet 0.10 or newer",
                                 "change what it names, or the context (kubectl config current-context)"))
    return done.stdout
