"""Run any attention kernel on CPUs, also those that the plan refuses there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from toolkit.config.kernels import AttentionKernel
from toolkit.plan.types import KernelChoice, RunPlan


def with_attention(plan: RunPlan, kernel: AttentionKernel) -> RunPlan:
    """``plan`` with another kernel, which is not checked."""
    return replace(plan, kernels=replace(plan.kernels, attention=KernelChoice(kernel.value, "a test")))


@contextmanager
def flex_attention_with_gradients() -> Iterator[None]:
    """Let FlexAttention compute gradients on CPUs.

    torch refuses it because it generates no backward kernel for CPUs. Without torch.compile its operator has
    one, of plain tensor operations, which evaluates the mask of every pair.
    """
    from torch.nn.attention import flex_attention

    before = flex_attention._validate_device
    flex_attention._validate_device = lambda *_: None
    try:
        yield
    finally:
        flex_attention._validate_device = before
