"""Show a scaling report: JSON for programs, tables and sentences for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import RunConfig
from toolkit.estimate.measured_factors import MeasuredEstimate, SpeedFactors, apply_factors
from toolkit.estimate.plan_report import describe_axes
from toolkit.estimate.scaling import (
    LEAST_EFFICIENCY,
    Candidate,
    Efficiency,
    Estimator,
    Planner,
    Scaling,
    ScalingCurve,
    ScalingPoint,
    scaling_curve,
    verdict,
)
from toolkit.estimate.types import StepEstimate
from toolkit.plan import make_plan
from toolkit.plan.types import RunPlan, World

if TYPE_CHECKING:
    from rich.console import RenderableType

FORMAT_VERSION = 1
MOST_DIFFERENCE = 0.15  # of a measured run from its corrected estimate; beyond, the factors do not explain it
NONE = "\u2013"
TABLE_HEAD = (
    "ranks",
    "global batch",
    "layout",
    "step",
    "80% interval",
    "{unit}/s",
    "efficiency",
    "80% interval",
)
TITLES = {
    Scaling.STRONG: "strong scaling: one global batch",
    Scaling.WEAK: "weak scaling: global batch proportional to the ranks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingReport:
    """The scaling of a run, as shown in the terminal, in JSON and on the page.

    Attributes:
        name: of the run.
        hardware: of the described machines, for people.
        unit: of throughput, in the plural; ``units_per_sample`` of them are a sample.
        curves: strong and weak scaling.
        measured: runs to compare with, by rising number of ranks.
        factors: fitted to them; None without runs.
    """

    name: str
    hardware: str
    unit: str
    units_per_sample: int
    curves: tuple[ScalingCurve, ...]
    measured: tuple[MeasuredEstimate, ...] = ()
    factors: SpeedFactors | None = None

    @property
    def sentences(self) -> list[str]:
        return [*(" ".join(verdict(curve)) for curve in self.curves), *fit_sentences(self)]


def create_report(
    config: RunConfig,
    world: World,
    ranks: Sequence[int],
    estimate: Estimator,
    *,
    measured: Sequence[MeasuredEstimate],
    factors: SpeedFactors | None,
    fixed: Container[str] = (),
    advance: Callable[[], object] = lambda: None,
    plan: Planner = make_plan,
) -> ScalingReport:
    """Return strong and weak scaling of ``config``; the arguments are those of
    :func:`toolkit.estimate.scaling.scaling_curve`.
    """
    curves = tuple(
        scaling_curve(kind, config, world, ranks, estimate, factors, fixed=fixed, advance=advance, plan=plan)
        for kind in Scaling
    )
    plans = [curve.reference.plan for curve in curves if curve.reference is not None]
    return ScalingReport(
        name=config.run.name,
        hardware=f"nodes of {world.ranks_per_node} x {world.hardware}",
        unit=plans[0].unit if plans else "samples",
        units_per_sample=plans[0].units_per_sample if plans else 1,
        curves=curves,
        measured=tuple(measured),
        factors=factors,
    )


def describe_layout(plan: RunPlan) -> str:
    """Return the sizes of axes and micro-batch: ``data 16, tensor 8, micro-batch 2 x 4``."""
    return f"{describe_axes(plan)}, micro-batch {plan.batch.micro_batch} x {plan.batch.accumulation}"


def scaling_to_json(report: ScalingReport) -> dict[str, Any]:
    """Return plain JSON types: seconds, samples, and efficiencies as fractions of 1. Unknown values are
    null.
    """
    return {
        "format_version": FORMAT_VERSION,
        "name": report.name,
        "least_efficiency": LEAST_EFFICIENCY,
        "curves": {
            curve.scaling.value: {
                "reference_ranks": curve.reference.plan.world.ranks if curve.reference else None,
                "first_broken_ranks": curve.first_broken.ranks if curve.first_broken else None,
                "verdict": list(verdict(curve)),
                "points": [_point_to_json(point, report) for point in curve.points],
            }
            for curve in report.curves
        },
        "measured": [
            {
                "run": run.name,
                "ranks": run.ranks,
                "global_batch": run.global_batch,
                "layout": run.layout,
                "measured_seconds": run.seconds,
                "predicted_seconds": run.estimate.seconds,
                "fitted_seconds": fitted.seconds,
            }
            for run, fitted in zip(report.measured, fitted_estimates(report), strict=True)
        ],
        "factors": None
        if report.factors is None
        else {"computing": report.factors.computing, "communication": report.factors.communication},
    }


def fitted_estimates(report: ScalingReport) -> list[StepEstimate]:
    """Return the estimates of the measured runs, multiplied by the factors."""
    if report.factors is None:
        return []
    return [apply_factors(run.estimate, report.factors, run.ranks) for run in report.measured]


def fit_sentences(report: ScalingReport) -> Iterator[str]:
    """Yield what the measured runs changed."""
    factors = report.factors
    if factors is None:
        return
    runs = "1 measured run" if len(report.measured) == 1 else f"{len(report.measured)} measured runs"
    yield (
        f"All times are corrected by {runs}: computing takes {factors.computing:.2f} times and communication "
        f"{factors.communication:.2f} times as long as the profile of the hardware predicts."
    )
    ratios = {
        run.name: run.seconds / fitted.seconds - 1
        for run, fitted in zip(report.measured, fitted_estimates(report), strict=True)
    }
    worst = max(ratios, key=lambda name: abs(ratios[name]))
    if abs(ratios[worst]) > MOST_DIFFERENCE:
        yield (
            f"{worst} differs by {ratios[worst]:+.0%} from its corrected estimate. Something else differs: "
            "look for other processes on its machines and for slow ranks in its report."
        )


def point_rows(curve: ScalingCurve, report: ScalingReport) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a curve's table: of each point as written, and below it with the best change."""
    for point in curve.points:
        if point.written is not None:
            yield _row(point.written, point.efficiency, report, describe_layout(point.written.plan))
        else:
            assert point.problem is not None
            yield (f"{point.ranks:,}", NONE, f"cannot run: {point.problem.seen}", *[NONE] * 5)
        if point.changed is not None:
            yield _row(
                point.changed, point.changed_efficiency, report, f"with {' '.join(point.changed.overrides)}"
            )


def measured_rows(report: ScalingReport) -> Iterator[tuple[str, ...]]:
    """Yield run, ranks, layout, measured, predicted and fitted seconds, and measured over fitted."""
    for run, fitted in zip(report.measured, fitted_estimates(report), strict=True):
        yield (
            run.name,
            f"{run.ranks:,}",
            run.layout,
            f"{run.seconds:.3g} s",
            f"{run.estimate.seconds:.3g} s",
            f"{fitted.seconds:.3g} s",
            f"{run.seconds / fitted.seconds - 1:+.1%}",
        )


MEASURED_HEAD = ("run", "ranks", "layout", "measured", "predicted", "corrected", "difference")


def table_head(report: ScalingReport) -> tuple[str, ...]:
    return tuple(title.format(unit=report.unit) for title in TABLE_HEAD)


def format_scaling(report: ScalingReport) -> RenderableType:
    """Return the report for the terminal."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(f"{report.name} on {report.hardware}", style="bold"), Text()]
    for curve in report.curves:
        parts += [
            _table(TITLES[curve.scaling], table_head(report), list(point_rows(curve, report)), {2}),
            Text(),
        ]
    if report.measured:
        parts += [_table("measured runs", MEASURED_HEAD, list(measured_rows(report)), {0, 2}), Text()]
    parts += [Text(sentence) for sentence in report.sentences]
    return Group(*parts)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: set[int]) -> RenderableType:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _row(
    candidate: Candidate, efficiency: Efficiency | None, report: ScalingReport, layout: str
) -> tuple[str, ...]:
    estimate, batch = candidate.estimate, candidate.plan.batch.global_batch
    return (
        f"{candidate.plan.world.ranks:,}",
        f"{batch:,}",
        layout,
        f"{estimate.seconds:.3g} s",
        f"{estimate.low:.3g} to {estimate.high:.3g} s",
        f"{batch * report.units_per_sample / estimate.seconds:,.0f}",
        NONE if efficiency is None else f"{efficiency.value:.0%}",
        NONE if efficiency is None else f"{efficiency.low:.0%} to {efficiency.high:.0%}",
    )


def _point_to_json(point: ScalingPoint, report: ScalingReport) -> dict[str, Any]:
    problem = point.problem
    return {
        "ranks": point.ranks,
        "broken": point.broken,
        "cause": point.cause,
        "problem": None
        if problem is None
        else {"key": problem.key, "seen": problem.seen, "rule": problem.rule, "remedy": problem.remedy},
        "written": _candidate_to_json(point.written, point.efficiency, report),
        "changed": _candidate_to_json(point.changed, point.changed_efficiency, report),
    }


def _candidate_to_json(
    candidate: Candidate | None, efficiency: Efficiency | None, report: ScalingReport
) -> dict[str, Any] | None:
    if candidate is None:
        return None
    plan, estimate = candidate.plan, candidate.estimate
    return {
        "overrides": list(candidate.overrides),
        "axes": asdict(plan.axes),
        "micro_batch": plan.batch.micro_batch,
        "global_batch": plan.batch.global_batch,
        "step_seconds": {
            "seconds": estimate.seconds,
            "low": estimate.low,
            "high": estimate.high,
            "parts": dict(estimate.parts),
        },
        f"{report.unit}_per_second": plan.batch.global_batch * report.units_per_sample / estimate.seconds,
        "efficiency": None if efficiency is None else asdict(efficiency),
        "device_bytes": None if plan.memory is None else plan.memory.device_total,
    }
