"""Measure how long a killed rank interrupts a training: from SIGKILL to the next step that had not been made.

    python benchmarks/restart.py                              about five minutes on two cores
    python benchmarks/restart.py --rounds 1 --kills 2 --only warm memory
    python benchmarks/restart.py --overhead                   the cost of supervision, standbys and snapshots;
                                                              about four minutes

A model of 11 M parameters trains with ZeRO 1 on two ranks. The contenders take turns; in each turn a run
starts, and ranks 0 and 1 are killed in turn after some steps:

    torchrun   torchrun --max-restarts without standbys, from the newest checkpoint
    relayed    the same with cluster.standbys=2: torchrun's workers hand their places to standbys
    cold       plain python with cluster.standbys=0
    warm       plain python with cluster.standbys=2: the ranks' places are taken by standbys
    memory     the same with checkpoint.memory_every: from the newest snapshot

No round begins after ``--minutes``. The phases are those of attempts/NNN/restart.json. Results go to
benchmarks/results/restart.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil
from harness.environment import describe_machine, package_versions

from toolkit.cluster.attempt.rank_processes import find_free_port
from toolkit.restart_phases import read_restart
from toolkit.rundir.directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "restart.json"
RANKS, LIMIT_SECONDS = 2, 300.0
CHECKPOINT_EVERY, MEMORY_EVERY = 40, 5
OVERHEAD_STEPS = 4 * CHECKPOINT_EVERY
STEPS_BEFORE_A_KILL = 12  # of an attempt; not a multiple of MEMORY_EVERY, so steps are repeated
KEYS = (
    "+exp=quickstart",
    "engine=deepspeed",
    "zero=stage1",
    "model.hidden_size=384",
    "model.intermediate_size=1024",
    "model.num_hidden_layers=6",
    "train.sequence_length=64",
    "train.global_batch=4",
    "train.steps=1000000",
    "schedule=constant",
    "schedule.warmup=0",
    "eval.every=0",
    "monitor=files",
    "debug.threads=1",
    f"checkpoint.every={CHECKPOINT_EVERY}",
    "cluster.restarts=1000",
    "+hooks.marks.target=restart_marks.StepMoments",
)
CONTENDERS: dict[str, tuple[str, ...]] = {
    "torchrun": ("cluster.standbys=0",),
    "relayed": (f"cluster.standbys={RANKS}",),
    "cold": ("cluster.standbys=0",),
    "warm": (f"cluster.standbys={RANKS}",),
    "memory": (f"cluster.standbys={RANKS}", f"checkpoint.memory_every={MEMORY_EVERY}"),
}


class RunningTraining:
    """One run of a contender, as a context manager."""

    def __init__(self, name: str, data: str, folder: Path) -> None:
        self.name, self.dir, self._marks = name, folder / "run", folder / "marks.txt"
        script = str(ROOT / "launch" / "train.py")
        overrides = [*KEYS, *CONTENDERS[name], f"run.dir={self.dir}", f"data.path={data}"]
        if name in ("torchrun", "relayed"):
            argv = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(RANKS)]
            argv += ["--max-restarts", "1000", "--master_port", str(find_free_port()), script, *overrides]
        else:
            argv = [sys.executable, script, *overrides, f"cluster.cpu_ranks={RANKS}"]
        search = os.pathsep.join([str(ROOT / "benchmarks" / "harness"), str(ROOT)])
        environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": search, "RESTART_MARKS": str(self._marks)}
        self._log = (folder / "log.txt").open("w")
        self.process = subprocess.Popen(
            argv, cwd=ROOT, env={**os.environ, **environ}, stdout=self._log, stderr=subprocess.STDOUT
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        processes = self.processes()
        for process in processes:
            process.kill()
        self.process.wait()
        psutil.wait_procs(processes)
        self._log.close()

    def processes(self) -> list[psutil.Process]:
        """Return the processes of this run. Those of torchrun's standbys are no children of its agent."""
        found = psutil.process_iter(["cmdline"])
        return [
            process
            for process in found
            if any(str(self.dir) in word for word in process.info["cmdline"] or ())
        ]

    def moments(self) -> list[tuple[float, int]]:
        """Return time and number of each step so far, in order of time."""
        lines = self._marks.read_text().splitlines() if self._marks.exists() else []
        rows = (line.split() for line in lines)
        return [(float(moment), int(step)) for moment, step in rows]

    def has_steps(self, count: int) -> bool:
        return len(self.moments()) >= count

    def wait_until(self, what: str, holds: Any) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline:
                log = Path(self._log.name).read_text()[-3000:]
                raise SystemExit(f"{self.name}: not {what} within {LIMIT_SECONDS:g} s\n{log}")
            time.sleep(0.02)

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the ranks, without standbys and relays."""
        found = {}
        for process in self.processes():
            try:
                environ, name = process.environ(), process.name()
            except psutil.Error:
                continue
            if "RANK" in environ and not name.startswith(("standby-", "warm-up-", "relay-")):
                found[int(environ["RANK"])] = process
        return found

    def standbys_are_ready(self) -> bool:
        if self.name in ("torchrun", "cold"):
            return True
        return sum(process.name().startswith("standby-") for process in self.processes()) == RANKS

    def kill_a_rank(self, rank: int, attempt: int) -> dict[str, Any]:
        """Kill ``rank`` of an attempt after some steps, and measure until the next new step."""
        done = len(self.moments())
        self.wait_until("stepping", partial(self.has_steps, done + STEPS_BEFORE_A_KILL))
        self.wait_until("with standbys", self.standbys_are_ready)
        killed = time.time()
        self.ranks()[rank].send_signal(signal.SIGKILL)
        before = max(step for moment, step in self.moments() if moment <= killed)

        def new() -> list[float]:
            return [moment for moment, step in self.moments() if step > before and moment > killed + 0.5]

        self.wait_until("stepping again", new)
        repeated = [step for moment, step in self.moments() if moment > killed + 0.5 and step <= before]
        phases = read_restart(RunDirectory(self.dir).attempt_folder(attempt + 1))
        return {
            "seconds": new()[0] - killed,
            "repeated_steps": len(repeated),
            "phases": phases.seconds() if phases is not None else {},
            "standbys": phases.standbys if phases is not None else 0,
        }


def turn(name: str, kills: int, data: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, RunningTraining(name, data, Path(folder)) as training:
        return [training.kill_a_rank(kill % RANKS, kill + 1) for kill in range(kills)]


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


def overhead(rounds: Iterable[int], data: str) -> dict[str, Any]:
    """Compare the time of a step under torchrun, without snapshots, with that of a run by the parent process
    with standbys and snapshots. Runs take turns; what counts begins when the standbys are ready.
    """
    plain, protected = "torchrun", "memory"
    took: dict[str, list[float]] = {plain: [], protected: []}
    for number in rounds:
        for name in list(took)[:: 1 if number % 2 == 0 else -1]:
            with (
                tempfile.TemporaryDirectory() as folder,
                RunningTraining(name, data, Path(folder)) as training,
            ):
                training.wait_until("stepping", partial(training.has_steps, STEPS_BEFORE_A_KILL))
                training.wait_until("with standbys", training.standbys_are_ready)
                # both sides count the same number of checkpoints
                first = (len(training.moments()) // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY
                last = first + OVERHEAD_STEPS
                training.wait_until("done", partial(training.has_steps, last + 1))
                moments = training.moments()
                took[name].append((moments[last][0] - moments[first][0]) / OVERHEAD_STEPS)
    ratios = [with_ / without for with_, without in zip(took[protected], took[plain], strict=True)]
    return {"step_seconds": took, "ratios": ratios, "median_ratio": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3, help="per turn")
    parser.add_argument("--overhead", action="store_true", help="measure runs without failures instead")
    parser.add_argument("--minutes", type=float, default=3.0, help="no round begins later")
    parser.add_argument(
        "--data", default=str(ROOT / "data" / "stdlib"), help="folder of the embedded text, created if absent"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    results = json.loads(given.out.read_text()) if given.out.exists() else {}
    results |= {"machine": describe_machine(), "versions": package_versions("torch", "deepspeed")}
    if given.overhead:
        results["overhead"] = overhead(rounds_in(given.minutes, given.rounds), given.data)
        ratio = results["overhead"]["median_ratio"]
        print(f"a step with standbys and a snapshot every {MEMORY_EVERY}: {ratio:.4f} times that of torchrun")
    else:
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in given.only}
        for _ in rounds_in(given.minutes, given.rounds):
            for name in given.only:
                rows[name] += turn(name, given.kills, given.data)
        results["contenders"] = {name: summarize(found) for name, found in rows.items()}
        for name, row in results["contenders"].items():
            phases = ", ".join(f"{phase} {took:.1f}" for phase, took in row["phases"].items())
            times = f"p50 {row['p50_seconds']:.1f} s, p95 {row['p95_seconds']:.1f} s"
            print(
                f"{name:>9}: {times} over {row['kills']} kills, {row['repeated_steps']:.1f} steps repeated; "
                f"{phases}"
            )
    given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
