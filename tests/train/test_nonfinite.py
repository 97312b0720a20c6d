"""Runs whose loss, gradient or weights become infinite or NaN.

pytest tests/train/test_nonfinite.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.tiny_run import TinyRun
from toolkit.checkpoint import open_reader
from toolkit.checkpoint_folder import committed_checkpoints
from toolkit.config.schema import OnNonfinite, RunConfig
from toolkit.engine.local import LocalEngine
from toolkit.errors import ExitCode
from toolkit.monitor.loss_plot import read_train_losses
from toolkit.rows import read_rows
from toolkit.rundir.status import RunState
from toolkit.train.nonfinite import Diverged, all_finite
from toolkit.train.rollback import read_rollbacks

STEPS, BAD = 12, 8  # steps from 1
Fault = Callable[[LocalEngine], None]


def nan_gradient(engine: LocalEngine) -> None:
    """Make the gradient of the next step NaN."""
    weight = next(iter(engine._parameters.values()))
    handle = weight.register_hook(lambda gradient: (handle.remove(), gradient * math.nan)[1])


def nan_weight(engine: LocalEngine) -> None:
    next(iter(engine._parameters.values())).data.view(-1)[0] = math.nan


def inject(patch: pytest.MonkeyPatch, fault: Fault, at: int = BAD, until: int = BAD) -> None:
    original = LocalEngine.train_step

    def train_step(self: LocalEngine, batches: Any, settings: Any) -> Any:
        if at <= settings.step + 1 <= until:
            fault(self)
        return original(self, batches, settings)

    patch.setattr(LocalEngine, "train_step", train_step)


def start(folder: Path, data: Path, on: str = "stop", **changes: Any) -> TinyRun:
    def config(settings: RunConfig) -> None:
        settings.train.on_nonfinite = OnNonfinite[on]
        settings.checkpoint.keep_last = 1

    return TinyRun(
        folder,
        data,
        config=config,
        **{"train__steps": STEPS, "checkpoint__every": "3", "model__dropout": 0.0, **changes},
    )


def saved(run: TinyRun) -> list[int]:
    return list(committed_checkpoints(run.directory.checkpoints))


def is_finite(run: TinyRun) -> bool:
    return all_finite(run.state().values())


def test_stop_ends_the_run_at_the_first_nonfinite_gradient(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inject(monkeypatch, nan_gradient)
    run = start(tmp_path / "run", data)
    assert run.code is ExitCode.DIVERGED
    assert (run.status.state, run.status.exit_code, run.status.step) == (RunState.FAILED, 65, BAD)
    assert saved(run) == [6]
    assert run.status.checkpoint is not None
    assert run.status.checkpoint.endswith("step-00000006")
    assert is_finite(run)
    reason = run.status.reason or ""
    assert f"step {BAD}: the gradient norm is not finite (loss " in reason
    assert "the weights are finite; the newest valid checkpoint is" in reason
    assert f"run.fork={run.status.checkpoint} optim.lr=" in reason
    assert reason in [record.message for record in caplog.records if record.levelname == "ERROR"]
    rows = list(read_rows(run.directory.metrics_file))
    assert [row["step"] for row in rows] == list(range(1, BAD + 1))
    assert (rows[-1]["skipped"], rows[-1]["weights_finite"], rows[-1]["grad_norm"]) == (True, True, None)
    assert "weights_finite" not in rows[-2]
    alerts = list(read_rows(run.directory.alerts_file))
    assert [(alert["name"], alert["fault"]) for alert in alerts] == [("non-finite", "gradient")]
    assert "the weights are finite, and the step was skipped" in alerts[0]["cause"]


@pytest.mark.full
def test_restarted_run_diverges_again_and_keeps_the_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, nan_gradient)
    first, second = (start(tmp_path / "run", data) for _ in range(2))
    assert second.code is ExitCode.DIVERGED
    assert (second.attempt, second.status.step, saved(second)) == (2, first.status.step, [6])
    continued = start(tmp_path / "run", data, on="skip")
    assert continued.code is ExitCode.DONE, "train.on_nonfinite is not part of the run's identity"


def test_diverged_step_is_not_saved(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are finite, but the next start would continue as if nothing had happened."""
    inject(monkeypatch, nan_gradient, at=6, until=6)
    assert saved(start(tmp_path / "run", data)) == [3]


def test_skip_trains_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, nan_gradient)
    run = start(tmp_path / "run", data, on="skip")
    assert run.code is ExitCode.DONE
    assert (saved(run), is_finite(run)) == ([STEPS], True)
    assert open_reader(run.directory.path).scalars["optimizer_step"] == STEPS - 1
    assert [row["step"] for row in read_rows(run.directory.metrics_file) if row.get("skipped")] == [BAD]


def test_run_with_nonfinite_weights_keeps_its_last_finite_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, nan_weight)
    run = start(tmp_path / "run", data)
    assert run.code is ExitCode.DIVERGED
    assert (saved(run), is_finite(run)) == ([6], True)
    assert f"step {BAD}: the loss is not finite" in (run.status.reason or "")
    assert "the weights are not finite either; the newest valid checkpoint is" in (run.status.reason or "")
    assert "the weights are not finite either" in next(iter(read_rows(run.directory.alerts_file)))["cause"]


def test_skip_never_saves_nonfinite_weights(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inject(monkeypatch, nan_weight)
    run = start(tmp_path / "run", data, on="skip")
    assert (saved(run), is_finite(run)) == ([6], True)
    assert (
        "after step 9 weights or the optimizer's state are not finite, and are not saved" in caplog.messages
    )
    assert (run.code, run.status.step) == (ExitCode.DIVERGED, STEPS), "the run has no result"


@pytest.mark.full
def test_weights_that_no_loss_depends_on_are_checked_before_a_save(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(
        monkeypatch,
        lambda engine: engine._parameters["transformer.wpe.weight"].data[-1].fill_(math.inf),
        at=9,
        until=9,
    )
    run = start(tmp_path / "run", data, train__sequence_length=16)
    assert run.code is ExitCode.DIVERGED
    assert saved(run) == [6]
    assert "after step 9 weights or the optimizer's state are not finite, and are not saved" in (
        run.status.reason or ""
    )


def test_rollback_replaces_state_that_is_not_finite(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loss depends on it, so it is found before a save."""
    broken: list[int] = []

    def once(engine: LocalEngine) -> None:
        if not broken:
            broken.append(1)
            engine._parameters["transformer.wpe.weight"].data[-1].fill_(math.inf)

    inject(monkeypatch, once, at=8, until=8)
    run = start(tmp_path / "run", data, on="rollback", train__sequence_length=16)
    assert run.code is ExitCode.DONE
    rows = read_rollbacks(run.directory.rollbacks_file)
    assert [(row.step, row.reason, row.checkpoint_step) for row in rows] == [(9, "non-finite-state", 6)]
    assert (saved(run), is_finite(run)) == ([STEPS], True)


def test_rows_are_valid_json_and_null_is_read_as_nan(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, nan_weight)
    run = start(tmp_path / "run", data, on="skip")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    for file in (
        run.directory.metrics_file,
        run.directory.eval_file,
        run.directory.ledger_file,
        run.directory.alerts_file,
    ):
        for text in file.read_text().splitlines():
            json.loads(text, parse_constant=refuse)
    steps, losses = read_train_losses(run.directory.metrics_file)
    assert [step for step, loss in zip(steps, losses, strict=True) if math.isnan(loss)] == list(
        range(BAD, STEPS + 1)
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_finite_finds_one_bad_value(value: float, dtype: torch.dtype) -> None:
    tensors = [
        torch.randn(7, 5).to(dtype),
        torch.zeros(0, dtype=dtype),
        torch.randn(300).double(),
        torch.arange(3),
    ]
    assert all_finite(tensors)
    tensors[0][3, 4] = value
    assert not all_finite(tensors)
    assert not all_finite([tensors[0][:, 4], tensors[2]])
    assert all_finite([tensors[0][:, 3]])
    assert all_finite([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_finite_accepts_values_whose_squares_overflow(dtype: torch.dtype) -> None:
    largest = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite([largest, torch.randn(4)])
    assert not all_finite([largest, torch.tensor([math.nan])])


@pytest.mark.parametrize(
    ("finite", "checked", "expected"),
    [
        (True, False, "the newest valid checkpoint is C."),
        (False, True, "the newest valid checkpoint is C."),
        (False, False, "action=verify source=C"),
    ],
)
def test_checkpoint_is_called_valid_only_if_its_values_were_checked(
    finite: bool, checked: bool, expected: str
) -> None:
    error = Diverged("step 8: the loss is not finite", weights_finite=finite)
    assert expected in error.describe("C", checked=checked)
    assert "there is no checkpoint" in error.describe(None, checked=checked)
