"""Decide how a Slurm job continues after its tasks have ended: it is done, requeued, or given up.

    python -m toolkit.cluster.jobs.requeue RUN_DIR/jobs/001 --asked=TERM --code=1    (last line of the script)

The decision depends on the run's status.json, its newest checkpoint and earlier decisions, which are appended
to ``RUN_DIR/jobs/001/ends.jsonl``. Slurm itself restarts a job that lost a node or was preempted without
warning; then nothing is appended. The pods of a Kubernetes job decide by the same rules (``pod.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from toolkit.cluster.jobs.job import CONFIG_FILE, RECORD_FILE
from toolkit.cluster.jobs.slurm_controller import RETRY_SECONDS, TRIES, ask_controller, call_controller
from toolkit.config.schema import RunConfig
from toolkit.errors import ExitCode
from toolkit.rows import last_row
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.excluded_hosts import read_excluded_hosts
from toolkit.rundir.status import RunState, ended_by_budget

T = TypeVar("T")

ENDS_FILE = "ends.jsonl"
# The first rank, possibly on another node, writes the final status; a network file system shows it a little
# later.
SETTLE_SECONDS = 15.0
POLL_SECONDS = 0.2
READ_SECONDS = 60.0  # a network file system may return errors for a while: ESTALE, EIO


class StopSignal(StrEnum):
    """The signal that asked the batch script to end."""

    NONE = "none"
    TERM = "TERM"  # sent by Slurm: time limit or preemption
    INT = "INT"  # sent by a user: cancel() of cluster/jobs/backends/slurm.py


class NextAction(StrEnum):
    END = "end"
    REQUEUE = "again"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBaseline:
    """State of the run when the job was submitted, or at its last end."""

    attempt: int = 0  # the newest attempt; 0: none
    checkpoint: str | None = None  # name of the newest complete checkpoint
    fruitless: int = 0  # counted restarts in a row, each without a newer checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """State of the run after the tasks have ended.

    Attributes:
        state: of the newest attempt; None: it has no status.
        code: exit code of srun, or of the pod's launcher.
        exit_code: of the newest attempt, from its status.
    """

    asked: StopSignal
    code: int
    attempt: int
    state: RunState | None
    reason: str | None
    checkpoint: str | None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueDecision:
    next: NextAction
    code: ExitCode  # of the job, if it ends here
    why: str
    fruitless: int = 0


def decide_requeue(
    before: JobBaseline, outcome: JobOutcome, *, restarts: int, requeue: bool
) -> RequeueDecision:
    """Decide how the job continues.

    Args:
        restarts: ``cluster.restarts``. The launcher inside the job (supervisor or torchrun) has already
            restarted the ranks this often. If the launcher itself was killed, was stopped before the ranks
            had saved, or could not start an attempt, the job is restarted up to this often in a row without a
            newer checkpoint.
        requeue: ``cluster.slurm.requeue``; True in Kubernetes.
    """

    def restart(why: str, fruitless: int = 0) -> RequeueDecision:
        return RequeueDecision(next=NextAction.REQUEUE, code=ExitCode.STOPPED, why=why, fruitless=fruitless)

    def end(code: ExitCode, why: str) -> RequeueDecision:
        return RequeueDecision(next=NextAction.END, code=code, why=why)

    def restart_counted(what: str) -> RequeueDecision:
        fruitless = before.fruitless + 1
        if fruitless <= restarts:
            return restart(f"{what}; restart {fruitless} of cluster.restarts={restarts}", fruitless)
        return end(ExitCode.FAILURE, f"{what}; {fruitless} times in a row (cluster.restarts={restarts})")

    if outcome.attempt <= before.attempt and outcome.state is not RunState.DONE:
        if outcome.asked is StopSignal.TERM and requeue:
            return restart("stopped before an attempt started")
        # A rejected start would be rejected again. A run that has attempts was accepted once, so what failed
        # may be a node or the network.
        accepted = before.attempt > 0 and outcome.code != ExitCode.USER
        if outcome.asked is StopSignal.NONE and accepted and requeue and restarts:
            return restart_counted("no attempt was started")
        code = (
            ExitCode.STOPPED
            if outcome.asked is not StopSignal.NONE
            else ExitCode.USER
            if outcome.code == ExitCode.USER
            else ExitCode.FAILURE
        )
        return end(code, "no attempt was started; see the output above")
    if outcome.state is RunState.DONE:
        return end(ExitCode.DONE, "done")
    if outcome.state is RunState.REFUSED:
        return end(ExitCode.USER, f"refused, and a restart would not help: {outcome.reason}")
    if outcome.state is RunState.FAILED and outcome.exit_code in (ExitCode.USER, ExitCode.DIVERGED):
        return end(ExitCode(outcome.exit_code), f"failed, and a restart would not help: {outcome.reason}")
    if outcome.asked is StopSignal.INT:
        return end(
            ExitCode.STOPPED if outcome.state is RunState.STOPPED else ExitCode.FAILURE,
            f"stopped by the user: {outcome.reason}",
        )
    if ended_by_budget(outcome.state, outcome.reason):
        return end(ExitCode.STOPPED, f"stopped by its budget, so it is not restarted: {outcome.reason}")
    if outcome.state is RunState.STOPPED:
        if (
            outcome.reason is not None
            and outcome.reason.startswith("SIGINT")
            and outcome.asked is StopSignal.NONE
        ):
            return end(ExitCode.STOPPED, "stopped by the user (SIGINT), so it is not restarted")
        return (
            restart(f"stopped ({outcome.reason}); resumes from {outcome.checkpoint or 'the beginning'}")
            if requeue
            else end(ExitCode.STOPPED, f"stopped ({outcome.reason}), and cluster.slurm.requeue=false")
        )
    recorded = outcome.state is RunState.FAILED
    what = (
        f"failed: {outcome.reason}"
        if recorded
        else ("ended without recording a reason (killed, or the node was lost)")
    )
    if not requeue or not restarts:
        return end(
            ExitCode.FAILURE, f"{what}; {'cluster.restarts=0' if requeue else 'cluster.slurm.requeue=false'}"
        )
    if outcome.checkpoint is not None and outcome.checkpoint != before.checkpoint:
        return restart(f"{what}; resumes from {outcome.checkpoint}")
    # After a stop the launcher restarts nothing: the ranks may have failed because saving took too long.
    if recorded and outcome.asked is not StopSignal.TERM:
        return end(
            ExitCode.FAILURE,
            f"{what}; no newer checkpoint, although its launcher was allowed {restarts} restarts",
        )
    return restart_counted(f"{what}; no newer checkpoint")


def read_baseline(run_dir: Path) -> JobBaseline:
    return JobBaseline(
        attempt=max(RunDirectory(run_dir).attempts(), default=0), checkpoint=newest_checkpoint_name(run_dir)
    )


def newest_checkpoint_name(run_dir: Path) -> str | None:
    """Return the name of the run's newest checkpoint."""
    checkpoint = RunDirectory(run_dir).newest_checkpoint()
    return checkpoint.name if checkpoint is not None else None


def load_baseline(folder: Path) -> JobBaseline:
    """Load the state at the job's last end, else at its submission; the defaults if neither was recorded."""
    last = last_row(folder / ENDS_FILE)  # a write that was interrupted leaves a part of a line
    if last is not None:
        return JobBaseline(
            attempt=last["attempt"], checkpoint=last["checkpoint"], fruitless=last["fruitless"]
        )
    file = folder / RECORD_FILE
    return (
        JobBaseline(**json.loads(file.read_text(encoding="utf-8"))["before"])
        if file.exists()
        else JobBaseline()
    )


def retry_read(read: Callable[[], T]) -> T:
    """Return what ``read`` returns. Call it again while it raises OSError, for at most ``READ_SECONDS``."""
    until = time.monotonic() + READ_SECONDS
    while True:
        try:
            return read()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(POLL_SECONDS)


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


def wait_for_outcome(
    run_dir: Path, before: JobBaseline, asked: StopSignal, code: int, seconds: float
) -> JobOutcome:
    """Read the outcome once the run has recorded its end, or after ``seconds``."""
    until = time.monotonic() + seconds
    while True:
        outcome = retry_read(lambda: read_outcome(run_dir, asked, code))
        begun = outcome.attempt > before.attempt
        recorded = begun and outcome.state is not None and not outcome.state.live
        if recorded or (not begun and code == ExitCode.USER) or time.monotonic() > until:
            return outcome
        time.sleep(POLL_SECONDS)


def append_outcome(folder: Path, outcome: JobOutcome, decision: RequeueDecision) -> None:
    """Record a decision. A failure is only reported, since the job must be requeued in any case."""
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **asdict(outcome),
        **asdict(decision),
        "code": outcome.code,
    }
    try:
        with (folder / ENDS_FILE).open("a+b") as file:
            file.seek(max(0, file.tell() - 1))
            separator = b"\n" if file.read() not in (b"", b"\n") else b""  # after an interrupted write
            file.write(separator + json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        print(f"the decision is not recorded in {folder / ENDS_FILE}: {error}", file=sys.stderr, flush=True)


def requeue_job(job: str) -> bool:
    """Requeue the job if it is still running; return whether it was requeued.

    Slurm would also requeue a cancelled job; while its script runs it is shown as COMPLETING, like one past
    its time limit. So a job is not requeued while Slurm's controller does not answer.
    """
    remedy = f"remedy: scontrol requeue {job}"
    state, tries = read_job_state(job), TRIES
    while state == "RUNNING":
        result = call_controller("scontrol", "requeue", job)
        if result.returncode == 0:
            print(f"job {job} was requeued", flush=True)
            return True
        tries -= 1
        if not tries:
            error = result.stderr.strip()
            print(f"job {job} could not be requeued: {error}\n    {remedy}", file=sys.stderr, flush=True)
            return False
        time.sleep(RETRY_SECONDS)
        state = read_job_state(job)
    if state is None:
        print(
            f"job {job} is not requeued: scontrol does not report its state\n    {remedy}",
            file=sys.stderr,
            flush=True,
        )
    else:
        print(
            f"job {job} is already {state} (cancelled, past its time limit, or requeued) and is left alone",
            flush=True,
        )
    return False


def read_job_state(job: str) -> str | None:
    """Return the state of a job; None if Slurm's controller does not report it."""
    words = ask_controller("scontrol", "--oneliner", "show", "job", job).stdout.split()
    return next((word.partition("=")[2] for word in words if word.startswith("JobState=")), None)


def exclude_from_job(job: str, hosts: str) -> None:
    """Exclude hosts from a job that was requeued. Slurm changes only jobs that wait, so call this after
    :func:`requeue_job`; Slurm ends this process some seconds later (``KillWait``).
    """
    result = ask_controller("scontrol", "update", f"JobId={job}", f"ExcNodeList={hosts}")
    if result.returncode:
        print(f"job {job} may use {hosts} again: {result.stderr.strip()}", file=sys.stderr, flush=True)
    else:
        print(f"job {job} no longer uses {hosts}", flush=True)


def join_hosts(configured: str | None, excluded: Sequence[str]) -> str | None:
    """Return one list for Slurm: ``cluster.slurm.exclude`` and the hosts that the run has excluded itself."""
    return ",".join([*([configured] if configured else []), *excluded]) or None


def main(arguments: Sequence[str]) -> int:
    from toolkit.config.compose import from_yaml

    parser = argparse.ArgumentParser(prog="python -m toolkit.cluster.jobs.requeue")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--asked", type=StopSignal, required=True)
    parser.add_argument("--code", type=int, required=True)
    given = parser.parse_args(arguments)
    file = given.folder / CONFIG_FILE
    config: RunConfig = from_yaml(retry_read(lambda: file.read_text(encoding="utf-8")))
    assert config.run.dir is not None, "a frozen configuration has its directory"
    before = retry_read(lambda: load_baseline(given.folder))
    several = (config.cluster.nodes or 1) > 1
    outcome = wait_for_outcome(
        Path(config.run.dir), before, given.asked, given.code, SETTLE_SECONDS if several else 0.0
    )
    decision = decide_requeue(
        before, outcome, restarts=config.cluster.restarts, requeue=config.cluster.slurm.requeue
    )
    append_outcome(given.folder, outcome, decision)
    job = os.environ["SLURM_JOB_ID"]
    print(f"job {job}: {decision.why}", flush=True)
    if decision.next is NextAction.REQUEUE and requeue_job(job):
        excluded = [entry.host for entry in read_excluded_hosts(Path(config.run.dir))]
        hosts = join_hosts(config.cluster.slurm.exclude, excluded)
        if excluded and hosts:
            exclude_from_job(job, hosts)
    return decision.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
