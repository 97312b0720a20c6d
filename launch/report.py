"""A run as one page that opens offline: how it is, its curves, where its time went, alerts, plan against reality, hardware.

    python launch/report.py runs/quickstart-1635fc16                      # writes runs/quickstart-1635fc16/report.html
    python launch/report.py runs/mine out=/tmp/mine.html
    python launch/report.py runs/mine nodes=/mnt/node1/mine,/mnt/node2/mine   # where nodes keep their samples on disks of their own

It reads the files of the run's directory and nothing else, so the run may be under way, done, failed, or of an older version. The page is
one file that asks no network for anything: send it, keep it, print it. Exit code: 0 written, 2 a mistake, named with its rule and remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import ExitCode, InputError, Problem, UserError, file_errors
from toolkit.logs import configure_logging
from toolkit.rundir.find import find_run

MARKS = (
    "status.json",
    "config.yaml",
    "plan.json",
    "metrics.jsonl",
)  # a run's directory has one of them at least
GIVE = "give the folder that train.py printed"


@dataclass(frozen=True, slots=True)
class Given:
    run: Path
    out: Path
    nodes: tuple[Path, ...]


def main(arguments: Sequence[str]) -> int:
    configure_logging()
    if not {"--help", "-h"}.isdisjoint(arguments):
        print((__doc__ or "").strip())
        return ExitCode.DONE
    try:
        with file_errors():
            print(f"the report is in {write(read_words(arguments))}")
    except UserError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    return ExitCode.DONE


def read_words(words: Sequence[str]) -> Given:
    """Raises InputError with every mistake."""
    options = dict(word.split("=", 1) for word in words if "=" in word and not Path(word).exists())
    runs = [find_run(word, "run") for word in words if "=" not in word or Path(word).exists()]
    problems = [
        Problem(
            name, f"{name}={value}", "a report takes out= and nodes= only", "python launch/report.py --help"
        )
        for name, value in options.items()
        if name not in ("out", "nodes")
    ]
    if len(runs) != 1:
        seen = f"{len(runs)} run directories: {' '.join(map(str, runs))}" if runs else "no run directory"
        problems.append(Problem("run", seen, "a report is of one run", "python launch/report.py runs/MINE"))
    nodes = tuple(Path(folder) for folder in options.get("nodes", "").split(",") if folder)
    for folder in runs:
        if not folder.is_dir():
            problems.append(Problem("run", f"run={folder}", "a run directory exists", GIVE))
        elif not any((folder / name).exists() for name in MARKS):
            problems.append(
                Problem("run", f"run={folder}", f"a run directory has one of {', '.join(MARKS)}", GIVE)
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
    return Given(runs[0], Path(options.get("out", runs[0] / "report.html")), nodes)


def write(given: Given) -> Path:
    """Raises InputError where ``out`` cannot be written."""
    from toolkit.files import write_whole
    from toolkit.monitor.report.data import read_run
    from toolkit.monitor.report.page import page
    from toolkit.progress import Progress

    with Progress() as progress:
        html = page(read_run(given.run, progress, nodes=given.nodes))
    try:
        write_whole(given.out, html, durable=False)
    except OSError as error:
        raise InputError(
            Problem(
                "out",
                f"out={given.out}: {error.strerror}",
                "the page's folder exists and can be written to",
                "name another file with out=FILE",
            )
        ) from error
    return given.out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
