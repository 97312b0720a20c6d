"""What a run logs at its start."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.config.schema import EngineName
from toolkit.testing.tiny import tiny_plan
from toolkit.train.build import log_setup


def test_run_logs_the_implementations_that_it_uses(caplog: pytest.LogCaptureFixture) -> None:
    plan = tiny_plan(engine__name=EngineName.megatron)
    data: Any = None  # read only if documents are separate
    with caplog.at_level("INFO", logger="toolkit"):
        log_setup(plan, data)
    lines = [record.message for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [
        "layers",
        "attention",
        "loss",
        "compile",
        "optimizer kernel",
    ]
    assert lines[0] == "layers: megatron-core (its own layers: Transformer Engine needs a GPU)"
