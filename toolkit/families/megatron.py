"""Maps from canonical tensors to Megatron-core's, as data that is used in both directions. No torch.

A family lists the tensors of a Megatron-core model (0.16, local layer spec, all axes 1); each states the
boxes of canonical tensors that it consists of. ``local_tensor`` computes what one tensor rank stores of it,
``intersect_parts`` what lies in any box of it (for example a range of a flat buffer), and ``TensorPart.view``
takes a part out of real memory. The inverse needs no second map: every element of a canonical tensor lies in
exactly one part, and the parts fill their tensor exactly once.

Sources in megatron/core: ``transformer/attention.py`` (linear_qkv stores ``[q..q k v]`` by query groups),
``transformer/mlp.py`` (a gated linear_fc1 is ``[gate; up]`` on each rank), ``tensor_parallel/layers.py`` (the
sharded dim), ``models/gpt/gpt_layer_specs.py`` (names of the local spec).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
# Transformer Engine fuses a norm into the next linear layer; checkpoints of both specs use this name.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


class TensorCut(StrEnum):
    """The way in which tensor parallelism shards a tensor."""

    whole = "whole"  # replicated
    rows = "rows"
    columns = "columns"
    gated = "gated"  # rows of the gate, and below them the same rows of the up projection
    vocabulary = "vocabulary"  # rows of the padded vocabulary; padding belongs to no part


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The box ``offset, extent`` of a canonical tensor, which lies at ``at`` in a Megatron-core tensor.

    ``at`` has the dims of the Megatron-core tensor. Leading dims that only the canonical tensor has (fused
    experts) are 1 in ``extent`` and are dropped. If ``transposed``, the two dims are swapped.
    """

    canonical: str
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    at: tuple[int, ...]
    transposed: bool = False

    def __post_init__(self) -> None:
        assert len(self.offset) == len(self.extent) >= len(self.at), (
            f"{self.canonical}: box {self.offset} {self.extent} at {self.at}"
        )
        assert set(self.extent[: self.dropped]) <= {1}, f"{self.canonical}: dims are dropped of {self.extent}"
        assert not self.transposed or len(self.at) == 2, f"{self.canonical}: only matrices are transposed"

    @property
    def dropped(self) -> int:
        """The number of leading dims that only the canonical tensor has."""
        return len(self.extent) - len(self.at)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box in the Megatron-core tensor."""
        kept = self.extent[self.dropped :]
        return kept[::-1] if self.transposed else kept

    def view(self, data: Any) -> Any:
        """Return this part of ``data``, the whole tensor (torch or numpy), as a view of shape ``extent``."""
        found = data[tuple(slice(a, a + n) for a, n in zip(self.at, self.shape, strict=True))]
        return (found.T if self.transposed else found)[(None,) * self.dropped]


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """One parameter of a Megatron-core model with all axes 1; names have global layer and expert numbers.

    Attributes:
        shape: whole, with an unpadded vocabulary.
        parts: boxes that fill it exactly once.
        layer, expert: global numbers; None outside blocks or experts.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    cut: TensorCut
    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """The local tensor of one tensor rank; ``at`` of ``parts`` counts from its origin."""

    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]


def local_tensor(tensor: MegatronTensor, rank: int, size: int, rows: int | None = None) -> LocalTensor:
    """Return the parts of ``tensor`` that tensor rank ``rank`` of ``size`` stores.

    Args:
        rank, size: on the axis that shards it: for experts the expert tensor axis.
        rows: rows of the padded vocabulary over all ranks; None without padding. For ``TensorCut.vocabulary``
            only.
    """
    assert 0 <= rank < size, f"rank {rank} of {size}"
    assert rows is None or (tensor.cut is TensorCut.vocabulary and rows >= tensor.shape[0]), (
        f"{tensor.name}: padded to {rows} rows"
    )
    boxes = local_boxes(tensor, rank, size, tensor.shape[0] if rows is None else rows)
    parts: list[TensorPart] = []
    height = 0
    for offset, shape in boxes:
        parts += (
            replace(part, at=(part.at[0] + height, *part.at[1:]))
            for part in intersect_parts(tensor.parts, offset, shape)
        )
        height += shape[0]
    return LocalTensor((height, *boxes[0][1][1:]), tuple(parts))


def local_boxes(
    tensor: MegatronTensor, rank: int, size: int, height: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the boxes (offset, shape) of ``tensor`` that a rank stores, stacked by rows.

    Args:
        height: rows of the whole tensor with padding.
    """
    rest = tensor.shape[1:]
    if tensor.cut is TensorCut.whole:
        return [((0,) * len(tensor.shape), tensor.shape)]
    if tensor.cut is TensorCut.columns:
        (width,) = rest
        return [((0, rank * (width // size)), (height, _divide_evenly(tensor, width, size)))]
    halves = 2 if tensor.cut is TensorCut.gated else 1
    share = _divide_evenly(tensor, height, halves * size)
    return [(((half * size + rank) * share, *(0 for _ in rest)), (share, *rest)) for half in range(halves)]


def _divide_evenly(tensor: MegatronTensor, length: int, pieces: int) -> int:
    assert length % pieces == 0, f"{tensor.name} {tensor.shape}: {length} {tensor.cut} in {pieces} pieces"
    return length // pieces


def intersect_parts(
    parts: Iterable[TensorPart], offset: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[TensorPart, ...]:
    """Return the parts within the box ``offset, shape``; ``at`` of the result counts from its origin."""
    found = []
    for part in parts:
        low = tuple(max(a, o) for a, o in zip(part.at, offset, strict=True))
        high = tuple(min(a + n, o + m) for a, n, o, m in zip(part.at, part.shape, offset, shape, strict=True))
        if any(b <= a for a, b in zip(low, high, strict=True)):
            continue
        skipped = tuple(a - b for a, b in zip(low, part.at, strict=True))
        kept = tuple(b - a for a, b in zip(low, high, strict=True))
        if part.transposed:
            skipped, kept = skipped[::-1], kept[::-1]
        lead = part.dropped
        found.append(
            replace(
                part,
                at=tuple(a - o for a, o in zip(low, offset, strict=True)),
                extent=part.extent[:lead] + kept,
                offset=part.offset[:lead]
                + tuple(a + s for a, s in zip(part.offset[lead:], skipped, strict=True)),
            )
        )
    return tuple(found)


def tensors_by_name(tensors: Iterable[MegatronTensor]) -> Mapping[str, MegatronTensor]:
    """Return the tensors of a model by name.

    With tied embeddings, a last pipeline stage has a copy of the embedding named ``output_layer.weight``;
    that name then maps to the embedding's entry.
    """
    found = {tensor.name: tensor for tensor in tensors}
    found.setdefault(OUTPUT, found[EMBEDDING])
    return found
