"""Hash what a forward pass computes, module by module, and leave the run's state as it is.

Hashes of two passes of the same micro-batch are equal if, and almost certainly only if, the output of every
module is equal to the bit. A loss alone hides most errors: one wrong output in thousands is rounded away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from toolkit.engine import seeding
from toolkit.engine.hashing import hash_tensors

FACTOR = 6364136223846793005  # odd, so that no bit of an earlier call of a module is lost


class ForwardHashes:
    """Collects the hashes of one forward pass; they stay on the device until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hashes: dict[str, torch.Tensor] = {}

    def add(self, name: str, output: object) -> None:
        """Add the floating-point tensors of an output to the hash of ``name``."""
        for tensor in _tensors(output):
            new = hash_tensors([tensor], tensor.device).to(self._device)
            earlier = self._hashes.get(name)
            self._hashes[name] = new if earlier is None else earlier * FACTOR + new

    def read(self) -> dict[str, int]:
        """Return 64-bit hashes by name, in the order of the first calls. Waits for the device."""
        values = torch.cat(list(self._hashes.values())).tolist()
        return dict(zip(self._hashes, values, strict=True))


@contextmanager
def hash_forward(chunks: Sequence[nn.Module], device: torch.device) -> Iterator[ForwardHashes]:
    """Hash the outputs of modules that are called in this context, which is for evaluation.

    Gradients and dropout are off. Random state, buffers and training modes are restored at the end.

    Args:
        chunks: the model, or the parts of it that this rank has.
    """
    hashes = ForwardHashes(device)
    modules = [module for chunk in chunks for module in chunk.modules()]
    modes = [(module, module.training) for module in modules]
    buffers = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
    values = [None if buffer is None else buffer.clone() for _, _, buffer in buffers]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(seeding.preserve_rng_state(device))
        for number, chunk in enumerate(chunks):
            prefix = f"chunk {number}: " if len(chunks) > 1 else ""
            for name, module in _hashed_modules(chunk, "", set()):
                stack.enter_context(
                    module.register_forward_hook(partial(_hash_output, hashes, prefix + name))
                )
            chunk.eval()
        try:
            yield hashes
        finally:
            for module, training in modes:
                module.training = training
            for (module, name, buffer), value in zip(buffers, values, strict=True):
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                module._buffers[name] = buffer  # forward may have assigned another tensor


def _hash_output(hashes: ForwardHashes, name: str, module: nn.Module, inputs: object, output: object) -> None:
    hashes.add(name, output)


def _hashed_modules(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules without children, each once. Of a compiled module only the output, because a hook
    inside its graph would become part of it.
    """
    if module in seen or module._compiled_call_impl is not None:
        return
    seen.add(module)
    children = list(module.named_children())
    if not children or hasattr(module.forward, "_torchdynamo_orig_callable"):
        yield name or "model", module
        return
    for part, child in children:
        # "module" is the name that wrappers give to what they wrap.
        inner = name if part == "module" else f"{name}.{part}" if name else part
        yield from _hashed_modules(child, inner, seen)


def _tensors(output: object) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
