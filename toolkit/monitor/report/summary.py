"""The first words of a report: how the run is, in a few sentences, and its most asked-for figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.monitor.report.curve_reader import is_number
from toolkit.monitor.report.elements import format_number, format_percent, format_seconds
from toolkit.monitor.report.ledger import USEFUL_PARTS
from toolkit.monitor.report.run_data import ReportData, mapping_at
from toolkit.monitor.step_parts import DATA, UNEXPLAINED
from toolkit.progress import duration, quantity

LATE_SECONDS = 60.0  # beyond the limit of a hang, after which a run that is alive would have ended itself
LIMIT_SECONDS = 86_400.0  # where it has no such limit
MOODS = {
    "done": "good",
    "running": "good",
    "starting": "good",
    "stopped": "warning",
    "failed": "error",
    "refused": "error",
}
MIN_SHARE = 0.005  # of the time: a smaller part is not worth a word


@dataclass(frozen=True, slots=True)
class SummaryTile:
    label: str
    value: str
    note: str = ""


def run_state(run: ReportData) -> tuple[str, str]:
    """A word or two for the run's state, and its mood: good, warning or error."""
    told = run.status.get("state")
    if told is None:
        return "not begun" if not run.steps.rows else "no status", "warning"
    if is_dead(run):
        return "not alive", "error"
    return str(told), MOODS.get(str(told), "warning")


def is_dead(run: ReportData) -> bool:
    """It says that it is under way and has not said so for longer than it could."""
    limit = mapping_at(run.config, "monitor").get("hang_seconds")
    patience = limit + LATE_SECONDS if is_number(limit) and limit else LIMIT_SECONDS
    return run.status.get("state") in ("running", "starting") and (run.status_age or 0.0) > patience


def summary_sentences(run: ReportData) -> list[str]:
    """Sentences, in the order in which a person asks."""
    return [
        " ".join(part)
        for part in ([*_course(run)], [*_losses(run)], [*_speed(run), *_time(run)], [*_alerts(run)])
        if part
    ]


def _course(run: ReportData) -> Iterator[str]:
    told, of = run.status.get("state"), f" of {run.planned_steps:,}" if run.planned_steps else ""
    steps = f"step {run.step:,}{of}"
    reason = run.status.get("reason")
    match told:
        case "done":
            yield f"The run is done: {run.step:,} steps."
        case "running" | "starting" if is_dead(run):
            yield (
                f"The run says that it is at {steps}, but said so {duration(run.status_age or 0.0)} ago: it is no longer alive. "
                f"The same command continues it."
            )
        case "running" | "starting":
            left = run.steps.total("eta_seconds").last
            yield f"The run is under way, at {steps}{f'; about {duration(left)} left' if left else ''}."
        case "stopped":
            yield f"The run was stopped at {steps}, and saved. The same command continues it."
        case "failed" | "refused":
            yield f"The run {'failed' if told == 'failed' else 'was refused'} at {steps}{f': {reason}' if reason else '.'}"
        case _:
            yield f"There is no status.json that tells how the run is; its rows end at {steps}."
    attempts = len(run.attempts)
    if attempts > 1:
        repeated = sum(attempt.repeated for attempt in run.attempts)
        yield f"It took {attempts} attempts{f', in which {repeated:,} steps were run twice' if repeated else ''}."


def _losses(run: ReportData) -> Iterator[str]:
    loss = run.steps.total("loss")
    if loss.first is not None:
        yield f"The training loss went from {format_number(loss.first)} to {format_number(loss.last)}."
    if loss.not_finite:
        yield f"In {loss.not_finite:,} step{'s' * (loss.not_finite > 1)} it was not finite."
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
    held = run.ledger
    if not held.parts:
        waited, whole = run.steps.total("data_seconds").sum, run.steps.total("step_seconds").sum
        if whole and run.steps.total("data_seconds").count:
            yield f"Of the steps' time {format_percent(waited / whole)} was spent waiting for samples."
        return
    yield f"{format_percent(sum(held.share(part) for part in USEFUL_PARTS))} of the time went into forward, backward and optimizer."
    lost = [
        part
        for part in held.parts
        if part not in USEFUL_PARTS and part != UNEXPLAINED and held.share(part) >= MIN_SHARE
    ]
    if lost:
        yield f"What took the rest: {', '.join(f'{part} {format_percent(held.share(part))}' for part in lost[:4])}."


def _alerts(run: ReportData) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for (_, name), count in run.alerts.counts.items():
        counts[name] += count
    if counts:
        total = sum(counts.values())
        yield f"{total:,} alert{'s' * (total > 1)}: {', '.join(f'{name} ({count:,})' for name, count in counts.most_common())}."
    elif run.steps.rows:
        yield "There was no alert."


def summary_tiles(run: ReportData) -> Iterator[SummaryTile]:
    """The figures themselves, those that are known."""
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
        yield SummaryTile("goodput", format_percent(share), "steps that stand, of all time")
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
        yield SummaryTile("cost", f"{cost.high:,.2f}", f"at {price:g} a GPU-hour" if is_number(price) else "")
