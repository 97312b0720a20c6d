"""Print the planned memory of one GPU with each way to store activations, as a Markdown table.

    python benchmarks/memory_table.py                          # 1.1 B at 4,096 tokens on one H200, DeepSpeed
    python benchmarks/memory_table.py engine=megatron
    python benchmarks/memory_table.py train.global_batch=16    # further overrides

It only plans; benchmarks/gpu.py compares plans with measured peaks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from toolkit.cluster.world.environment import detect_world, read_launch
from toolkit.config.compose import compose
from toolkit.errors import PlanError
from toolkit.plan import make_plan
from toolkit.plan.flops import hardware_flops, model_flops

MACHINE = ("+exp=bench_1b", "cluster.nodes=1", "cluster.gpus_per_node=1", "cluster.gpu=h200")
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("train.activation_checkpointing=selective",),
    "every second block": ("train.activation_checkpointing=2",),
    "full": ("train.activation_checkpointing=full",),
    "full, inputs on the host": ("train.activation_checkpointing=full", "offload.activations=cpu"),
}
LOSSES = ("plain", "fused")
COLUMNS = (
    "activation checkpointing",
    "loss",
    "states",
    "activations",
    "device",
    "host",
    "hardware / model FLOPs",
)


def row(name: str, loss: str, overrides: Sequence[str]) -> list[str]:
    config = compose([*MACHINE, f"train.loss_kernel={loss}", *overrides])
    try:
        plan = make_plan(config, detect_world(config.cluster, read_launch({}, [])[0]))
    except PlanError as error:
        return [name, loss, *["-"] * 4, f"refused: {error.problems[0].seen}"]
    memory, hardware, model = plan.memory, hardware_flops(plan), model_flops(plan)
    assert memory is not None
    assert memory.activations is not None
    assert hardware is not None
    assert model is not None
    sizes = (memory.states + memory.buffers, memory.activations, memory.device_total, memory.host)
    return [name, loss, *(f"{size / 1e9:.1f}" for size in sizes), f"{hardware / model:.2f}"]


def table(overrides: Sequence[str]) -> str:
    """GB (10^9 bytes) on the rank with the most memory."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for name, own in ACTIVATIONS.items():
        lines += ["| " + " | ".join(row(name, loss, [*own, *overrides])) + " |" for loss in LOSSES]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(sys.argv[1:]))
