"""Record the FLOPs of operators, and the memory of the tensors that they create."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from toolkit.plan.trace import OperatorWork

aten = torch.ops.aten


class OperatorRecorder(TorchDispatchMode):
    """Records the operators that run inside the context, on real or fake tensors.

    Args:
        known: tensors whose storages are not recorded, such as parameters. They must outlive the recorder.

    Attributes:
        operators: how many ran.
        bytes: of the recorded storages that exist now.
        peak_bytes: the most of them that existed at any time.
        flops: by name, such as ``aten::mm``. Attention counts all pairs of queries and keys; in the backward
            pass it counts the gradients, not the scores that a fused kernel computes again.
        work: by name, what the calls of an operator compute and move, without those that only view tensors.
        in_backward: set it when the backward pass begins.
        recomputed_flops: those of activations that the backward pass computes again. Gradients of gradients
            are not recorded, so only recomputation builds a graph there.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.operators = self.bytes = self.peak_bytes = 0
        self.flops: Counter[str] = Counter()
        self.work: dict[str, OperatorWork] = {}
        self.in_backward, self.recomputed_flops = False, 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _run(func, args, kwargs)
        if func.namespace == "prim":  # a question about a tensor, such as its device
            return result
        self.operators += 1
        name = func._schema.name
        flops = count_flops(func, args, kwargs, result)
        if (moved := moved_bytes(func, args, kwargs, result)) is not None:
            one = OperatorWork(flops * executed_share(func, args), moved, 1)
            self.work[name] = self.work.get(name, NO_WORK).plus(one, 1)
        if flops:
            self.flops[name] += flops
            if self.in_backward and torch.is_grad_enabled():
                self.recomputed_flops += flops
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.record(tensor)
        return result

    def record(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` from now on until it is freed, unless it is known."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._live:
            return

        def free(_: object) -> None:
            del self._live[key]
            self.bytes -= size

        self._live[key] = weakref.ref(storage, free)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator. The fake version of grouped products supports bf16 only, other than real ones."""
    if func is aten._grouped_mm.default and isinstance(args[0], FakeTensor):
        product = func(*(operand.bfloat16() for operand in args[:2]), *args[2:], **kwargs)
        return product.to(args[0].dtype)
    return func(*args, **kwargs)


def count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of one call of an operator: torch's own count, and those that torch 2.13 does not
    count.
    """
    operator = func.overloadpacket
    if operator in ATTENTION:
        first, factor = ATTENTION[operator]
        query, key, value = args[first : first + 3]
        batch, heads, queries, width = query.shape
        pairs: int = batch * heads * queries * key.shape[2]
        return factor * 2 * pairs * (width + int(value.shape[3]))
    if (products := GROUPED_PRODUCTS.get(func._schema.name)) is not None:
        left, right = args[:2]  # [tokens, in] x [experts, in, out], or [in, tokens] x [tokens, out]
        found: int = products * 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]
        return found
    counter: Callable[..., int] | None = flop_registry.get(operator)
    return 0 if counter is None else counter(*args, **kwargs, out_val=result)


def executed_share(func: Any, args: Any) -> float:
    """Return the FLOPs that a kernel computes over those of :func:`count_flops`.

    A causal kernel of attention skips half of the pairs; its backward pass computes the scores again, five
    products instead of four (Dao, 2307.08691, section 3.1).
    """
    if (place := IS_CAUSAL.get(func.overloadpacket)) is None:
        return 1.0
    position, products = place
    return products * (0.5 if len(args) > position and args[position] else 1.0)


def moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Return the bytes that one call reads and writes, each tensor once; None if it only views or allocates
    tensors.

    An operator that gathers rows of a tensor reads as much as it writes.
    """
    outputs = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
    inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
    given = {tensor.untyped_storage()._cdata for tensor in inputs}
    views = all(tensor.untyped_storage()._cdata in given for tensor in outputs)
    if func.overloadpacket in ALLOCATORS or (views and not func._schema.is_mutable):
        return None
    written = sum(map(_bytes, outputs))
    return written + (written if func.overloadpacket in GATHERS else sum(map(_bytes, inputs)))


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements; an expanded tensor has fewer than its shape suggests."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


NO_WORK = OperatorWork(0, 0, 0)
ALLOCATORS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
GATHERS = {aten.embedding, aten.gather, aten.index, aten.index_select}
# Position of the argument is_causal, and products that are computed over those that are counted.
IS_CAUSAL: dict[Any, tuple[int, float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (4, 1.0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (7, 5 / 4),
}
# Position of the queries among the arguments, and how many times the FLOPs of the forward pass it takes.
ATTENTION: dict[Any, tuple[int, int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (0, 1),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 2),
}
# Products of experts, also those of transformers for other machines, and how many products each is.
GROUPED_PRODUCTS = {
    "aten::_grouped_mm": 1,
    "transformers::grouped_mm_fallback": 1,
    "transformers::grouped_mm_fallback_backward": 2,
}
