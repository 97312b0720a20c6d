"""Findings of the doctor's checks for good and bad measurements."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.cluster.doctor import clocks, compilers, cross_node, disk, gpus, host, network, software
from toolkit.cluster.doctor import data_access as data
from toolkit.cluster.doctor.preflight import find_failures
from toolkit.cluster.doctor.report import format_summary, to_json
from toolkit.cluster.doctor.types import (
    CheckFinding,
    CheckVerdict,
    DoctorReport,
    MachineReport,
    RunRequirements,
    compute_requirements,
    fail,
    ok,
    warn,
)
from toolkit.config.compose import compose
from toolkit.config.schema import EngineName
from toolkit.errors import Problem
from toolkit.monitor.comm_benchmark_rows import ALL_REDUCE, probe_row
from toolkit.plan import make_plan
from toolkit.plan.checkpoint_size import checkpoint_bytes
from toolkit.plan.types import Device, World

GIB = 2**30
OK, WARN, FAIL, UNKNOWN = CheckVerdict.OK, CheckVerdict.WARN, CheckVerdict.FAIL, CheckVerdict.UNKNOWN
CPU = RunRequirements(
    device=Device.CPU,
    engine=EngineName.deepspeed,
    ranks=2,
    ranks_per_node=2,
    nodes=1,
    run_dir=Path("runs/x"),
    checkpoint_bytes=100 * GIB,
    keep_checkpoints=2,
    grace_seconds=60,
    host_bytes=10 * GIB,
    device_bytes=None,
)
GPU = replace(CPU, device=Device.CUDA, ranks=8, ranks_per_node=8, device_bytes=60 * GIB)
NODES = replace(GPU, ranks=32, nodes=4)


def check_findings(
    findings: Iterable[CheckFinding], *, verdicts: set[CheckVerdict], text: str = "", remedy: str = ""
) -> list[CheckFinding]:
    """Findings that are not ok have a remedy; ok findings have none."""
    found = list(findings)
    assert {finding.verdict for finding in found} == verdicts, found
    assert all(bool(finding.remedy) == (finding.verdict in (WARN, FAIL)) for finding in found), found
    assert any(text in finding.evidence for finding in found), found
    assert any(remedy in finding.remedy for finding in found), found
    return found


# ---- software

VERSIONS = software.InstalledVersions(
    python="3.11.9",
    python_range=">=3.11,<3.13",
    cuda="12.8",
    nccl="2.27.3",
    requirements=(
        "torch<2.14,>=2.11",
        "deepspeed<0.20,>=0.19.8",
        "rich<16,>=14",
        'megatron-core==0.16.*; extra == "megatron"',
    ),
    installed={"torch": "2.13.0+cu128", "deepspeed": "0.19.8", "rich": "14.1", "megatron-core": None},
)


def with_versions(**versions: str | None) -> software.InstalledVersions:
    return replace(
        VERSIONS,
        installed={
            **VERSIONS.installed,
            **{name.replace("_", "-"): value for name, value in versions.items()},
        },
    )


def test_versions_in_tested_ranges_are_ok() -> None:
    check_findings(software.assess_versions(VERSIONS, GPU), verdicts={OK}, text="CUDA 12.8, NCCL 2.27.3")
    nvidia = with_versions(torch="2.11.0a0+5228986c39.nv25.6")
    check_findings(software.assess_versions(nvidia, GPU), verdicts={OK})


@pytest.mark.parametrize(
    ("versions", "requirements", "verdict", "text"),
    [
        (with_versions(deepspeed="0.21.0"), GPU, FAIL, "deepspeed 0.21.0: tested with"),
        (with_versions(torch="2.15.0"), GPU, WARN, "torch 2.15.0"),
        (with_versions(rich=None), GPU, FAIL, "rich is not installed"),
        (replace(VERSIONS, python="3.14.0"), GPU, FAIL, "Python 3.14.0"),
        (replace(VERSIONS, cuda=None), GPU, FAIL, "built without CUDA"),
        (VERSIONS, replace(GPU, engine=EngineName.megatron), FAIL, "megatron-core is not installed"),
    ],
)
def test_untested_versions_are_reported(
    versions: software.InstalledVersions, requirements: RunRequirements, verdict: CheckVerdict, text: str
) -> None:
    check_findings(software.assess_versions(versions, requirements), verdicts={verdict}, text=text)


def test_unused_engine_may_have_any_version() -> None:
    check_findings(
        software.assess_versions(with_versions(deepspeed="0.1"), replace(GPU, engine=EngineName.local)),
        verdicts={OK},
    )


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("HF_TOKEN=hf_" + "a" * 34, "a Hugging Face token"),
        ("--key=AKIA" + "A" * 16, "an AWS access key"),
        ("WANDB_API_KEY=" + "0123456789" * 4, "a W&B key"),
        ("data.path=https://user:secret@host/data", "a password in a URL"),
    ],
)
def test_secret_in_command_line_is_reported_without_its_value(word: str, kind: str) -> None:
    found = software.find_secrets({"this command": ["launch/train.py", word]})
    assert found == [f"{kind} in the command line of this command"]
    message = check_findings(
        software.assess_arguments(found, CPU), verdicts={FAIL}, text=kind, remedy="revoke it"
    )
    assert all(word not in finding.evidence + finding.remedy for finding in message)


def test_normal_arguments_are_not_secrets() -> None:
    words = [
        "launch/train.py",
        "+exp=gpt2_125m",
        "data.path=s3://bucket/corpus",
        "run.name=hf_small",
        "monitor.project=wandb",
    ]
    assert software.find_secrets({"this command": words}) == []
    check_findings(software.assess_arguments([], CPU), verdicts={OK})


# ---- driver and GPUs

H100 = gpus.GpuState(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    total_bytes=80 * GIB,
    used_bytes=0,
    persistent=True,
    ecc=True,
    uncorrected=0,
    remap_pending=False,
    remap_failed=False,
)
EIGHT = [replace(H100, index=index) for index in range(8)]
DRIVER = gpus.DriverInfo(version="570.86", cuda=(12, 8), built=(12, 8))


@pytest.mark.parametrize(
    ("driver", "requirements", "verdict", "text"),
    [
        (DRIVER, GPU, OK, "570.86"),
        (replace(DRIVER, built=(12, 9)), GPU, WARN, "CUDA 12.9"),
        (replace(DRIVER, built=(13, 0)), GPU, FAIL, "CUDA 13.0"),
        (replace(DRIVER, built=None), CPU, OK, "570.86"),
        (gpus.DriverInfo(version=None), GPU, FAIL, "no driver"),
        (gpus.DriverInfo(version=None), CPU, OK, "none"),
    ],
)
def test_driver_verdict(
    driver: gpus.DriverInfo, requirements: RunRequirements, verdict: CheckVerdict, text: str
) -> None:
    check_findings(gpus.assess_driver(driver, requirements), verdicts={verdict}, text=text)


def test_healthy_gpus() -> None:
    check_findings(gpus.assess_gpus(EIGHT, GPU), verdicts={OK}, text="8 x NVIDIA H100 80GB HBM3; ECC on")
    check_findings(gpus.assess_gpus([], CPU), verdicts={OK}, text="CPU ranks")
    check_findings(
        gpus.assess_gpus([gpus.GpuState(index=0, name="MIG")], replace(GPU, ranks_per_node=1)),
        verdicts={OK, UNKNOWN},
        text="does not report",
    )


@pytest.mark.parametrize(
    ("change", "verdict", "text"),
    [
        ({"uncorrected": 2}, FAIL, "GPU 3: 2 uncorrected"),
        ({"remap_failed": True}, FAIL, "failed"),
        ({"remap_pending": True}, WARN, "at the next reset"),
        ({"persistent": False}, WARN, "persistence mode is off"),
        ({"slowed": ("power brake",)}, WARN, "power brake"),
        ({"used_bytes": 30 * GIB}, FAIL, "50.0 GiB free"),
        ({"used_bytes": 5 * GIB}, WARN, "5.0 GiB are already in use"),
        ({"name": "NVIDIA A100-SXM4-80GB"}, WARN, "slowest"),
    ],
)
def test_unhealthy_gpu(change: dict[str, object], verdict: CheckVerdict, text: str) -> None:
    cards = [replace(card, **change) if card.index == 3 else card for card in EIGHT]  # type: ignore[arg-type]
    message = " ".join(
        item.evidence + item.remedy
        for item in check_findings(gpus.assess_gpus(cards, GPU), verdicts={verdict})
    )
    assert text in message
    check_findings(
        gpus.assess_gpus(cards, replace(GPU, ranks_per_node=3)), verdicts={OK}
    )  # a GPU that the run does not use


def test_too_few_gpus() -> None:
    check_findings(gpus.assess_gpus(EIGHT[:7], GPU), verdicts={FAIL}, text="for 8 ranks")
    check_findings(gpus.assess_gpus([], GPU), verdicts={FAIL}, text="none for 8 ranks")


class FakeNvml:
    """Two GPUs; the second does not support row remapping."""

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlClocksThrottleReasonHwSlowdown, nvmlClocksThrottleReasonSwThermalSlowdown = 0x8, 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown, nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x40, 0x80

    def nvmlInit(self) -> None: ...

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 * GIB, used=GIB)

    def nvmlDeviceGetEccMode(self, handle: int) -> list[int]:
        return [1, 1]

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetRemappedRows(self, handle: int) -> list[int]:
        if handle == 1:
            raise self.NVMLError
        return [4, 0, 1, 0]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x80 | 0x4 | 0x1  # a power brake counts; a power cap and idling are harmless

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return 0


def test_fake_nvml_matches_pynvml_names() -> None:
    real = gpus.load_nvml()
    names = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert len(names) > 15
    assert not [name for name in names if not hasattr(real, name)]
    assert not [
        name
        for name in names
        if isinstance(getattr(FakeNvml, name), int) and getattr(FakeNvml, name) != getattr(real, name)
    ]


def test_measure_gpus_with_fake_nvml() -> None:
    nvml = FakeNvml()
    first, second = gpus.measure_gpus(GPU, nvml, "0,1")
    assert first == replace(
        H100, used_bytes=GIB, persistent=False, remap_pending=True, slowed=("power brake",)
    )
    assert second == replace(first, index=1, persistent=True, remap_pending=None, remap_failed=None)
    assert [card.index for card in gpus.measure_gpus(GPU, nvml, "GPU-1")] == [1]
    assert gpus.measure_gpus(GPU, nvml, "") == []
    driver = gpus.measure_driver(GPU, nvml)
    assert (driver.version, driver.cuda) == ("570.86", (12, 8))


# ---- the host


@pytest.mark.parametrize(
    ("free", "requirements", "verdict"),
    [
        (16 * GIB, GPU, OK),
        (512 * 2**20, GPU, WARN),
        (64 * 2**20, GPU, FAIL),
        (64 * 2**20, CPU, OK),
        (64 * 2**20, replace(GPU, ranks_per_node=1), OK),
    ],
)
def test_shared_memory_verdict(free: int, requirements: RunRequirements, verdict: CheckVerdict) -> None:
    check_findings(
        host.assess_shared(host.SharedMemory(16 * GIB, free), requirements),
        verdicts={verdict},
        remedy="shm-size" if verdict is not OK else "",
    )


def test_host_memory_verdict() -> None:
    check_findings(
        host.assess_memory(host.HostMemory(64 * GIB, 20 * GIB), CPU),
        verdicts={OK},
        text="the run needs 10.0 GiB",
    )
    check_findings(
        host.assess_memory(host.HostMemory(64 * GIB, 9 * GIB), CPU), verdicts={FAIL}, text="9.0 GiB available"
    )
    check_findings(
        host.assess_memory(host.HostMemory(64 * GIB, 9 * GIB), replace(CPU, host_bytes=None)),
        verdicts={UNKNOWN},
    )


HALVES = (frozenset(range(8)), frozenset(range(8, 16)))


@pytest.mark.parametrize(
    ("cores", "requirements", "verdict", "text"),
    [
        (host.CpuCores(usable=frozenset(range(16)), numa=HALVES), GPU, OK, "16 cores on 2 NUMA nodes"),
        (host.CpuCores(usable=frozenset(range(4)), numa=HALVES), GPU, WARN, "4 cores"),
        (host.CpuCores(usable=HALVES[0], numa=HALVES), GPU, WARN, "none on NUMA node 1"),
        (host.CpuCores(usable=HALVES[0], numa=HALVES), CPU, OK, "8 cores"),
        (
            host.CpuCores(usable=frozenset(range(16)), numa=HALVES, balancing=True),
            GPU,
            WARN,
            "migrates pages",
        ),
    ],
)
def test_cores_verdict(
    cores: host.CpuCores, requirements: RunRequirements, verdict: CheckVerdict, text: str
) -> None:
    check_findings(host.assess_cores(cores, requirements), verdicts={verdict}, text=text)


def test_parse_cpu_list() -> None:
    assert host.parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert host.parse_cpu_list("\n") == frozenset()


LIMITS = host.ProcessLimits(files=65536, files_hard=65536, locked_bytes=None, rdma=True)


@pytest.mark.parametrize(
    ("limits", "requirements", "verdicts", "text"),
    [
        (LIMITS, NODES, {OK}, "65,536 open files"),
        (replace(LIMITS, files=None), NODES, {OK}, "unlimited"),
        (replace(LIMITS, files=1024), NODES, {WARN, OK}, "1,024"),
        (replace(LIMITS, files=1024), replace(NODES, ranks=512), {FAIL, OK}, "1,024"),
        (replace(LIMITS, locked_bytes=65536), NODES, {FAIL, OK}, "RDMA"),
        (replace(LIMITS, locked_bytes=65536, rdma=False), NODES, {OK}, "without RDMA"),
    ],
)
def test_limits_verdict(
    limits: host.ProcessLimits, requirements: RunRequirements, verdicts: set[CheckVerdict], text: str
) -> None:
    check_findings(host.assess_limits(limits, requirements), verdicts=verdicts, text=text)


def test_low_hard_limit_needs_root() -> None:
    low = host.ProcessLimits(files=1024, files_hard=1024, locked_bytes=None, rdma=True)
    check_findings(host.assess_limits(low, NODES), verdicts={WARN, OK}, remedy="only root can raise")
    assert not any("root" in item.remedy for item in host.assess_limits(replace(low, files_hard=None), NODES))


# ---- the disk

FAST = disk.DiskProbe(folder="/runs", free_bytes=1000 * GIB, written_bytes=256 * 2**20, seconds=0.1)


@pytest.mark.parametrize(
    ("found", "requirements", "verdicts", "text"),
    [
        (FAST, CPU, {OK}, "a save takes about 40 s"),
        (replace(FAST, seconds=1.0), CPU, {OK, WARN}, "about 400 s, more than cluster.grace_seconds=60"),
        (replace(FAST, seconds=1.0), replace(CPU, nodes=16), {OK}, "about 25 s"),
        (
            replace(FAST, free_bytes=99 * GIB),
            CPU,
            {FAIL, OK},
            "99.0 GiB free; one checkpoint takes 100.0 GiB",
        ),
        (replace(FAST, free_bytes=299 * GIB), CPU, {WARN, OK}, "take 300.0 GiB"),
        (replace(FAST, free_bytes=GIB), replace(CPU, checkpoint_bytes=None), {OK}, "unknown"),
        (disk.DiskProbe(folder="/runs", problem="Read-only file system"), CPU, {FAIL}, "Read-only"),
        (
            disk.DiskProbe(folder="/runs", free_bytes=1000),
            replace(CPU, checkpoint_bytes=10),
            {OK, WARN},
            "too full",
        ),
    ],
)
def test_disk_verdict(
    found: disk.DiskProbe, requirements: RunRequirements, verdicts: set[CheckVerdict], text: str
) -> None:
    check_findings(disk.assess(found, requirements), verdicts=verdicts, text=text)


def test_disk_measurement_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_BYTES", 2 * disk.BLOCK_BYTES)
    found = disk.measure(replace(CPU, run_dir=tmp_path / "not" / "there"))
    assert (found.folder, found.written_bytes, found.problem) == (str(tmp_path), 2 * disk.BLOCK_BYTES, None)
    assert found.seconds > 0
    assert not list(tmp_path.iterdir())


def test_disk_measurement_is_bounded_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(
        disk, "time", SimpleNamespace(perf_counter=lambda: float(next(now)))
    )  # one second per clock reading
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    written, seconds = disk.timed_write(tmp_path / "file", 100 * disk.BLOCK_BYTES, 3.0)
    assert (written, seconds) == (2 * disk.BLOCK_BYTES, 4.0)


def test_checkpoint_size_is_independent_of_layout() -> None:
    """Weights of 2 bytes, master weights of 4, two moments of 4: 14 bytes per parameter in bf16, 12 in
    fp32.
    """
    for precision, each in (("bf16", 14), ("fp32", 12)):
        config = compose(["+exp=quickstart", f"precision={precision}", "zero=stage1"])
        sizes = set()
        for ranks in (1, 2, 4):
            plan = make_plan(config, World(ranks=ranks, ranks_per_node=ranks, device=Device.CPU))
            sizes.add(checkpoint_bytes(plan))
        assert sizes == {each * sum(spec.numel for spec in plan.parameters)}


def test_compute_requirements() -> None:
    config = compose(["+exp=quickstart", "zero=stage1"])
    world = World(ranks=8, ranks_per_node=2, device=Device.CPU)
    plan = make_plan(config, world)
    assert plan.memory is not None
    requirements = compute_requirements(config, world, plan)
    assert (requirements.nodes, requirements.host_bytes, requirements.device_bytes) == (
        4,
        2 * plan.memory.device_total,
        None,
    )
    behind = compose(["+exp=quickstart", "zero=stage1", "checkpoint.background=true"])
    saved = checkpoint_bytes(plan)
    assert saved is not None
    assert (
        compute_requirements(behind, world, make_plan(behind, world)).host_bytes
        == 2 * plan.memory.device_total + saved // 4
    )
    assert compute_requirements(config, world, None).checkpoint_bytes is None


# ---- the network


@pytest.mark.parametrize(
    ("name", "requirements", "verdict"),
    [
        (network.HostName("node1", ("10.0.0.1",)), NODES, OK),
        (network.HostName("node1", ()), NODES, WARN),
        (network.HostName("node1", ()), GPU, OK),
        (network.HostName("node1", ("127.0.1.1",)), NODES, WARN),
        (network.HostName("node1", ("127.0.1.1",)), GPU, OK),
    ],
)
def test_host_name_verdict(
    name: network.HostName, requirements: RunRequirements, verdict: CheckVerdict
) -> None:
    check_findings(network.assess_name(name, requirements), verdicts={verdict}, text="node1")


UP = {"lo": True, "eth0": True, "eth1": False, "ib0": True}


def interfaces(rdma: dict[str, str] | None = None, **chosen: str) -> network.NetworkInterfaces:
    return network.NetworkInterfaces(
        up=UP, rdma={"mlx5_0:1": "ACTIVE"} if rdma is None else rdma, chosen=chosen
    )


@pytest.mark.parametrize(
    ("found", "requirements", "verdict", "text"),
    [
        (interfaces(), NODES, OK, "none is selected"),
        (interfaces(GLOO_SOCKET_IFNAME="eth0"), NODES, OK, "GLOO_SOCKET_IFNAME=eth0"),
        (interfaces(GLOO_SOCKET_IFNAME="eth"), NODES, FAIL, "no such interface"),
        (interfaces(GLOO_SOCKET_IFNAME="eth1"), NODES, FAIL, "the interface is down"),
        (interfaces(GLOO_SOCKET_IFNAME="lo"), NODES, FAIL, "does not reach other machines"),
        (interfaces(GLOO_SOCKET_IFNAME="lo"), GPU, OK, "lo"),
        (interfaces(NCCL_SOCKET_IFNAME="eth,ib"), NODES, OK, "eth,ib"),
        (interfaces(NCCL_SOCKET_IFNAME="^lo,docker"), NODES, OK, "^lo"),
        (interfaces(NCCL_SOCKET_IFNAME="=eth"), NODES, FAIL, "no such interface"),
        (interfaces(NCCL_SOCKET_IFNAME="enp"), NODES, FAIL, "no such interface"),
        (interfaces(NCCL_SOCKET_IFNAME="enp"), replace(CPU, nodes=2), OK, "eth0"),
        (interfaces(NCCL_IB_HCA="mlx5_1"), NODES, FAIL, "no such RDMA device"),
        (interfaces(NCCL_IB_HCA="mlx5_0:1"), NODES, OK, "mlx5_0"),
        (interfaces({"mlx5_0:1": "DOWN"}), NODES, WARN, "RDMA port mlx5_0:1: DOWN"),
        (interfaces({"mlx5_0:1": "DOWN"}), GPU, OK, "eth0"),
    ],
)
def test_interfaces_verdict(
    found: network.NetworkInterfaces, requirements: RunRequirements, verdict: CheckVerdict, text: str
) -> None:
    check_findings(network.assess_interfaces(found, requirements), verdicts={verdict}, text=text)


@pytest.mark.parametrize(
    ("place", "requirements", "verdict", "text"),
    [
        (
            network.MasterAddress(addresses=("10.0.0.1",)),
            replace(NODES, address="node0", serves_port=29500),
            OK,
            "port 29500 is free",
        ),
        (
            network.MasterAddress(addresses=()),
            replace(NODES, address="node0"),
            FAIL,
            "MASTER_ADDR=node0 does not resolve",
        ),
        (
            network.MasterAddress(addresses=("127.0.1.1",)),
            replace(NODES, address="node0"),
            FAIL,
            "only one of them can reach it",
        ),
        (network.MasterAddress(addresses=("127.0.0.1",)), replace(GPU, address="localhost"), OK, "localhost"),
        (
            network.MasterAddress(addresses=("10.0.0.1",), taken="Address already in use"),
            replace(NODES, serves_port=29500),
            FAIL,
            "in use",
        ),
    ],
)
def test_master_address_verdict(
    place: network.MasterAddress, requirements: RunRequirements, verdict: CheckVerdict, text: str
) -> None:
    check_findings(network.assess_master_address(place, requirements), verdicts={verdict}, text=text)


def test_occupied_port_is_detected() -> None:
    import socket

    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as held:
        held.bind(("", 0))
        held.listen(1)
        port = held.getsockname()[1]
        assert network.measure_master_address(replace(CPU, serves_port=port)).taken is not None
    assert network.measure_master_address(replace(CPU, serves_port=port)).taken is None


# ---- data


def read(
    problems: tuple[Problem, ...] = (), seconds: float | None = 0.01, note: str | None = None
) -> SimpleNamespace:
    return SimpleNamespace(problems=problems, open_seconds=0.1, read_seconds=seconds, note=note)


def test_unreadable_data_fails() -> None:
    absent = Problem(
        "data.path", "s3://user:word@bucket/x: absent", "the store holds the data", "check data.path"
    )
    check_findings(data.assess(read(), CPU), verdicts={OK}, text="read in 10 ms")
    check_findings(data.assess(read(seconds=9.0), CPU), verdicts={WARN}, text="9.0 s")
    check_findings(data.assess(read(seconds=None, note="made later"), CPU), verdicts={OK}, text="made later")
    message = check_findings(
        data.assess(read((absent,)), CPU), verdicts={FAIL}, text="absent", remedy="check data.path"
    )
    assert "word" not in message[0].evidence


# ---- across machines


def machine(node: int, **traits: str) -> MachineReport:
    return MachineReport(
        node=node, host=f"node{node}", findings=(), traits={"torch": "2.13.0", "GPUs": "H100", **traits}
    )


def test_check_uniformity() -> None:
    assert cross_node.check_uniformity([machine(0)]) == []
    check_findings(
        cross_node.check_uniformity([machine(0), machine(1)]),
        verdicts={OK},
        text="2 machines have the same torch, GPUs",
    )
    check_findings(
        cross_node.check_uniformity([machine(0), machine(1), machine(2, torch="2.12.0")]),
        verdicts={FAIL},
        text="torch: 2.13.0 on node0, node1; 2.12.0 on node2",
    )
    check_findings(
        cross_node.check_uniformity([machine(0), machine(1, GPUs="A100")]),
        verdicts={WARN},
        text="A100 on node1",
    )


@pytest.mark.parametrize(
    ("seconds", "error", "verdict"),
    [(0.02, 0.001, OK), (-0.7, 0.001, WARN), (0.7, 0.3, OK), (400.0, 0.1, FAIL), (-400.0, 0.1, FAIL)],
)
def test_check_clocks(seconds: float, error: float, verdict: CheckVerdict) -> None:
    """An offset within its measurement error is ignored."""
    found = cross_node.check_clocks(
        {"node1": clocks.ClockOffset(0.0, 0.001), "node2": clocks.ClockOffset(seconds, error)}
    )
    check_findings(found, verdicts={verdict}, text="node2")
    assert cross_node.check_clocks({}) == []


def row(slowest: float, fastest: float) -> dict[str, object]:
    return probe_row(
        "tensor",
        operation=ALL_REDUCE,
        ranks=2,
        latency_p50=1e-5,
        latency_p99=2e-5,
        large_bytes=2**26,
        slowest_large=slowest,
        fastest_large=fastest,
        slowest_of=[6, 7],
    )


def test_check_links() -> None:
    check_findings(
        cross_node.check_links([row(0.001, 0.0009)], 1.2),
        verdicts={OK},
        text="tensor (2 ranks): 10 µs (p99 20), bus bandwidth 67.11 GB/s",
    )
    check_findings(
        cross_node.check_links([row(0.003, 0.001)], 1.2), verdicts={OK, WARN}, text="between ranks 6, 7"
    )
    check_findings(
        cross_node.report_failed_rendezvous("rank 1 waited 120 s"),
        verdicts={FAIL},
        text="rank 1",
        remedy="MASTER_ADDR",
    )


def test_check_plan() -> None:
    config = compose(["+exp=quickstart", "zero=stage1"])
    plan = make_plan(config, World(ranks=2, ranks_per_node=2, device=Device.CPU, host_memory_bytes=64 * GIB))
    check_findings(cross_node.check_plan(plan, ()), verdicts={OK}, text="2 ranks")
    check_findings(cross_node.check_plan(replace(plan, memory=None), ()), verdicts={UNKNOWN})
    broken = Problem("zero.stage", "82 GB of states", "they fit on the device", "write zero=stage3")
    check_findings(
        cross_node.check_plan(None, (broken,)), verdicts={FAIL}, text="82 GB", remedy="zero=stage3"
    )


# ---- the report

REPORT = DoctorReport(
    machines=(
        MachineReport(node=0, host="node0", traits={}, findings=(ok("fine"), warn("slow", "cool it"))),
    ),
    cross_machine=(fail("they do not meet", "open the firewall"),),
)


def test_worst_finding_decides_the_verdict() -> None:
    assert REPORT.verdict is FAIL
    assert replace(REPORT, cross_machine=()).verdict is WARN
    assert DoctorReport(machines=(), cross_machine=()).verdict is OK
    assert format_summary(REPORT) == "1 fail, 1 warn, 1 ok: this run would fail"
    assert format_summary(replace(REPORT, cross_machine=())).endswith("ready")
    assert [problem.remedy for problem in find_failures(REPORT)] == ["open the firewall"]


def test_machine_report_survives_json() -> None:
    item = REPORT.machines[0]
    assert MachineReport.from_json(item.to_json()) == item
    message = to_json(REPORT)
    assert (
        message["format_version"],
        message["verdict"],
        message["machines"][0]["findings"][1]["remedy"],
    ) == (1, "fail", "cool it")


# ---- compilers and Transformer Engine


@pytest.mark.parametrize(
    ("tools", "verdict", "text", "remedy"),
    [
        (compilers.BuildTools(nvcc="12.8", torch_cuda="12.6"), OK, "nvcc of CUDA 12.8; libaio", ""),
        (compilers.BuildTools(nvcc="12.8", libaio=False), OK, "no libaio", ""),
        (
            compilers.BuildTools(torch_cuda="13.0", matches=False),
            WARN,
            "no nvcc, and torch was built with CUDA 13.0",
            "CUDA_HOME",
        ),
        (
            compilers.BuildTools(nvcc="12.4", torch_cuda="13.0", matches=False),
            WARN,
            "nvcc of CUDA 12.4, and torch",
            "the CUDA toolkit 13.0",
        ),
        (
            compilers.BuildTools(lacking=("Python.h",), ninja=False),
            WARN,
            "Python.h, ninja: absent",
            "python3-dev",
        ),
    ],
)
def test_build_tools(tools: compilers.BuildTools, verdict: CheckVerdict, text: str, remedy: str) -> None:
    check_findings(compilers.assess_build_tools(tools, GPU), verdicts={verdict}, text=text, remedy=remedy)


def test_transformer_engine_is_checked_for_megatron_on_gpus() -> None:
    megatron = replace(GPU, engine=EngineName.megatron)
    assess = compilers.assess_transformer_engine
    check_findings(assess(("2.11.0", "13.0"), megatron), verdicts={OK}, text="in Megatron-core's range")
    check_findings(assess(("2.20.2", "13.0"), megatron), verdicts={WARN}, text="2.20.2", remedy="core_cu13")
    check_findings(assess((None, "12.8"), megatron), verdicts={WARN}, text="FP8", remedy="core_cu12")
    check_findings(assess((None, None), GPU), verdicts={OK}, text="not used")


def test_measurements_of_this_machine() -> None:
    assert compilers.measure_build_tools(CPU).nvcc is None, "no GPU, no nvcc"
    version, _ = compilers.measure_transformer_engine(CPU)
    assert version is None or version[0].isdigit()
