"""Losses of text tasks, compared with direct computations.

pytest tests/train/test_task.py
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from toolkit.errors import ConfigError
from toolkit.models.build import build_model
from toolkit.models.initial_weights import InitialWeights
from toolkit.plan.types import RunPlan
from toolkit.testing.tiny import micro_batches, tiny_plan
from toolkit.train.generate import load_model
from toolkit.train.task import IGNORE_INDEX, ModelLossTask, NextTokenTask, load_balance, text_task

CPU = torch.device("cpu")


def model_of(plan: RunPlan) -> nn.Module:
    assert plan.shape is not None
    return load_model(plan.shape, InitialWeights(plan))


def test_collate_shifts_and_masks() -> None:
    samples = np.array([[5, 6, 7, 8], [1, 2, IGNORE_INDEX, IGNORE_INDEX]])
    batch = NextTokenTask().collate(samples)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [1, 2, 0]]
    assert batch["labels"].tolist() == [[6, 7, 8], [2, IGNORE_INDEX, IGNORE_INDEX]]
    assert batch["labels"].dtype == torch.int64
    assert NextTokenTask().units(batch) == 4


def test_collate_restarts_positions_in_each_document() -> None:
    samples = np.array([[5, 9, 7, 8, 9], [1, 2, 9, IGNORE_INDEX, IGNORE_INDEX]])
    assert "position_ids" not in NextTokenTask().collate(samples)
    for task in (NextTokenTask(), ModelLossTask("my.Model")):
        task.end_of_text = 9
        batch = task.collate(samples)
        assert batch["position_ids"].tolist() == [[0, 1, 0, 1], [0, 1, 2, 0]]
        assert batch["labels"].tolist() == [[9, 7, 8, 9], [2, 9, IGNORE_INDEX, IGNORE_INDEX]]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_next_token_sums_over_unmasked_labels(family: str) -> None:
    plan = tiny_plan(family)
    model, batch, task = model_of(plan), micro_batches(plan, 0)[0], text_task(plan)
    with torch.no_grad():
        log_probabilities = torch.log_softmax(model(input_ids=batch["input_ids"]).logits.double(), dim=-1)
        expected = -sum(
            log_probabilities[row, place, label].item()
            for row, labels in enumerate(batch["labels"].tolist())
            for place, label in enumerate(labels)
            if label != IGNORE_INDEX
        )
        assert task.loss_sum(model, batch).item() == pytest.approx(expected, rel=1e-5)
    assert task.units(batch) == int((batch["labels"] >= 0).sum())


def test_bf16_loss_is_summed_in_fp32() -> None:
    plan = tiny_plan()
    batch = micro_batches(plan, 0)[0]
    loss = NextTokenTask().loss_sum(model_of(plan).to(torch.bfloat16), batch)
    assert loss.dtype == torch.float32


def test_router_loss_is_added_per_token_in_training_only() -> None:
    plan = tiny_plan("mixtral", model__router_aux_loss_coef=0.25)
    model, batch, task = model_of(plan), micro_batches(plan, 0)[0], text_task(plan)
    with torch.no_grad():
        plain = NextTokenTask().loss_sum(model, batch)
        logits = model(input_ids=batch["input_ids"], output_router_logits=True).router_logits
        auxiliary = load_balance(logits, 2)
        assert auxiliary > 2
        assert task.loss_sum(model, batch) == plain
        model.train()
        assert task.loss_sum(model, batch).item() == pytest.approx(
            (plain + 0.25 * auxiliary * task.units(batch)).item(), rel=1e-6
        )


def test_load_balance_is_computed_per_layer() -> None:
    """For one layer it equals transformers' loss. Layers with different preferences do not cancel out."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 64, 4, generator=generator)
    for layer in (one, other):
        assert load_balance([layer], 2).item() == pytest.approx(
            load_balancing_loss_func((layer,), 4, 2).item(), rel=1e-6
        )
    assert load_balance(
        [torch.eye(4).repeat(16, 1) + torch.eye(4).roll(1, 0).repeat(16, 1)], 2
    ).item() == pytest.approx(2.0)
    first = torch.tensor([[9.0, 8.0, 0.0, 0.0]]).expand(64, 4)
    last = first.flip(1)
    assert load_balance([first, last], 2).item() == pytest.approx(4.0, abs=0.01)
    assert load_balancing_loss_func((first, last), 4, 2).item() == pytest.approx(2.0, abs=0.01)


class Bigram(nn.Module):
    """Return the loss in the given form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.table = nn.Embedding(264, 264)
        self.form = form

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.table(input_ids)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {
            "tensor": loss,
            "object": SimpleNamespace(loss=loss),
            "dict": {"loss": loss},
            "logits": logits,
            "none": None,
        }[self.form]


@pytest.mark.parametrize("form", ["tensor", "object", "dict"])
def test_mean_loss_of_a_module_is_weighted_by_its_tokens(form: str) -> None:
    batch = micro_batches(tiny_plan(), 0)[0]
    model, task = Bigram(form), ModelLossTask("my.Model")
    logits = model.table(batch["input_ids"])
    expected = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    assert task.loss_sum(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_mean_over_no_labels_counts_as_zero() -> None:
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "labels": torch.full((2, 4), IGNORE_INDEX)}
    assert ModelLossTask("my.Model").loss_sum(Bigram("tensor"), batch).item() == 0


@pytest.mark.parametrize(
    ("form", "seen"), [("logits", "a tensor of shape (2, 32, 264)"), ("none", "NoneType")]
)
def test_output_that_is_no_loss_is_refused(form: str, seen: str) -> None:
    with pytest.raises(ConfigError, match=r"one mean loss") as refused:
        ModelLossTask("my.Model").loss_sum(Bigram(form), micro_batches(tiny_plan(), 0)[0])
    assert seen in str(refused.value)
    assert "model.target=my.Model" in str(refused.value)


def test_plan_determines_the_task() -> None:
    plan = tiny_plan(None, model__target="torch.nn.Linear")
    assert isinstance(text_task(plan), ModelLossTask)
    assert isinstance(text_task(tiny_plan()), NextTokenTask)
    assert build_model(tiny_plan(), CPU).training
