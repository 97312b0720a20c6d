"""Store activations on the host until the backward pass needs them: ``offload.activations=cpu``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class StoreOnHost(saved_tensors_hooks):
    """Under this context autograd stores activations in host memory, pinned if they come from a GPU.

    ``torch.autograd.graph.save_on_cpu`` does the same on the stream that computes. Here copies run on a
    stream of their own, so they overlap with computing: the copy to the host begins when the tensor is
    complete, and the copy back when the backward pass enters the block that was stored next. The device has
    at most two of these tensors in the backward pass.

    Parameters, and tensors that need no gradient (masks, rotary embeddings: blocks share them), stay on the
    device.
    """

    def __init__(self) -> None:
        super().__init__(_pack, _unpack)


def saved_on_host(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` under :class:`StoreOnHost`."""

    @wraps(forward)
    def run(*arguments: Any, **settings: Any) -> Any:
        with StoreOnHost():
            return forward(*arguments, **settings)

    return run


def store_inputs_on_host(block: nn.Module) -> None:
    """Run the ``forward`` of a recomputed block under :class:`StoreOnHost`, which sees its inputs.

    Hooks of the block do it, so that a compiled ``forward`` stays one graph. Recomputation runs none of them.
    """
    contexts: list[StoreOnHost] = []

    def enter(*_: object) -> None:
        contexts.append(StoreOnHost())
        contexts[-1].__enter__()

    def leave(*_: object) -> None:
        contexts.pop().__exit__()

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave, always_call=True)


class _Stored:
    """A tensor in host memory."""

    def __init__(self, tensor: torch.Tensor, previous: _Stored | None) -> None:
        self.device = tensor.device
        # The tensor that was stored before this one, which the backward pass needs next. The graph owns it.
        self._previous = None if previous is None else ref(previous)
        self._fetched: torch.Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor.detach().clone()
            return
        stream = _copy_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is reused only after the copy

    def take(self) -> torch.Tensor:
        """Return the tensor on its device. Also begin to copy back the one stored before it."""
        tensor = self._fetched if self._fetched is not None else self._fetch()
        self._fetched = None
        if self._ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._ready)
            tensor.record_stream(current)
        previous = None if self._previous is None else self._previous()
        if previous is not None and previous._fetched is None:
            previous._fetched = previous._fetch()
        return tensor

    def _fetch(self) -> torch.Tensor:
        if self.device.type != "cuda":
            return self._host
        stream = _copy_stream(self.device)
        with torch.cuda.stream(stream):
            tensor = self._host.to(self.device, non_blocking=True)
            self._ready = stream.record_event()
        return tensor


_newest: ReferenceType[_Stored] | None = None


def _pack(tensor: torch.Tensor) -> torch.Tensor | _Stored:
    global _newest
    if isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
        return tensor
    stored = _Stored(tensor, None if _newest is None else _newest())
    _newest = ref(stored)
    return stored


def _unpack(stored: torch.Tensor | _Stored) -> torch.Tensor:
    return stored if isinstance(stored, torch.Tensor) else stored.take()


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
