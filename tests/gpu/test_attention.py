"""Every choice of ``model.attention`` runs its kernel on a GPU, and equals attention with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.gpu.runs import sized
from tests.gpu.test_gpu import FLASH, kernels_and_peak
from toolkit.config.data import DocumentMasking
from toolkit.config.kernels import AttentionKernel, CompileMode
from toolkit.config.schema import EngineName
from toolkit.models.attention import attend, document_causal_mask, make_mask
from toolkit.testing.dist import RankPool

pytestmark = pytest.mark.gpu

SEPARATE = {"data__documents": DocumentMasking.separate}
UNCOMPILED = {
    "compile__mode": CompileMode.none
}  # inductor's kernels would have the names of their operations
TEMPLATE = ("triton_tem_", "flex_attention")  # inductor generates FlexAttention's kernels from templates


@pytest.mark.parametrize("engine", [EngineName.local, EngineName.megatron])
@pytest.mark.parametrize(
    ("kernel", "changes", "flash", "flex"),
    [
        (AttentionKernel.auto, {}, True, False),
        (AttentionKernel.sdpa, {}, True, False),
        (AttentionKernel.flash, {}, True, False),
        (AttentionKernel.eager, {}, False, False),
        (AttentionKernel.auto, SEPARATE, False, True),
        (AttentionKernel.flex, SEPARATE, False, True),
        (AttentionKernel.eager, SEPARATE, False, False),
    ],
)
def test_chosen_kernel_runs(
    engine: EngineName,
    kernel: AttentionKernel,
    changes: dict[str, Any],
    flash: bool,
    flex: bool,
    gpu: RankPool,
) -> None:
    settings = UNCOMPILED if engine is EngineName.local else {}
    plan = sized(engine, 0, model__attention=kernel, **changes, **settings)
    names, _ = gpu.run(kernels_and_peak, plan, timeout=300)[0]
    assert any(word in name.lower() for name in names for word in FLASH) is flash, names
    assert any(word in name.lower() for name in names for word in TEMPLATE) is flex, names


def differences(rank: int, ranks: int, dtype: torch.dtype) -> dict[str, float]:
    """Relative differences of outputs and gradients from attention in fp64 with a mask of all pairs."""
    length, device = 1000, torch.device("cuda")
    positions = (torch.arange(length, device=device) % 300).expand(2, -1)
    causal = torch.arange(length, device=device).expand(2, -1)
    generator = torch.Generator(device).manual_seed(1)
    given = [
        torch.randn(2, heads, length, 64, dtype=dtype, device=device, generator=generator)
        for heads in (8, 2, 2, 8)
    ]

    def results(kernel: AttentionKernel, places: torch.Tensor | None, first: int = 0) -> list[torch.Tensor]:
        leaves = [part.clone().requires_grad_() for part in given[:3]]
        mask = None if places is None else make_mask(kernel, places)
        output = attend(leaves[0][:, :, first:], *leaves[1:], kernel=kernel, mask=mask)
        gradients = torch.autograd.grad((output * given[3][:, :, first:]).sum(), leaves)
        return [output.detach(), *gradients]

    def plain(places: torch.Tensor, first: int = 0) -> list[torch.Tensor]:
        leaves = [part.double().requires_grad_() for part in given[:3]]
        mask = document_causal_mask(places)[:, :, first:]
        keys = (part.repeat_interleave(4, dim=1) for part in leaves[1:])
        output = functional.scaled_dot_product_attention(leaves[0][:, :, first:], *keys, attn_mask=mask)
        gradients = torch.autograd.grad((output * given[3][:, :, first:]).sum(), leaves)
        return [output.detach(), *gradients]

    def distance(found: list[torch.Tensor], right: list[torch.Tensor]) -> float:
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True))

    right = plain(positions)
    found = {
        "sdpa": distance(results(AttentionKernel.sdpa, positions), right),
        "flex": distance(results(AttentionKernel.flex, positions), right),
        "joined": distance(results(AttentionKernel.flex, causal), right),
    }
    if dtype is not torch.float32:
        for first in (0, 600):  # 600: the prefix of a context rank's second chunk
            whole = plain(causal, first)
            found[f"flash {first}"] = distance(results(AttentionKernel.flash, None, first), whole)
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_kernels_match_fp64(dtype: torch.dtype, tolerance: float, gpu: RankPool) -> None:
    found = gpu.run(differences, dtype, timeout=300)[0]
    assert found.pop("joined") > 10 * tolerance
    assert max(found.values()) < tolerance, found
