"""Render a run as one HTML page: summary, curves, time per step, alerts, plan and measurements, hardware.

    python launch/report.py runs/quickstart-1635fc16              # writes report.html there
    python launch/report.py runs/mine out=mine.html
    python launch/report.py runs/mine nodes=/mnt/node1/mine,/mnt/node2/mine   # nodes with local disks

The report needs only the files of the run's directory, so the run may be in progress, complete, failed, or of
an older version. The page is one file that opens offline and makes no network requests. Exit code: 0 if it
was written, 2 for invalid arguments, which are named with their rule and remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.commands import command_line, in_this_form
from toolkit.errors import ExitCode, InputError, Problem, run_command
from toolkit.logs import configure_logging
from toolkit.rundir.find import find_run

# a run's directory has at least one of them
RUN_FILES = ("status.json", "config.yaml", "plan.json", "metrics.jsonl")
PATH_REMEDY = "pass the folder that training printed"


@dataclass(frozen=True, slots=True)
class ReportArguments:
    run: Path
    out: Path
    nodes: tuple[Path, ...]


def main(arguments: Sequence[str]) -> int:
    configure_logging()
    if not {"--help", "-h"}.isdisjoint(arguments):
        print(in_this_form(__doc__ or "").strip())
        return ExitCode.DONE
    return run_command(lambda: print(f"the report is in {write_report(parse_arguments(arguments))}"))


def parse_arguments(arguments: Sequence[str]) -> ReportArguments:
    """Parse the command line. Raises InputError with all mistakes."""
    options = dict(
        argument.split("=", 1) for argument in arguments if "=" in argument and not Path(argument).exists()
    )
    runs = [
        find_run(argument, "run") for argument in arguments if "=" not in argument or Path(argument).exists()
    ]
    problems = [
        Problem(
            name,
            f"{name}={value}",
            "a report has only the options out= and nodes=",
            f"see {command_line('report', '--help')}",
        )
        for name, value in options.items()
        if name not in ("out", "nodes")
    ]
    if len(runs) != 1:
        seen = f"{len(runs)} run directories: {' '.join(map(str, runs))}" if runs else "no run directory"
        problems.append(
            Problem("run", seen, "a report covers one run", f"write {command_line('report', 'runs/MINE')}")
        )
    nodes = tuple(Path(folder) for folder in options.get("nodes", "").split(",") if folder)
    for folder in runs:
        if not folder.is_dir():
            problems.append(Problem("run", f"run={folder}", "the run directory exists", PATH_REMEDY))
        elif not any((folder / name).exists() for name in RUN_FILES):
            problems.append(
                Problem(
                    "run", f"run={folder}", f"a run directory has one of {', '.join(RUN_FILES)}", PATH_REMEDY
                )
            )
    problems += [
        Problem(
            "nodes",
            f"nodes={folder}",
            "the run's directory on another node has a folder system",
            "correct the path",
        )
        for folder in nodes
        if not (folder / "system").is_dir()
    ]
    if problems:
        raise InputError(*problems)
    return ReportArguments(runs[0], Path(options.get("out", runs[0] / "report.html")), nodes)


def write_report(options: ReportArguments) -> Path:
    """Write the page and return its path. Raises InputError if ``out`` cannot be written."""
    from toolkit.files import write_whole
    from toolkit.monitor.report.page import render_page
    from toolkit.monitor.report.run_reader import read_run
    from toolkit.progress import Progress

    with Progress() as progress:
        html = render_page(read_run(options.run, progress, nodes=options.nodes))
    try:
        write_whole(options.out, html, durable=False)
    except OSError as error:
        raise InputError(
            Problem(
                "out",
                f"out={options.out}: {error.strerror}",
                "the page's folder exists and is writable",
                "choose another file with out=FILE",
            )
        ) from error
    return options.out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
