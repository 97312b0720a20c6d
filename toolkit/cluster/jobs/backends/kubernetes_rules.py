"""Check ``cluster.kubernetes.*`` for values that Kubernetes would reject, or accept and never start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from toolkit.cluster.jobs.job import TrainingJob
from toolkit.config.cluster import KubernetesConfig
from toolkit.errors import Problem

WORKING_DIR = "/workspace"  # working directory of the image, see the Dockerfile
CONFIG_FOLDER = "/etc/toolkit"
RESERVED_FOLDERS = ("/dev/shm", CONFIG_FOLDER, "/opt/toolkit")  # no volume may hide these
RESERVED_VARIABLES = (
    "JOBSET_RESTART",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
AFFINITIES = ("nodeAffinity", "podAffinity", "podAntiAffinity")
TOLERATION_KEYS = ("key", "operator", "value", "effect", "tolerationSeconds")
PERSISTENT_SOURCES = {
    "nfs",
    "cephfs",
    "glusterfs",
    "csi",
}  # volume sources shared by all pods of a run and kept for its next attempt
MAX_CONFIG_BYTES = 1_000_000  # a ConfigMap has at most 1 MiB (kubernetes.io, ConfigMaps)

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"  # RFC 1123: most names in Kubernetes
_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"  # of a label
# name of a device, or key of a label
_RESOURCE = rf"{_SUBDOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
_SECRET = rf"(?P<secret>{_SUBDOMAIN})/(?P<key>[-._A-Za-z0-9]+)"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_SECRET_NAME = re.compile(r"(_KEY|_TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)$", re.IGNORECASE)


def find_problems(job: TrainingJob) -> Iterator[Problem]:
    kubernetes = job.config.cluster.kubernetes
    if kubernetes.image is None:
        yield Problem(
            "cluster.kubernetes.image",
            "cluster=kubernetes without cluster.kubernetes.image",
            "pods need an image",
            "build one (see the first lines of the Dockerfile), and set "
            "cluster.kubernetes.image=REGISTRY/NAME:TAG",
        )
    elif re.fullmatch(r"[^\s/][^\s]*", kubernetes.image) is None:
        yield _invalid("image", kubernetes.image, "an image is one word: REGISTRY/NAME:TAG")
    for name in ("namespace", "queue", "priority_class", "service_account"):
        value = getattr(kubernetes, name)
        if value is not None and re.fullmatch(_LABEL if name == "namespace" else _SUBDOMAIN, value) is None:
            yield _invalid(name, value, "names in Kubernetes consist of lowercase letters, digits and dashes")
    yield from _check_numbers(kubernetes)
    yield from _check_variables(kubernetes)
    yield from _check_scheduling(kubernetes)
    yield from _check_volumes(job)
    size = len(job.yaml.encode())
    if size > MAX_CONFIG_BYTES:
        yield Problem(
            "cluster",
            f"a configuration of {size} bytes",
            f"a ConfigMap has at most {MAX_CONFIG_BYTES} bytes",
            "remove long values from it, for example lists of files",
        )


def _check_numbers(kubernetes: KubernetesConfig) -> Iterator[Problem]:
    for name, least in (("shared_memory_gib", 1), ("cpus", 1), ("memory_gib", 1), ("ttl_seconds", 0)):
        value = getattr(kubernetes, name)
        if value is not None and value < least:
            yield _invalid(name, value, f"{name} must be at least {least}")
    if kubernetes.memory_gib is not None and kubernetes.memory_gib <= kubernetes.shared_memory_gib:
        yield Problem(
            "cluster.kubernetes.memory_gib",
            f"cluster.kubernetes.memory_gib={kubernetes.memory_gib} and "
            f"shared_memory_gib={kubernetes.shared_memory_gib}",
            "shared memory counts towards the pod's memory",
            "increase memory_gib, or reduce shared_memory_gib",
        )
    for device, count in kubernetes.rdma.items():
        if re.fullmatch(_RESOURCE, device) is None or count < 1:
            yield _invalid(
                "rdma",
                f"{{{device}: {count}}}",
                "devices are counted by resource name: {rdma/hca_shared_devices: 8}",
            )


def _check_variables(kubernetes: KubernetesConfig) -> Iterator[Problem]:
    for variable, reference in kubernetes.secrets.items():
        if re.fullmatch(_VARIABLE, variable) is None or re.fullmatch(_SECRET, reference) is None:
            # The value is not shown, since it may be the secret itself.
            yield Problem(
                "cluster.kubernetes.secrets",
                f"cluster.kubernetes.secrets: {variable}",
                "a secret is given by reference: VARIABLE: SECRET/KEY of a Secret in the namespace",
                "create one with kubectl create secret generic, and set {WANDB_API_KEY: wandb/api-key}",
            )
    for variable in kubernetes.environment:
        if re.fullmatch(_VARIABLE, variable) is None or variable in RESERVED_VARIABLES:
            yield _invalid(
                "environment",
                f"{{{variable}: ...}}",
                "variable names consist of letters, digits and underscores, and must not be set by "
                f"launchers ({', '.join(RESERVED_VARIABLES)})",
            )
        elif variable in kubernetes.secrets:
            yield _invalid(
                "environment",
                f"{{{variable}: ...}}",
                f"{variable} is also in cluster.kubernetes.secrets: a variable is set once",
            )
        elif _SECRET_NAME.search(variable) is not None:
            yield Problem(
                "cluster.kubernetes.environment",
                f"cluster.kubernetes.environment: {variable}",
                "a manifest must not contain secrets, and this name denotes one",
                f"set cluster.kubernetes.secrets={{{variable}: SECRET/KEY}}",
            )


def _check_scheduling(kubernetes: KubernetesConfig) -> Iterator[Problem]:
    """Check where pods may run. The cluster validates the rest (kubectl apply --server-side)."""
    for label, value in kubernetes.node_selector.items():
        if re.fullmatch(f"{_RESOURCE}|{_VALUE}", label) is None or re.fullmatch(_VALUE, value) is None:
            yield _invalid(
                "node_selector",
                f"{{{label}: {value}}}",
                "labels consist of at most 63 letters, digits, dashes, dots and underscores",
            )
    if kubernetes.topology is not None and re.fullmatch(f"{_RESOURCE}|{_VALUE}", kubernetes.topology) is None:
        yield _invalid(
            "topology", kubernetes.topology, "a topology is a node label: topology.kubernetes.io/zone"
        )
    if kubernetes.topology is not None and kubernetes.queue is None and "podAffinity" in kubernetes.affinity:
        yield Problem(
            "cluster.kubernetes.topology",
            f"cluster.kubernetes.topology={kubernetes.topology} and affinity.podAffinity",
            "without a queue, the topology becomes the pods' podAffinity",
            "remove cluster.kubernetes.topology, or podAffinity of cluster.kubernetes.affinity",
        )
    for key in kubernetes.affinity.keys() - set(AFFINITIES):
        yield _invalid("affinity", f"{{{key}: ...}}", f"an affinity must be one of {', '.join(AFFINITIES)}")
    for toleration in kubernetes.tolerations:
        if not isinstance(toleration, dict) or not toleration or toleration.keys() - set(TOLERATION_KEYS):
            yield _invalid(
                "tolerations", toleration, f"a toleration has only the keys {', '.join(TOLERATION_KEYS)}"
            )
    for name in kubernetes.image_pull_secrets:
        if re.fullmatch(_SUBDOMAIN, name) is None:
            yield _invalid(
                "image_pull_secrets",
                name,
                "names of Secrets consist of lowercase letters, digits, dots and dashes",
            )
    for name in kubernetes.annotations:
        if re.fullmatch(f"{_RESOURCE}|{_VALUE}", name) is None or name.startswith("toolkit/"):
            yield _invalid(
                "annotations",
                f"{{{name}: ...}}",
                "annotations are named like labels, and toolkit/ is reserved",
            )


def _check_volumes(job: TrainingJob) -> Iterator[Problem]:
    """Check the volumes, and that the run directory outlives its pods."""
    kubernetes = job.config.cluster.kubernetes
    for key, mount_path, source in [
        *(("volumes", mount_path, claim) for mount_path, claim in kubernetes.volumes.items()),
        *(("extra_volumes", mount_path, source) for mount_path, source in kubernetes.extra_volumes.items()),
    ]:
        path = PurePosixPath(mount_path)
        if (
            not path.is_absolute()
            or path == PurePosixPath("/")
            or ".." in path.parts
            or ":" in mount_path
            or not mount_path.isprintable()
        ):
            yield _invalid(
                key,
                f"{{{mount_path}: {source}}}",
                "a volume is mounted at an absolute path: {/workspace: training}",
            )
        elif any(
            path == own or path in own.parents or own in path.parents
            for own in map(PurePosixPath, RESERVED_FOLDERS)
        ):
            yield _invalid(key, f"{{{mount_path}: {source}}}", f"{', '.join(RESERVED_FOLDERS)} are reserved")
    for mount_path in kubernetes.volumes.keys() & kubernetes.extra_volumes.keys():
        yield _invalid(
            "extra_volumes",
            f"{{{mount_path}: ...}}",
            f"{mount_path} is also in cluster.kubernetes.volumes: a path has one volume",
        )
    for mount_path, source in kubernetes.extra_volumes.items():
        if not isinstance(source, dict) or len(source) != 1 or "persistentVolumeClaim" in source:
            yield _invalid(
                "extra_volumes",
                f"{{{mount_path}: {source}}}",
                "an extra volume has one source of Kubernetes, {hostPath: {path: /mnt/nvme}}; claims "
                "belong in cluster.kubernetes.volumes",
            )
    for mount_path, claim in kubernetes.volumes.items():
        if re.fullmatch(_SUBDOMAIN, claim) is None:
            yield _invalid(
                "volumes",
                f"{{{mount_path}: {claim}}}",
                "names of PersistentVolumeClaims consist of lowercase letters, digits and dashes",
            )
    run_dir = PurePosixPath(WORKING_DIR) / job.run_dir
    lasting = [
        mount_path
        for mount_path, source in kubernetes.extra_volumes.items()
        if isinstance(source, dict) and source.keys() & PERSISTENT_SOURCES
    ]
    mounts = [PurePosixPath(mount_path) for mount_path in (*kubernetes.volumes, *lasting)]
    if ".." in run_dir.parts or not any(mount == run_dir or mount in run_dir.parents for mount in mounts):
        yield Problem(
            "cluster.kubernetes.volumes",
            f"run.dir={job.run_dir}, which is {run_dir} in the pods and on none of the volumes "
            f"({', '.join(kubernetes.volumes) or 'there are none'})",
            "files elsewhere are lost with the pod, including checkpoints",
            f'set "cluster.kubernetes.volumes={{{WORKING_DIR}: CLAIM}}", or a run.dir on a volume',
        )


def _invalid(name: str, value: object, rule: str) -> Problem:
    return Problem(
        f"cluster.kubernetes.{name}",
        f"cluster.kubernetes.{name}={value}",
        rule,
        f"correct cluster.kubernetes.{name}",
    )
