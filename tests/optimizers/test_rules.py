"""Rules about optimizers: each names the value, the rule and a remedy that works."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.cases import CPU, run_config
from toolkit.config.schema import EngineName, OffloadDevice
from toolkit.errors import PlanError
from toolkit.plan import make_plan

OWN = {"optim__name": "custom", "optim__target": "my.Optimizer", "optim__weight_decay": 0.0}
MISTAKES: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    ({"optim__name": "lino"}, "the optimizers are adamw", "optim=lion", {"optim__name": "lion"}),
    ({"optim__name": "custom"}, "your own", "optim=custom optim.target=", OWN),
    (
        {"optim__target": "my.Optimizer"},
        "one source",
        "optim=custom optim.target=my.Optimizer",
        {"optim__name": "custom"},
    ),
    (
        {"optim__name": "lion", "optim__arguments": {"rho": 1}},
        "the arguments of lion are none",
        "leave it out",
        {"optim__arguments": {}},
    ),
    (
        {"optim__name": "lion", "optim__momentum": 0.9},
        "lion has no setting optim.momentum",
        "optim.betas=[0.9,0.95]",
        {"optim__momentum": 0.0},
    ),
    (
        {"optim__name": "adafactor", "zero__stage": 2},
        "needs whole parameters on each rank, because it factors moments",
        "zero=stage0",
        {"zero__stage": 0},
    ),
    (
        {"optim__name": "adafactor", "parallel__tensor": 2},
        "needs whole parameters",
        "parallel.tensor=1",
        {"parallel__tensor": 1},
    ),
    (
        {**OWN, "engine__name": EngineName.megatron},
        "Megatron-core builds its own optimizers",
        "engine=deepspeed",
        {"engine__name": EngineName.deepspeed},
    ),
    (
        {**OWN, "zero__stage": 3, "offload__optimizer": OffloadDevice.nvme, "offload__nvme_path": "/n"},
        "to NVMe",
        "offload=cpu",
        {"offload__optimizer": OffloadDevice.cpu},
    ),
]


@pytest.mark.parametrize(
    ("changes", "rule", "remedy", "corrected"),
    MISTAKES,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_refused_and_the_remedy_works(
    changes: dict[str, Any], rule: str, remedy: str, corrected: dict[str, Any]
) -> None:
    with pytest.raises(PlanError) as raised:
        make_plan(run_config(**changes), CPU)
    assert rule in str(raised.value)
    assert remedy in str(raised.value)
    make_plan(run_config(**{**changes, **corrected}), CPU)


def test_unused_settings_are_warned_about() -> None:
    plan = make_plan(run_config(optim__name="lion", optim__eps=1e-3), CPU)
    assert [warning.key for warning in plan.warnings] == ["optim.eps"]


def test_unknown_optimizer_does_not_hide_other_problems() -> None:
    with pytest.raises(PlanError, match=r"(?s)optim.name=lino.*train.global_batch=7"):
        make_plan(run_config(optim__name="lino", train__global_batch=7, train__micro_batch=2), CPU)


def test_factored_states_are_counted() -> None:
    """Adafactor's states are rows and columns, AdamW's two copies of the weights."""
    bytes_of = {
        name: make_plan(run_config(optim__name=name), CPU).memory.optimizer  # type: ignore[union-attr]
        for name in ("adamw", "lion", "adafactor")
    }
    assert bytes_of["lion"] * 2 == bytes_of["adamw"]
    assert 0 < bytes_of["adafactor"] < bytes_of["adamw"] / 10
