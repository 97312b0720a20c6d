"""Every check of the doctor on facts that are well and on facts that are not.

pytest tests/cluster/test_doctor.py
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.cluster.doctor import clocks, cross_node, data, disk, gpus, host, network, software
from toolkit.cluster.doctor.examine import failures
from toolkit.cluster.doctor.show import summary, to_json
from toolkit.cluster.doctor.types import (
    Finding,
    MachineReport,
    Need,
    Report,
    Verdict,
    fail,
    need_of,
    ok,
    warn,
)
from toolkit.config.compose import compose
from toolkit.config.schema import EngineName
from toolkit.errors import Problem
from toolkit.monitor.probe import ALL_REDUCE, probe_row
from toolkit.plan import make_plan
from toolkit.plan.checkpoint_size import checkpoint_bytes
from toolkit.plan.types import Device, World

GIB = 2**30
OK, WARN, FAIL, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
CPU = Need(
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


def judged(
    findings: Iterable[Finding], *, verdicts: set[Verdict], said: str = "", remedy: str = ""
) -> list[Finding]:
    """Each finding that is not well has a remedy; those that are have none."""
    found = list(findings)
    assert {finding.verdict for finding in found} == verdicts, found
    assert all(bool(finding.remedy) == (finding.verdict in (WARN, FAIL)) for finding in found), found
    assert any(said in finding.evidence for finding in found), found
    assert any(remedy in finding.remedy for finding in found), found
    return found


# ---- software

VERSIONS = software.Versions(
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


def with_versions(**versions: str | None) -> software.Versions:
    return replace(
        VERSIONS,
        installed={
            **VERSIONS.installed,
            **{name.replace("_", "-"): value for name, value in versions.items()},
        },
    )


def test_versions_in_their_ranges() -> None:
    judged(software.judge_versions(VERSIONS, GPU), verdicts={OK}, said="CUDA 12.8, NCCL 2.27.3")
    nvidia = with_versions(torch="2.11.0a0+5228986c39.nv25.6")
    judged(software.judge_versions(nvidia, GPU), verdicts={OK})


@pytest.mark.parametrize(
    ("versions", "need", "verdict", "said"),
    [
        (with_versions(deepspeed="0.21.0"), GPU, FAIL, "deepspeed 0.21.0: tested with"),
        (with_versions(torch="2.15.0"), GPU, WARN, "torch 2.15.0"),
        (with_versions(rich=None), GPU, FAIL, "rich is not installed"),
        (replace(VERSIONS, python="3.14.0"), GPU, FAIL, "Python 3.14.0"),
        (replace(VERSIONS, cuda=None), GPU, FAIL, "built without CUDA"),
        (VERSIONS, replace(GPU, engine=EngineName.megatron), FAIL, "megatron-core is not installed"),
    ],
)
def test_versions_out_of_their_ranges(
    versions: software.Versions, need: Need, verdict: Verdict, said: str
) -> None:
    judged(software.judge_versions(versions, need), verdicts={verdict}, said=said)


def test_an_engine_that_the_run_does_not_use_may_be_of_any_version() -> None:
    judged(
        software.judge_versions(with_versions(deepspeed="0.1"), replace(GPU, engine=EngineName.local)),
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
def test_a_secret_in_a_command_line_is_told_and_not_shown(word: str, kind: str) -> None:
    found = software.secrets_in({"this command": ["launch/train.py", word]})
    assert found == [f"{kind} in the command line of this command"]
    told = judged(software.judge_arguments(found, CPU), verdicts={FAIL}, said=kind, remedy="revoke it")
    assert all(word not in finding.evidence + finding.remedy for finding in told)


def test_words_of_a_run_are_no_secrets() -> None:
    words = [
        "launch/train.py",
        "+exp=gpt2_125m",
        "data.path=s3://bucket/corpus",
        "run.name=hf_small",
        "monitor.project=wandb",
    ]
    assert software.secrets_in({"this command": words}) == []
    judged(software.judge_arguments([], CPU), verdicts={OK})


# ---- driver and GPUs

H100 = gpus.Card(
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
DRIVER = gpus.Driver(version="570.86", cuda=(12, 8), built=(12, 8))


@pytest.mark.parametrize(
    ("driver", "need", "verdict", "said"),
    [
        (DRIVER, GPU, OK, "570.86"),
        (replace(DRIVER, built=(12, 9)), GPU, WARN, "CUDA 12.9"),
        (replace(DRIVER, built=(13, 0)), GPU, FAIL, "CUDA 13.0"),
        (replace(DRIVER, built=None), CPU, OK, "570.86"),
        (gpus.Driver(version=None), GPU, FAIL, "no driver"),
        (gpus.Driver(version=None), CPU, OK, "none"),
    ],
)
def test_the_driver(driver: gpus.Driver, need: Need, verdict: Verdict, said: str) -> None:
    judged(gpus.judge_driver(driver, need), verdicts={verdict}, said=said)


def test_gpus_that_are_well() -> None:
    judged(gpus.judge_gpus(EIGHT, GPU), verdicts={OK}, said="8 x NVIDIA H100 80GB HBM3; ECC on")
    judged(gpus.judge_gpus([], CPU), verdicts={OK}, said="CPU ranks")
    judged(
        gpus.judge_gpus([gpus.Card(index=0, name="MIG")], replace(GPU, ranks_per_node=1)),
        verdicts={OK, UNKNOWN},
        said="says nothing",
    )


@pytest.mark.parametrize(
    ("change", "verdict", "said"),
    [
        ({"uncorrected": 2}, FAIL, "GPU 3: 2 uncorrected"),
        ({"remap_failed": True}, FAIL, "failed"),
        ({"remap_pending": True}, WARN, "waits for a reset"),
        ({"persistent": False}, WARN, "persistence mode is off"),
        ({"slowed": ("power brake",)}, WARN, "power brake"),
        ({"used_bytes": 30 * GIB}, FAIL, "50.0 GiB free"),
        ({"used_bytes": 5 * GIB}, WARN, "5.0 GiB are in use"),
        ({"name": "NVIDIA A100-SXM4-80GB"}, WARN, "slowest"),
    ],
)
def test_one_gpu_that_is_not(change: dict[str, object], verdict: Verdict, said: str) -> None:
    cards = [replace(card, **change) if card.index == 3 else card for card in EIGHT]  # type: ignore[arg-type]
    told = " ".join(
        one.evidence + one.remedy for one in judged(gpus.judge_gpus(cards, GPU), verdicts={verdict})
    )
    assert said in told
    judged(
        gpus.judge_gpus(cards, replace(GPU, ranks_per_node=3)), verdicts={OK}
    )  # a GPU that the run does not use


def test_too_few_gpus() -> None:
    judged(gpus.judge_gpus(EIGHT[:7], GPU), verdicts={FAIL}, said="for 8 ranks")
    judged(gpus.judge_gpus([], GPU), verdicts={FAIL}, said="none for 8 ranks")


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
        return 0x80 | 0x4 | 0x1  # a power brake; the power cap and idling do no harm

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return 0


def test_the_fake_has_the_words_of_the_library() -> None:
    real = gpus.load()
    names = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert len(names) > 15
    assert not [name for name in names if not hasattr(real, name)]
    assert not [
        name
        for name in names
        if isinstance(getattr(FakeNvml, name), int) and getattr(FakeNvml, name) != getattr(real, name)
    ]


def test_what_nvml_says() -> None:
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


# ---- the machine besides


@pytest.mark.parametrize(
    ("free", "need", "verdict"),
    [
        (16 * GIB, GPU, OK),
        (512 * 2**20, GPU, WARN),
        (64 * 2**20, GPU, FAIL),
        (64 * 2**20, CPU, OK),
        (64 * 2**20, replace(GPU, ranks_per_node=1), OK),
    ],
)
def test_shared_memory(free: int, need: Need, verdict: Verdict) -> None:
    judged(
        host.judge_shared(host.Shared(16 * GIB, free), need),
        verdicts={verdict},
        remedy="shm-size" if verdict is not OK else "",
    )


def test_host_memory() -> None:
    judged(
        host.judge_memory(host.Memory(64 * GIB, 20 * GIB), CPU), verdicts={OK}, said="the run needs 10.0 GiB"
    )
    judged(host.judge_memory(host.Memory(64 * GIB, 9 * GIB), CPU), verdicts={FAIL}, said="9.0 GiB available")
    judged(
        host.judge_memory(host.Memory(64 * GIB, 9 * GIB), replace(CPU, host_bytes=None)), verdicts={UNKNOWN}
    )


HALVES = (frozenset(range(8)), frozenset(range(8, 16)))


@pytest.mark.parametrize(
    ("cores", "need", "verdict", "said"),
    [
        (host.Cores(usable=frozenset(range(16)), numa=HALVES), GPU, OK, "16 cores on 2 NUMA nodes"),
        (host.Cores(usable=frozenset(range(4)), numa=HALVES), GPU, WARN, "4 cores"),
        (host.Cores(usable=HALVES[0], numa=HALVES), GPU, WARN, "none of NUMA node 1"),
        (host.Cores(usable=HALVES[0], numa=HALVES), CPU, OK, "8 cores"),
        (host.Cores(usable=frozenset(range(16)), numa=HALVES, balancing=True), GPU, WARN, "moves pages"),
    ],
)
def test_cores(cores: host.Cores, need: Need, verdict: Verdict, said: str) -> None:
    judged(host.judge_cores(cores, need), verdicts={verdict}, said=said)


def test_the_kernels_lists_of_cores() -> None:
    assert host.cores_of("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert host.cores_of("\n") == frozenset()


LIMITS = host.Limits(files=65536, files_hard=65536, locked_bytes=None, rdma=True)


@pytest.mark.parametrize(
    ("limits", "need", "verdicts", "said"),
    [
        (LIMITS, NODES, {OK}, "65,536 open files"),
        (replace(LIMITS, files=None), NODES, {OK}, "unlimited"),
        (replace(LIMITS, files=1024), NODES, {WARN, OK}, "1,024"),
        (replace(LIMITS, files=1024), replace(NODES, ranks=512), {FAIL, OK}, "1,024"),
        (replace(LIMITS, locked_bytes=65536), NODES, {FAIL, OK}, "RDMA"),
        (replace(LIMITS, locked_bytes=65536, rdma=False), NODES, {OK}, "no RDMA"),
    ],
)
def test_limits(limits: host.Limits, need: Need, verdicts: set[Verdict], said: str) -> None:
    judged(host.judge_limits(limits, need), verdicts=verdicts, said=said)


def test_a_hard_limit_is_root_s_to_raise() -> None:
    low = host.Limits(files=1024, files_hard=1024, locked_bytes=None, rdma=True)
    judged(host.judge_limits(low, NODES), verdicts={WARN, OK}, remedy="root raises")
    assert not any("root" in one.remedy for one in host.judge_limits(replace(low, files_hard=None), NODES))


# ---- the disk

FAST = disk.Disk(folder="/runs", free_bytes=1000 * GIB, written_bytes=256 * 2**20, seconds=0.1)


@pytest.mark.parametrize(
    ("found", "need", "verdicts", "said"),
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
        (replace(FAST, free_bytes=GIB), replace(CPU, checkpoint_bytes=None), {OK}, "not known"),
        (disk.Disk(folder="/runs", problem="Read-only file system"), CPU, {FAIL}, "Read-only"),
        (
            disk.Disk(folder="/runs", free_bytes=1000),
            replace(CPU, checkpoint_bytes=10),
            {OK, WARN},
            "too full",
        ),
    ],
)
def test_the_disk(found: disk.Disk, need: Need, verdicts: set[Verdict], said: str) -> None:
    judged(disk.judge(found, need), verdicts=verdicts, said=said)


def test_the_disk_is_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MOST_BYTES", 2 * disk.BLOCK_BYTES)
    found = disk.measure(replace(CPU, run_dir=tmp_path / "not" / "there"))
    assert (found.folder, found.written_bytes, found.problem) == (str(tmp_path), 2 * disk.BLOCK_BYTES, None)
    assert found.seconds > 0
    assert not list(tmp_path.iterdir())


def test_a_slow_disk_ends_the_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(
        disk, "time", SimpleNamespace(perf_counter=lambda: float(next(now)))
    )  # a second a look
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    written, seconds = disk.write(tmp_path / "file", 100 * disk.BLOCK_BYTES, 3.0)
    assert (written, seconds) == (2 * disk.BLOCK_BYTES, 4.0)


def test_a_checkpoint_is_reckoned_whatever_the_layout() -> None:
    """Weights of 2 bytes, master weights of 4, two moments of 4: 14 a parameter in bf16, 12 in fp32."""
    for precision, each in (("bf16", 14), ("fp32", 12)):
        config = compose(["+exp=quickstart", f"precision={precision}", "zero=stage1"])
        sizes = set()
        for ranks in (1, 2, 4):
            plan = make_plan(config, World(ranks=ranks, ranks_per_node=ranks, device=Device.CPU))
            sizes.add(checkpoint_bytes(plan))
        assert sizes == {each * sum(spec.numel for spec in plan.parameters)}


def test_what_a_run_needs_of_a_machine() -> None:
    config = compose(["+exp=quickstart", "zero=stage1"])
    world = World(ranks=8, ranks_per_node=2, device=Device.CPU)
    plan = make_plan(config, world)
    assert plan.memory is not None
    need = need_of(config, world, plan)
    assert (need.nodes, need.host_bytes, need.device_bytes) == (4, 2 * plan.memory.device_total, None)
    behind = compose(["+exp=quickstart", "zero=stage1", "checkpoint.background=true"])
    saved = checkpoint_bytes(plan)
    assert saved is not None
    assert (
        need_of(behind, world, make_plan(behind, world)).host_bytes
        == 2 * plan.memory.device_total + saved // 4
    )
    assert need_of(config, world, None).checkpoint_bytes is None


# ---- the network


@pytest.mark.parametrize(
    ("name", "need", "verdict"),
    [
        (network.Name("node1", ("10.0.0.1",)), NODES, OK),
        (network.Name("node1", ()), NODES, WARN),
        (network.Name("node1", ()), GPU, OK),
        (network.Name("node1", ("127.0.1.1",)), NODES, WARN),
        (network.Name("node1", ("127.0.1.1",)), GPU, OK),
    ],
)
def test_the_machine_s_name(name: network.Name, need: Need, verdict: Verdict) -> None:
    judged(network.judge_name(name, need), verdicts={verdict}, said="node1")


UP = {"lo": True, "eth0": True, "eth1": False, "ib0": True}


def interfaces(rdma: dict[str, str] | None = None, **chosen: str) -> network.Interfaces:
    return network.Interfaces(up=UP, rdma={"mlx5_0:1": "ACTIVE"} if rdma is None else rdma, chosen=chosen)


@pytest.mark.parametrize(
    ("found", "need", "verdict", "said"),
    [
        (interfaces(), NODES, OK, "none is chosen"),
        (interfaces(GLOO_SOCKET_IFNAME="eth0"), NODES, OK, "GLOO_SOCKET_IFNAME=eth0"),
        (interfaces(GLOO_SOCKET_IFNAME="eth"), NODES, FAIL, "no such interface"),
        (interfaces(GLOO_SOCKET_IFNAME="eth1"), NODES, FAIL, "it is down"),
        (interfaces(GLOO_SOCKET_IFNAME="lo"), NODES, FAIL, "over the loopback"),
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
def test_interfaces(found: network.Interfaces, need: Need, verdict: Verdict, said: str) -> None:
    judged(network.judge_interfaces(found, need), verdicts={verdict}, said=said)


@pytest.mark.parametrize(
    ("place", "need", "verdict", "said"),
    [
        (
            network.Place(addresses=("10.0.0.1",)),
            replace(NODES, address="node0", serves_port=29500),
            OK,
            "port 29500 is free",
        ),
        (
            network.Place(addresses=()),
            replace(NODES, address="node0"),
            FAIL,
            "MASTER_ADDR=node0 does not resolve",
        ),
        (
            network.Place(addresses=("127.0.1.1",)),
            replace(NODES, address="node0"),
            FAIL,
            "only one of them reaches it",
        ),
        (network.Place(addresses=("127.0.0.1",)), replace(GPU, address="localhost"), OK, "localhost"),
        (
            network.Place(addresses=("10.0.0.1",), taken="Address already in use"),
            replace(NODES, serves_port=29500),
            FAIL,
            "in use",
        ),
    ],
)
def test_the_meeting_place(place: network.Place, need: Need, verdict: Verdict, said: str) -> None:
    judged(network.judge_place(place, need), verdicts={verdict}, said=said)


def test_a_port_that_is_taken_is_found() -> None:
    import socket

    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as held:
        held.bind(("", 0))
        held.listen(1)
        port = held.getsockname()[1]
        assert network.measure_place(replace(CPU, serves_port=port)).taken is not None
    assert network.measure_place(replace(CPU, serves_port=port)).taken is None


# ---- data


def read(
    problems: tuple[Problem, ...] = (), seconds: float | None = 0.01, note: str | None = None
) -> SimpleNamespace:
    return SimpleNamespace(problems=problems, open_seconds=0.1, read_seconds=seconds, note=note)


def test_data() -> None:
    absent = Problem(
        "data.path", "s3://user:word@bucket/x: absent", "the store holds the data", "check data.path"
    )
    judged(data.judge(read(), CPU), verdicts={OK}, said="read in 10 ms")
    judged(data.judge(read(seconds=9.0), CPU), verdicts={WARN}, said="9.0 s")
    judged(data.judge(read(seconds=None, note="made later"), CPU), verdicts={OK}, said="made later")
    told = judged(data.judge(read((absent,)), CPU), verdicts={FAIL}, said="absent", remedy="check data.path")
    assert "word" not in told[0].evidence


# ---- together


def machine(node: int, **traits: str) -> MachineReport:
    return MachineReport(
        node=node, host=f"node{node}", findings=(), traits={"torch": "2.13.0", "GPUs": "H100", **traits}
    )


def test_machines_that_are_alike_or_not() -> None:
    assert cross_node.alike([machine(0)]) == []
    judged(
        cross_node.alike([machine(0), machine(1)]), verdicts={OK}, said="2 machines have the same torch, GPUs"
    )
    judged(
        cross_node.alike([machine(0), machine(1), machine(2, torch="2.12.0")]),
        verdicts={FAIL},
        said="torch: 2.13.0 on node0, node1; 2.12.0 on node2",
    )
    judged(cross_node.alike([machine(0), machine(1, GPUs="A100")]), verdicts={WARN}, said="A100 on node1")


@pytest.mark.parametrize(
    ("seconds", "error", "verdict"),
    [(0.02, 0.001, OK), (-0.7, 0.001, WARN), (0.7, 0.3, OK), (400.0, 0.1, FAIL), (-400.0, 0.1, FAIL)],
)
def test_clocks(seconds: float, error: float, verdict: Verdict) -> None:
    """An offset that lies within the error of its measurement is none."""
    found = cross_node.clocks({"node1": clocks.Offset(0.0, 0.001), "node2": clocks.Offset(seconds, error)})
    judged(found, verdicts={verdict}, said="node2")
    assert cross_node.clocks({}) == []


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


def test_links() -> None:
    judged(
        cross_node.links([row(0.001, 0.0009)], 1.2),
        verdicts={OK},
        said="tensor (2 ranks): 10 µs (p99 20), bus bandwidth 67.11 GB/s",
    )
    judged(cross_node.links([row(0.003, 0.001)], 1.2), verdicts={OK, WARN}, said="between ranks 6, 7")
    judged(cross_node.not_met("rank 1 waited 120 s"), verdicts={FAIL}, said="rank 1", remedy="MASTER_ADDR")


def test_the_plan() -> None:
    config = compose(["+exp=quickstart", "zero=stage1"])
    plan = make_plan(config, World(ranks=2, ranks_per_node=2, device=Device.CPU, host_memory_bytes=64 * GIB))
    judged(cross_node.of_plan(plan, ()), verdicts={OK}, said="2 ranks")
    judged(cross_node.of_plan(replace(plan, memory=None), ()), verdicts={UNKNOWN})
    broken = Problem("zero.stage", "82 GB of states", "they fit on the device", "write zero=stage3")
    judged(cross_node.of_plan(None, (broken,)), verdicts={FAIL}, said="82 GB", remedy="zero=stage3")


# ---- the report

REPORT = Report(
    machines=(
        MachineReport(node=0, host="node0", traits={}, findings=(ok("fine"), warn("slow", "cool it"))),
    ),
    together=(fail("they do not meet", "open the firewall"),),
)


def test_the_worst_decides() -> None:
    assert REPORT.verdict is FAIL
    assert replace(REPORT, together=()).verdict is WARN
    assert Report(machines=(), together=()).verdict is OK
    assert summary(REPORT) == "1 fail, 1 warn, 1 ok: this run would fail"
    assert summary(replace(REPORT, together=())).endswith("ready")
    assert [problem.remedy for problem in failures(REPORT)] == ["open the firewall"]


def test_what_machines_say_crosses_the_store_whole() -> None:
    one = REPORT.machines[0]
    assert MachineReport.from_json(one.to_json()) == one
    told = to_json(REPORT)
    assert (told["format_version"], told["verdict"], told["machines"][0]["findings"][1]["remedy"]) == (
        1,
        "fail",
        "cool it",
    )
