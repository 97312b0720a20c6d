"""The fused loss equals the plain one, and never has the logits of all tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.data.evaluation import IGNORE_INDEX
from toolkit.models import fused_loss
from toolkit.models.fused_loss import linear_cross_entropy
from toolkit.plan.activations import fused_loss_bytes

TOKENS, HIDDEN, VOCABULARY, CHUNK = 300, 32, 1000, 64
WEIGHT = 1 / 1234.5  # of the sum, which no 16-bit number equals
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def tensors(dtype: torch.dtype, tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> list[torch.Tensor]:
    """Hidden states and weight; the same values in every precision."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    weight = (torch.randn(vocabulary, HIDDEN, generator=generator) * 0.2).bfloat16()
    return [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]


def labels(masked: str = "some", tokens: int = TOKENS) -> torch.Tensor:
    """As frequent as the words of a text."""
    frequencies = 1 / torch.arange(1, VOCABULARY + 1)
    found = torch.multinomial(frequencies, tokens, True, generator=torch.Generator().manual_seed(6))
    found[
        {"none": slice(0), "some": slice(0, None, 3), "chunk": slice(CHUNK), "all": slice(None)}[masked]
    ] = IGNORE_INDEX
    return found


def plain(targets: torch.Tensor, weights: torch.Tensor | None = None) -> Loss:
    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(hidden, weight)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        losses = functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
        return (losses if weights is None else losses * weights).sum()

    return loss


def fused(targets: torch.Tensor, weights: torch.Tensor | None = None, **more: Any) -> Loss:
    return lambda hidden, weight: linear_cross_entropy(
        hidden, weight, targets, weights, **{"chunk": CHUNK, **more}
    )


def results(loss: Loss, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The loss, and the gradients of hidden states and weight, in fp64."""
    found = loss(*given)
    (found * WEIGHT).backward()
    return [found.detach().double(), *(tensor.grad.double() for tensor in given if tensor.grad is not None)]


def errors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """Relative errors in the norm of each tensor."""
    return [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("masked", ["none", "some", "chunk", "all"])
@pytest.mark.parametrize("weighted", [False, True])
def test_fused_loss_equals_the_plain_one_in_fp32(masked: str, weighted: bool) -> None:
    targets = labels(masked)
    weights = torch.rand(TOKENS, generator=torch.Generator().manual_seed(7)) * 2 if weighted else None
    found = results(fused(targets, weights), tensors(torch.float32))
    expected = results(plain(targets, weights), tensors(torch.float32))
    assert max(errors(found, expected)) < 1e-6
    assert (found[0] == 0) == (masked == "all")


def test_control_another_label_or_weight_is_found() -> None:
    targets = labels()
    expected = results(plain(targets), tensors(torch.float32))
    other = targets.clone()
    other[1] = (other[1] + 1) % VOCABULARY
    for wrong in (fused(other), fused(targets, torch.full((TOKENS,), 1.0001))):
        assert min(errors(results(wrong, tensors(torch.float32)), expected)) > 1e-5


@pytest.mark.parametrize("chunk", [1, 64, TOKENS - 1, TOKENS, 10**6])
def test_every_chunk_size_gives_the_same(chunk: int) -> None:
    targets = labels()
    found = results(fused(targets, chunk=chunk), tensors(torch.float32))
    assert max(errors(found, results(plain(targets), tensors(torch.float32)))) < 1e-6


def test_padded_rows_of_the_vocabulary_have_no_probability() -> None:
    targets, (hidden, weight) = labels(), tensors(torch.float32)
    padded = torch.cat([weight.detach(), torch.zeros(24, HIDDEN)]).requires_grad_()
    found = results(fused(targets, vocabulary=VOCABULARY), [hidden, padded])
    expected = results(plain(targets), tensors(torch.float32))
    assert found[2][VOCABULARY:].abs().max() == 0
    assert max(errors([*found[:2], found[2][:VOCABULARY]], expected)) < 1e-6
    control = results(fused(targets), [tensors(torch.float32)[0], padded.detach().requires_grad_()])
    assert errors(control[:1], expected[:1])[0] > 1e-4, "the control counts rows of padding"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_exact_as_the_plain_loss(dtype: torch.dtype) -> None:
    """Rounding errors, against fp64, are at most 1.5 times those of the plain loss."""
    targets = labels()
    exact = results(plain(targets), tensors(torch.float64))
    found = errors(results(fused(targets, chunk=32), tensors(dtype)), exact)
    reference = errors(results(plain(targets), tensors(dtype)), exact)
    assert all(mine < 1.5 * theirs for mine, theirs in zip(found, reference, strict=True))
    assert found[0] < 1e-4


@pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="torch < 2.13")
def test_torch_rounds_the_sum_and_the_gradient_in_bf16() -> None:
    """Why the loss is not torch's own function. If this fails, a later torch can replace ours."""
    targets = labels()
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=32)

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)

    exact = results(plain(targets), tensors(torch.float64))
    torchs = errors(results(loss, tensors(torch.bfloat16)), exact)
    ours = errors(results(fused(targets, chunk=32), tensors(torch.bfloat16)), exact)
    assert torchs[0] > 20 * ours[0]
    assert torchs[2] > 1.4 * ours[2]


def test_frozen_weights_and_evaluation_compute_no_gradients() -> None:
    targets = labels()
    expected = results(plain(targets), tensors(torch.float32))
    hidden, weight = tensors(torch.float32)
    found = results(fused(targets), [hidden, weight.requires_grad_(False)])
    assert max(errors(found, expected[:2])) < 1e-6
    with torch.no_grad(), PeakMemory() as peak:
        assert float(fused(targets)(hidden, weight)) == pytest.approx(float(expected[0]), rel=1e-6)
    assert peak.largest < TOKENS * VOCABULARY / 4


def test_second_backward_is_refused() -> None:
    loss = fused(labels())(*tensors(torch.float32))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"train\.loss_kernel=plain"):
        loss.backward()


def test_compiled_operations_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by a backend that needs no compiler of C++."""
    graphs: list[Any] = []

    def count(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(fused_loss._softmax, backend=count, fullgraph=True)
    monkeypatch.setattr(fused_loss, "_compiled", lambda backend: compiled)
    targets = labels()
    loss = torch.compiler.disable(fused(targets, backend="inductor"))
    found = results(loss, tensors(torch.float32))
    assert graphs, "nothing was compiled"
    assert max(errors(found, results(plain(targets), tensors(torch.float32)))) < 1e-6


class PeakMemory(TorchDispatchMode):
    """The largest number of bytes of storages that operations create, and of one tensor's elements.

    Args:
        inputs: tensors that do not count.
    """

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.bytes = self.largest = self._now = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        return found

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self.largest = max(self.largest, tensor.numel())
        if key not in self._known:
            self._known.add(key)
            self._now += size
            self.bytes = max(self.bytes, self._now)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_has_the_logits_of_all_tokens(dtype: torch.dtype) -> None:
    targets = labels()
    with PeakMemory() as peak:
        results(fused(targets), tensors(dtype))
    assert peak.largest < TOKENS * VOCABULARY / 4
    with PeakMemory() as control:
        results(plain(targets), tensors(dtype))
    assert control.largest == TOKENS * VOCABULARY
    assert control.bytes > 2 * peak.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [64, TOKENS])
def test_planned_bytes_are_the_measured_peak(dtype: torch.dtype, chunk: int) -> None:
    targets = labels()
    given = tensors(dtype)
    with PeakMemory(*given) as peak:
        fused(targets, chunk=chunk)(*given)
    planned = fused_loss_bytes(TOKENS, HIDDEN, VOCABULARY, dtype.itemsize, chunk)
    assert peak.bytes == pytest.approx(planned, rel=0.02)
