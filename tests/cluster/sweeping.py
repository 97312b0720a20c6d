"""Points of a sweep for tests, as Hydra's sweeper and the planner make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.cluster.machine import Gpu, Machine
from toolkit.cluster.sweep.points import make_points
from toolkit.config.multirun import BatchRunner, read_sweep, run_sweeper

GIB = 2**30
TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train.py"
MADE: dict[tuple[tuple[str, ...], Machine], list[Any]] = {}
LAPTOP = Machine(cores=4, host_memory_bytes=16 * GIB)
H100S = tuple(Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, f"GPU-{number}") for number in range(8))
EIGHT = Machine(cores=64, gpus=H100S, host_memory_bytes=2**40)


def batches(*typed: str, folder: Path = Path("sweeps/x")) -> list[list[tuple[str, ...]]]:
    """What Hydra's sweeper makes of the words."""
    made: list[list[tuple[str, ...]]] = []
    run_sweeper(
        read_sweep(["-m", *typed]),
        folder,
        BatchRunner(lambda batch: made.append(list(batch)) or [0.0] * len(batch)),
    )  # type: ignore[func-returns-value]
    return made


def points(*typed: str, machine: Machine = LAPTOP, folder: Path) -> list[Any]:
    """Made once for the same words and machine: composing takes a tenth of a second a point."""
    if (typed, machine) not in MADE:
        words = read_sweep(["-m", *typed])
        MADE[typed, machine] = make_points(
            batches(*typed, folder=folder)[0], words, Path("/sweeps/here"), machine, TRAIN
        )
    return MADE[typed, machine]
