"""Trial steps show the behaviour of a user's optimizer.

pytest tests/optimizers/test_trial_steps.py
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from toolkit.config.optim import OptimConfig
from toolkit.errors import ConfigError
from toolkit.optimizers import OPTIMIZERS
from toolkit.optimizers.base import parameter_groups
from toolkit.optimizers.trial_steps import OptimizerBehaviour, create_custom, run_trial_steps

OWN = "tests.optimizers.own_optimizers"


def optim(target: str, weight_decay: float = 0.1, lr: float = 1e-2, **arguments: Any) -> OptimConfig:
    path = target if "." in target else f"{OWN}.{target}"
    return OptimConfig(name="custom", target=path, arguments=arguments, lr=lr, weight_decay=weight_decay)


def found(target: str, **settings: Any) -> OptimizerBehaviour:
    return run_trial_steps(optim(target, **settings))


@pytest.mark.parametrize(
    ("target", "tensors", "numbers"),
    [
        ("Adagrad", ("sum",), ("count",)),
        ("torch.optim.AdamW", ("exp_avg", "exp_avg_sq"), ("step",)),
        ("torch.optim.RAdam", ("exp_avg", "exp_avg_sq"), ("step",)),
        ("torch.optim.NAdam", ("exp_avg", "exp_avg_sq"), ("step", "mu_product")),
        ("torch.optim.RMSprop", ("square_avg",), ("step",)),
        ("torch.optim.Rprop", ("prev", "step_size"), ("step",)),
        ("torch.optim.ASGD", ("ax",), ("step", "eta", "mu")),
    ],
)
def test_elementwise_optimizers_are_exact_on_every_layout(
    target: str, tensors: tuple[str, ...], numbers: tuple[str, ...]
) -> None:
    decay = {} if "Rprop" not in target else {"weight_decay": 0.0}
    behaviour = found(target, **decay)
    assert behaviour.not_flat is None
    assert behaviour.not_stage3 is None
    assert set(behaviour.states.tensors) == set(tensors)
    assert set(behaviour.states.numbers) == set(numbers)
    assert not behaviour.states.whole


def test_factored_states_need_whole_parameters() -> None:
    behaviour = found("torch.optim.Adafactor")
    assert {"row_var", "col_var"} <= set(behaviour.states.whole)
    assert behaviour.not_flat
    assert behaviour.not_stage3


def test_norm_of_a_parameter_needs_whole_parameters() -> None:
    behaviour = found("Normalized", weight_decay=0.0)
    assert behaviour.states.whole == ("norms",)
    assert behaviour.not_flat
    assert "flat range differs" in behaviour.not_flat


def test_count_in_a_group_is_exact_on_stages_1_and_2_only() -> None:
    behaviour = found("CountsInGroup", weight_decay=0.0)
    assert behaviour.states.group_numbers == ("k",)
    assert behaviour.not_flat is None
    assert behaviour.not_stage3


def test_states_created_by_the_constructor_are_not_exact_on_zero() -> None:
    """DeepSpeed replaces the parameters by flat ranges after the constructor has run."""
    behaviour = found("EagerState")
    assert behaviour.not_flat
    assert "KeyError" in behaviour.not_flat


def test_deepspeed_cannot_run_torchs_adagrad() -> None:
    """Its ZeRO creates another Adagrad with one parameter group, and so without groups for weight decay."""
    behaviour = found("torch.optim.Adagrad")
    assert behaviour.not_flat
    assert "without parameter groups" in behaviour.not_flat


@pytest.mark.parametrize(
    ("target", "settings", "seen", "remedy"),
    [
        ("HiddenCount", {}, "computes other weights", "move attributes"),
        ("NeedsClosure", {}, r"requires closure \(.*own_optimizers.py:\d+", "no required arguments"),
        ("torch.optim.LBFGS", {"weight_decay": 0.0}, "requires closure", "no required arguments"),
        ("Explodes", {}, "not finite", "correct step"),
        ("ListState", {}, "its state history is a list", "tensor of the parameter's shape"),
        ("not_an_optimizer", {}, "returns a dict", "derive the class"),
        ("Normalized", {}, "no weight_decay", "optim.weight_decay=0"),
        (
            "Adagrad",
            {"delta": 3},
            r"unexpected keyword argument 'delta' \(.*own_opt.*:\d+",
            "optim.arguments",
        ),
        ("Adagrat", {}, "has no Adagrat", "own_optimizers.Adagrad"),
    ],
)
def test_mistakes_are_reported(target: str, settings: dict[str, Any], seen: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        found(target, **settings)
    (problem,) = raised.value.problems
    assert problem.key == "optim.target"
    assert re.search(seen, problem.seen), problem.seen
    assert remedy in problem.remedy


def test_error_of_the_constructor_names_its_line() -> None:
    with pytest.raises(RuntimeError, match="no such preconditioner") as raised:
        found("RefusesToBuild", weight_decay=0.0)
    assert re.search(
        r"optim.target .*own_optimizers.py:\d+\) raised this error in .*own_optimizers.py:\d+",
        raised.value.__notes__[0],
    )


def test_weight_decay_is_that_of_the_run() -> None:
    """Also if the class has another default."""
    parameters = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
    for decay in (0.3, 0.0):
        settings = optim("torch.optim.AdamW", weight_decay=decay)
        created = create_custom(parameter_groups(parameters, decay), settings)
        assert [group["weight_decay"] for group in created.param_groups] == [decay, 0.0]


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_optimizer_specs_match_measured_behaviour(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial steps of a built-in optimizer show the states that its file declares."""
    from toolkit.optimizers import trial_steps as module

    settings = OptimConfig(name=name, momentum=0.9, target=f"built.in.{name}", lr=1e-2)
    monkeypatch.setattr(module, "create_custom", OPTIMIZERS[name].create)
    behaviour = module._Trial(settings, "cpu").run()
    stated = OPTIMIZERS[name].states(settings)
    assert set(behaviour.states.tensors) == set(stated.tensors)
    assert set(behaviour.states.numbers) == set(stated.numbers)
    assert behaviour.not_flat is None
    assert behaviour.not_stage3 is None
