"""Runs whose loss, gradient or weights become infinite or NaN: where they end, what they keep, and what they record.

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

from tests.train.test_run import Start, data, texts
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.directory import committed
from toolkit.config.schema import OnNonfinite, RunConfig
from toolkit.engine.local import LocalEngine
from toolkit.errors import ExitCode
from toolkit.monitor.loss_plot import read_train_losses
from toolkit.rows import read_rows
from toolkit.rundir.status import RunState
from toolkit.train.nonfinite import Diverged, all_finite

__all__ = ["data", "texts"]  # fixtures

STEPS, BAD = 12, 8  # steps from 1
Act = Callable[[LocalEngine], None]


def nan_gradient(engine: LocalEngine) -> None:
    """In the step that follows, and only there."""
    weight = next(iter(engine._parameters.values()))
    handle = weight.register_hook(lambda gradient: (handle.remove(), gradient * math.nan)[1])


def nan_weight(engine: LocalEngine) -> None:
    next(iter(engine._parameters.values())).data.view(-1)[0] = math.nan


def strike(patch: pytest.MonkeyPatch, act: Act, at: int = BAD, until: int = BAD) -> None:
    original = LocalEngine.train_step

    def train_step(self: LocalEngine, batches: Any, settings: Any) -> Any:
        if at <= settings.step + 1 <= until:
            act(self)
        return original(self, batches, settings)

    patch.setattr(LocalEngine, "train_step", train_step)


def start(folder: Path, data: Path, on: str = "stop", **changes: Any) -> Start:
    def config(settings: RunConfig) -> None:
        settings.train.on_nonfinite = OnNonfinite[on]
        settings.checkpoint.keep_last = 1

    return Start(
        folder,
        data,
        config=config,
        **{"train__steps": STEPS, "checkpoint__every": "3", "model__dropout": 0.0, **changes},
    )


def saved(run: Start) -> list[int]:
    return list(committed(run.directory.checkpoints))


def sound(run: Start) -> bool:
    return all_finite(run.state().values())


def test_stop_ends_at_the_first_gradient_that_is_not_finite(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    strike(monkeypatch, nan_gradient)
    run = start(tmp_path / "run", data)
    assert run.code is ExitCode.DIVERGED
    assert (run.status.state, run.status.exit_code, run.status.step) == (RunState.FAILED, 65, BAD)
    assert saved(run) == [6]
    assert run.status.checkpoint is not None
    assert run.status.checkpoint.endswith("step-00000006")
    assert sound(run)
    reason = run.status.reason or ""
    assert f"step {BAD}: the gradient norm is not finite (loss " in reason
    assert "the weights are finite; the newest sound checkpoint is" in reason
    assert f"run.fork={run.status.checkpoint} optim.lr=" in reason
    assert reason in capfd.readouterr().err
    rows = list(read_rows(run.directory.metrics_file))
    assert [row["step"] for row in rows] == list(range(1, BAD + 1))
    assert (rows[-1]["skipped"], rows[-1]["weights_finite"], rows[-1]["grad_norm"]) == (True, True, None)
    assert "weights_finite" not in rows[-2]
    alerts = list(read_rows(run.directory.alerts_file))
    assert [(alert["name"], alert["fault"]) for alert in alerts] == [("non-finite", "gradient")]
    assert "the weights are finite, and the step was skipped" in alerts[0]["cause"]


def test_the_same_command_meets_it_again_and_keeps_the_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(monkeypatch, nan_gradient)
    first, second = (start(tmp_path / "run", data) for _ in range(2))
    assert second.code is ExitCode.DIVERGED
    assert (second.attempt, second.status.step, saved(second)) == (2, first.status.step, [6])
    goes_on = start(tmp_path / "run", data, on="continue")
    assert goes_on.code is ExitCode.DONE, "the key is no part of the run's identity"


def test_a_step_at_the_cadence_is_not_saved_when_it_ends_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are sound, but the next start would go on behind it as if nothing had happened."""
    strike(monkeypatch, nan_gradient, at=6, until=6)
    assert saved(start(tmp_path / "run", data)) == [3]


def test_continue_skips_the_step_and_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(monkeypatch, nan_gradient)
    run = start(tmp_path / "run", data, on="continue")
    assert run.code is ExitCode.DONE
    assert (saved(run), sound(run)) == ([STEPS], True)
    assert open_reader(run.directory.path).scalars["optimizer_step"] == STEPS - 1
    assert [row["step"] for row in read_rows(run.directory.metrics_file) if row.get("skipped")] == [BAD]


def test_a_model_that_is_lost_keeps_its_last_sound_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(monkeypatch, nan_weight)
    run = start(tmp_path / "run", data)
    assert run.code is ExitCode.DIVERGED
    assert (saved(run), sound(run)) == ([6], True)
    assert f"step {BAD}: the loss is not finite" in (run.status.reason or "")
    assert "the weights are not finite either; the newest sound checkpoint is" in (run.status.reason or "")
    assert "the weights are not finite either" in next(iter(read_rows(run.directory.alerts_file)))["cause"]


def test_continue_never_saves_weights_that_are_not_finite(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    strike(monkeypatch, nan_weight)
    run = start(tmp_path / "run", data, on="continue")
    assert (saved(run), sound(run)) == ([6], True)
    assert (
        "after step 9 weights or the optimizer's state are not finite, and are not saved"
        in capfd.readouterr().err
    )
    assert (run.code, run.status.step) == (ExitCode.DIVERGED, STEPS), (
        "the run has no result, whatever it may continue through"
    )


def test_weights_are_checked_before_a_save_though_no_loss_shows_them(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(
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


def test_rows_are_json_and_the_readers_take_null_for_nan(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(monkeypatch, nan_weight)
    run = start(tmp_path / "run", data, on="continue")

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
def test_one_bad_value_in_any_tensor_is_found(value: float, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize(
    ("finite", "checked", "words"),
    [
        (True, False, "the newest sound checkpoint is C."),
        (False, True, "the newest sound checkpoint is C."),
        (False, False, "action=verify source=C"),
    ],
)
def test_a_checkpoint_is_called_sound_only_if_its_values_were_seen(
    finite: bool, checked: bool, words: str
) -> None:
    found = Diverged("step 8: the loss is not finite", weights_finite=finite)
    assert words in found.describe("C", checked=checked)
    assert "there is no checkpoint" in found.describe(None, checked=checked)
