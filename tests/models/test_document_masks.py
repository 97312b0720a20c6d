"""A document in a window with others has the logits that it has alone, in every family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.attention_kernels import with_attention
from tests.models.broken import Fine
from tests.models.pipeline_stages import stages
from toolkit.config.data import DocumentMasking
from toolkit.config.kernels import AttentionKernel
from toolkit.config.model import ModelConfig
from toolkit.engine.protocol import MicroBatch
from toolkit.errors import ConfigError
from toolkit.families import FAMILIES
from toolkit.models.attention import document_causal_mask
from toolkit.models.build import build_model
from toolkit.models.user_model import build_user_module
from toolkit.plan.types import RunPlan
from toolkit.testing.tiny import micro_batches, tiny_plan
from toolkit.train.task import ModelLossTask, text_task

TOLERANCE = 1e-5
SEPARATE = {"data__documents": DocumentMasking.separate}


def filled(plan: RunPlan) -> nn.Module:
    model = build_model(plan, "cpu")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1, generator=generator)
    return model


def documents(batch: MicroBatch) -> Iterator[tuple[int, slice]]:
    """Row and slice of each document of a micro-batch."""
    for row, places in enumerate(batch["position_ids"]):
        starts = [*torch.nonzero(places == 0).flatten().tolist(), len(places)]
        yield from ((row, slice(first, end)) for first, end in pairwise(starts))


def apart(model: Any, logits: torch.Tensor, batch: MicroBatch) -> float:
    """The largest difference of any document's ``logits`` from those that it has alone."""
    found = []
    for row, place in documents(batch):
        alone = model(input_ids=batch["input_ids"][row : row + 1, place], use_cache=False).logits
        found.append(float((logits[row, place] - alone[0]).detach().abs().max()))
    assert len(found) > 2 * len(logits), "windows of several documents"
    return max(found)


KERNELS = [
    pytest.param(family, kernel, marks=[] if kernel is AttentionKernel.sdpa else pytest.mark.full)
    for family in FAMILIES
    for kernel in (AttentionKernel.sdpa, AttentionKernel.eager, AttentionKernel.flex)
]


@pytest.mark.parametrize(("family", "kernel"), KERNELS)
def test_document_in_a_window_matches_the_document_alone(family: str, kernel: AttentionKernel) -> None:
    plan = with_attention(tiny_plan(family, **SEPARATE), kernel)
    model, batch = filled(plan), micro_batches(plan, 0)[0]
    with torch.no_grad():
        together = model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits
        joined = model(input_ids=batch["input_ids"], use_cache=False).logits
        assert apart(model, together, batch) < TOLERANCE
        assert apart(model, joined, batch) > 1e3 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_blocks_use_the_same_mask(family: str) -> None:
    """Gradients and evaluation loss equal the sum over the documents alone."""
    plan = tiny_plan(family, train__activation_checkpointing="full", **SEPARATE)
    model, batch, task = filled(plan), micro_batches(plan, 0)[0], text_task(plan)

    def gradients(batches: list[MicroBatch]) -> torch.Tensor:
        model.zero_grad()
        for one in batches:
            task.loss_sum(model, one).backward()
        return torch.cat(
            [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        )

    alone: list[MicroBatch] = [
        {name: batch[name][row : row + 1, place] for name in ("input_ids", "labels")}
        for row, place in documents(batch)
    ]
    right = gradients(alone)
    largest = float(right.abs().max())
    assert float((gradients([batch]) - right).abs().max()) < TOLERANCE * largest
    joined = {name: tensor for name, tensor in batch.items() if name != "position_ids"}
    assert float((gradients([joined]) - right).abs().max()) > 1e3 * TOLERANCE * largest
    model.eval()
    with torch.no_grad():
        expected = sum(task.loss_sum(model, one).item() for one in alone)
        assert task.loss_sum(model, batch).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_pipeline_stages_match_the_model_with_documents(family: str) -> None:
    plan = tiny_plan(family, model__num_hidden_layers=3, **SEPARATE)
    whole, batch = filled(plan), micro_batches(plan, 0)[0]
    positions = batch["position_ids"]
    parts = stages(plan, 3, dict(whole.named_parameters()))
    with torch.no_grad():
        logits = whole(input_ids=batch["input_ids"], position_ids=positions, use_cache=False).logits
        given = forgotten = batch["input_ids"]
        for number, part in enumerate(parts):
            given, forgotten = part(given, positions), part(forgotten, positions if number == 0 else None)
        assert torch.equal(given, logits)
        assert float((forgotten - logits).abs().max()) > 1e3 * TOLERANCE


def test_generation_cache_is_not_mistaken_for_documents() -> None:
    """Generating token by token with running positions matches the whole text at once."""
    model, ids = filled(tiny_plan()).eval(), torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        first = model(input_ids=ids[:, :7], use_cache=True)
        rest = [first.logits]
        past = first.past_key_values
        for place in range(7, 12):
            output = model(input_ids=ids[:, place : place + 1], past_key_values=past, use_cache=True)
            rest.append(output.logits)
            past = output.past_key_values
    assert float((torch.cat(rest, 1) - whole).abs().max()) < TOLERANCE


def test_mask_is_causal_within_documents() -> None:
    seen = document_causal_mask(torch.tensor([[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]))
    assert seen.shape == (2, 1, 5, 5)
    assert seen[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert torch.equal(seen[1, 0], torch.ones(5, 5, dtype=torch.bool).tril())
    some = document_causal_mask(
        torch.tensor([[0, 1, 0, 0, 1]]), torch.tensor([4, 1]), torch.tensor([3, 4, 0, 1])
    )
    assert some[0, 0].int().tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]


class Placed(nn.Module):
    """Takes positions and records them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.given: torch.Tensor | None = None

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        self.given = position_ids
        return self.weight * input_ids.float().mean()


class AnyName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **others: Any) -> torch.Tensor:
        return self.weight * input_ids.float().mean()


def test_custom_model_receives_position_ids() -> None:
    here = "tests.models.test_document_masks"
    plan = tiny_plan(None, model__target=f"{here}.Placed", **SEPARATE)
    model, batch = build_model(plan, "cpu"), micro_batches(plan, 0)[0]
    text_task(plan, 0).loss_sum(model, batch)
    assert isinstance(text_task(plan), ModelLossTask)
    assert torch.equal(model.given, batch["position_ids"])  # type: ignore[arg-type]
    for target, arguments in ((f"{here}.AnyName", {}), (f"{Fine.__module__}.Fine", {"width": 2})):
        own = replace(ModelConfig(), target=target, arguments=arguments)
        build_user_module(own, 0)
        with pytest.raises(ConfigError, match="position_ids") as refused:
            build_user_module(own, 0, documents=DocumentMasking.separate)
        assert "data.documents=joined" in refused.value.problems[0].remedy
