"""The summary at the top of the report: a few sentences and the most important figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.monitor.report.curve_reader import is_number
from toolkit.monitor.report.elements import format_number, format_percent, format_seconds
from toolkit.monitor.report.ledger import USEFUL_PARTS
from toolkit.monitor.report.run_data import ReportData, mapping_at
from toolkit.progress import duration, quantity
from toolkit.step_parts import DATA, UNEXPLAINED

LATE_SECONDS = 60.0  # beyond the hang limit, after which a live run would have ended itself
LIMIT_SECONDS = 86_400.0  # if the run has no hang limit
STATE_LEVELS = {
    "done": "good",
    "running": "good",
    "starting": "good",
    "stopped": "warning",
    "failed": "error",
    "refused": "error",
}
MIN_SHARE = 0.005  # of the time; smaller parts are not mentioned


@dataclass(frozen=True, slots=True)
class SummaryTile:
    label: str
    value: str
    note: str = ""


def run_state(run: ReportData) -> tuple[str, str]:
    """Return the run's state in one or two words, and its level: good, warning or error."""
    state = run.status.get("state")
    if state is None:
        return "not begun" if not run.steps.rows else "no status", "warning"
    if is_dead(run):
        return "not alive", "error"
    return str(state), STATE_LEVELS.get(str(state), "warning")


def is_dead(run: ReportData) -> bool:
    """Return whether the status says that the run is in progress but is older than possible."""
    limit = mapping_at(run.config, "monitor").get("hang_seconds")
    patience = limit + LATE_SECONDS if is_number(limit) and limit else LIMIT_SECONDS
    return run.status.get("state") in ("running", "starting") and (run.status_age or 0.0) > patience


def summary_sentences(run: ReportData) -> list[str]:
    """Return paragraphs on progress, losses, time and alerts."""
    return [
        " ".join(part)
        for part in ([*_course(run)], [*_losses(run)], [*_speed(run), *_time(run)], [*_alerts(run)])
        if part
    ]


def _course(run: ReportData) -> Iterator[str]:
    state, of = run.status.get("state"), f" of {run.planned_steps:,}" if run.planned_steps else ""
    steps = f"step {run.step:,}{of}"
    reason = run.status.get("reason")
    match state:
        case "done":
            yield f"The run is complete: {run.step:,} steps."
        case "running" | "starting" if is_dead(run):
            yield (
                f"The status says that the run is at {steps}, but was written "
                f"{duration(run.status_age or 0.0)} ago: the run is no longer alive. "
                "The same command continues it."
            )
        case "running" | "starting":
            left = run.steps.total("eta_seconds").last
            yield f"The run is in progress at {steps}{f'; about {duration(left)} left' if left else ''}."
        case "stopped":
            yield (
                f"The run was stopped at {steps} and has saved a checkpoint. The same command continues it."
            )
        case "failed" | "refused":
            ended = "failed" if state == "failed" else "was refused"
            yield f"The run {ended} at {steps}{f': {reason}' if reason else '.'}"
        case _:
            yield f"There is no status.json; the rows end at {steps}."
    attempts = len(run.attempts)
    if attempts > 1:
        repeated = sum(attempt.repeated for attempt in run.attempts)
        note = f", in which {repeated:,} steps were repeated" if repeated else ""
        yield f"It took {attempts} attempts{note}."


def _losses(run: ReportData) -> Iterator[str]:
    loss = run.steps.total("loss")
    if loss.first is not None:
        yield f"The training loss went from {format_number(loss.first)} to {format_number(loss.last)}."
    if loss.not_finite:
        yield f"It was not finite in {loss.not_finite:,} step{'s' * (loss.not_finite > 1)}."
    for name, curves in run.evals.items():
        of_set = curves.total("loss")
        if of_set.last is not None:
            best = (
                "its lowest" if of_set.last <= of_set.low else f"the lowest was {format_number(of_set.low)}"
            )
            yield f"The {name} loss is {format_number(of_set.last)} after {curves.x[-1]:,.0f} steps, {best}."


def _speed(run: ReportData) -> Iterator[str]:
    step, speed = run.steps.total("step_seconds").median, run.steps.total(f"{run.unit}_per_second").median
    if step is not None and speed is not None:
        mfu = run.steps.total("mfu").median
        used = f", {format_percent(mfu)} of the dense peak (MFU)" if mfu else ""
        yield f"A median step takes {format_seconds(step)}: {quantity(speed, run.unit)}/s{used}."


def _time(run: ReportData) -> Iterator[str]:
    ledger = run.ledger
    if not ledger.parts:
        waited, whole = run.steps.total("data_seconds").sum, run.steps.total("step_seconds").sum
        if whole and run.steps.total("data_seconds").count:
            yield f"Waiting for samples took {format_percent(waited / whole)} of the steps' time."
        return
    yield (
        f"{format_percent(sum(ledger.share(part) for part in USEFUL_PARTS))} of the time went into "
        "forward, backward and optimizer."
    )
    lost = [
        part
        for part in ledger.parts
        if part not in USEFUL_PARTS and part != UNEXPLAINED and ledger.share(part) >= MIN_SHARE
    ]
    if lost:
        shares = ", ".join(f"{part} {format_percent(ledger.share(part))}" for part in lost[:4])
        yield f"Largest other parts: {shares}."


def _alerts(run: ReportData) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for (_, name), count in run.alerts.counts.items():
        counts[name] += count
    if counts:
        total = sum(counts.values())
        names = ", ".join(f"{name} ({count:,})" for name, count in counts.most_common())
        yield f"{total:,} alert{'s' * (total > 1)}: {names}."
    elif run.steps.rows:
        yield "There were no alerts."


def summary_tiles(run: ReportData) -> Iterator[SummaryTile]:
    """Yield the figures that are known."""
    steps, unit = run.steps, run.unit
    of = f"of {run.planned_steps:,}" if run.planned_steps else ""
    yield SummaryTile("steps done", f"{run.step:,}", of)
    loss = steps.total("loss")
    if loss.last is not None:
        yield SummaryTile("training loss", format_number(loss.last), f"lowest {format_number(loss.low)}")
    for name, curves in list(run.evals.items())[:2]:
        if (last := curves.total("loss").last) is not None:
            yield SummaryTile(f"{name} loss", format_number(last), f"after {curves.x[-1]:,.0f} steps")
    if (speed := steps.total(f"{unit}_per_second").median) is not None:
        each = steps.total(f"{unit}_per_second_per_gpu").median
        yield SummaryTile(
            f"{unit}/s, median",
            format_number(speed, 5),
            f"{format_number(each, 5)} a GPU" if each is not None else "",
        )
    if (mfu := steps.total("mfu").median) is not None:
        hfu = steps.total("hfu").median
        yield SummaryTile(
            "MFU, median",
            format_percent(mfu),
            f"HFU {format_percent(hfu)}" if hfu is not None else "of the dense peak",
        )
    if run.ledger.parts:
        yield SummaryTile(
            "useful time",
            format_percent(sum(run.ledger.share(part) for part in USEFUL_PARTS)),
            "forward, backward, optimizer",
        )
        yield SummaryTile("waiting for data", format_percent(run.ledger.share(DATA)))
    elif (whole := steps.total("step_seconds").sum) and steps.total("data_seconds").count:
        yield SummaryTile("waiting for data", format_percent(steps.total("data_seconds").sum / whole))
    if is_number(share := mapping_at(run.status, "goodput").get("share")):
        yield SummaryTile("goodput", format_percent(share), "of all time, without repeated steps")
    total = sum(run.alerts.counts.values())
    errors = sum(count for (level, _), count in run.alerts.counts.items() if level == "error")
    yield SummaryTile("alerts", f"{total:,}", f"errors: {errors:,}" if total else "")
    if (elapsed := steps.total("elapsed_seconds")).count:
        hours = steps.total("gpu_hours")
        yield SummaryTile(
            "time",
            duration(elapsed.high),
            f"{hours.high:,.3g} GPU-hours" if hours.count and hours.high else "over all attempts",
        )
    if (cost := steps.total("cost")).count:
        price = mapping_at(run.config, "monitor").get("price_per_gpu_hour")
        yield SummaryTile(
            "cost", f"{cost.high:,.2f}", f"at {price:g} per GPU-hour" if is_number(price) else ""
        )
