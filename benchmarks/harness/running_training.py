"""A small training on two CPU ranks: for restart.py and goodput.py, which kill its ranks, and
snapshot_overhead.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from toolkit.testing.dist import find_free_port

ROOT = Path(__file__).resolve().parents[2]
RANKS, LIMIT_SECONDS = 2, 300.0
# A model of 11 M parameters with ZeRO 1.
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
    "cluster.restarts=1000",
    "+hooks.marks.target=restart_marks.StepMoments",
)


class StepMoment(NamedTuple):
    """The end of a step on rank 0.

    Attributes:
        time: in seconds since 1970.
        step: number of completed steps.
        seconds: of the step, as the run's own record counts them.
    """

    time: float
    step: int
    seconds: float


class RunningTraining:
    """One run, as a context manager that ends the run's processes and no others.

    Args:
        name: of the contender, for messages.
        overrides: keys in addition to ``KEYS``.
        data: folder of the embedded text, created if absent.
        folder: for the run directory, the log and the moments of steps.
        torchrun: start the ranks with torchrun and not with plain ``python``.
        standbys: as many as the run keeps when it is ready for a failure.
    """

    def __init__(
        self,
        name: str,
        overrides: Sequence[str],
        data: str,
        folder: Path,
        *,
        torchrun: bool = False,
        standbys: int = 0,
    ) -> None:
        self.name, self.dir, self._marks = name, folder / "run", folder / "marks.txt"
        self._standbys = standbys
        script = str(ROOT / "launch" / "train.py")
        overrides = [*KEYS, *overrides, f"run.dir={self.dir}", f"data.path={data}"]
        if torchrun:
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
            with suppress(psutil.NoSuchProcess):  # standbys end with the parent process
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

    def moments(self) -> list[StepMoment]:
        """Return the moments of the steps so far, in order of time."""
        lines = self._marks.read_text().splitlines() if self._marks.exists() else []
        rows = (line.split() for line in lines)
        return [StepMoment(float(moment), int(step), float(seconds)) for moment, step, seconds in rows]

    def has_steps(self, count: int) -> bool:
        return len(self.moments()) >= count

    def wait_until(self, what: str, holds: Callable[[], object], *, poll_seconds: float = 0.02) -> None:
        """Wait until ``holds()``; end the benchmark if the run ends, or after ``LIMIT_SECONDS``."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline:
                log = Path(self._log.name).read_text()[-3000:]
                when = "before its end" if self.process.poll() is not None else f"within {LIMIT_SECONDS:g} s"
                raise SystemExit(f"{self.name}: not {what} {when}\n{log}")
            time.sleep(poll_seconds)

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
        if not self._standbys:
            return True
        found = self.processes()
        try:
            return sum(process.name().startswith("standby-") for process in found) == self._standbys
        except psutil.NoSuchProcess:
            return False
