"""A rollback and a request to end the run early.

pytest tests/train/test_rollback_end.py
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from toolkit.train import rollback
from toolkit.train.soundness import Fault, FaultKind
from toolkit.train.user_hooks import EndRequest


@pytest.mark.parametrize("rank", [1, 3])
def test_rollback_cancels_an_early_end_on_every_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decided = SimpleNamespace(rollback=SimpleNamespace(checkpoint_step=4, skipped=(40, 56)))
    monkeypatch.setattr(rollback, "agreed_sound_step", lambda context: 4)
    monkeypatch.setattr(rollback, "decide_rollback", lambda *_, **__: decided)
    monkeypatch.setattr(rollback, "open_reader", MagicMock())
    monkeypatch.setattr(rollback.state, "namespace", lambda plan: "test/1")
    monkeypatch.setattr(rollback.state, "hook_states", lambda reader: {})
    training = MagicMock(end=EndRequest())
    training.context.rank = rank
    training.end.request("the loss is not finite")
    fault = Fault(
        step=7, kind=FaultKind.SPIKE, loss=9.0, grad_norm=1.0, weights_finite=True, cause="the loss is 9"
    )
    rollback.roll_back(training, MagicMock(), fault)
    assert training.end.reason is None
