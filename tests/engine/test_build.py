"""Settings that building an engine applies to the process."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.config.schema import EngineName
from toolkit.engine import build

RENAMED = (
    "`torch.distributed.all_gather_into_tensor` is deprecated. "
    "Please use `torch.distributed.all_gather_single` instead."
)


def test_renamed_torch_collectives_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(build.ENGINES, EngineName.local, lambda *_: None)
    plan: Any = SimpleNamespace(config=SimpleNamespace(engine=SimpleNamespace(name=EngineName.local)))
    objective: Any = None
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        build.build_engine(plan, objective, rank=0, local_rank=0)
        warnings.warn(RENAMED, FutureWarning, stacklevel=1)
        warnings.warn("something else is deprecated", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["something else is deprecated"]
