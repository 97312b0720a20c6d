"""fp8 matrix products: rounding, gradients, convergence. CPUs compute the numbers of GPUs, in software.

pytest tests/engine/test_fp8.py             rounding and gradients
pytest tests/engine/test_fp8.py -m full     losses of 60 steps
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from toolkit.config.kernels import CompileBackend, CompileMode
from toolkit.config.schema import Precision
from toolkit.engine import fp8
from toolkit.engine.local import LocalEngine
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import run_trace, trace_on_rank
from toolkit.testing.tiny import tiny_plan
from toolkit.train.task import text_task

BF16: dict[str, Any] = {"precision__name": Precision.bf16}
FP8 = BF16 | {"precision__fp8": True}
BAND = 0.015  # nats: the largest distance between losses of bf16 and fp8 in 60 steps; measured: 0.006


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [48, 64] and a weight [32, 64] in bf16, whose rows have very different sizes."""
    generator = torch.Generator().manual_seed(5)
    rows, weight = (torch.randn(size, 64, generator=generator) for size in (48, 32))
    sizes = torch.logspace(-6, 4, 48).unsqueeze(1)
    return (rows * sizes).bfloat16(), weight.bfloat16()


def test_values_are_rounded_to_three_bits_of_their_row() -> None:
    rows, _ = matrices()
    values, scales = fp8.quantize(rows)
    assert (values.dtype, scales.shape) == (torch.float8_e4m3fn, (48, 1))
    assert values.float().abs().amax(dim=-1).eq(448).all()
    # Half a unit in the last of three bits, or of the smallest subnormal, 2^-9.
    error = (values.float() * scales - rows.float()).abs()
    assert (error <= torch.maximum(rows.float().abs() * 2**-4, scales * 2**-10) * 1.001).all()
    assert fp8.quantize(torch.zeros(2, 16))[0].float().eq(0).all()


def test_infinite_gradients_stay_visible() -> None:
    rows, weight = matrices()
    rows[3, 5] = torch.inf
    assert not fp8.multiply(rows, weight)[3].isfinite().any()


def test_products_equal_those_of_the_rounded_matrices() -> None:
    rows, weight = matrices()
    rounded = [values.float() * scales for values, scales in map(fp8.quantize, (rows, weight))]
    exact = rounded[0] @ rounded[1].t()
    torch.testing.assert_close(fp8.multiply(rows, weight).float(), exact, rtol=2**-7, atol=1e-9)


def test_gradients_of_weights_are_products_in_bf16() -> None:
    rows, weight = (each.requires_grad_() for each in matrices())
    gradient = torch.randn(48, 32, generator=torch.Generator().manual_seed(6)).bfloat16()
    fp8._Fp8Linear.apply(rows, weight).backward(gradient)
    assert rows.grad is not None
    assert weight.grad is not None
    assert torch.equal(weight.grad, gradient.t() @ rows.detach())
    assert torch.equal(rows.grad, fp8.multiply(gradient, weight.detach().t()))
    exact = gradient.float() @ weight.detach().float()
    assert float((rows.grad.float() - exact).norm() / exact.norm()) < 0.04


def test_only_linear_layers_of_decoder_layers_compute_in_fp8() -> None:
    plan = tiny_plan(**FP8)
    engine = LocalEngine(plan, text_task(plan))
    changed = {name for name, part in engine._module.named_modules() if "forward" in vars(part)}
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    names += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert changed == {f"model.layers.{layer}.{name}" for layer in range(2) for name in names}


@pytest.fixture(scope="module")
def bf16_losses() -> list[float]:
    return run_trace(tiny_plan(**BF16), steps=60).losses


def farthest(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


@pytest.mark.full
def test_losses_stay_near_those_of_bf16(bf16_losses: list[float]) -> None:
    losses = run_trace(tiny_plan(**FP8), steps=60).losses
    print("distance", farthest(losses, bf16_losses), "losses", losses[0], losses[-1], bf16_losses[-1])
    assert losses[0] - losses[-1] > 1, "the run learns"
    assert losses != bf16_losses
    assert farthest(losses, bf16_losses) < BAND


@pytest.mark.full
def test_fp8_without_scaling_exceeds_the_tolerance(
    bf16_losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small gradients underflow in fp8 unless they are scaled: 0.029 nats."""

    def unscaled(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return matrix.to(fp8.FP8).contiguous(), torch.ones(len(matrix), 1)

    monkeypatch.setattr(fp8, "quantize", unscaled)
    losses = run_trace(tiny_plan(**FP8), steps=60).losses
    assert farthest(losses, bf16_losses) > BAND


@pytest.mark.full
def test_compiled_layers_compute_the_same() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = tiny_plan(compile__mode=CompileMode.layers, compile__backend=CompileBackend.aot_eager, **FP8)
    assert run_trace(compiled, steps=3).results == run_trace(tiny_plan(**FP8), steps=3).results
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.full
def test_zero2_agrees_with_the_local_engine(pool: RankPool) -> None:
    changes = {**FP8, "zero__stage": 2}
    found = pool.run(trace_on_rank, tiny_plan(ranks=2, **changes), ranks=2)[0]
    local = run_trace(tiny_plan(**FP8, train__global_batch=8))
    assert farthest(found.losses, local.losses) < 5e-3
