"""Traces on fake tensors against the same operators on real tensors, and against FLOPs counted by hand.

pytest tests/models/test_trace.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from toolkit.models import trace
from toolkit.models.operator_recorder import OperatorRecorder
from toolkit.models.trace import CannotTrace, trace_module
from toolkit.plan.trace import ModuleTrace

BATCH, LENGTH, WIDTH, ROWS = 2, 32, 16, 50
IDS = {"ids": torch.zeros(BATCH, LENGTH, dtype=torch.int64)}


class OwnBlock(nn.Module):
    def __init__(self, number: int = 0, dropout: float = 0.0, *, recompute: bool = False) -> None:
        super().__init__()
        self.number, self.dropout, self.recompute = number, dropout, recompute
        self.norm = nn.LayerNorm(WIDTH)
        self.projection, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.recompute and self.training:
            output: torch.Tensor = checkpoint(self.compute, hidden, use_reentrant=False)
            return output
        return self.compute(hidden)

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.projection(self.norm(hidden)).unflatten(-1, (3, 2, WIDTH // 2))
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout
        )
        hidden = hidden + attended.transpose(1, 2).flatten(2)
        result: torch.Tensor = hidden + self.down(functional.gelu(self.up(hidden)))
        return result


class OwnModel(nn.Module):
    """A module of the user's own that returns its loss."""

    def __init__(self, layers: int = 3, block: Callable[[int], OwnBlock] = OwnBlock) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(block(number) for number in range(layers))
        self.head = nn.Linear(WIDTH, ROWS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def loss_of(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = module(**batch)
    return loss


def traced(module: nn.Module) -> ModuleTrace:
    return trace_module(module, loss_of, IDS, samples=BATCH, dtype=torch.float32)


def saved_by_autograd(module: nn.Module) -> int:
    """Bytes of distinct storages that autograd saves in a real forward pass, and of the loss."""
    known = {tensor.untyped_storage().data_ptr() for tensor in module.parameters()}
    storages: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = module(**IDS)
    return sum(storage.nbytes() for storage in storages.values()) + loss.nbytes


def test_saved_bytes_of_an_own_module_are_those_of_autograd() -> None:
    assert traced(OwnModel()).saved_bytes == saved_by_autograd(OwnModel())


def test_trace_equals_real_tensors() -> None:
    """The peak and the operators of fake tensors are those of real ones."""
    module = OwnModel()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(trace._free_gradient)
    recorder = OperatorRecorder(module.parameters())
    recorder.record(IDS["ids"])
    with recorder:
        module(**IDS).backward()
    found = traced(OwnModel())
    assert found.peak_bytes == recorder.peak_bytes
    assert found.peak_bytes > found.saved_bytes
    assert found.operators == recorder.operators
    assert found.hardware_flops == recorder.flops.total()


def test_flops_are_two_for_each_product_and_twice_as_many_backward() -> None:
    tokens, layers = BATCH * LENGTH, 3
    products = tokens * (layers * WIDTH * WIDTH * (3 + 4 + 4) + WIDTH * ROWS)
    scores = layers * tokens * LENGTH * 2 * WIDTH
    found = traced(OwnModel(layers))
    assert sum(found.forward_flops.values()) == 2 * (products + scores)
    assert found.model_flops == found.hardware_flops == 6 * (products + scores)


@pytest.mark.parametrize("recompute", [False, True])
def test_equal_blocks_are_extrapolated_exactly(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        return OwnModel(12, lambda number: OwnBlock(number, recompute=recompute))

    found = traced(model())
    monkeypatch.setattr(trace, "MOST_TRACED", 12)
    whole = traced(model())
    assert (found.traced_blocks, whole.traced_blocks) == ((2, 3, 4, 12), None)
    names = ("saved_bytes", "peak_bytes", "operators", "hardware_flops", "recomputed_flops")
    for name in (*names, "forward_work", "backward_work"):
        assert getattr(found, name) == getattr(whole, name), name


def test_recomputed_flops_are_apart() -> None:
    kept = traced(OwnModel())
    again = traced(OwnModel(block=lambda number: OwnBlock(number, recompute=True)))
    assert again.saved_bytes < kept.saved_bytes
    assert again.model_flops == kept.model_flops
    assert again.recomputed_flops == again.hardware_flops - kept.hardware_flops > 0


def test_blocks_that_differ_are_all_traced() -> None:
    """Two kinds of blocks in turn would be on a line with each other by chance only."""
    found = traced(OwnModel(12, lambda number: OwnBlock(number, recompute=number % 2 == 0)))
    assert found.traced_blocks is None


def test_attention_with_dropout_stores_no_matrix() -> None:
    plain = traced(OwnModel())
    assert traced(OwnModel(block=lambda number: OwnBlock(number, 0.1))).saved_bytes == plain.saved_bytes


class ReadsValues(OwnModel):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (2 if ids.sum() > 3 else 1)


def test_a_module_that_reads_values_is_named_with_the_line() -> None:
    with pytest.raises(CannotTrace, match=r"depends on values of tensors .*test_trace\.py:\d+"):
        traced(ReadsValues())


class Broken(OwnModel):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.embedding(ids) @ torch.empty(3, 3)


def test_an_error_of_the_module_is_named_with_the_line() -> None:
    with pytest.raises(CannotTrace, match=r"test_trace\.py:\d+ raised RuntimeError"):
        traced(Broken())


class Small(nn.Module):
    """One product, one elementwise operation, a view and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.projection = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.projection(self.embedding(ids)).flatten(0, 1)
        return torch.relu(hidden).sum()


def test_bytes_of_operators_are_those_that_they_read_and_write() -> None:
    found = traced(Small()).forward_work
    tokens = BATCH * LENGTH
    assert found["aten::embedding"].moved_bytes == 2 * 4 * tokens * WIDTH  # the rows, and not the whole table
    product = found["aten::mm"]
    assert product.moved_bytes == 4 * (tokens * WIDTH + WIDTH * 3 * WIDTH + tokens * 3 * WIDTH)
    assert product.flops == 2 * tokens * WIDTH * 3 * WIDTH
    assert found["aten::relu"].moved_bytes == 2 * 4 * tokens * 3 * WIDTH
    assert found.keys() == {"aten::embedding", "aten::mm", "aten::relu", "aten::sum"}  # no views


def test_causal_attention_computes_half_of_the_pairs() -> None:
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    found = traced(OwnModel())
    assert found.forward_work[name].flops == found.forward_flops[name] / 2
    backward = f"{name}_backward"
    assert found.backward_work[backward].flops == found.backward_flops[backward] / 2 * 5 / 4
