"""Inject random faults into trainings and check what they leave behind: `make campaign SEED=7`, or

    python benchmarks/campaign.py --seed 7                         500 faults, some hours on two cores
    python benchmarks/campaign.py --seed 7 --faults 40 --classes rank-killed,disk-full
    python benchmarks/campaign.py --seed 7 --record --minutes 60   one sitting of a campaign that is recorded
    python benchmarks/campaign.py --seed 7 --case 12               one case again, with its whole row
    python benchmarks/campaign.py --list                           the classes, and those that are left out

Each case trains a tiny model for 20 steps with DeepSpeed or Megatron-core on 2 to 8 ranks, or on two
simulated machines, and suffers one fault at a random moment; if that ends the command, the same command is
repeated. Then the invariants of benchmarks/faults/invariants.py are checked, against an unbroken run of the
same layout. Some runs under plain ``python`` have standbys and snapshots in memory. Kills of DeepSpeed ranks
are repeated with a plain script under ``torchrun --max-restarts``.

The seed decides every case. Finished cases are rows of FOLDER/cases.jsonl; a second start continues after
them. With ``--record`` each finished case goes to benchmarks/results/campaign.jsonl and docs/results.md at
once, and the campaign also continues after the cases in that file, on whatever machine they ran; ``--case 12
--record`` replaces a recorded case. Needs Linux; some classes need root. Exit code: 0 all invariants hold, 1
one is violated, 2 the recorded rows cannot be continued.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from benchmarks.faults.cases import DISTRIBUTED, LAYOUTS, PLANNED_CASES, Case, RunLayout, choose_cases  # noqa: E402
from benchmarks.faults.catalogue import FAULTS, LEFT_OUT, possible_faults  # noqa: E402
from benchmarks.faults.live_run import release_folder  # noqa: E402
from benchmarks.faults.plain_deepspeed import can_run_without_toolkit, run_without_toolkit  # noqa: E402
from benchmarks.faults.records import is_current, read_records, write_records  # noqa: E402
from benchmarks.faults.report import replace_table, table  # noqa: E402
from benchmarks.faults.run import run_case, unbroken_losses  # noqa: E402
from toolkit.data.tokens.stdlib import ensure_stdlib  # noqa: E402
from toolkit.errors import ExitCode, UserError  # noqa: E402
from toolkit.files import write_whole  # noqa: E402
from toolkit.progress import duration  # noqa: E402
from toolkit.rows import read_rows  # noqa: E402

RECORDS = ROOT / "benchmarks" / "results" / "campaign.jsonl"
PAGE = ROOT / "docs" / "results.md"
DESCRIPTION = (__doc__ or "").splitlines()[0]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=PLANNED_CASES, help="number of cases")
    parser.add_argument("--minutes", type=float, default=inf, help="begin no case after this time")
    parser.add_argument("--classes", default="", help="only these classes, separated by commas")
    parser.add_argument("--layouts", default="", help="only these layouts, separated by commas")
    parser.add_argument("--out", type=Path, help="folder; runs/campaign-SEED by default")
    parser.add_argument("--case", type=int, help="run only this case, and print its row")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results and docs/results.md")
    parser.add_argument("--list", action="store_true", help="print the classes and the layouts")
    return parser.parse_args()


class Campaign:
    """The cases of a seed in a folder.

    Args:
        folder: of all runs, references and rows.
        classes, layouts: names; empty: all.
        records: file of the recorded rows, which are continued, and ``page`` with their table; None: finished
            cases are not recorded.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        classes: list[str],
        layouts: list[str],
        records: Path | None = None,
        page: Path = PAGE,
    ) -> None:
        self.seed, self.folder, self.records, self.page = seed, folder, records, page
        self.faults, self.missing = possible_faults(classes or None)
        self.layouts: dict[str, RunLayout] = {name: LAYOUTS[name] for name in layouts or DISTRIBUTED}
        self.data = folder / "data"
        self.rows_file = folder / "cases.jsonl"

    def cases(self, count: int) -> list[Case]:
        choices = {name: fault.choice for name, fault in self.faults.items()}
        return list(choose_cases(self.seed, count, choices, self.layouts))

    def rows(self, count: int) -> dict[int, dict[str, Any]]:
        """Return the rows of finished cases by number, those of the folder before recorded ones.

        Raises:
            UserError: the recorded rows belong to other cases.
        """
        cases = self.cases(max(count, PLANNED_CASES))
        recorded = read_records(self.records, self.seed, cases) if self.records is not None else []
        found = list(read_rows(self.rows_file))
        own = [row for row in found if is_current(row, self.seed, cases)]
        if len(own) < len(found):
            left = len(found) - len(own)
            print(f"{self.rows_file}: {left} rows are of other cases and do not count", flush=True)
        return {row["number"]: row for row in (*recorded, *own)}

    def run(self, case: Case) -> dict[str, Any]:
        """Run a case, its reference if that is new, and the same kills without the toolkit; return its row.

        Sound cases leave no files.
        """
        # a text that does not change with the toolkit, so a folder's references stay valid
        ensure_stdlib(self.data, 264, root=Path(asyncio.__file__).parent)
        layout = LAYOUTS[case.layout]
        reference = unbroken_losses(layout, self.folder / "references" / layout.name, self.data)
        folder = self.folder / case.name
        row = {**run_case(case, folder, self.data, reference), **self.origin}
        row["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
        if can_run_without_toolkit(case):
            release_folder(self.folder / f"{case.name}-stock")
            row["stock"] = run_without_toolkit(case, self.folder / f"{case.name}-stock")
            release_folder(self.folder / f"{case.name}-stock")
        if not row["violations"]:
            release_folder(folder)
        return row

    @cached_property
    def origin(self) -> dict[str, Any]:
        """What a row records of the campaign, the machine and the versions."""
        from harness.environment import describe_machine, package_versions

        machine, versions = describe_machine(), package_versions()
        return {
            "campaign_seed": self.seed,
            "machine": f"{machine['cpu']}, {machine['cores']} cores",
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        }

    def run_remaining(self, count: int, minutes: float = inf) -> list[dict[str, Any]]:
        """Run the cases that have no row yet, and return the rows of all.

        Args:
            minutes: after which no case begins.
        """
        rows = self.rows(count)
        waiting = [case for case in self.cases(count) if case.number not in rows]
        self.record(rows)
        began = time.monotonic()
        for index, case in enumerate(waiting):
            if time.monotonic() - began >= 60 * minutes:
                print(f"{len(waiting) - index} cases are left after {minutes:g} minutes", flush=True)
                break
            row = self.finish(case, rows)
            left = (time.monotonic() - began) / (index + 1) * (len(waiting) - index - 1)
            print(f"{describe_row(row)}; {len(waiting) - index - 1} left, {duration(left)}", flush=True)
        return [row for number, row in sorted(rows.items()) if number < count]

    def finish(self, case: Case, rows: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """Run a case, add its row to ``rows`` and to the files, and return it."""
        rows[case.number] = row = self.run(case)
        with self.rows_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.record(rows)
        return row

    def record(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Write the rows and their table, if this campaign is recorded."""
        if self.records is not None and rows:
            recorded = write_records(self.records, rows.values())
            page = replace_table(self.page.read_text(encoding="utf-8"), table(recorded))
            write_whole(self.page, page)

    def repeat(self, number: int) -> dict[str, Any]:
        """Run a case again and return its row, which replaces an earlier one."""
        return self.finish(self.cases(number + 1)[-1], self.rows(number + 1))


def describe_row(row: dict[str, Any]) -> str:
    recovery = f"{row['recovery']['seconds']:.1f} s" if row["recovery"] else "no new step"
    wrong = "; ".join(f"{name}: {texts[0]}" for name, texts in row["violations"].items())
    return (
        f"{row['number']:5d} {row['fault']}, {row['layout']}, {row['launcher']}{' warm' * row['warm']}, "
        f"step {row['moment']:.1f}: "
        f"{'VIOLATED ' + wrong if wrong else 'ok'} ({recovery}, case {row['seconds']:.0f} s)"
    )


def print_catalogue() -> None:
    possible, missing = possible_faults()
    for name, fault in FAULTS.items():
        where = "two nodes" if fault.nodes > 1 else ", ".join(fault.launchers)
        print(f"{name:<20} {fault.expected:<11} {where}{'' if name in possible else '; ' + missing[name]}")
    for name, why in LEFT_OUT.items():
        print(f"left out: {name}: {why}")
    print(f"layouts: {', '.join(LAYOUTS)}")


def split(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main() -> int:
    given = parse_arguments()
    if given.list:
        print_catalogue()
        return 0
    folder = (given.out or Path(f"runs/campaign-{given.seed}")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    records = RECORDS if given.record else None
    campaign = Campaign(given.seed, folder, split(given.classes), split(given.layouts), records)
    try:
        if given.case is not None:
            row = campaign.repeat(given.case)
            print(json.dumps(row, indent=1))
            return int(bool(row["violations"]))
        rows = campaign.run_remaining(given.faults, given.minutes)
    except UserError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    print(f"\n{table(rows, campaign.missing)}")
    return int(any(row["violations"] for row in rows if not row["missed"]))


if __name__ == "__main__":
    # so that the ``finally`` clauses end the processes of the case in progress
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
