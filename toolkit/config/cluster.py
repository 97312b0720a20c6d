"""Every key of where a run's jobs are carried out, and how they are started again: ``cluster.*``. The string under a field is its
documentation."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from toolkit.config.checks import at_least


class ClusterBackend(Enum):
    """Where a run's jobs are carried out; chosen by ``cluster=``."""

    local = "local"
    slurm = "slurm"
    kubernetes = "kubernetes"


class PreemptionNotice(Enum):
    """Who is asked whether a machine will be taken away."""

    none = "none"
    gce = "gce"
    aws = "aws"
    azure = "azure"


@dataclass(kw_only=True, slots=True)
class SlurmConfig:
    account: str | None = None
    """--account of sbatch: who pays."""
    partition: str | None = None
    """--partition: which machines."""
    qos: str | None = None
    """--qos: quality of service, which decides quotas and preemption."""
    time: str | None = None
    """Limit of one job: "DAYS-HH:MM:SS". A run that needs longer is requeued."""
    priority: int | None = None
    """--priority: higher is sooner, where the site lets users say so."""
    constraint: str | None = None
    """--constraint: features that the nodes must have."""
    exclude: str | None = None
    """Nodes that are not to be used: "node[3,7-9]"."""
    reservation: str | None = None
    """--reservation."""
    cpus_per_task: int | None = None
    """Cores of a node for all its ranks. Null: the site's own default."""
    memory: str | None = None
    """--mem, of a node: "200G"; "0": all of it. Null: the site's own default."""
    requeue: bool = True
    """A job that was preempted, stopped at its time limit or lost a node goes on in the same job."""
    setup: list[str] = field(default_factory=list)
    """Lines of the job's script before the training: modules, environments."""
    options: dict[str, str] = field(default_factory=dict)
    """More options of sbatch: {mail-type: END}."""


@dataclass(kw_only=True, slots=True)
class KubernetesConfig:
    image: str | None = None
    """Image with this toolkit as its entry point, as Dockerfile makes it. Needed for cluster=kubernetes."""
    namespace: str = "default"
    """Where the job's objects are made."""
    queue: str | None = None
    """Kueue's LocalQueue: all pods of a job start together or none does."""
    priority_class: str | None = None
    """Name of the PriorityClass of Kubernetes, or with a queue of Kueue's WorkloadPriorityClass."""
    shared_memory_gib: int = 16
    """Of /dev/shm, which NCCL and data workers use."""
    rdma: dict[str, int] = field(default_factory=dict)
    """Network devices of a pod by resource name: {rdma/hca_shared_devices: 8}."""
    secrets: dict[str, str] = field(default_factory=dict)
    """Environment variables from Secrets, by reference: {WANDB_API_KEY: wandb/api-key}."""
    volumes: dict[str, str] = field(default_factory=dict)
    """PersistentVolumeClaims by where they are mounted: {/workspace: training}. The run directory has to lie on one."""
    service_account: str | None = None
    """ServiceAccount of the pods. Null: the namespace's default, without its token."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that the nodes must have."""
    cpus: int | None = None
    """Cores of a pod. Null: not asked for."""
    memory_gib: int | None = None
    """Host memory of a pod. Null: not asked for."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the pods: {NCCL_DEBUG: WARN}. Secrets belong to cluster.kubernetes.secrets."""
    image_pull_secrets: list[str] = field(default_factory=list)
    """Names of the Secrets with which nodes fetch the image: [registry]."""
    ttl_seconds: int | None = None
    """Seconds after its end when Kubernetes removes the JobSet and its pods. Null: never."""
    annotations: dict[str, str] = field(default_factory=dict)
    """More annotations of the JobSet and its pods: {prometheus.io/scrape: "false"}."""
    topology: str | None = None
    """Label of nodes whose value all pods of a job must share: topology.kubernetes.io/zone. With a queue, Kueue looks for the place
    (podset-required-topology); without one, the pods have an affinity for each other."""
    affinity: dict[str, Any] = field(default_factory=dict)
    """The field ``affinity`` of the pods, as Kubernetes writes it: {nodeAffinity: {...}}."""
    tolerations: list[Any] = field(default_factory=list)
    """More tolerations of the pods: [{key: dedicated, operator: Equal, value: train, effect: NoSchedule}]."""
    extra_volumes: dict[str, Any] = field(default_factory=dict)
    """Volumes that are not PersistentVolumeClaims, by where they are mounted: {/scratch: {hostPath: {path: /mnt/nvme}}}."""


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    where: ClusterBackend = ClusterBackend.local
    """local, slurm or kubernetes. Written by choosing cluster=NAME."""
    nodes: int | None = None
    """Machines. Null: what the launcher started, or this one."""
    gpus_per_node: int | None = None
    """GPUs a machine; 0: train on CPU. Null: what is here."""
    cpu_ranks: int = 1
    """Ranks a machine where there is no GPU."""
    gpu: str | None = None
    """Kind of GPU, for memory and speed in the plan: h100, h200, a100-80gb ... Null: what is here, else unknown."""
    grace_seconds: int = 60
    """Time between a signal and the end, in which a stopping run saves."""
    restarts: int = 3
    """How often a job that failed goes on from its newest checkpoint by itself; only attempts without progress count. A mistake in
    configuration is never started again."""
    notice: PreemptionNotice = PreemptionNotice.none
    """Ask this cloud every five seconds whether it takes a machine of the run away (spot, preemptible): gce, aws or azure. Then the run
    is saved and stops. none: nobody is asked; a signal does the same."""
    preflight: bool = False
    """Look at every machine with launch/doctor.py before the first step."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)

    def __post_init__(self) -> None:
        at_least("cluster", 1, nodes=self.nodes, cpu_ranks=self.cpu_ranks, grace_seconds=self.grace_seconds)
        at_least("cluster", 0, gpus_per_node=self.gpus_per_node, restarts=self.restarts)
