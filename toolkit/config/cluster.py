"""The section ``cluster`` of the schema: where jobs run and how they restart.

The string below a field is its help text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from toolkit.config.checks import at_least, check


class ClusterBackend(Enum):
    """Where the jobs of a run are executed; selected with ``cluster=``."""

    local = "local"
    slurm = "slurm"
    kubernetes = "kubernetes"


class PreemptionNotice(Enum):
    """The cloud whose metadata service announces the preemption of a machine."""

    none = "none"
    gce = "gce"
    aws = "aws"
    azure = "azure"


@dataclass(kw_only=True, slots=True)
class SlurmConfig:
    account: str | None = None
    """--account of sbatch: the account that is charged."""
    partition: str | None = None
    """--partition: which machines."""
    qos: str | None = None
    """--qos: quality of service, which decides quotas and preemption."""
    time: str | None = None
    """Time limit of one job: "DAYS-HH:MM:SS". A run that needs longer is requeued."""
    priority: int | None = None
    """--priority: higher is sooner, if the site allows users to set it."""
    constraint: str | None = None
    """--constraint: features that the nodes must have."""
    exclude: str | None = None
    """Nodes that must not be used: "node[3,7-9]"."""
    reservation: str | None = None
    """--reservation."""
    cpus_per_task: int | None = None
    """Cores of a node for all its ranks. Null: the default of the site."""
    memory: str | None = None
    """--mem, per node: "200G"; "0": all memory. Null: the default of the site."""
    requeue: bool = True
    """Requeue a job that was preempted, reached its time limit or lost a node."""
    setup: list[str] = field(default_factory=list)
    """Lines of the job script before the training command: modules, environments."""
    options: dict[str, str] = field(default_factory=dict)
    """More options of sbatch: {mail-type: END}."""


@dataclass(kw_only=True, slots=True)
class KubernetesConfig:
    image: str | None = None
    """Image with this toolkit as its entry point, as built by Dockerfile. Required for cluster=kubernetes."""
    namespace: str = "default"
    """Namespace of the job's objects."""
    queue: str | None = None
    """LocalQueue of Kueue: the pods of a job start all together."""
    priority_class: str | None = None
    """Name of the PriorityClass of Kubernetes, or of Kueue's WorkloadPriorityClass if there is a queue."""
    shared_memory_gib: int = 16
    """Size of /dev/shm, which NCCL and data workers use, in GiB."""
    rdma: dict[str, int] = field(default_factory=dict)
    """Network devices of a pod by resource name: {rdma/hca_shared_devices: 8}."""
    secrets: dict[str, str] = field(default_factory=dict)
    """Environment variables from Secrets, by reference: {WANDB_API_KEY: wandb/api-key}."""
    volumes: dict[str, str] = field(default_factory=dict)
    """PersistentVolumeClaims by mount path: {/workspace: training}. The run directory must be on one of them.
    """
    service_account: str | None = None
    """ServiceAccount of the pods. Null: the namespace's default, without its token."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that the nodes must have."""
    cpus: int | None = None
    """Cores of a pod. Null: no request."""
    memory_gib: int | None = None
    """Host memory of a pod, in GiB. Null: no request."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the pods: {NCCL_DEBUG: WARN}. Secrets belong to cluster.kubernetes.secrets."""
    image_pull_secrets: list[str] = field(default_factory=list)
    """Names of the Secrets with which nodes pull the image: [registry]."""
    ttl_seconds: int | None = None
    """Seconds after which Kubernetes removes a finished JobSet and its pods. Null: never."""
    annotations: dict[str, str] = field(default_factory=dict)
    """More annotations of the JobSet and its pods: {prometheus.io/scrape: "false"}."""
    topology: str | None = None
    """Node label whose value all pods of a job must share: topology.kubernetes.io/zone. With a queue, Kueue
    finds the nodes (podset-required-topology); without a queue, the pods have an affinity to each other.
    """
    affinity: dict[str, Any] = field(default_factory=dict)
    """The field ``affinity`` of the pods, in Kubernetes' format: {nodeAffinity: {...}}."""
    tolerations: list[Any] = field(default_factory=list)
    """More tolerations of the pods: [{key: dedicated, operator: Equal, value: train, effect: NoSchedule}]."""
    extra_volumes: dict[str, Any] = field(default_factory=dict)
    """Volumes that are not PersistentVolumeClaims, by mount path: {/scratch: {hostPath: {path: /mnt/nvme}}}.
    """


@dataclass(kw_only=True, slots=True)
class NetworkConfig:
    """The links that predicted step times assume."""

    nvlink_gpus: int | None = None
    """GPUs that share NVLink or xGMI: 8 in most nodes, 72 in an NVL72 rack, 2 with a bridge; 1: they have
    only PCIe. Null: as usual for the kind of GPU.
    """
    nic_gbit_per_gpu: float | None = None
    """Network bandwidth of a node divided by its GPUs (or ranks on CPUs), in Gbit/s: 400 with a 400 Gbit card
    for each GPU, 50 with one for eight. Null: as usual for the kind of GPU.
    """

    def __post_init__(self) -> None:
        at_least("cluster.network", 1, nvlink_gpus=self.nvlink_gpus)
        gbit = self.nic_gbit_per_gpu
        check(
            gbit is None or gbit > 0,
            "cluster.network.nic_gbit_per_gpu",
            gbit,
            "cluster.network.nic_gbit_per_gpu is greater than 0",
            "write cluster.network.nic_gbit_per_gpu=400, or null for the usual value of the GPU",
        )


@dataclass(kw_only=True, slots=True)
class EnergyConfig:
    """What a run's energy and CO2 are computed from. Its price: monitor.price_per_gpu_hour."""

    watts_per_gpu: float | None = None
    """Power of a GPU in training with its share of the host, in watts. Null: 1.5 times the GPU's thermal
    design power.
    """
    pue: float = 1.2
    """Power usage effectiveness: energy of the data center per energy of its computers."""
    grams_co2_per_kwh: float = 473.0
    """CO2 of the electricity. 473: the world's mean in 2024 (Ember, Global Electricity Review 2025)."""

    def __post_init__(self) -> None:
        at_least("cluster.energy", 1, watts_per_gpu=self.watts_per_gpu, pue=self.pue)
        at_least("cluster.energy", 0, grams_co2_per_kwh=self.grams_co2_per_kwh)


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    where: ClusterBackend = ClusterBackend.local
    """local, slurm or kubernetes. Set by choosing cluster=NAME."""
    nodes: int | None = None
    """Number of machines. Null: as many as the launcher started, or this one."""
    min_nodes: int | None = None
    """Smallest number of nodes with which a job of Slurm or Kubernetes continues when it loses nodes; less
    than cluster.nodes. The global batch and the samples stay the same. Null: the job needs all its nodes.
    """
    gpus_per_node: int | None = None
    """GPUs per machine; 0: train on CPU. Null: the GPUs of this machine."""
    cpu_ranks: int = 1
    """Ranks per machine if there is no GPU."""
    gpu: str | None = None
    """Kind of GPU, for memory and speed in the plan: h100, h200, a100-80gb ... Null: that of this machine,
    else unknown.
    """
    transformer_engine: str | None = None
    """Version of Transformer Engine on the machines, for plans of other machines: 2.11.0. Null: that of this
    machine, if it is installed.
    """
    calibration: str | None = None
    """File of launch/calibrate.py: the measured speed of this kind of machine, for predicted step times.
    Null: the published figures of the GPU.
    """
    node_mtbf_hours: float | None = None
    """Mean hours between failures of one node, for the predicted goodput. Null: as in the training of Llama 3
    on GPUs, about 6,300; no failures on CPUs.
    """
    restart_seconds: float | None = None
    """Seconds from a failure to the start of training, without reading the checkpoint, for the predicted
    goodput; attempts/NNN/restart.json has those of a run's own restarts. Null: 600, the mean of a published
    run in which nodes were tested before each restart.
    """
    repair_hours: float | None = None
    """Mean hours until a node that failed is repaired or replaced, for the predicted goodput. A run that has
    no spare node left waits for it. Null: a node can always be replaced at once.
    """
    spare_nodes: int = 0
    """Nodes that stand by to replace those that fail. With cluster.min_nodes a job takes them in addition to
    cluster.nodes; with cluster.repair_hours the predicted goodput counts them.
    """
    grace_seconds: int = 60
    """Time between a signal and the end of the job, in which a stopping run saves."""
    restarts: int = 3
    """How often a failed job restarts from its newest checkpoint; only attempts without progress count.
    Errors in the configuration are never retried.
    """
    standbys: int | None = None
    """Processes per machine that have done their imports and wait to take the places of the ranks at a
    restart, if cluster.restarts is greater than 0, or torchrun has --max-restarts or --nnodes=MIN:MAX. Null:
    on GPUs as many as ranks; on CPUs, whose cores and memory they would take from the ranks, none.
    """
    notice: PreemptionNotice = PreemptionNotice.none
    """Ask this cloud every five seconds whether it preempts a machine of the run (spot, preemptible): gce,
    aws or azure. If so, the run saves and stops. none: do not ask; a signal does the same.
    """
    numa_binding: bool = True
    """Run each rank on the cores of its GPU's NUMA node, if a machine has several and the launcher has not
    bound the rank.
    """
    preflight: bool = False
    """Check every machine with launch/doctor.py before the first step."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    energy: EnergyConfig = field(default_factory=EnergyConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)

    def __post_init__(self) -> None:
        at_least("cluster", 1, nodes=self.nodes, cpu_ranks=self.cpu_ranks, grace_seconds=self.grace_seconds)
        at_least(
            "cluster",
            0,
            restart_seconds=self.restart_seconds,
            repair_hours=self.repair_hours,
            spare_nodes=self.spare_nodes,
        )
        at_least(
            "cluster", 0, gpus_per_node=self.gpus_per_node, restarts=self.restarts, standbys=self.standbys
        )
        self._check_min_nodes()
        mtbf = self.node_mtbf_hours
        check(
            mtbf is None or mtbf > 0,
            "cluster.node_mtbf_hours",
            mtbf,
            "cluster.node_mtbf_hours is greater than 0",
            "write cluster.node_mtbf_hours=5000, or null for a published rate",
        )

    def _check_min_nodes(self) -> None:
        if self.min_nodes is None:
            return
        at_least("cluster", 1, min_nodes=self.min_nodes)
        nodes = self.nodes or 1
        remedy = "leave out cluster.min_nodes"
        check(
            self.where is not ClusterBackend.local,
            "cluster.min_nodes",
            f"{self.min_nodes} with cluster=local",
            "only jobs of Slurm and Kubernetes are started with a range of nodes",
            f"{remedy}, and type the range: torchrun --nnodes={self.min_nodes}:MAX on every node",
        )
        check(
            self.min_nodes < nodes,
            "cluster.min_nodes",
            f"{self.min_nodes} with cluster.nodes={nodes}",
            "cluster.min_nodes is less than cluster.nodes",
            f"write cluster.min_nodes={nodes - 1}, or leave it out" if nodes > 1 else remedy,
        )
