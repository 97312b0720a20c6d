"""Links of GPUs by name, from data sheets, and what collectives reach of them.

The fractions are those of NCCL's and RCCL's own models, which their authors measured, and of published runs
of nccl-tests. ``dmt calibrate`` replaces them by what it measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.cluster import ClusterConfig
from toolkit.estimate.network import Link, Topology
from toolkit.plan.devices import normalise_gpu_name
from toolkit.plan.types import Device, World

GB = 1e9
BITS = 8

# NVLink: 20.0 of 25 GB/s per link on Ampere, 20.6 of 25 on Hopper, 40.1 of 50 on Blackwell (NCCL,
# src/graph/topo.h); "protocol overhead ~20%, effective 370 GB/s" of 450 (NVIDIA/nccl-tests issue 212).
NVLINK_FRACTION = 0.82
# NVLink SHARP: a bus bandwidth of 480 GB/s on 8 GPUs, which is 274 GB/s of the tensor (the same issue).
SWITCH_FRACTION = 274 / 450
# xGMI: 48 of 64 GB/s per link after protocol and error correction (ROCm/rccl issue 1210).
XGMI_FRACTION = 0.75
# 46 to 48 of 50 GB/s of a 400 Gbit card (NVIDIA/nccl-tests issue 290).
NIC_FRACTION = 0.94
# 12 of 15.75 GB/s of PCIe 3.0 x16 (NCCL, src/graph/topo.h).
PCIE_FRACTION = 0.76

# Seconds of a step and of the start: those of NCCL's ring with the protocol LL128 (src/graph/tuning.cc).
NVLINK_LATENCY, PCIE_LATENCY, NIC_LATENCY, START = 1.9e-6, 2.5e-6, 4.0e-6, 10e-6
HOST_LATENCY = 10e-6  # cudaMemcpyAsync and its synchronisation

PCIE3, PCIE4, PCIE5 = 15.75 * GB, 31.5 * GB, 63 * GB  # x16, one direction: PCI-SIG

# gloo over the loopback interface and over a 10 Gbit network; the order of magnitude, to be calibrated.
CPU_INSIDE = Link(bandwidth=1.5 * GB, latency=50e-6)
CPU_HOST = Link(bandwidth=10 * GB, latency=1e-6)
CPU_NIC_GBIT = 10.0
TCP_LATENCY = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """The usual connections of a kind of GPU.

    Attributes:
        fabric: NVLink or xGMI bytes per second of a GPU in one direction; None: only PCIe.
        gpus: GPUs that share it; None: all of a node; 1: none, unless cluster.network.nvlink_gpus says so.
        nic_gbit: share of a GPU in the network cards of its node, in Gbit/s.
        host: bytes per second between GPU and host memory in one direction, by the data sheet.
        switch_adds: whether NVSwitch computes all-reduces (NVLink SHARP, since Hopper).
        mesh: GPUs of an xGMI mesh, of which each pair has a link.
    """

    fabric: float | None = None
    gpus: int | None = 1
    nic_gbit: float = 25.0
    host: float = PCIE4
    switch_adds: bool = False
    mesh: int = 0


# Data sheets as in plan/devices.py. Network cards are those of the vendor's reference systems, and for GPUs
# on PCIe cards a fourth of a 100 Gbit card, as in clouds.
INTERCONNECTS: dict[str, Interconnect] = {
    # NVLink 5 at 900 GB/s per direction; NVL72 racks; a Grace CPU's 450 GB/s for two GPUs
    "gb300": Interconnect(fabric=900 * GB, gpus=72, nic_gbit=800, host=225 * GB, switch_adds=True),
    "gb200": Interconnect(fabric=900 * GB, gpus=72, nic_gbit=400, host=225 * GB, switch_adds=True),
    "b300": Interconnect(fabric=900 * GB, gpus=None, nic_gbit=800, host=PCIE5, switch_adds=True),
    "b200": Interconnect(fabric=900 * GB, gpus=None, nic_gbit=400, host=PCIE5, switch_adds=True),
    # NVLink 4 at 450 GB/s; NVL cards in bridged groups of four (H200) and two (H100)
    "gh200": Interconnect(fabric=450 * GB, gpus=None, nic_gbit=400, host=450 * GB),
    "h200": Interconnect(fabric=450 * GB, gpus=None, nic_gbit=400, host=PCIE5, switch_adds=True),
    "h200-nvl": Interconnect(fabric=450 * GB, gpus=4, nic_gbit=200, host=PCIE5),
    "h100": Interconnect(fabric=450 * GB, gpus=None, nic_gbit=400, host=PCIE5, switch_adds=True),
    "h100-nvl": Interconnect(fabric=300 * GB, gpus=2, nic_gbit=200, host=PCIE5),
    "h100-pcie": Interconnect(fabric=300 * GB, nic_gbit=200, host=PCIE5),
    # NVLink 3 at 300 GB/s
    "a100-40gb": Interconnect(fabric=300 * GB, gpus=None, nic_gbit=200),
    "a100-80gb": Interconnect(fabric=300 * GB, gpus=None, nic_gbit=200),
    # NVLink 2 at 150 GB/s; DGX-1: four cards of 100 Gbit for eight GPUs
    "v100-16gb": Interconnect(fabric=150 * GB, gpus=None, nic_gbit=50, host=PCIE3),
    "v100-32gb": Interconnect(fabric=150 * GB, gpus=None, nic_gbit=50, host=PCIE3),
    "v100-pcie-16gb": Interconnect(host=PCIE3),
    "v100-pcie-32gb": Interconnect(host=PCIE3),
    # Cards for which a bridge between pairs exists
    "a30": Interconnect(fabric=100 * GB),
    "a40": Interconnect(fabric=56.25 * GB),
    "rtx-a6000": Interconnect(fabric=56.25 * GB),
    "rtx-3090": Interconnect(fabric=56.25 * GB),
    "l40s": Interconnect(),
    "l40": Interconnect(),
    "l4": Interconnect(),
    "a10": Interconnect(),
    "a10g": Interconnect(),
    "rtx-pro-6000": Interconnect(host=PCIE5),
    "rtx-6000-ada": Interconnect(),
    "rtx-5090": Interconnect(host=PCIE5),
    "rtx-4090": Interconnect(),
    "t4": Interconnect(host=PCIE3),
    # Seven xGMI links of 64 GB/s; MI250X: 50 GB/s links, of which a die has about four to other dies
    "mi325x": Interconnect(fabric=448 * GB, gpus=None, nic_gbit=400, host=PCIE5, mesh=8),
    "mi300x": Interconnect(fabric=448 * GB, gpus=None, nic_gbit=400, host=PCIE5, mesh=8),
    "mi250x": Interconnect(fabric=200 * GB, gpus=None, nic_gbit=100, mesh=8),
}


def topology_of(cluster: ClusterConfig, world: World) -> Topology:
    """Return the network between the ranks of ``world``. An unknown GPU is taken for a PCIe card.

    Args:
        cluster: its section ``network`` replaces the usual values of the kind of GPU.
    """
    given, node = cluster.network, min(world.ranks_per_node, world.ranks)
    if world.device is Device.CPU:
        card = (given.nic_gbit_per_gpu or CPU_NIC_GBIT / node) * GB / BITS * NIC_FRACTION
        between = Link(bandwidth=card, latency=TCP_LATENCY)
        return Topology(domain=node, inside=CPU_INSIDE, between=between, host=CPU_HOST)
    usual = INTERCONNECTS.get(normalise_gpu_name(world.gpu or "") or "", Interconnect())
    gbit = given.nic_gbit_per_gpu if given.nic_gbit_per_gpu is not None else usual.nic_gbit
    between = Link(bandwidth=gbit * GB / BITS * NIC_FRACTION, latency=NIC_LATENCY)
    host = Link(bandwidth=usual.host * PCIE_FRACTION, latency=HOST_LATENCY)
    gpus = given.nvlink_gpus if given.nvlink_gpus is not None else usual.gpus
    if usual.fabric is None or gpus == 1:
        inside = Link(bandwidth=host.bandwidth, latency=PCIE_LATENCY)
        return Topology(domain=node, inside=inside, between=between, host=host, start=START)
    domain = min(gpus or node, world.ranks)
    if domain < world.ranks <= node:  # pairs or quads with a bridge, and PCIe between them
        between = Link(bandwidth=host.bandwidth, latency=PCIE_LATENCY)
    fraction = XGMI_FRACTION if usual.mesh else NVLINK_FRACTION
    return Topology(
        domain=domain,
        inside=Link(bandwidth=usual.fabric * fraction, latency=NVLINK_LATENCY),
        between=between,
        host=host,
        start=START,
        mesh=usual.mesh,
        switch_bandwidth=usual.fabric * SWITCH_FRACTION if usual.switch_adds else None,
    )
