"""Requeue decisions depend on status.json and checkpoints, not on exit codes."""

from __future__ import annotations

import errno
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.cluster.jobs import requeue, slurm_controller
from toolkit.cluster.jobs.requeue import JobBaseline, JobOutcome, NextAction, StopSignal, decide_requeue
from toolkit.config.compose import compose, from_yaml, to_yaml
from toolkit.errors import ExitCode
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.excluded_hosts import ExcludedHost, exclude_hosts
from toolkit.rundir.status import RunState, Status


def ended(
    state: RunState | None,
    *,
    asked: StopSignal = StopSignal.NONE,
    code: int = 1,
    attempt: int = 2,
    checkpoint: str | None = "step-00000001",
    reason: str | None = "SIGTERM",
) -> JobOutcome:
    return JobOutcome(
        asked=asked, code=code, attempt=attempt, state=state, reason=reason, checkpoint=checkpoint
    )


BEFORE = JobBaseline(attempt=1, checkpoint="step-00000001")
NEWER = "step-00000002"


@pytest.mark.parametrize(
    ("end", "next", "code"),
    [
        # srun returns torchrun's code, which does not reflect the ranks' codes
        (ended(RunState.DONE, code=1), NextAction.END, ExitCode.DONE),
        (ended(RunState.REFUSED, code=1), NextAction.END, ExitCode.USER),
        (ended(RunState.STOPPED, code=1, asked=StopSignal.TERM), NextAction.REQUEUE, None),
        # preempted: Slurm signalled the tasks directly
        (ended(RunState.STOPPED, code=1), NextAction.REQUEUE, None),
        (ended(RunState.STOPPED, asked=StopSignal.INT), NextAction.END, ExitCode.STOPPED),
        # from W&B's page, or by hand
        (ended(RunState.STOPPED, reason="SIGINT"), NextAction.END, ExitCode.STOPPED),
        (
            ended(RunState.STOPPED, reason="budget.usd=100: 99.1 are used", checkpoint=NEWER),
            NextAction.END,
            ExitCode.STOPPED,
        ),
        (ended(RunState.FAILED, checkpoint=NEWER), NextAction.REQUEUE, None),
        # its launcher has used cluster.restarts already
        (ended(RunState.FAILED), NextAction.END, ExitCode.FAILURE),
        # saving took longer than cluster.grace_seconds, and after a stop the launcher restarts nothing
        (ended(RunState.FAILED, asked=StopSignal.TERM), NextAction.REQUEUE, None),
        (replace(ended(RunState.FAILED, checkpoint=NEWER), exit_code=65), NextAction.END, ExitCode.DIVERGED),
        (
            replace(ended(RunState.FAILED, checkpoint=NEWER), exit_code=2),
            NextAction.END,
            ExitCode.USER,
        ),  # for example a full disk
        (ended(RunState.RUNNING, code=137), NextAction.REQUEUE, None),
        # killed without a status
        (ended(RunState.RUNNING, checkpoint=NEWER, code=137), NextAction.REQUEUE, None),
        (ended(RunState.FAILED, asked=StopSignal.INT), NextAction.END, ExitCode.FAILURE),
        # no attempt was started
        (ended(None, attempt=1, code=2), NextAction.END, ExitCode.USER),
        (ended(RunState.STOPPED, attempt=1, code=2), NextAction.END, ExitCode.USER),
        # a rendezvous without an answer, or a lost GPU: the run was accepted once
        (ended(RunState.STOPPED, attempt=1, code=1), NextAction.REQUEUE, None),
        (ended(RunState.STOPPED, attempt=1, code=75, asked=StopSignal.TERM), NextAction.REQUEUE, None),
        (ended(RunState.STOPPED, attempt=1, code=75, asked=StopSignal.INT), NextAction.END, ExitCode.STOPPED),
        (ended(RunState.DONE, attempt=1, code=0), NextAction.END, ExitCode.DONE),
    ],
)
def test_end_of_a_job_is_requeued_or_final(end: JobOutcome, next: NextAction, code: ExitCode | None) -> None:
    decision = decide_requeue(BEFORE, end, restarts=3, requeue=True)
    assert decision.next is next
    assert code is None or decision.code is code


@pytest.mark.parametrize(
    "end",
    [
        ended(RunState.STOPPED, asked=StopSignal.TERM),
        ended(RunState.FAILED, checkpoint=NEWER),
        ended(None, attempt=1, asked=StopSignal.TERM),
    ],
)
def test_without_requeue_every_end_is_final(end: JobOutcome) -> None:
    assert decide_requeue(BEFORE, end, restarts=3, requeue=False).next is NextAction.END


def test_first_start_without_an_attempt_is_final() -> None:
    decision = decide_requeue(JobBaseline(), ended(None, attempt=0), restarts=3, requeue=True)
    assert (decision.next, decision.code) == (NextAction.END, ExitCode.FAILURE)


@pytest.mark.parametrize(
    ("state", "asked", "begins"),
    [
        (RunState.RUNNING, StopSignal.NONE, True),
        (RunState.FAILED, StopSignal.TERM, True),
        (RunState.STOPPED, StopSignal.NONE, False),  # of an earlier attempt
    ],
)
def test_ends_without_progress_are_limited_and_progress_resets_them(
    state: RunState, asked: StopSignal, begins: bool
) -> None:
    before, decisions = BEFORE, []
    for attempt in range(2, 6):
        end = ended(state, asked=asked, attempt=attempt if begins else before.attempt)
        decision = decide_requeue(before, end, restarts=2, requeue=True)
        decisions.append(decision.next)
        before = JobBaseline(attempt=end.attempt, checkpoint="step-00000001", fruitless=decision.fruitless)
        if decision.next is NextAction.END:
            break
    assert decisions == [NextAction.REQUEUE, NextAction.REQUEUE, NextAction.END]
    twice = JobBaseline(attempt=3, checkpoint="step-00000001", fruitless=2)
    forgiven = decide_requeue(
        twice, ended(RunState.RUNNING, attempt=4, checkpoint=NEWER), restarts=2, requeue=True
    )
    assert (forgiven.next, forgiven.fruitless) == (NextAction.REQUEUE, 0)
    assert (
        decide_requeue(BEFORE, ended(RunState.FAILED, checkpoint=NEWER), restarts=0, requeue=True).next
        is NextAction.END
    )


# ---- the command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job's folder, and a ``scontrol`` that records its arguments."""
    run_dir = tmp_path / "run"
    own = run_dir / "jobs" / "001"
    own.mkdir(parents=True)
    (own / "config.yaml").write_text(
        to_yaml(compose(["+exp=quickstart", f"run.dir={run_dir}", "cluster.restarts=1"]))
    )
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\necho "JobId=7 JobState=${{JOB_STATE-RUNNING}} '
        'Reason=None"\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return own


def attempt(folder: Path, number: int, state: RunState, checkpoint: str | None = None) -> None:
    directory = RunDirectory(folder.parent.parent)
    directory.attempt_folder(number).mkdir(parents=True)
    directory.write_status(Status(state=state, attempt=number, reason="because"))
    if checkpoint is not None:
        (directory.checkpoints / checkpoint).mkdir(parents=True)
        (directory.checkpoints / checkpoint / "manifest.json").write_text("{}")


def asked(folder: Path) -> list[str]:
    file = folder.parents[2] / "asked"
    return file.read_text().splitlines() if file.exists() else []


def test_stopped_job_is_requeued(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    attempt(folder, 1, RunState.STOPPED)
    assert requeue.main([str(folder), "--asked=TERM", "--code=1"]) == 75
    assert asked(folder) == ["--oneliner show job 7", "requeue 7"]
    assert "stopped (because)" in capfd.readouterr().out


@pytest.mark.parametrize(("exclude", "hosts"), [("", "node7"), ("node[1-3]", "node[1-3],node7")])
def test_requeued_job_avoids_excluded_hosts(exclude: str, hosts: str, folder: Path) -> None:
    """Slurm changes the excluded nodes of waiting jobs only."""
    config = from_yaml((folder / "config.yaml").read_text())
    slurm = replace(config.cluster.slurm, exclude=exclude or None)
    config = replace(config, cluster=replace(config.cluster, slurm=slurm))
    (folder / "config.yaml").write_text(to_yaml(config))
    exclude_hosts(folder.parent.parent, [ExcludedHost(host="node7", step=3, reason="wrong")])
    attempt(folder, 1, RunState.STOPPED)
    assert requeue.main([str(folder), "--asked=TERM", "--code=1"]) == 75
    assert asked(folder) == ["--oneliner show job 7", "requeue 7", f"update JobId=7 ExcNodeList={hosts}"]


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", ""])
def test_cancelled_job_is_not_requeued(state: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_STATE", state)
    attempt(folder, 1, RunState.STOPPED)
    assert requeue.main([str(folder), "--asked=TERM", "--code=1"]) == 75
    assert asked(folder) == ["--oneliner show job 7"]


@pytest.mark.parametrize("answers", [2, 9])
def test_silent_controller_is_asked_again(
    answers: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """``scontrol`` fails until it has been called ``answers`` times; three calls are made."""
    monkeypatch.setattr(slurm_controller, "RETRY_SECONDS", 0.0)
    scontrol = folder.parents[2] / "scontrol"
    fails = f'[ "$(wc -l < {scontrol.parent}/asked)" -ge {answers} ] || exit 1\n'
    text = scontrol.read_text()
    scontrol.write_text(text.replace("/asked\n", f"/asked\n{fails}"))
    attempt(folder, 1, RunState.STOPPED)
    code = requeue.main([str(folder), "--asked=TERM", "--code=1"])
    show = "--oneliner show job 7"
    if answers == 2:
        assert code == 75
        assert asked(folder) == [show, show, "requeue 7"]
    else:
        assert asked(folder) == [show, show, show]
        assert "remedy: scontrol requeue 7" in capfd.readouterr().err


def fail_requests(folder: Path, failure: str) -> None:
    """Let each first request of ``scontrol`` that changes the job fail."""
    scontrol = folder.parents[2] / "scontrol"
    once = (
        f'[ "$1" = --oneliner ] || [ "$(grep -c "^$1" {scontrol.parent}/asked)" -ge 2 ] || {{ {failure}; }}\n'
    )
    scontrol.write_text(scontrol.read_text().replace("/asked\n", f"/asked\n{once}"))


@pytest.mark.parametrize("failure", ["exit 1", "exec sleep 60"])
def test_requests_to_change_the_job_are_repeated(
    failure: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_controller, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(slurm_controller, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(requeue, "RETRY_SECONDS", 0.0)
    fail_requests(folder, failure)
    exclude_hosts(folder.parent.parent, [ExcludedHost(host="node7", step=3, reason="wrong")])
    attempt(folder, 1, RunState.STOPPED)
    assert requeue.main([str(folder), "--asked=TERM", "--code=1"]) == 75
    show, update = "--oneliner show job 7", "update JobId=7 ExcNodeList=node7"
    assert asked(folder) == [show, "requeue 7", show, "requeue 7", update, update]


def test_job_that_is_cancelled_meanwhile_is_not_requeued(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm would also requeue a cancelled job."""
    monkeypatch.setattr(requeue, "RETRY_SECONDS", 0.0)
    fail_requests(folder, "exit 1")
    scontrol = folder.parents[2] / "scontrol"
    cancelled = f"grep -q requeue {scontrol.parent}/asked && JOB_STATE=COMPLETING\n"
    scontrol.write_text(scontrol.read_text().replace("/asked\n", f"/asked\n{cancelled}"))
    attempt(folder, 1, RunState.STOPPED)
    assert requeue.main([str(folder), "--asked=TERM", "--code=1"]) == 75
    assert asked(folder) == ["--oneliner show job 7", "requeue 7", "--oneliner show job 7"]
    assert "already COMPLETING" in capfd.readouterr().out


def test_done_job_ends(folder: Path) -> None:
    attempt(folder, 1, RunState.DONE)
    assert requeue.main([str(folder), "--asked=none", "--code=1"]) == 0
    assert asked(folder) == []


def test_earlier_decisions_are_loaded(folder: Path) -> None:
    (folder / "job.json").write_text(
        json.dumps({"before": {"attempt": 0, "checkpoint": None, "fruitless": 0}})
    )
    attempt(folder, 1, RunState.FAILED, checkpoint="step-00000001")
    assert requeue.main([str(folder), "--asked=none", "--code=1"]) == 75
    attempt(folder, 2, RunState.RUNNING)
    assert (
        requeue.main([str(folder), "--asked=none", "--code=1"]) == 75
    )  # the single restart of cluster.restarts=1
    attempt(folder, 3, RunState.RUNNING)
    assert requeue.main([str(folder), "--asked=none", "--code=1"]) == 1
    lines = [json.loads(line) for line in (folder / "ends.jsonl").read_text().splitlines()]
    assert [(line["attempt"], line["next"], line["fruitless"]) for line in lines] == [
        (1, "again", 0),
        (2, "again", 1),
        (3, "end", 0),
    ]
    # no newer attempt: it was not started, which is one restart more
    assert requeue.main([str(folder), "--asked=none", "--code=1"]) == 75
    assert requeue.main([str(folder), "--asked=none", "--code=1"]) == 1


def test_part_of_a_recorded_decision_is_skipped(folder: Path) -> None:
    """A write was interrupted, for example by a full disk."""
    attempt(folder, 1, RunState.RUNNING)
    assert requeue.main([str(folder), "--asked=none", "--code=1"]) == 75
    with (folder / "ends.jsonl").open("a") as file:
        file.write('{"time": "2026-')
    assert requeue.load_baseline(folder) == JobBaseline(attempt=1, fruitless=1)
    attempt(folder, 2, RunState.RUNNING)
    assert requeue.main([str(folder), "--asked=none", "--code=1"]) == 1, "cluster.restarts=1"
    assert requeue.load_baseline(folder) == JobBaseline(attempt=2), "control: the new line is complete"


def test_job_is_requeued_if_its_decision_cannot_be_recorded(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    attempt(folder, 1, RunState.STOPPED)
    (folder / "elsewhere").mkdir()
    (folder / "ends.jsonl").symlink_to(folder / "elsewhere" / "absent" / "ends.jsonl")
    assert requeue.main([str(folder), "--asked=TERM", "--code=1"]) == 75
    assert asked(folder)[-1] == "requeue 7"
    assert "the decision is not recorded" in capfd.readouterr().err


@pytest.mark.parametrize("recovers", [True, False])
def test_status_on_a_failing_file_system_is_read_again(
    recovers: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(folder, 1, RunState.DONE)
    monkeypatch.setattr(requeue, "READ_SECONDS", 0.5)
    status, errors = RunDirectory.status, [errno.ESTALE, errno.EIO]

    def fail(directory: RunDirectory) -> Status | None:
        if errors:
            raise OSError(errors.pop() if recovers else errno.EIO, "failed")
        return status(directory)

    monkeypatch.setattr(RunDirectory, "status", fail)
    if recovers:
        assert requeue.main([str(folder), "--asked=none", "--code=0"]) == 0
        assert not errors
    else:
        with pytest.raises(OSError, match="failed"):
            requeue.main([str(folder), "--asked=none", "--code=0"])


def test_late_status_is_waited_for(folder: Path) -> None:
    attempt(folder, 1, RunState.RUNNING)
    run_dir = folder.parent.parent
    late = threading.Timer(
        0.5, lambda: RunDirectory(run_dir).write_status(Status(state=RunState.DONE, attempt=1))
    )
    late.start()
    assert (
        requeue.wait_for_outcome(run_dir, JobBaseline(), StopSignal.NONE, 1, seconds=20).state
        is RunState.DONE
    )
    late.join()
    assert (
        requeue.wait_for_outcome(run_dir, JobBaseline(attempt=1), StopSignal.NONE, 2, seconds=20).attempt == 1
    )  # a mistake before it started: at once


def test_incomplete_checkpoint_is_not_progress(folder: Path) -> None:
    attempt(folder, 1, RunState.FAILED, checkpoint=".step-2")
    assert requeue.newest_checkpoint_name(folder.parent.parent) is None
