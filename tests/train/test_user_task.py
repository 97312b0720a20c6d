"""task.target: what a user's task trains, and the error for each mistake.

pytest tests/train/test_user_task.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train import user_tasks
from toolkit.config.data import DocumentMasking
from toolkit.config.schema import EngineName, RunConfig
from toolkit.data.custom.samples import Samples
from toolkit.errors import ConfigError, PlanError
from toolkit.plan.flops import hardware_flops, model_flops, why_no_utilisation
from toolkit.testing.tiny import tiny_config, tiny_plan
from toolkit.train.task import NextTokenTask, Task
from toolkit.train.user_task import CheckedTask, build_user_task, check_user_task, describe_task
from toolkit.user_code import UserObject

HERE = "tests.train.user_tasks"
FILE = str(Path(user_tasks.__file__).resolve())


def config_of(target: str, family: str | None = None, **changes: Any) -> RunConfig:
    model = {} if family else {"model__target": f"{HERE}.Network"}
    return tiny_config(family, **model, task__target=f"{HERE}.{target}", **changes)


def checked(task: Task) -> CheckedTask:
    return CheckedTask(task, UserObject("task", f"{HERE}.{type(task).__name__}"))


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    generator = np.random.default_rng(start)
    return [
        {
            "x": generator.normal(size=4).astype(np.float32),
            "y": np.float32(number),
            "weight": float(number % 3),
        }
        for number in range(start, start + count)
    ]


def test_default_collate_stacks_dicts_and_structs() -> None:
    batch = user_tasks.Regression().collate(rows(5))
    assert {name: list(tensor.shape) for name, tensor in batch.items()} == {
        "x": [5, 4],
        "y": [5],
        "weight": [5],
    }
    structs = np.zeros(3, dtype=[("x", np.float32, (4,)), ("y", np.int16)])
    structs["y"] = [1, 2, 3]
    batch = user_tasks.Regression().collate(structs)
    assert batch["x"].shape == (3, 4)
    assert batch["y"].tolist() == [1, 2, 3]


def test_samples_that_do_not_count_change_no_sum() -> None:
    task, model = checked(user_tasks.Regression()), user_tasks.Network()
    samples = Samples(rows(3), real=2)
    batch, alone = task.collate(samples), task.collate(rows(2))
    assert task.units(batch) == task.units(alone) == 1
    assert task.eval_sums(model, batch) == task.eval_sums(model, alone)
    samples.real = 0
    masked = task.collate(samples)
    assert task.units(masked) == 0
    assert {name: float(value) for name, value in task.eval_sums(model, masked).items()} == {
        "loss": 0,
        "close": 0,
    }
    assert task.units(task.collate(rows(3))) == 2, "the control: the third sample counts"


LOSS, EVALUATE = (r"its loss_sum \(FILE:\d+\) returned ", r"its evaluate \(FILE:\d+\) returned ")
WRONG: dict[str, tuple[str, Any, str]] = {
    "no batch": ("collate", None, r"its collate \(FILE:\d+\) returned None"),
    "a list": ("collate", [torch.zeros(2)], r"its collate \(FILE:\d+\) returned a list"),
    "an array": ("collate", {"x": np.zeros(2)}, r"its collate \(FILE:\d+\) returned a ndarray as x"),
    "a loss per sample": ("loss_sum", torch.zeros(3), LOSS + r"a tensor of shape \[3\] as the loss"),
    "a float": ("loss_sum", 0.5, LOSS + "a float as the loss"),
    "no gradient": ("loss_sum", torch.zeros(()), LOSS + "a loss without a gradient"),
    "fractional units": ("units", 1.5, r"its units \(FILE:\d+\) returned 1.5"),
    "negative units": ("units", -1, r"its units \(FILE:\d+\) returned -1"),
    "no sums": ("evaluate", {"accuracy": torch.zeros(())}, EVALUATE + "accuracy, without loss"),
    "a tensor": ("evaluate", torch.zeros(()), EVALUATE + "a tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_results_are_refused_with_the_line_of_the_method(case: str) -> None:
    method, wrong, seen = WRONG[case]
    task, model = checked(user_tasks.Broken(method, wrong)), user_tasks.Network()
    arguments: tuple[Any, ...] = (rows(3),)
    if method != "collate":
        batch = task.collate(rows(3))
        arguments = (batch,) if method == "units" else (model, batch)
    with pytest.raises(ConfigError) as refused:
        getattr(task, method)(*arguments)
    assert re.search(
        f"task.target={HERE}.Broken: {seen}".replace("FILE", re.escape(FILE)), str(refused.value)
    )


def test_errors_of_the_task_name_the_key_and_the_line() -> None:
    task = checked(user_tasks.Regression())
    with pytest.raises(KeyError) as raised:
        task.loss_sum(user_tasks.Network(), {"x": torch.zeros(1, 4)})
    (note,) = raised.value.__notes__
    assert re.match(
        rf"task.target \({re.escape(FILE)}:\d+\) raised this error in {re.escape(FILE)}:\d+", note
    )


def use(**changes: Any) -> Callable[[RunConfig], None]:
    def change(config: RunConfig) -> None:
        for key, value in changes.items():
            section, name = key.split("__")
            setattr(getattr(config, section), name, value)

    return change


MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "not a task": ("NotDerived", {}, r"the class NotDerived is not derived from Task"),
    "no class": ("Regresion", {}, rf"has no Regresion\n.*\n.*write task.target={HERE}.Regression"),
    "arguments": ("Regression", {"task__arguments": {"sclae": 2}}, r"does not accept .*sclae"),
    "signature": ("WrongSignature", {}, r"its loss_sum\(self, batch.*user_tasks.py:\d+\) does not fit"),
    "no loss": ("NoLoss", {}, r"the class NoLoss \(.*user_tasks.py:\d+\) has no loss_sum"),
    "documents": (
        "Regression",
        {"data__documents": DocumentMasking.separate},
        r"data.documents=separate, and Regression is not derived from TextTask",
    ),
    "megatron": (
        "OwnLoss",
        {"engine__name": EngineName.megatron},
        "engine.name=megatron with the loss_sum of OwnLoss",
    ),
    "pipeline": ("OwnLoss", {"parallel__pipeline": 2}, r"parallel.pipeline=2 with the loss_sum of OwnLoss"),
    "context": (
        "Regression",
        {"parallel__context": 2},
        r"parallel.context=2 with the loss_sum of Regression",
    ),
    "router": ("OwnLoss", {"model__router_aux_loss_coef": 0.1}, r"write model.router_aux_loss_coef=0"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_refused_before_the_task_is_built(case: str) -> None:
    target, changes, seen = MISTAKES[case]
    with pytest.raises(ConfigError, match=seen):
        check_user_task(config_of(target, "llama", **changes))


def test_arguments_without_a_task_are_refused() -> None:
    with pytest.raises(PlanError, match=r"write task.target=my.package.Task, or leave task.arguments out"):
        tiny_plan(task__arguments={"scale": 2})
    tiny_plan(task__target=f"{HERE}.Weighted", task__arguments={"scale": 2})


@pytest.mark.parametrize("axis", ["pipeline", "context"])
def test_tasks_that_keep_the_loss_of_text_are_accepted_everywhere(axis: str) -> None:
    check_user_task(config_of("Weighted", "llama", **{f"parallel__{axis}": 2}))
    check_user_task(config_of("Weighted", "llama", engine__name=EngineName.megatron))


def test_the_plan_gets_the_unit_of_the_task() -> None:
    plan = tiny_plan(None, model__target=f"{HERE}.Network", task__target=f"{HERE}.Regression")
    assert (plan.unit, plan.units_per_sample, plan.loss_unit) == ("samples", 1, "a sample")
    task = build_user_task(plan.config)
    assert isinstance(task, user_tasks.Regression)
    assert describe_task(plan, task).unit == "rows"
    assert describe_task(plan, None) is plan
    assert tiny_plan().loss_unit == "nats a token"


def test_the_flops_of_a_task_give_the_utilisation() -> None:
    plan = tiny_plan("llama", task__target=f"{HERE}.Weighted")
    assert model_flops(plan) is None, "the FLOPs of a token are not those of the task's unit"
    assert "the task does not define flops_per_unit" in str(why_no_utilisation(plan))
    task = user_tasks.Weighted()
    task.flops_per_unit = 12.0
    known = describe_task(plan, task)
    assert model_flops(known) == hardware_flops(known) == 12
    assert why_no_utilisation(known) == "it runs on CPUs"


def test_weights_multiply_the_loss_of_each_token() -> None:
    task = user_tasks.Weighted()
    batch = dict(task.collate(np.arange(18).reshape(2, 9)))

    class Logits(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            torch.manual_seed(0)
            return type("Output", (), {"logits": torch.randn(2, 8, 20)})

    logits = Logits()(batch["input_ids"]).logits.log_softmax(-1)
    expected = -sum(
        float(batch["loss_weights"][row, place]) * float(logits[row, place, 9 * row + place + 1])
        for row in range(2)
        for place in range(2, 8)
    )
    assert task.units(batch) == 12
    assert float(task.loss_sum(Logits(), batch)) == pytest.approx(expected, rel=1e-5)
    del batch["loss_weights"]
    assert float(NextTokenTask().loss_sum(Logits(), batch)) != pytest.approx(expected, rel=1e-2)


def test_a_subclass_with_its_own_loss_evaluates_it() -> None:
    class Output:
        logits = torch.zeros(2, 8, 20)

    batch = NextTokenTask().collate(np.arange(18).reshape(2, 9))
    found = user_tasks.OwnLoss().evaluate(lambda **_: Output, batch)  # type: ignore[arg-type]
    assert float(found["loss"]) == pytest.approx(2 * 16 * np.log(20))
    assert set(NextTokenTask().evaluate(lambda **_: Output, batch)) == {"loss", "preds", "target"}  # type: ignore[arg-type]
