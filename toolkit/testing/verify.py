"""Run the parity matrix: compare every cell with its reference and return a verdict for each.

    with rank_pool(4) as pool:
        rows = verify(CORE, pool, devices=4, device=Device.CPU, progress=progress)

A reference runs once for all cells with its family, sizes and optimizer, on one rank of the same pool and the
same device.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from importlib import metadata
from typing import Any

import torch

import toolkit
from toolkit.config.schema import EngineName
from toolkit.errors import PlanError
from toolkit.plan.types import Device
from toolkit.progress import Progress
from toolkit.testing.dist import RankPool, RanksFailed
from toolkit.testing.matrix import Cell, OptimizerCase
from toolkit.testing.measure import Differences, Measured, OpenInitialWeights, measure
from toolkit.testing.parity import REQUIRED_FALL, STEPS

SECONDS = 300.0  # the time limit of a cell; the first on a GPU compiles and loads kernels
# A gap between a router's choices that another order of summation can close: fp32 logits of size one differ
# by 1e-7 to 1e-6 between correct runs, and by more in later steps.
FLIP_GAP = 1e-5


class ParityVerdict(StrEnum):
    EQUAL = "equal"  # within the tolerances
    BOUND = "within its bound"  # above a tolerance, with a measured cause
    FLIP = "equal until a routing flip"
    APART = "apart"
    INVALID = "invalid"  # the reference's loss did not decrease, so agreement proves nothing
    FAILED = "failed"  # the run raised
    NOT_RUN = "not run"  # it needs more devices than there are

    @property
    def good(self) -> bool:
        return self in (ParityVerdict.EQUAL, ParityVerdict.BOUND, ParityVerdict.FLIP, ParityVerdict.NOT_RUN)


@dataclass(frozen=True, kw_only=True)
class ParityRow:
    """The result of one cell with one optimizer case, on one kind of device."""

    cell: str
    engine: str
    family: str
    layout: str
    ranks: int
    case: str
    device: str  # cpu or cuda
    hardware: str
    versions: dict[str, str]
    day: str  # UTC
    seconds: float
    verdict: ParityVerdict
    cause: str  # of a verdict other than EQUAL
    differences: Differences | None
    tolerance: Differences


Judgement = tuple[ParityVerdict, str, Differences]
Report = Callable[[ParityRow], None]


def verify(
    cells: Sequence[Cell],
    pool: RankPool,
    *,
    devices: int,
    device: Device,
    progress: Progress,
    report: Report = lambda row: None,
    steps: int = STEPS,
) -> list[ParityRow]:
    """Run ``cells`` with their optimizer cases, grouped by reference.

    Args:
        devices: the number of ranks that can have a device; larger cells are NOT_RUN.
        report: called with each row.
    """

    @cache
    def reference(cell: Cell, case: OptimizerCase) -> Measured:
        return measure_cell(cell, case, pool, device, steps)

    rows = []
    ordered = sorted(cells, key=lambda cell: (cell.family, cell.layers, cell.vocabulary))
    with progress.task("parity", total=sum(len(cell.cases) for cell in ordered), unit="runs") as task:
        for cell in ordered:
            for case in cell.cases:
                row = verify_cell(cell, case, pool, reference, devices=devices, device=device, steps=steps)
                rows.append(row)
                report(row)
                task.advance(note=f"{cell.name} {case}: {row.verdict}")
    return rows


def verify_cell(
    cell: Cell,
    case: OptimizerCase,
    pool: RankPool,
    reference: Callable[[Cell, OptimizerCase], Measured],
    *,
    devices: int,
    device: Device,
    steps: int = STEPS,
) -> ParityRow:
    started = time.monotonic()
    differences = None
    if cell.ranks > devices:
        verdict, cause = ParityVerdict.NOT_RUN, f"needs {cell.ranks} devices, here are {devices}"
    else:
        try:
            verdict, cause, differences = judge(
                cell, measure_cell(cell, case, pool, device, steps), reference(cell.reference(), case)
            )
        except (PlanError, RanksFailed) as error:
            verdict, cause = ParityVerdict.FAILED, str(error)
    return ParityRow(
        cell=cell.name,
        engine=cell.engine.value,
        family=cell.family,
        layout=cell.layout,
        ranks=cell.ranks,
        case=case.value,
        device=device.value,
        hardware=hardware_name(device),
        versions=package_versions(cell.engine),
        day=datetime.now(UTC).date().isoformat(),
        seconds=round(time.monotonic() - started, 2),
        verdict=verdict,
        cause=cause,
        differences=differences,
        tolerance=cell.allowed,
    )


def measure_cell(
    cell: Cell, case: OptimizerCase, pool: RankPool, device: Device, steps: int = STEPS
) -> Measured:
    """Train a cell on the ranks of ``pool`` and return its results. Raises PlanError if the layout cannot
    run, RanksFailed if a rank fails.
    """
    plan = cell.plan(case, device)
    assert plan.shape is not None, "cells are of families"
    watched = cell.engine is EngineName.local and plan.shape.num_local_experts > 0
    found: Measured = pool.run(
        measure_on_rank,
        plan,
        steps,
        case is OptimizerCase.SGD,
        watched,
        cell.open_initial_weights,
        ranks=cell.ranks,
        timeout=SECONDS,
    )[0]
    return found


def measure_on_rank(
    rank: int, ranks: int, plan: Any, steps: int, gradients: bool, gaps: bool, first: OpenInitialWeights
) -> Measured:
    return measure(rank, ranks, plan, steps=steps, gradients=gradients, gaps=gaps, first=first)


def judge(cell: Cell, found: Measured, right: Measured) -> Judgement:
    """Judge the differences.

    After a routing flip correct runs diverge, so only the steps before it are judged.
    """
    fall = right.trace.losses[0] - right.trace.losses[-1]
    differences = found.differences(right)
    if not right.gradients and fall < REQUIRED_FALL:
        return ParityVerdict.INVALID, f"the reference's loss fell by {fall:.3f} only", differences
    over = differences.over(cell.allowed)
    if not over:
        above = differences.over(Cell(engine=cell.engine, family=cell.family).allowed)
        return (
            (ParityVerdict.BOUND, cell.excess.cause, differences)
            if above and cell.excess
            else (ParityVerdict.EQUAL, "", differences)
        )
    step = found.first_different_step(right, cell.allowed.loss)
    if step and right.gaps and (gap := min(right.gaps[step - 1 : step + 1])) <= FLIP_GAP:
        before = found.differences(right, step)
        if not {"loss", "norm", "gradient"} & set(before.over(cell.allowed)):
            cause = (
                f"at step {step} two experts are {gap:.1e} apart for a token and rounding chooses; "
                "loss and norm are from before"
            )
            return ParityVerdict.FLIP, cause, before
    worst = ", ".join(
        f"{name} {getattr(differences, name):.1e} (allowed {getattr(cell.allowed, name):.0e})"
        for name in over
    )
    return ParityVerdict.APART, f"{worst}; loss first apart at step {step}", differences


def package_versions(engine: EngineName) -> dict[str, str]:
    names = {
        EngineName.deepspeed: ["deepspeed"],
        EngineName.megatron: ["megatron-core"],
        EngineName.local: [],
    }[engine]
    found = {"toolkit": toolkit.__version__, "python": platform.python_version()}
    return found | {name: metadata.version(name) for name in ("torch", *names, "transformers")}


@cache
def hardware_name(device: Device) -> str:
    return torch.cuda.get_device_name() if device is Device.CUDA else platform.machine()


def failed_rows(rows: Iterable[ParityRow]) -> list[ParityRow]:
    return [row for row in rows if not row.verdict.good]
