"""Hooks of the configuration, early stopping and the best checkpoints, in whole runs on one process.

pytest tests/train/test_user_hooks.py
"""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train import user_code
from tests.train.fakes import FakeClock, completed_step
from tests.train.user_run import CODE, UserRun
from toolkit import Hook
from toolkit.checkpoint import open_reader
from toolkit.config.checkpoint import KeepBestConfig, MetricMode
from toolkit.config.schema import EarlyStoppingConfig, RunConfig
from toolkit.errors import ConfigError, ExitCode
from toolkit.rundir.start_checks import NothingToDo, check_remaining_work
from toolkit.rundir.status import RunState
from toolkit.train.metric_tracking import BestCheckpoints, EarlyStopping
from toolkit.train.user_hooks import SLOW_SECONDS, UserHook, check_user_hooks
from toolkit.user_code import UserObject


def with_hook(target: str = "Recorder", **arguments: Any) -> Any:
    def change(config: RunConfig) -> None:
        config.hooks = {"mine": {"target": f"{CODE}.{target}", "arguments": arguments}}

    return change


def hook_state(run: UserRun) -> dict[str, Any]:
    state: Any = open_reader(run.directory.path).scalars["hooks"]
    return dict(state["mine"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> UserRun:
    return UserRun(tmp_path_factory.mktemp("runs") / "whole", with_hook(), steps=7)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run, stopped after three steps. Tests copy it."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    run = UserRun(folder, with_hook(), steps=7, stop_after=3)
    assert (run.code, hook_state(run)["steps"]) == (ExitCode.STOPPED, 3)
    return folder


# ---- events and state


def test_events_come_in_order_and_metrics_are_recorded(whole: UserRun) -> None:
    assert hook_state(whole)["events"] == [
        "start 0",
        *("step 1", "step 2", "eval 2", "checkpoint step-00000002"),
        *("step 3", "step 4", "eval 4", "checkpoint step-00000004"),
        *("step 5", "step 6", "eval 6", "checkpoint step-00000006"),
        *("step 7", "eval 7"),
    ]
    rows = [(row["step"], row["hook"], row["steps"]) for row in whole.rows("hooks")]
    assert rows == [(step, "mine", step) for step in range(1, 8)]


def test_stopped_run_resumes_with_the_state_of_its_hook_and_equal_losses(
    whole: UserRun, stopped: Path, tmp_path: Path
) -> None:
    resumed = UserRun(Path(shutil.copytree(stopped, tmp_path / "run")), with_hook(), steps=7)
    assert hook_state(resumed)["steps"] == 7
    assert "start 3" in hook_state(resumed)["events"]
    assert resumed.losses() == whole.losses()
    assert [row["loss"] for row in resumed.rows("eval")] == [row["loss"] for row in whole.rows("eval")]
    assert [row["step"] for row in resumed.rows("hooks")] == list(range(1, 8)), "each step once"


def test_hook_without_its_state_counts_from_zero(
    stopped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The control: a hook that the checkpoint does not know. The state of the other one is logged."""

    def renamed(config: RunConfig) -> None:
        config.hooks = {"other": {"target": f"{CODE}.Recorder", "ranks": "first"}}

    resumed = UserRun(Path(shutil.copytree(stopped, tmp_path / "run")), renamed, steps=7)
    state: Any = open_reader(resumed.directory.path).scalars["hooks"]
    assert state["other"]["steps"] == 4
    assert "the checkpoint has the state of mine, which this run does not have" in caplog.text


def test_runs_with_and_without_hooks_have_equal_losses(whole: UserRun, tmp_path: Path) -> None:
    assert UserRun(tmp_path, steps=7).losses() == whole.losses()
    assert not (tmp_path / "hooks.jsonl").exists()


def test_request_stop_completes_the_run_after_the_next_step(tmp_path: Path) -> None:
    run = UserRun(tmp_path, with_hook(stop_at=3), steps=50)
    assert (run.code, run.status.state, run.status.step) == (ExitCode.DONE, RunState.DONE, 4)
    assert run.status.reason == "hooks.mine: enough"
    assert run.checkpoints() == [2, 4]
    with pytest.raises(NothingToDo, match=r"ended early after step 4 of 50: hooks\.mine: enough"):
        check_remaining_work(run.config, run.directory)
    run.config.train.steps = 60
    check_remaining_work(run.config, run.directory)


# ---- mistakes and slow hooks


def test_exception_names_the_key_and_the_line_and_reaches_every_hook(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(config: RunConfig) -> None:
        config.hooks = {
            "fails": {"target": f"{CODE}.Fails", "arguments": {"event": "step"}},
            "watches": {"target": f"{CODE}.Recorder"},
        }

    with pytest.raises(KeyError) as caught:
        UserRun(tmp_path, change)
    notes = "\n".join(caught.value.__notes__)
    assert f"hooks.fails.on_step ({user_code.__file__}:" in notes
    assert "raised this error in" in notes
    assert "hooks.fails.on_exception failed too: ValueError: in on_exception" in notes
    assert "rank 0 saw KeyError" in capsys.readouterr().out


def test_state_that_json_cannot_store_is_refused_at_the_first_save(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state_dict\(\) of hooks.mine .*: Object of type Tensor"):
        UserRun(tmp_path, with_hook("Fails", event="state"))


class WrongEvent(Hook):
    def on_step(self) -> None:  # type: ignore[override]
        pass


class WrongState(Hook):
    def load_state_dict(self) -> None:  # type: ignore[override]
        pass


class NeedsWidth(Hook):
    def __init__(self, width: int) -> None:
        pass


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (f"{__name__}.WrongEvent", r"its on_step\(self\) .*test_user_hooks.py:\d+\) does not fit"),
        (f"{__name__}.WrongState", r"def load_state_dict\(self, state\)"),
        (f"{__name__}.NeedsWidth", r"write \+hooks.mine.arguments.NAME=VALUE for width"),
        (f"{CODE}.Linear", "the class Linear is not derived from Hook"),
        (f"{CODE}.Absent", "has no Absent"),
    ],
)
def test_wrong_hooks_are_refused_before_training(target: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_user_hooks(RunConfig(hooks={"mine": {"target": target}}))


class Advances(Hook):
    """Takes ``seconds`` of a fake clock in each step."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def on_step(self, completed: Any) -> None:
        self.clock.now += self.seconds


def run_steps(seconds: float, steps: int = 120) -> list[str]:
    clock, entered = FakeClock(), list[str]()
    given = UserObject("hooks.mine", f"{__name__}.Advances")
    hook = UserHook(given, Advances(clock, seconds), rank=1, enter=entered.append, clock=clock)
    hook.on_start(0)
    for step in range(1, steps + 1):
        clock.now += 1.0
        hook.on_step(completed_step(step))
    return entered


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.1, r"hooks.mine took 9% of the 50 steps up to step 50 on rank 1"),
        (SLOW_SECONDS + 1, r"hooks.mine.on_step took 11.0 s on rank 1"),
    ],
)
def test_slow_hook_is_named_once(seconds: float, text: str, caplog: pytest.LogCaptureFixture) -> None:
    entered = run_steps(seconds)
    assert entered[-2:] == ["hooks.mine.on_step", ""], "a hang report names the event"
    assert len(caplog.messages) == 1
    assert text in caplog.text.replace("\\", "")
    assert "test_user_hooks.py:" in caplog.text


def test_fast_hook_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run_steps(0.01)
    assert not caplog.messages


# ---- early stopping


def stopping(values: list[float], **settings: Any) -> tuple[int | None, EarlyStopping]:
    """Return the evaluation after which the run ends."""
    reasons: list[str] = []
    hook = EarlyStopping(EarlyStoppingConfig(metric="validation/loss", **settings), reasons.append)
    for number, value in enumerate(values, 1):
        hook.on_eval({"step": 10 * number, "set": "validation", "loss": value, "seconds": 0.0})
        hook.on_eval({"step": 10 * number, "set": "other", "loss": -number, "seconds": 0.0})
        if reasons:
            return number, hook
    return None, hook


def test_early_stopping_waits_for_improvements() -> None:
    assert stopping([3, 2, 2.5, 2.2, 2.1], patience=3)[0] == 5
    assert stopping([3, 2, 2.5, 2.2, 1.9], patience=3)[0] is None
    assert stopping([3, 2, 1.99, 1.98], patience=2, min_delta=0.1)[0] == 4
    assert stopping([1, 2, 3, 3, 3], patience=2, mode=MetricMode.max)[0] == 5
    assert stopping([math.nan, math.nan], patience=2)[0] == 2
    assert stopping([math.nan, 5, 4], patience=2)[0] is None


def test_early_stopping_continues_to_wait_after_a_resume() -> None:
    _, before = stopping([3, 2, 2.5, 2.2], patience=3)
    reasons: list[str] = []
    after = EarlyStopping(EarlyStoppingConfig(metric="validation/loss", patience=3), reasons.append)
    after.load_state_dict(before.state_dict())
    after.on_eval({"step": 50, "set": "validation", "loss": 2.1, "seconds": 0.0})
    assert reasons == [
        "train.early_stopping: validation/loss was best at step 20 (2) and has not improved in 3 evaluations "
        "since"
    ]


def test_unknown_metric_is_refused_with_the_known_ones() -> None:
    hook = EarlyStopping(EarlyStoppingConfig(metric="validation/accuracy"), lambda reason: None)
    with pytest.raises(
        ConfigError, match=r"has validation/loss\n.*write train.early_stopping.metric=validation/loss"
    ):
        hook.on_eval({"step": 1, "set": "validation", "loss": 1.0, "seconds": 0.0})


# ---- best checkpoints


def test_best_checkpoints_rank_evaluations() -> None:
    best = BestCheckpoints(KeepBestConfig(metric="validation/loss", count=2), lambda steps: steps)
    kept = []
    for step, value in enumerate([5.0, 4.0, 6.0, math.nan, 4.5, 4.0], 1):
        best.on_eval({"step": step, "set": "validation", "loss": value})
        kept.append(best.steps(step) if best.due(step) else None)
    assert kept == [[1], [2, 1], None, None, [2, 5], [2, 6]]
    resumed = BestCheckpoints(KeepBestConfig(metric="validation/loss", count=2), lambda steps: [2])
    resumed.load_state_dict(best.state_dict())
    assert resumed.steps(7) == [2], "a checkpoint that does not exist any more is forgotten"


def test_best_checkpoint_is_kept_and_resumed_from(tmp_path: Path) -> None:
    """The loss is smallest in the middle: the learning rate is too large."""

    def change(config: RunConfig) -> None:
        config.optim.lr, config.eval.every, config.checkpoint.every = 0.5, 1, "never"
        config.checkpoint.keep_last = 1
        config.checkpoint.keep_best = KeepBestConfig(metric="validation/loss", count=2)
        config.train.early_stopping = EarlyStoppingConfig(metric="validation/loss", patience=3)

    run = UserRun(tmp_path, change, steps=40)
    losses = {row["step"]: row["loss"] for row in run.rows("eval")}
    assert run.status.state is RunState.DONE
    assert run.status.step is not None
    assert run.status.step < 40
    assert "train.early_stopping: validation/loss was best at step" in str(run.status.reason)
    ranked = sorted(losses, key=lambda step: losses[step])
    assert run.checkpoints() == sorted({*ranked[:2], run.status.step})
    assert (tmp_path / "checkpoints" / "best").read_text() == f"step-{ranked[0]:08d}\n"

    def again(config: RunConfig) -> None:
        change(config)
        config.resume = str(tmp_path / "checkpoints" / "best")
        config.train.early_stopping.patience = 1

    repeated = UserRun(tmp_path, again, steps=40)
    steps = [row["step"] for row in repeated.rows("eval")]
    assert steps == list(range(1, ranked[0] + 3)), (
        "it continues after the best and ends one step after the next"
    )
    assert {row["step"]: row["loss"] for row in repeated.rows("eval")}.items() <= losses.items()
