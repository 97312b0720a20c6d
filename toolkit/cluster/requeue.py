"""What becomes of a Slurm job whose tasks have ended: it is done, it goes on in the same job, or it is given up.

    python -m toolkit.cluster.requeue RUN_DIR/jobs/001 --asked=TERM --code=1       (the last line of the batch script)

Decided by the run's status.json and its newest checkpoint, and by what was decided before: ``RUN_DIR/jobs/001/ends.jsonl``, one line
an end. Slurm itself starts a job again that lost a node or was preempted without a word; then no line is written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from toolkit.cluster.job import CONFIG_FILE, RECORD_FILE
from toolkit.config.schema import RunConfig
from toolkit.errors import ExitCode
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

ENDS_FILE = "ends.jsonl"
SCONTROL_SECONDS = 120.0
# The first rank, maybe on another node, writes how the run ended; a network's file system shows it a little later.
SETTLE_SECONDS = 15.0
POLL_SECONDS = 0.2


class StopSignal(StrEnum):
    """By which signal the batch script was asked to end."""

    NONE = "none"
    TERM = "TERM"  # Slurm: the time limit, or a preemption
    INT = "INT"  # a person: cancel() of cluster/backends/slurm.py


class NextAction(StrEnum):
    END = "end"
    AGAIN = "again"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBaseline:
    """When the job was submitted, or at its last end."""

    attempt: int = 0  # the newest; 0: none
    checkpoint: str | None = None  # name of the newest complete one
    fruitless: int = 0  # ends without a word in a row that left no newer checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """What there is after the tasks have ended.

    Attributes:
        state: of the newest attempt; None: there is no status.
        code: how srun ended.
        exit_code: of the newest attempt, as its status has it.
    """

    asked: StopSignal
    code: int
    attempt: int
    state: RunState | None
    reason: str | None
    checkpoint: str | None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    next: NextAction
    code: ExitCode  # of the job, if this is its end
    why: str
    fruitless: int = 0


def decide(before: JobBaseline, ended: JobOutcome, *, restarts: int, requeue: bool) -> Decision:
    """
    Args:
        restarts: ``cluster.restarts``. The launcher inside the job (our parent, torchrun) has had so many starts already; where it
            was killed itself, so many ends in a row without a newer checkpoint are answered by another start.
        requeue: ``cluster.slurm.requeue``.
    """

    def again(why: str, fruitless: int = 0) -> Decision:
        return Decision(next=NextAction.AGAIN, code=ExitCode.STOPPED, why=why, fruitless=fruitless)

    def end(code: ExitCode, why: str) -> Decision:
        return Decision(next=NextAction.END, code=code, why=why)

    if ended.attempt <= before.attempt and ended.state is not RunState.DONE:
        # What refused it before it could write into the run's directory would refuse it again.
        if ended.asked is StopSignal.TERM and requeue:
            return again("stopped before an attempt began")
        code = (
            ExitCode.STOPPED
            if ended.asked is not StopSignal.NONE
            else ExitCode.USER
            if ended.code == ExitCode.USER
            else ExitCode.FAILURE
        )
        return end(code, "no attempt was begun: what is said above is the reason")
    if ended.state is RunState.DONE:
        return end(ExitCode.DONE, "done")
    if ended.state is RunState.REFUSED:
        return end(ExitCode.USER, f"refused, which another start would not change: {ended.reason}")
    if ended.state is RunState.FAILED and ended.exit_code in (ExitCode.USER, ExitCode.DIVERGED):
        return end(ExitCode(ended.exit_code), f"failed, which another start would not change: {ended.reason}")
    if ended.asked is StopSignal.INT:
        return end(
            ExitCode.STOPPED if ended.state is RunState.STOPPED else ExitCode.FAILURE,
            f"stopped by a person: {ended.reason}",
        )
    if ended.state is RunState.STOPPED:
        if ended.reason is not None and ended.reason.startswith("SIGINT") and ended.asked is StopSignal.NONE:
            return end(ExitCode.STOPPED, "stopped by a person (SIGINT), so it is not started again")
        return (
            again(f"stopped ({ended.reason}); goes on from {ended.checkpoint or 'the beginning'}")
            if requeue
            else end(ExitCode.STOPPED, f"stopped ({ended.reason}), and cluster.slurm.requeue=false")
        )
    told = ended.state is RunState.FAILED
    what = f"failed: {ended.reason}" if told else "ended without a word (killed, or a lost node)"
    if not requeue or not restarts:
        return end(
            ExitCode.FAILURE, f"{what}; {'cluster.restarts=0' if requeue else 'cluster.slurm.requeue=false'}"
        )
    if ended.checkpoint is not None and ended.checkpoint != before.checkpoint:
        return again(f"{what}; goes on from {ended.checkpoint}")
    if told:
        return end(
            ExitCode.FAILURE,
            f"{what}; no newer checkpoint came of it, though its launcher could start it {restarts} times again",
        )
    fruitless = before.fruitless + 1
    if fruitless <= restarts:
        return again(
            f"{what}; no newer checkpoint, start {fruitless} of cluster.restarts={restarts}", fruitless
        )
    return end(
        ExitCode.FAILURE,
        f"{what}; {fruitless} times in a row without a newer checkpoint (cluster.restarts={restarts})",
    )


def read_baseline(run_dir: Path) -> JobBaseline:
    return JobBaseline(attempt=max(RunDirectory(run_dir).attempts(), default=0), checkpoint=newest_checkpoint_name(run_dir))


def newest_checkpoint_name(run_dir: Path) -> str | None:
    """Name of the run's newest checkpoint."""
    found = RunDirectory(run_dir).newest_checkpoint()
    return found.name if found is not None else None


def load_baseline(folder: Path) -> JobBaseline:
    """Of the job's last end, or of its submission; of the run's beginning where neither was recorded."""
    file = folder / ENDS_FILE
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    if lines:
        last = json.loads(lines[-1])
        return JobBaseline(attempt=last["attempt"], checkpoint=last["checkpoint"], fruitless=last["fruitless"])
    file = folder / RECORD_FILE
    return JobBaseline(**json.loads(file.read_text(encoding="utf-8"))["before"]) if file.exists() else JobBaseline()


def read_outcome(run_dir: Path, asked: StopSignal, code: int) -> JobOutcome:
    directory = RunDirectory(run_dir)
    status = directory.status()
    return JobOutcome(
        asked=asked,
        code=code,
        attempt=max(directory.attempts(), default=0),
        state=status.state if status else None,
        reason=status.reason if status else None,
        checkpoint=newest_checkpoint_name(run_dir),
        exit_code=status.exit_code if status else None,
    )


def wait_for_outcome(run_dir: Path, before: JobBaseline, asked: StopSignal, code: int, seconds: float) -> JobOutcome:
    """:func:`look`, once the run has said its last word, if it does so within ``seconds``."""
    until = time.monotonic() + seconds
    while True:
        ended = read_outcome(run_dir, asked, code)
        begun = ended.attempt > before.attempt
        told = begun and ended.state is not None and not ended.state.live
        if told or (not begun and code == ExitCode.USER) or time.monotonic() > until:
            return ended
        time.sleep(POLL_SECONDS)


def append_outcome(folder: Path, ended: JobOutcome, decision: Decision) -> None:
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **asdict(ended),
        **asdict(decision),
        "code": ended.code,
    }
    with (folder / ENDS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def requeue_job(job: str) -> None:
    """``scontrol requeue``, where the job runs still. Slurm would put back a cancelled job, too, and while its script runs
    it is shown as COMPLETING, as one that was over its time is."""
    shown = _scontrol("--oneliner", "show", "job", job)
    state = next(
        (word.partition("=")[2] for word in shown.stdout.split() if word.startswith("JobState=")), "unknown"
    )
    if state != "RUNNING":
        print(f"job {job} is {state} already (cancelled, or over its time limit): it stays so", flush=True)
        return
    done = _scontrol("requeue", job)
    if done.returncode:
        print(
            f"job {job} could not be put back into the queue: {done.stderr.strip()}",
            file=sys.stderr,
            flush=True,
        )
    else:
        print(f"job {job} is put back into the queue", flush=True)


def _scontrol(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scontrol", *words], capture_output=True, text=True, timeout=SCONTROL_SECONDS, check=False
    )


def main(arguments: Sequence[str]) -> int:
    from toolkit.config.compose import from_yaml

    parser = argparse.ArgumentParser(prog="python -m toolkit.cluster.requeue")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--asked", type=StopSignal, required=True)
    parser.add_argument("--code", type=int, required=True)
    given = parser.parse_args(arguments)
    config: RunConfig = from_yaml((given.folder / CONFIG_FILE).read_text(encoding="utf-8"))
    assert config.run.dir is not None, "a frozen configuration has its directory"
    before = load_baseline(given.folder)
    several = (config.cluster.nodes or 1) > 1
    ended = wait_for_outcome(Path(config.run.dir), before, given.asked, given.code, SETTLE_SECONDS if several else 0.0)
    decision = decide(before, ended, restarts=config.cluster.restarts, requeue=config.cluster.slurm.requeue)
    append_outcome(given.folder, ended, decision)
    job = os.environ["SLURM_JOB_ID"]
    print(f"job {job}: {decision.why}", flush=True)
    if decision.next is NextAction.AGAIN:
        requeue_job(job)
    return decision.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
