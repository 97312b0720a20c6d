"""Detection of launcher and world, on fabricated launches and machines."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.cluster.world.environment import Launch, Launcher, check_startable, detect_world, read_launch
from toolkit.cluster.world.machine_info import (
    GpuInfo,
    MachineInfo,
    detect_machine,
    nvcc_version,
    select_visible_gpus,
)
from toolkit.cluster.world.node_range import NodeRange
from toolkit.cluster.world.process_environment import add_ninja_to_path, set_cuda_defaults, set_defaults
from toolkit.config.cluster import ClusterConfig
from toolkit.config.schema import EngineName, Precision
from toolkit.errors import ConfigError
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.testing.tiny import tiny_config

GIB = 2**30
H100 = GpuInfo("NVIDIA H100 80GB HBM3", 80 * GIB, "GPU-h100")
A100 = GpuInfo("NVIDIA A100-SXM4-40GB", 40 * GIB, "GPU-a100")
CPU_MACHINE = MachineInfo(cores=16, host_memory_bytes=64 * GIB)
EIGHT_H100 = MachineInfo(
    cores=64, gpus=(H100,) * 8, host_memory_bytes=2048 * GIB, has_libaio=True, has_compiler=True
)

TORCHRUN = {
    "RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0",
    "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


def launched(
    launcher: Launcher = Launcher.TORCHELASTIC, *, ranks: int = 2, per_node: int | None = None, rank: int = 0
) -> Launch:
    per_node = per_node or ranks
    return Launch(
        launcher=launcher,
        rank=rank,
        local_rank=rank % per_node,
        ranks=ranks,
        ranks_per_node=per_node,
        port=29500,
    )


def test_plain_python_is_one_process() -> None:
    assert read_launch({"PATH": "/bin"}, ["+exp=quickstart", "train.steps=3"]) == (
        Launch(),
        ["+exp=quickstart", "train.steps=3"],
    )


def test_read_torchrun_launch() -> None:
    launch, rest = read_launch(TORCHRUN, ["a=1"])
    assert launch == Launch(
        launcher=Launcher.TORCHELASTIC,
        rank=9,
        local_rank=1,
        ranks=16,
        ranks_per_node=8,
        address="node0",
        port=29400,
        agent_store=True,
        restart=2,
        restarts_left=1,
    )
    assert (launch.nodes, launch.node, rest) == (2, 1, ["a=1"])


@pytest.mark.parametrize(("nodes", "accepted"), [(2, True), (4, True), (1, False), (5, False)])
def test_elastic_launch_may_have_another_number_of_nodes_than_the_configuration(
    nodes: int, accepted: bool
) -> None:
    """``cluster.nodes`` counts the nodes of the whole cluster, and the run may have lost one of them."""
    launch = replace(launched(ranks=3, per_node=1), node_range=NodeRange(2, 4))
    with nullcontext() if accepted else pytest.raises(ConfigError, match=f"cluster.nodes={nodes}"):
        assert detect_world(ClusterConfig(nodes=nodes), launch, CPU_MACHINE).nodes == 3


@pytest.mark.parametrize("spelling", ["--local_rank=1", "--local-rank=1"])
def test_read_deepspeed_launch_and_remove_its_argument(spelling: str) -> None:
    """honeybee#24, hydra#2038: Hydra rejects the launcher's --local_rank."""
    launch, rest = read_launch(DEEPSPEED, [spelling, "+exp=quickstart", "monitor.prompt='a, b'"])
    assert launch == Launch(
        launcher=Launcher.DEEPSPEED, rank=1, local_rank=1, ranks=2, ranks_per_node=2, port=29500
    )
    assert rest == ["+exp=quickstart", "monitor.prompt='a, b'"]


def test_read_supervisor_launch() -> None:
    environ = {name: value for name, value in DEEPSPEED.items() if not name.startswith("CROSS")}
    launch, rest = read_launch(environ, ["--handover=/runs/a=b/handover.json"])
    assert (launch.launcher, launch.handover, rest) == (
        Launcher.SUPERVISOR,
        Path("/runs/a=b/handover.json"),
        [],
    )


def test_read_launch_of_unknown_launcher() -> None:
    environ = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "n0",
        "MASTER_PORT": "1234",
    }
    launch, _ = read_launch(environ, [])
    assert (launch.launcher, launch.local_rank, launch.node, launch.agent_store) == (
        Launcher.OTHER,
        1,
        1,
        False,
    )


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", ""), ("MASTER_PORT", ""), ("RANK", "x")])
def test_incomplete_launcher_variables_are_rejected(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_launch({**DEEPSPEED, name: value}, [])


# ---- the world


def test_world_of_a_cpu_machine() -> None:
    assert detect_world(ClusterConfig(), Launch(), CPU_MACHINE) == World(
        ranks=1, ranks_per_node=1, device=Device.CPU, host_memory_bytes=64 * GIB
    )
    assert detect_world(ClusterConfig(cpu_ranks=3), Launch(), CPU_MACHINE).ranks == 3


def test_world_uses_local_gpus() -> None:
    assert detect_world(ClusterConfig(), Launch(), EIGHT_H100) == World(
        ranks=8,
        ranks_per_node=8,
        device=Device.CUDA,
        gpu="h100",
        device_memory_bytes=80 * GIB,
        host_memory_bytes=2048 * GIB,
        has_libaio=True,
        has_compiler=True,
    )
    assert detect_world(ClusterConfig(gpus_per_node=2), Launch(), EIGHT_H100).ranks == 2
    on_cpu = detect_world(ClusterConfig(gpus_per_node=0, cpu_ranks=4), Launch(), EIGHT_H100)
    assert (on_cpu.ranks, on_cpu.device, on_cpu.gpu, on_cpu.device_memory_bytes) == (
        4,
        Device.CPU,
        None,
        None,
    )


def test_mixed_or_unknown_gpus_have_no_type() -> None:
    mixed = MachineInfo(cores=8, gpus=(H100, A100))
    assert detect_world(ClusterConfig(), Launch(), mixed).gpu is None
    assert detect_world(ClusterConfig(), Launch(), mixed).device_memory_bytes == 40 * GIB
    unknown = MachineInfo(cores=8, gpus=(GpuInfo("NVIDIA Z9", None),))
    assert detect_world(ClusterConfig(), Launch(), unknown).device_memory_bytes is None


def test_described_world_can_be_planned_but_not_started() -> None:
    cluster = ClusterConfig(nodes=8, gpus_per_node=8, gpu="h100")
    world = detect_world(cluster, Launch(), CPU_MACHINE)
    assert world == World(
        ranks=64,
        ranks_per_node=8,
        device=Device.CUDA,
        gpu="h100",
        has_libaio=True,
        has_compiler=True,
        has_nvcc=True,
    )
    assert world.nodes == 8
    with pytest.raises(ConfigError) as refused:
        check_startable(cluster, Launch(), CPU_MACHINE)
    assert [problem.key for problem in refused.value.problems] == [
        "cluster.nodes",
        "cluster.gpus_per_node",
        "cluster.gpu",
    ]


def test_remote_gpu_has_no_measured_memory() -> None:
    assert detect_world(ClusterConfig(gpu="a100-40gb"), Launch(), EIGHT_H100).device_memory_bytes is None
    assert detect_world(ClusterConfig(nodes=2), Launch(), EIGHT_H100).device_memory_bytes == 80 * GIB


def test_local_machine_is_startable() -> None:
    check_startable(ClusterConfig(), Launch(), CPU_MACHINE)
    check_startable(ClusterConfig(nodes=1, gpus_per_node=8, gpu="H100"), Launch(), EIGHT_H100)


def test_torch_without_cuda_is_rejected_on_gpus() -> None:
    machine = MachineInfo(cores=8, gpus=(H100,), torch_has_cuda=False)
    with pytest.raises(ConfigError, match="gpus_per_node=0"):
        check_startable(ClusterConfig(), Launch(), machine)
    check_startable(ClusterConfig(gpus_per_node=0), Launch(), machine)


# ---- under a launcher


def test_launcher_determines_the_world() -> None:
    """DeepSpeed#6914, #3228: the world is read as one rank."""
    assert detect_world(ClusterConfig(), launched(ranks=4), CPU_MACHINE).ranks == 4
    world = detect_world(ClusterConfig(), launched(ranks=16, per_node=8), EIGHT_H100)
    assert (world.ranks, world.ranks_per_node, world.nodes, world.device) == (16, 8, 2, Device.CUDA)
    assert (
        detect_world(
            ClusterConfig(nodes=2, gpus_per_node=8, gpu="h100"), launched(ranks=16, per_node=8), EIGHT_H100
        )
        == world
    )


@pytest.mark.parametrize(
    ("cluster", "launch", "machine", "named"),
    [
        (ClusterConfig(nodes=4), launched(ranks=2), CPU_MACHINE, "cluster.nodes=4"),
        (ClusterConfig(gpus_per_node=4), launched(ranks=8), EIGHT_H100, "cluster.gpus_per_node=4"),
        (ClusterConfig(gpus_per_node=2), launched(ranks=2), CPU_MACHINE, "sees 0 GPUs"),
        (ClusterConfig(cpu_ranks=4), launched(ranks=2), CPU_MACHINE, "cluster.cpu_ranks=4"),
        (ClusterConfig(gpu="a100-80gb"), launched(ranks=8), EIGHT_H100, "cluster.gpu=a100-80gb"),
        (ClusterConfig(), launched(ranks=9, rank=8), EIGHT_H100, "9 ranks on a node with 8 visible GPUs"),
    ],
)
def test_cluster_keys_that_contradict_the_launcher_are_rejected(
    cluster: ClusterConfig, launch: Launch, machine: MachineInfo, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        detect_world(cluster, launch, machine)


def test_thousand_ranks_detect_the_same_world() -> None:
    worlds = {
        detect_world(ClusterConfig(), launched(ranks=1024, per_node=8, rank=rank), EIGHT_H100)
        for rank in range(1024)
    }
    assert len(worlds) == 1


# ---- the machine


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (None, (H100, A100)),
        ("1", (A100,)),
        ("1,0", (A100, H100)),
        ("", ()),
        ("-1", ()),
        ("GPU-a", (A100,)),
        ("0,7,1", (H100,)),
    ],
)
def test_select_visible_gpus(selection: str | None, expected: tuple[GpuInfo, ...]) -> None:
    assert select_visible_gpus((H100, A100), selection) == expected


def test_mig_slice_has_unknown_memory() -> None:
    assert select_visible_gpus((H100,), "MIG-1234") == (GpuInfo("MIG", None, "MIG-1234"),)


def test_detect_machine() -> None:
    machine = detect_machine({"CUDA_VISIBLE_DEVICES": ""})
    assert machine.cores >= 1
    assert machine.gpus == ()
    assert machine.host_memory_bytes is not None
    assert machine.host_memory_bytes > 2**28


def test_nvcc_is_found_where_torch_looks_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "cuda" / "bin"
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    assert nvcc_version({"CUDA_HOME": str(tmp_path / "cuda"), "PATH": ""}) == "12.8"
    assert nvcc_version({"PATH": str(folder)}) == "12.8"
    assert nvcc_version({"CUDA_HOME": str(tmp_path), "PATH": str(folder)}) is None, "CUDA_HOME comes first"


@pytest.mark.parametrize(
    ("nvcc", "cuda", "has"), [("12.8", "12.6", True), ("12.8", "13.0", False), (None, "13.0", False)]
)
def test_nvcc_has_the_major_version_of_torch(nvcc: str | None, cuda: str, has: bool) -> None:
    machine = MachineInfo(cores=8, gpus=(H100,), nvcc=nvcc, torch_cuda=cuda, transformer_engine="2.11.0")
    here = detect_world(ClusterConfig(), Launch(), machine)
    assert (here.has_nvcc, here.nvcc, here.torch_cuda, here.transformer_engine) == (has, nvcc, cuda, "2.11.0")
    elsewhere = detect_world(ClusterConfig(nodes=4, gpus_per_node=8), Launch(), machine)
    assert elsewhere.has_nvcc, "other machines are checked when the run starts there"
    assert elsewhere.nvcc is None


def test_ninja_of_this_python_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    ninja = tmp_path / "bin" / "ninja"
    ninja.touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    environ = {"PATH": "/nowhere"}
    add_ninja_to_path(environ)
    assert environ["PATH"] == f"/nowhere:{tmp_path / 'bin'}"
    add_ninja_to_path(environ)
    assert environ["PATH"] == f"/nowhere:{tmp_path / 'bin'}", "it is in PATH already"


def test_defaults_keep_user_variables() -> None:
    world = World(ranks=2, ranks_per_node=2, device=Device.CPU)
    environ: dict[str, str] = {}
    set_defaults(environ, Launch(), world, CPU_MACHINE, None)
    assert (
        environ["OMP_NUM_THREADS"],
        environ["TORCHDYNAMO_DISABLE"],
        environ["TOKENIZERS_PARALLELISM"],
    ) == ("8", "1", "false")
    environ = {}
    set_defaults(environ, Launch(), world, CPU_MACHINE, None, compiles=True)
    assert "TORCHDYNAMO_DISABLE" not in environ, "it would turn compile=layers off"
    environ = {"OMP_NUM_THREADS": "3", "TORCHDYNAMO_DISABLE": "0", "RANK": "1"}
    set_defaults(environ, Launch(), world, CPU_MACHINE, None)
    assert (environ["OMP_NUM_THREADS"], environ["TORCHDYNAMO_DISABLE"], environ["RANK"]) == ("3", "0", "1")
    set_defaults(environ, Launch(), world, CPU_MACHINE, 5)
    assert environ["OMP_NUM_THREADS"] == "5"


def test_cpu_run_hides_gpus() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    set_defaults(environ, Launch(), World(ranks=1, ranks_per_node=1, device=Device.CPU), EIGHT_H100, None)
    assert environ["CUDA_VISIBLE_DEVICES"] == environ["HIP_VISIBLE_DEVICES"] == ""


def test_gpu_run_enables_flight_recorder() -> None:
    world = World(ranks=8, ranks_per_node=8, device=Device.CUDA)
    environ: dict[str, str] = {}
    set_defaults(environ, Launch(), world, EIGHT_H100, None)
    assert environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    environ = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "50"}
    set_defaults(environ, Launch(), world, EIGHT_H100, None)
    assert "TORCH_FR_BUFFER_SIZE" not in environ, "the older name stays in force"


@pytest.mark.parametrize(
    ("engine", "axis", "gpu", "expected"),
    [
        (EngineName.megatron, "tensor", "h100", "1"),
        (EngineName.megatron, "context", "h100", "1"),
        (EngineName.megatron, "tensor", None, "1"),
        (EngineName.megatron, "tensor", "b200", None),
        (EngineName.megatron, "pipeline", "h100", None),
        (EngineName.megatron, "tensor", "cpu", None),
        (EngineName.deepspeed, "tensor", "h100", None),
    ],
)
def test_megatron_tensor_and_context_parallelism_use_a_single_cuda_queue(
    engine: EngineName, axis: str, gpu: str | None, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {f"parallel__{axis}": 2, "zero__stage": 1, "precision__name": Precision.bf16}
    device, gpu = (Device.CPU, None) if gpu == "cpu" else (Device.CUDA, gpu)
    plan = make_plan(
        tiny_config(engine__name=engine, **settings),
        World(ranks=2, ranks_per_node=2, device=device, gpu=gpu, has_compiler=True),
    )
    environ: dict[str, str] = {}
    set_cuda_defaults(environ, plan)
    assert environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected
    assert not caplog.messages
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    set_cuda_defaults(environ, plan)
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8", "the user's setting stays"
    assert any("needs 1" in message for message in caplog.messages) == (expected is not None)


@pytest.mark.parametrize(
    ("device", "own", "environ", "expected"),
    [
        (Device.CUDA, {}, {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (Device.CPU, {}, {}, {}),
        *(
            (Device.CUDA, {}, {name: "max_split_size_mb:64"}, {name: "max_split_size_mb:64"})
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        ),
        (Device.CUDA, {"nccl_ub": True}, {}, {}),
    ],
)
def test_gpu_ranks_use_expandable_segments_unless_the_user_or_the_engine_needs_others(
    device: Device, own: dict[str, object], environ: dict[str, str], expected: dict[str, str]
) -> None:
    world = World(ranks=1, ranks_per_node=1, device=device, gpu="h100" if device is Device.CUDA else None)
    plan = make_plan(tiny_config(engine__name=EngineName.megatron, precision__name=Precision.bf16), world)
    plan.config.engine.megatron.update(
        own
    )  # after the plan, which refuses some of them without their packages
    set_cuda_defaults(environ, plan)
    assert environ == expected
