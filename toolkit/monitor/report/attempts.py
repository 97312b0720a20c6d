"""The starts of a run: when, for how long, how each one ended; and its configuration as it was resolved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime

from toolkit.errors import without_secrets
from toolkit.monitor.report.data import Attempt, Run
from toolkit.monitor.report.view import UNKNOWN, Folded, Section, Table
from toolkit.progress import duration


def attempts(run: Run) -> Section:
    if not run.attempts:
        missing = "There is no folder attempts/, so it is not known when the run was started."
        return Section(id="attempts", title="Attempts", intro=(missing,))
    newest = run.attempts[-1].number
    rows = tuple(
        (str(one.number), _when(one.began), _when(one.ended), duration(one.ended - one.began) if one.began and one.ended else UNKNOWN,
         _end(run) if one.number == newest else "a later attempt followed: see the end of its log",
         f"{one.repeated:,}", "\n".join(one.files)) for one in run.attempts)
    table = Table(
        caption="Starts", align="rnnrlrl", rows=rows, note="Times are those of the files, in UTC.",
        head=("attempt", "began", "last word", "took", "how it ended", "steps run again later", "left behind"))
    return Section(id="attempts", title="Attempts", tables=(table,), texts=tuple(_texts(run.attempts)))


def configuration(run: Run) -> Section:
    plan = json.dumps(run.plan, indent=1) if run.plan else ""
    files = (("config.yaml: the configuration, resolved", run.config_text), ("plan.json: what was decided from it", plan))
    texts = tuple(Folded(title, without_secrets(text)) for title, text in files if text)
    intro = () if texts else ("There is neither config.yaml nor plan.json.",)
    return Section(id="configuration", title="Configuration", intro=intro, texts=texts)


def _end(run: Run) -> str:
    state, reason = run.status.get("state", "unknown"), run.status.get("reason")
    code = run.status.get("exit_code")
    return f"{state}{f', exit code {code}' if code is not None else ''}{f': {without_secrets(str(reason))}' if reason else ''}"


def _texts(every: tuple[Attempt, ...]) -> Iterator[Folded]:
    for one in every:
        if one.hang:
            yield Folded(f"attempt {one.number}: the report of its hang", without_secrets(one.hang))
        if one.log_end:
            yield Folded(f"attempt {one.number}: the end of its log", without_secrets(one.log_end))


def _when(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
