"""Inject random faults into trainings and check what they leave behind: `make campaign SEED=7`, or

    python benchmarks/campaign.py --seed 7                         500 faults, some hours on two cores
    python benchmarks/campaign.py --seed 7 --faults 40 --classes rank-killed,disk-full
    python benchmarks/campaign.py --seed 7 --case 12               one case again, with its whole row
    python benchmarks/campaign.py --list                           the classes, and those that are left out

Each case trains a tiny model for 20 steps with DeepSpeed or Megatron-core on 2 to 8 ranks, or on two
simulated machines, and suffers one fault at a random moment; if that ends the command, the same command is
repeated. Then the invariants of benchmarks/faults/invariants.py are checked, against an unbroken run of the
same layout. Some runs of the parent process have standbys and snapshots in memory. Kills of DeepSpeed ranks
are repeated with a plain script under ``torchrun --max-restarts``.

The seed decides every case. Finished cases are rows of FOLDER/cases.jsonl; a second start continues after
them. Figures go to benchmarks/results/campaign.json and docs/results.md with ``--record``. Needs Linux; some
classes need root. Exit code: 0 all invariants hold, 1 one is violated.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from benchmarks.faults.cases import DISTRIBUTED, LAYOUTS, Case, Choice, RunLayout, choose_cases  # noqa: E402
from benchmarks.faults.catalogue import FAULTS, LEFT_OUT, possible_faults  # noqa: E402
from benchmarks.faults.plain_deepspeed import can_run_without_toolkit, run_without_toolkit  # noqa: E402
from benchmarks.faults.report import replace_table, summarise, summarise_restarts, table  # noqa: E402
from benchmarks.faults.run import release_folder, run_case, unbroken_losses  # noqa: E402
from toolkit.data.tokens.stdlib import ensure_stdlib  # noqa: E402
from toolkit.files import write_whole  # noqa: E402
from toolkit.progress import duration  # noqa: E402
from toolkit.rows import read_rows  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "campaign.json"
PAGE = ROOT / "docs" / "results.md"
DESCRIPTION = (__doc__ or "").splitlines()[0]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=500, help="number of cases")
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
    """

    def __init__(self, seed: int, folder: Path, classes: list[str], layouts: list[str]) -> None:
        self.seed, self.folder = seed, folder
        self.faults, self.missing = possible_faults(classes or None)
        self.layouts: dict[str, RunLayout] = {name: LAYOUTS[name] for name in layouts or DISTRIBUTED}
        self.data = folder / "data"
        self.rows_file = folder / "cases.jsonl"

    def cases(self, count: int) -> list[Case]:
        choices = {
            name: Choice(fault.launchers, fault.nodes, fault.warm) for name, fault in self.faults.items()
        }
        return list(choose_cases(self.seed, count, choices, self.layouts))

    def rows(self) -> list[dict[str, Any]]:
        return list(read_rows(self.rows_file))

    def run(self, case: Case) -> dict[str, Any]:
        """Run a case, its reference if that is new, and the same kills without the toolkit.

        Sound cases leave no files.
        """
        ensure_stdlib(self.data, 264, root=ROOT / "toolkit")
        layout = LAYOUTS[case.layout]
        reference = unbroken_losses(layout, self.folder / "references" / layout.name, self.data)
        folder = self.folder / case.name
        row = run_case(case, folder, self.data, reference)
        if can_run_without_toolkit(case):
            release_folder(self.folder / f"{case.name}-stock")
            row["stock"] = run_without_toolkit(case, self.folder / f"{case.name}-stock")
            release_folder(self.folder / f"{case.name}-stock")
        if not row["violations"]:
            release_folder(folder)
        return row

    def go_on(self, count: int) -> list[dict[str, Any]]:
        """Run the cases that have no row yet, and return the rows of all."""
        cases = self.cases(count)
        done = {row["number"] for row in self.rows()}
        waiting = [case for case in cases if case.number not in done]
        began = time.monotonic()
        for index, case in enumerate(waiting):
            row = self.run(case)
            with self.rows_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            left = (time.monotonic() - began) / (index + 1) * (len(waiting) - index - 1)
            print(f"{describe_row(row)}; {len(waiting) - index - 1} left, {duration(left)}", flush=True)
        numbers = {case.number for case in cases}
        return [row for row in self.rows() if row["number"] in numbers]

    def result(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from harness.environment import describe_machine, package_versions

        return {
            "seed": self.seed,
            "layouts": sorted({row["layout"] for row in rows}),
            "load": max(row["load"] for row in rows),
            "classes": summarise(rows),
            "restarts": summarise_restarts(rows),
            "left_out": {**LEFT_OUT, **self.missing},
            "machine": describe_machine(),
            "versions": package_versions(),
        }


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
    campaign = Campaign(given.seed, folder, split(given.classes), split(given.layouts))
    if given.case is not None:
        row = campaign.run(campaign.cases(given.case + 1)[-1])
        print(json.dumps(row, indent=1))
        return int(bool(row["violations"]))
    result = campaign.result(campaign.go_on(given.faults))
    print(f"\n{table(result)}")
    if given.record:
        write_whole(RESULTS, json.dumps(result, indent=1) + "\n")
        write_whole(PAGE, replace_table(PAGE.read_text(encoding="utf-8"), table(result)))
    return int(any(figures["violated"] for figures in result["classes"].values()))


if __name__ == "__main__":
    # so that the ``finally`` clauses end the processes of the case in progress
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
