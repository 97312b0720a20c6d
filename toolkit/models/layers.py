"""The layers of a model: the members of its lists of modules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def find_layers(module: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters in the outermost ``nn.ModuleList``s of ``module``, in order.

    These are the decoder layers of a language model. A pipeline stage has modules without parameters in place
    of other stages' layers.
    """
    return [
        layer for part in _outermost_lists(module) for layer in part if any(True for _ in layer.parameters())
    ]


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)
