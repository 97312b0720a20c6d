"""Who started this process and what world that makes, on fabricated launches and machines.

pytest tests/cluster/test_environment.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.cluster.environment import (
    Launch,
    Launcher,
    check_startable,
    detect_world,
    is_elastic,
    read_launch,
    set_cuda_defaults,
    set_defaults,
)
from toolkit.cluster.machine import Gpu, Machine, this_machine, visible
from toolkit.config.cluster import ClusterConfig
from toolkit.config.schema import EngineName, Precision
from toolkit.errors import ConfigError
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.testing.tiny import tiny_config

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, "GPU-h100")
A100 = Gpu("NVIDIA A100-SXM4-40GB", 40 * GIB, "GPU-a100")
CPU_MACHINE = Machine(cores=16, host_memory_bytes=64 * GIB)
EIGHT_H100 = Machine(
    cores=64, gpus=(H100,) * 8, host_memory_bytes=2048 * GIB, has_libaio=True, has_compiler=True
)

TORCHRUN = {
    "RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
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


def test_torchrun() -> None:
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


@pytest.mark.parametrize(
    ("environ", "words", "elastic"),
    [
        ({}, ["python", "torchrun", "--nnodes=1:2", "launch/train.py"], True),
        ({}, ["python", "-m", "torch.distributed.run", "--nnodes", "2:4", "launch/train.py"], True),
        ({}, ["python", "torchrun", "--nnodes=2:2", "launch/train.py"], False),
        ({}, ["python", "torchrun", "--nnodes=2", "launch/train.py"], False),
        ({}, ["python", "torchrun", "launch/train.py"], False),
        ({"PET_NNODES": "1:8"}, ["python", "torchrun", "launch/train.py"], True),
        ({"PET_NNODES": "1:8"}, ["python", "torchrun", "--nnodes=2", "launch/train.py"], False),
    ],
)
def test_a_range_of_nodes_makes_torchrun_elastic(
    environ: dict[str, str], words: list[str], elastic: bool
) -> None:
    assert is_elastic(environ, words) is elastic


@pytest.mark.parametrize("spelling", ["--local_rank=1", "--local-rank=1"])
def test_deepspeed_and_its_argument(spelling: str) -> None:
    launch, rest = read_launch(DEEPSPEED, [spelling, "+exp=quickstart", "monitor.prompt='a, b'"])
    assert launch == Launch(
        launcher=Launcher.DEEPSPEED, rank=1, local_rank=1, ranks=2, ranks_per_node=2, port=29500
    )
    assert rest == ["+exp=quickstart", "monitor.prompt='a, b'"]


def test_our_parent() -> None:
    environ = {name: value for name, value in DEEPSPEED.items() if not name.startswith("CROSS")}
    launch, rest = read_launch(environ, ["--handover=/runs/a=b/handover.json"])
    assert (launch.launcher, launch.handover, rest) == (Launcher.PARENT, Path("/runs/a=b/handover.json"), [])


def test_another_launcher_that_sets_torch_variables() -> None:
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
def test_half_a_launcher_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_launch({**DEEPSPEED, name: value}, [])


# ---- the world


def test_a_cpu_machine() -> None:
    assert detect_world(ClusterConfig(), Launch(), CPU_MACHINE) == World(
        ranks=1, ranks_per_node=1, device=Device.CPU, host_memory_bytes=64 * GIB
    )
    assert detect_world(ClusterConfig(cpu_ranks=3), Launch(), CPU_MACHINE).ranks == 3


def test_gpus_of_this_machine() -> None:
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


def test_unlike_or_unknown_gpus_are_not_guessed() -> None:
    mixed = Machine(cores=8, gpus=(H100, A100))
    assert detect_world(ClusterConfig(), Launch(), mixed).gpu is None
    assert detect_world(ClusterConfig(), Launch(), mixed).device_memory_bytes == 40 * GIB
    unknown = Machine(cores=8, gpus=(Gpu("NVIDIA Z9", None),))
    assert detect_world(ClusterConfig(), Launch(), unknown).device_memory_bytes is None


def test_a_described_world_is_planned_and_not_started() -> None:
    cluster = ClusterConfig(nodes=8, gpus_per_node=8, gpu="h100")
    world = detect_world(cluster, Launch(), CPU_MACHINE)
    assert world == World(
        ranks=64, ranks_per_node=8, device=Device.CUDA, gpu="h100", has_libaio=True, has_compiler=True
    )
    assert world.nodes == 8
    with pytest.raises(ConfigError) as refused:
        check_startable(cluster, Launch(), CPU_MACHINE)
    assert [problem.key for problem in refused.value.problems] == [
        "cluster.nodes",
        "cluster.gpus_per_node",
        "cluster.gpu",
    ]


def test_a_described_gpu_that_is_not_here_has_no_measured_memory() -> None:
    assert detect_world(ClusterConfig(gpu="a100-40gb"), Launch(), EIGHT_H100).device_memory_bytes is None
    assert detect_world(ClusterConfig(nodes=2), Launch(), EIGHT_H100).device_memory_bytes == 80 * GIB


def test_what_is_here_starts() -> None:
    check_startable(ClusterConfig(), Launch(), CPU_MACHINE)
    check_startable(ClusterConfig(nodes=1, gpus_per_node=8, gpu="H100"), Launch(), EIGHT_H100)


def test_a_torch_without_cuda_is_refused_on_gpus() -> None:
    machine = Machine(cores=8, gpus=(H100,), torch_has_cuda=False)
    with pytest.raises(ConfigError, match="gpus_per_node=0"):
        check_startable(ClusterConfig(), Launch(), machine)
    check_startable(ClusterConfig(gpus_per_node=0), Launch(), machine)


# ---- under a launcher


def test_what_a_launcher_started_is_the_world() -> None:
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
def test_a_written_cluster_that_differs_is_refused(
    cluster: ClusterConfig, launch: Launch, machine: Machine, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        detect_world(cluster, launch, machine)


def test_a_thousand_ranks_agree_on_their_world() -> None:
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
def test_visible_gpus(selection: str | None, expected: tuple[Gpu, ...]) -> None:
    assert visible((H100, A100), selection) == expected


def test_a_slice_of_a_gpu_is_a_gpu_of_unknown_memory() -> None:
    assert visible((H100,), "MIG-1234") == (Gpu("MIG", None, "MIG-1234"),)


def test_this_machine() -> None:
    machine = this_machine({"CUDA_VISIBLE_DEVICES": ""})
    assert machine.cores >= 1
    assert machine.gpus == ()
    assert machine.host_memory_bytes is not None
    assert machine.host_memory_bytes > 2**28


def test_defaults_leave_what_the_user_set() -> None:
    world = World(ranks=2, ranks_per_node=2, device=Device.CPU)
    environ: dict[str, str] = {}
    set_defaults(environ, Launch(), world, CPU_MACHINE, None)
    assert (
        environ["OMP_NUM_THREADS"],
        environ["TORCHDYNAMO_DISABLE"],
        environ["TOKENIZERS_PARALLELISM"],
    ) == ("8", "1", "false")
    environ = {"OMP_NUM_THREADS": "3", "TORCHDYNAMO_DISABLE": "0", "RANK": "1"}
    set_defaults(environ, Launch(), world, CPU_MACHINE, None)
    assert (environ["OMP_NUM_THREADS"], environ["TORCHDYNAMO_DISABLE"], environ["RANK"]) == ("3", "0", "1")
    set_defaults(environ, Launch(), world, CPU_MACHINE, 5)
    assert environ["OMP_NUM_THREADS"] == "5"


def test_a_cpu_run_hides_the_gpus_it_was_told_to_leave() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    set_defaults(environ, Launch(), World(ranks=1, ranks_per_node=1, device=Device.CPU), EIGHT_H100, None)
    assert environ["CUDA_VISIBLE_DEVICES"] == ""


def test_on_gpus_collectives_are_remembered_for_the_report_of_a_hang() -> None:
    world = World(ranks=8, ranks_per_node=8, device=Device.CUDA)
    environ: dict[str, str] = {}
    set_defaults(environ, Launch(), world, EIGHT_H100, None)
    assert environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    environ = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "50"}
    set_defaults(environ, Launch(), world, EIGHT_H100, None)
    assert "TORCH_FR_BUFFER_SIZE" not in environ, "the older name stays in force"


@pytest.mark.parametrize(
    ("engine", "tensor", "device", "expected"),
    [
        (EngineName.megatron, 2, Device.CUDA, "1"),
        (EngineName.megatron, 1, Device.CUDA, None),
        (EngineName.megatron, 2, Device.CPU, None),
        (EngineName.deepspeed, 2, Device.CUDA, None),
    ],
)
def test_megatron_tensor_parallelism_on_gpus_uses_a_single_cuda_queue(
    engine: EngineName, tensor: int, device: Device, expected: str | None
) -> None:
    config = tiny_config(
        engine__name=engine, parallel__tensor=tensor, zero__stage=1, precision__name=Precision.bf16
    )
    gpu = "h100" if device is Device.CUDA else None
    plan = make_plan(config, World(ranks=2, ranks_per_node=2, device=device, gpu=gpu, has_compiler=True))
    environ: dict[str, str] = {}
    set_cuda_defaults(environ, plan)
    assert environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    set_cuda_defaults(environ, plan)
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8", "the user's setting stays"
