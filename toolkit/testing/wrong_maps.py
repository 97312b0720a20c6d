"""Deliberately wrong tables of Megatron-core's tensors: controls that a parity test must detect.

Each still covers every element exactly once, so only the numbers of a run can show the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from toolkit.families import FAMILIES
from toolkit.families.base import ModelShape
from toolkit.families.megatron import MegatronTensor, TensorCut, intersect_parts

Change = Callable[[tuple[MegatronTensor, ...]], tuple[MegatronTensor, ...]]


def rotate_groups(tensors: tuple[MegatronTensor, ...]) -> tuple[MegatronTensor, ...]:
    """Move each query group to the position of the next one; linear_proj does not change."""

    def rotated(tensor: MegatronTensor) -> MegatronTensor:
        group = sum(part.shape[0] for part in tensor.parts[:3])  # queries, key, value
        assert group < tensor.shape[0], f"{tensor.name} has one query group: there is nothing to rotate"
        return replace(
            tensor,
            parts=tuple(
                replace(part, at=((part.at[0] + group) % tensor.shape[0], *part.at[1:]))
                for part in tensor.parts
            ),
        )

    return tuple(rotated(tensor) if ".linear_qkv." in tensor.name else tensor for tensor in tensors)


def swap_gate_and_up(tensors: tuple[MegatronTensor, ...]) -> tuple[MegatronTensor, ...]:
    """``[up; gate]`` in every gated linear_fc1."""

    def swapped(tensor: MegatronTensor) -> MegatronTensor:
        half = (tensor.shape[0] // 2, *tensor.shape[1:])
        below = intersect_parts(tensor.parts, (half[0], 0), half)
        above = tuple(
            replace(part, at=(part.at[0] + half[0], *part.at[1:]))
            for part in intersect_parts(tensor.parts, (0, 0), half)
        )
        return replace(tensor, parts=(*below, *above))

    return tuple(swapped(tensor) if tensor.cut is TensorCut.gated else tensor for tensor in tensors)


@contextmanager
def wrong_map(family: str, change: Change) -> Iterator[None]:
    """Apply ``change`` to the tables of ``family`` in this process, inside the context."""
    owner = FAMILIES[family]
    right = owner.megatron_tensors

    def wrong(shape: ModelShape) -> tuple[MegatronTensor, ...]:
        return change(right(shape))

    owner.megatron_tensors = wrong  # type: ignore[method-assign]  # on the object, before its class
    try:
        yield
    finally:
        del owner.megatron_tensors
