"""Measure how long a killed rank interrupts a training: from SIGKILL to the next step that had not been made.

    python benchmarks/restart.py                              about five minutes on two cores
    python benchmarks/restart.py --rounds 1 --kills 2 --only warm memory

A model of 11 M parameters trains with ZeRO 1 on two ranks. The contenders take turns; in each turn a run
starts, and ranks 0 and 1 are killed in turn after some steps:

    torchrun          torchrun --max-restarts without standbys, from the newest checkpoint
    relayed           the same with cluster.standbys=2: torchrun's workers hand their places to standbys
    relayed_memory    the same with checkpoint.memory_every: from the newest snapshot
    cold              plain python with cluster.standbys=0
    warm              plain python with cluster.standbys=2: the ranks' places are taken by standbys
    memory            the same with checkpoint.memory_every: from the newest snapshot

No round begins after ``--minutes``. The phases are those of attempts/NNN/restart.json. Results go to
benchmarks/results/restart.json.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.environment import describe_machine, package_versions
from harness.running_training import RANKS, ROOT, RunningTraining

from toolkit.restart_phases import read_restart
from toolkit.rundir.directory import RunDirectory

RESULTS = ROOT / "benchmarks" / "results" / "restart.json"
CHECKPOINT_EVERY, MEMORY_EVERY = 40, 5
STEPS_BEFORE_A_KILL = 12  # of an attempt; not a multiple of MEMORY_EVERY, so steps are repeated


@dataclass(frozen=True)
class RestartContender:
    torchrun: bool = False  # starts the ranks, not plain python
    standbys: int = 0
    memory_every: int = 0  # steps between snapshots in memory; 0: none

    def start(self, name: str, data: str, folder: Path) -> RunningTraining:
        overrides = (
            f"checkpoint.every={CHECKPOINT_EVERY}",
            f"checkpoint.memory_every={self.memory_every}",
            f"cluster.standbys={self.standbys}",
        )
        return RunningTraining(name, overrides, data, folder, torchrun=self.torchrun, standbys=self.standbys)


CONTENDERS = {
    "torchrun": RestartContender(torchrun=True),
    "relayed": RestartContender(torchrun=True, standbys=RANKS),
    "relayed_memory": RestartContender(torchrun=True, standbys=RANKS, memory_every=MEMORY_EVERY),
    "cold": RestartContender(),
    "warm": RestartContender(standbys=RANKS),
    "memory": RestartContender(standbys=RANKS, memory_every=MEMORY_EVERY),
}


def kill_a_rank(training: RunningTraining, rank: int, attempt: int) -> dict[str, Any]:
    """Kill ``rank`` of an attempt after some steps, and measure until the next new step."""
    done = len(training.moments())
    training.wait_until("stepping", partial(training.has_steps, done + STEPS_BEFORE_A_KILL))
    training.wait_until("with standbys", training.standbys_are_ready)
    killed = time.time()
    training.ranks()[rank].send_signal(signal.SIGKILL)
    before = max(each.step for each in training.moments() if each.time <= killed)

    def new() -> list[float]:
        return [each.time for each in training.moments() if each.step > before and each.time > killed + 0.5]

    training.wait_until("stepping again", new)
    repeated = [each for each in training.moments() if each.time > killed + 0.5 and each.step <= before]
    phases = read_restart(RunDirectory(training.dir).attempt_folder(attempt + 1))
    return {
        "seconds": new()[0] - killed,
        "repeated_steps": len(repeated),
        "phases": phases.seconds() if phases is not None else {},
        "standbys": phases.standbys if phases is not None else 0,
    }


def turn(name: str, kills: int, data: str) -> list[dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        CONTENDERS[name].start(name, data, Path(folder)) as training,
    ):
        return [kill_a_rank(training, kill % RANKS, kill + 1) for kill in range(kills)]


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seconds = sorted(row["seconds"] for row in rows)
    names = dict.fromkeys(name for row in rows for name in row["phases"])
    return {
        "kills": len(rows),
        "p50_seconds": statistics.median(seconds),
        "p95_seconds": seconds[min(len(seconds) - 1, round(0.95 * (len(seconds) - 1) + 0.499))],
        "repeated_steps": statistics.mean(row["repeated_steps"] for row in rows),
        "standbys": min(row["standbys"] for row in rows),
        "phases": {name: statistics.median(row["phases"].get(name, 0.0) for row in rows) for name in names},
    }


def rounds_in(minutes: float, count: int) -> Iterator[int]:
    """Yield the numbers of at most ``count`` rounds; none begins after ``minutes``, except for the first."""
    began = time.monotonic()
    for number in range(count):
        if number == 0 or time.monotonic() - began < 60 * minutes:
            yield number


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3, help="per turn")
    parser.add_argument("--minutes", type=float, default=3.0, help="no round begins later")
    parser.add_argument(
        "--data", default=str(ROOT / "data" / "stdlib"), help="folder of the embedded text, created if absent"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    results = {"machine": describe_machine(), "versions": package_versions("torch", "deepspeed")}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in given.only}
    for _ in rounds_in(given.minutes, given.rounds):
        for name in given.only:
            rows[name] += turn(name, given.kills, given.data)
    results["contenders"] = {name: summarize(found) for name, found in rows.items()}
    for name, row in results["contenders"].items():
        phases = ", ".join(f"{phase} {took:.1f}" for phase, took in row["phases"].items())
        times = f"p50 {row['p50_seconds']:.1f} s, p95 {row['p95_seconds']:.1f} s"
        print(
            f"{name:>14}: {times} over {row['kills']} kills, {row['repeated_steps']:.1f} steps repeated; "
            f"{phases}"
        )
    given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
