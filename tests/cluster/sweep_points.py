"""Points of a sweep for tests, created by Hydra's sweeper and the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.cluster.sweep.points import make_points
from toolkit.cluster.world.machine_info import GpuInfo, MachineInfo
from toolkit.config.multirun import BatchRunner, read_sweep, run_sweeper

GIB = 2**30
TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train.py"
MADE: dict[tuple[tuple[str, ...], MachineInfo], list[Any]] = {}
LAPTOP = MachineInfo(cores=4, host_memory_bytes=16 * GIB)
H100S = tuple(GpuInfo("NVIDIA H100 80GB HBM3", 80 * GIB, f"GPU-{number}") for number in range(8))
EIGHT = MachineInfo(cores=64, gpus=H100S, host_memory_bytes=2**40)


def batches(*typed: str, folder: Path = Path("sweeps/x")) -> list[list[tuple[str, ...]]]:
    """Return the batches that Hydra's sweeper creates from the arguments."""
    made: list[list[tuple[str, ...]]] = []
    run_sweeper(
        read_sweep(["-m", *typed]),
        folder,
        BatchRunner(lambda batch: made.append(list(batch)) or [0.0] * len(batch)),
    )  # type: ignore[func-returns-value]
    return made


def points(*typed: str, machine: MachineInfo = LAPTOP, folder: Path) -> list[Any]:
    """Create points, cached because composing takes a tenth of a second per point."""
    if (typed, machine) not in MADE:
        words = read_sweep(["-m", *typed])
        MADE[typed, machine] = make_points(
            batches(*typed, folder=folder)[0], words, Path("/sweeps/here"), machine, TRAIN
        )
    return MADE[typed, machine]
