"""How the supervisor ends an attempt and records it. The ranks are simulated.

pytest tests/cluster/test_attempt_end.py
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolkit.cluster import supervisor
from toolkit.cluster.attempt.attempt_spec import AttemptSpec
from toolkit.cluster.attempt.exit_handling import ExitHandler
from toolkit.cluster.attempt.rank_processes import ABORT_REAP_SECONDS, RankProcesses
from toolkit.cluster.stop.stop_request import StopRequest
from toolkit.cluster.supervisor import AttemptEnd
from toolkit.errors import ExitCode
from toolkit.plan.types import Device, World
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

STEPS = 9
FAILED_FIRST = "rank 3 failed first (code 1): see the attempt's log"
OVERDUE = "SIGTERM, and saving took more than cluster.grace_seconds=60"
STUCK = "rank 3 (PID 77) does not end after SIGKILL"


class Ranks:
    """Ranks that have ended. Attributes as those of ``RankProcesses``."""

    failure_times = None

    def __init__(
        self,
        code: ExitCode,
        *,
        failure: str | None = None,
        killed: bool = False,
        stop_overdue: bool = False,
        end_overdue: bool = False,
        stuck: str | None = None,
        rank_0_code: int = -9,
    ) -> None:
        self._code, self._failure, self.rank_0_code = code, failure, rank_0_code
        self.killed, self.stop_overdue, self.end_overdue, self.stuck = (
            killed,
            stop_overdue,
            end_overdue,
            stuck,
        )

    def wait(self, stop: StopRequest, *_: object, **__: object) -> ExitCode:
        return self._code

    def kill(self, seconds: float = 0) -> None:
        pass

    def first_failure(self) -> str | None:
        return self._failure


class Run:
    """The directory of a run in progress, and its supervisor."""

    def __init__(self, folder: Path) -> None:
        self.directory = RunDirectory(folder)
        self.directory.attempt_folder(1).mkdir(parents=True)
        assert self.directory.try_lock()
        self.directory.write_status(Status(state=RunState.RUNNING, attempt=1, step=7))
        self.stop = StopRequest()
        self.exit_handler = ExitHandler(self.stop)
        self.exit_handler.directory, self.exit_handler.attempt = self.directory, 1
        self.cleaned: list[str] = []

    def attempt(self) -> AttemptEnd:
        """Run an attempt, and check that the exit handler has its code."""
        config = SimpleNamespace(
            cluster=SimpleNamespace(grace_seconds=60), train=SimpleNamespace(steps=STEPS)
        )
        standbys = SimpleNamespace(kill=lambda: self.cleaned.append("standbys"))
        made = supervisor._Supervisor(
            command=[],
            plan=cast("Any", SimpleNamespace(config=config)),
            directory=self.directory,
            stop=self.stop,
            exit_handler=self.exit_handler,
            standbys=cast("Any", standbys),
            snapshots=None,
        )
        end = made._run_attempt(AttemptSpec("", World(ranks=4, ranks_per_node=4, device=Device.CPU), 1))
        assert end.code is self.exit_handler.code
        return end

    def recorded(self) -> tuple[RunState, str | None]:
        status = self.directory.status()
        assert status is not None
        return status.state, status.reason


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.directory.release()


def use(monkeypatch: pytest.MonkeyPatch, ranks: object) -> None:
    monkeypatch.setattr(supervisor, "RankProcesses", lambda *_, **__: ranks)


@pytest.mark.parametrize(
    ("requested", "killed", "reason"),
    [(True, False, OVERDUE), (True, True, FAILED_FIRST), (False, False, FAILED_FIRST)],
    ids=["rank 0 saw it", "control: killed by a signal", "control: no stop"],
)
def test_reason_of_rank_0_stays_after_a_stop(
    requested: bool, killed: bool, reason: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Ranks(ExitCode.FAILURE, failure=FAILED_FIRST, killed=killed))
    if requested:
        run.stop.request("SIGTERM")
    run.directory.finish(RunState.FAILED, 1, OVERDUE, attempt=1)
    assert run.attempt().code is ExitCode.FAILURE
    assert run.recorded() == (RunState.FAILED, reason)


def test_run_is_not_done_if_rank_0_has_not_recorded_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after os._exit(0) in code of the user."""
    use(monkeypatch, Ranks(ExitCode.DONE))
    assert run.attempt() == AttemptEnd(ExitCode.FAILURE, by_itself=True)
    state, reason = run.recorded()
    assert state is RunState.FAILED
    assert "exit code 0 before the run was complete" in str(reason)


def test_run_that_rank_0_has_recorded_is_done(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Ranks(ExitCode.DONE))
    run.directory.finish(RunState.DONE, 0, "a hook ended it", attempt=1)
    assert run.attempt().code is ExitCode.DONE
    assert run.recorded() == (RunState.DONE, "a hook ended it")


@pytest.mark.parametrize(
    ("rank_0_code", "code"),
    [(2, ExitCode.FAILURE), (-9, ExitCode.USER)],
    ids=["rank 0", "control: another rank, and rank 0 was killed"],
)
def test_exit_code_of_a_mistake_counts_only_with_a_mistake(
    rank_0_code: int, code: ExitCode, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ends with code 2 as well if the file server with the script does not answer at a restart."""
    use(monkeypatch, Ranks(ExitCode.USER, rank_0_code=rank_0_code))
    assert run.attempt().code is code
    assert run.recorded()[0] is RunState.FAILED


def test_mistake_that_rank_0_has_recorded_is_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Ranks(ExitCode.USER, rank_0_code=2))
    run.directory.finish(RunState.REFUSED, 2, "no data", attempt=1)
    assert run.attempt().code is ExitCode.USER
    assert run.recorded() == (RunState.REFUSED, "no data")


@pytest.mark.parametrize(
    ("step", "state"),
    [(STEPS, RunState.DONE), (7, RunState.FAILED)],
    ids=["all steps", "control: a rank left"],
)
def test_run_whose_rank_0_hangs_at_its_end_is_done_after_all_steps(
    step: int, state: RunState, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Ranks(ExitCode.DONE, end_overdue=True))
    run.directory.write_status(Status(state=RunState.RUNNING, attempt=1, step=step))
    run.attempt()
    assert run.recorded()[0] is state


def test_rank_that_cannot_be_killed_is_the_recorded_reason(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Ranks(ExitCode.FAILURE, failure=STUCK, stuck=STUCK, stop_overdue=True))
    run.directory.finish(RunState.FAILED, 1, "hang: rank 3 is silent", attempt=1)
    assert run.attempt().stuck == STUCK
    assert run.recorded() == (RunState.FAILED, STUCK)


def test_ranks_that_cannot_be_started_are_a_failed_attempt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> RankProcesses:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(supervisor, "RankProcesses", fail)
    assert run.attempt() == AttemptEnd(ExitCode.FAILURE, by_itself=True)
    assert run.recorded() == (
        RunState.FAILED,
        "the ranks cannot be started: [Errno 11] Resource temporarily unavailable",
    )


def test_aborted_run_is_recorded_before_anything_can_block(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the ranks, which could overwrite the record, get a moment to end before."""
    seen: list[object] = []

    class Insisting(Ranks):
        def wait(self, stop: StopRequest, *_: object, **__: object) -> ExitCode:
            stop.abort("SIGINT twice: ended without saving", ExitCode.FAILURE)
            seen.append(run.cleaned.copy())
            return ExitCode.FAILURE

        def kill(self, seconds: float = 0) -> None:
            seen.append((seconds, run.recorded()[0]))

    record = run.exit_handler.record

    def note(reason: str | None, **options: bool) -> None:
        seen.append(run.cleaned.copy())
        record(reason, **options)

    monkeypatch.setattr(run.exit_handler, "record", note)
    use(monkeypatch, Insisting(ExitCode.FAILURE))
    run.attempt()
    assert seen[:3] == [(ABORT_REAP_SECONDS, RunState.RUNNING), [], ["standbys"]]
    assert run.recorded() == (RunState.FAILED, "SIGINT twice: ended without saving")
