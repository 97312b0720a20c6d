"""Print the doctor's report as a table grouped by machine, or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from toolkit.cluster.doctor.types import RANKING, CheckFinding, CheckVerdict, DoctorReport

if TYPE_CHECKING:
    from rich.console import RenderableType

FORMAT_VERSION = 1
FEW_MACHINES = 4  # with more machines, the table shows only rows that are not ok
COLOURS = {
    CheckVerdict.OK: "green",
    CheckVerdict.UNKNOWN: "cyan",
    CheckVerdict.WARN: "yellow",
    CheckVerdict.FAIL: "bold red",
}


def to_json(report: DoctorReport) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "verdict": report.verdict.value,
        "machines": [machine.to_json() for machine in report.machines],
        "together": [finding.to_json() for finding in report.cross_machine],
    }


def print_report(report: DoctorReport, stream: TextIO) -> None:
    from rich.console import Console

    # Files and pipes have no width, and the table should not be folded at 80 there.
    Console(file=stream, width=None if stream.isatty() else 140).print(format_table(report))
    stream.flush()


def format_table(report: DoctorReport) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table(show_edge=False, pad_edge=False, show_lines=False)
    rows.add_column("check", no_wrap=True)
    rows.add_column("", no_wrap=True)
    rows.add_column("finding and remedy", overflow="fold")

    def add_section(title: str, findings: Sequence[CheckFinding], *, briefly: bool) -> None:
        rows.add_section()
        shown = [finding for finding in findings if not briefly or finding.verdict is not CheckVerdict.OK]
        rest = f"  {len(findings) - len(shown)} checks are ok" if len(shown) < len(findings) else ""
        rows.add_row(Text(title, style="bold"), "", Text(rest))
        for finding in shown:
            text = Text(finding.evidence)
            if finding.remedy:
                text.append(f"\n-> {finding.remedy}", style="bold")
            rows.add_row(
                f"  {finding.check}", Text(finding.verdict.value, style=COLOURS[finding.verdict]), text
            )

    for machine in report.machines:
        add_section(
            f"machine {machine.node}: {machine.host}",
            machine.findings,
            briefly=len(report.machines) > FEW_MACHINES,
        )
    add_section("together", report.cross_machine, briefly=False)
    return Group(rows, Text(), Text(format_summary(report), style=COLOURS[report.verdict]))


def format_summary(report: DoctorReport) -> str:
    counts = Counter(finding.verdict for finding in report.findings)
    text = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in reversed(RANKING) if counts[verdict])
    return f"{text}: {'this run would fail' if report.verdict is CheckVerdict.FAIL else 'ready'}"
