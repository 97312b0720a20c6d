"""The fused loss on a GPU: equal to the plain one, eager and compiled, in the memory that the plan counts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from toolkit.data.evaluation import IGNORE_INDEX
from toolkit.models.fused_loss import linear_cross_entropy
from toolkit.plan.activations import fused_loss_bytes

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, VOCABULARY, CHUNK = 8192, 2048, 32_000, 2048


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, device="cuda", generator=generator) / HIDDEN**0.5
    labels = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda", generator=generator)
    labels[::5] = IGNORE_INDEX
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = functional.linear(hidden, weight).float()
    return functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_fused_loss_equals_the_plain_one(dtype: torch.dtype, tolerance: float, backend: str | None) -> None:
    found, expected = tensors(dtype), tensors(dtype)
    ours = linear_cross_entropy(*found, chunk=CHUNK, backend=backend)
    theirs = plain(*expected)
    (ours / TOKENS).backward()
    (theirs / TOKENS).backward()
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    for mine, reference in zip(found[:2], expected[:2], strict=True):
        assert mine.grad is not None
        assert reference.grad is not None
        assert (mine.grad - reference.grad).norm() < tolerance * reference.grad.norm()


def test_peak_memory_is_planned() -> None:
    given = tensors(torch.bfloat16)
    linear_cross_entropy(*given, chunk=CHUNK)  # workspaces of cuBLAS
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(*given, chunk=CHUNK)
    planned = fused_loss_bytes(TOKENS, HIDDEN, VOCABULARY, 2, CHUNK)
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(planned, rel=0.05)
