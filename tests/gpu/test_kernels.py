"""Kernels that only a GPU has."""

from __future__ import annotations

import pytest
import torch

from toolkit.engine.megatron.patches import add_weight_gradient

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [0, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weight_gradient_is_added_in_fp32(dtype: torch.dtype, tokens: int) -> None:
    """The sum with the buffer is not rounded to 16 bits: bf16 numbers above 4096 are 32 apart."""
    inputs, gradient = (torch.randn(tokens, width, device="cuda").to(dtype) for width in (96, 160))
    buffer = torch.full((160, 96), 4096.0, device="cuda")
    add_weight_gradient(inputs, gradient, buffer)
    right = gradient.double().t() @ inputs.double() + 4096.0
    torch.testing.assert_close(buffer.double(), right, rtol=0, atol=0.05)
