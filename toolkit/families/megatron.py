"""Where the elements of canonical tensors lie in Megatron-core's, as data that is read in both directions. No torch.

A family lists the tensors of a Megatron-core model (0.16, local layer spec, all axes 1); each says which boxes of canonical
tensors it is made of. ``local_tensor`` says what one tensor rank holds of it, ``intersect_parts`` what lies in any box of it (a range of a
flat buffer, for instance), and ``Part.view`` takes a part out of real memory. So the way back needs no second map: every
element of a canonical tensor lies in exactly one part, and the parts fill their tensor exactly once.

Sources, in megatron/core: ``transformer/attention.py`` (linear_qkv holds, group after group, ``[q..q k v]``),
``transformer/mlp.py`` (a gated linear_fc1 is ``[gate; up]``, on each rank), ``tensor_parallel/layers.py`` (which dim is cut),
``models/gpt/gpt_layer_specs.py`` (the names of the local spec).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
# Transformer Engine keeps a norm inside the linear layer that follows it, and checkpoints of either spec name it so.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


class TensorCut(StrEnum):
    """How the tensor axis cuts a tensor."""

    whole = "whole"  # not at all: each rank has all of it
    rows = "rows"
    columns = "columns"
    gated = "gated"  # rows of the gate, and the same rows of the up projection below them
    vocabulary = "vocabulary"  # rows of the padded vocabulary; padded rows belong to no part


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The box ``offset, extent`` of a canonical tensor lies at ``at`` in a Megatron-core tensor.

    ``at`` has the dims of the Megatron-core tensor. Where the canonical tensor has more (experts fused in one tensor), the dims
    before are 1 in ``extent`` and are dropped. ``transposed``: then the two dims change places.
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
        """How many dims the canonical tensor has before those of the Megatron-core tensor."""
        return len(self.extent) - len(self.at)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box in the Megatron-core tensor."""
        kept = self.extent[self.dropped :]
        return kept[::-1] if self.transposed else kept

    def view(self, data: Any) -> Any:
        """This part of ``data``, which is the tensor that ``at`` counts in (torch's or numpy's): a view of shape ``extent``."""
        found = data[tuple(slice(a, a + n) for a, n in zip(self.at, self.shape, strict=True))]
        return (found.T if self.transposed else found)[(None,) * self.dropped]


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """One parameter of a Megatron-core model with all axes 1: layers and experts have their global numbers in ``name``.

    Attributes:
        shape: whole; the vocabulary is not padded.
        parts: boxes that fill it exactly once.
        layer, expert: its global numbers; None outside blocks, and where it is not an expert's.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    cut: TensorCut
    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """What one tensor rank holds; ``at`` of ``parts`` counts from its own corner."""

    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]


def local_tensor(tensor: MegatronTensor, rank: int, size: int, rows: int | None = None) -> LocalTensor:
    """What tensor rank ``rank`` of ``size`` holds of ``tensor``.

    Args:
        rank, size: on the axis that cuts it: the expert tensor axis where ``tensor.expert`` is a number.
        rows: of the padded vocabulary, all ranks together; None where it is not padded. For ``Cut.vocabulary`` only.
    """
    assert 0 <= rank < size, f"rank {rank} of {size}"
    assert rows is None or (tensor.cut is TensorCut.vocabulary and rows >= tensor.shape[0]), (
        f"{tensor.name}: padded to {rows} rows"
    )
    boxes = local_boxes(tensor, rank, size, tensor.shape[0] if rows is None else rows)
    parts: list[TensorPart] = []
    height = 0
    for offset, shape in boxes:  # one below the other
        parts += (
            replace(part, at=(part.at[0] + height, *part.at[1:]))
            for part in intersect_parts(tensor.parts, offset, shape)
        )
        height += shape[0]
    return LocalTensor((height, *boxes[0][1][1:]), tuple(parts))


def local_boxes(
    tensor: MegatronTensor, rank: int, size: int, height: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes (offset, shape) of ``tensor`` that a rank holds one below the other; ``height`` counts its rows with padding."""
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
    """What of ``parts`` lies in the box ``offset, shape`` of their tensor. ``at`` of what is returned counts from the box's corner."""
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
    """The table of a model. With tied embeddings a last pipeline stage of its own has a copy of the embedding as its
    ``output_layer.weight``: that name leads to the embedding's entry then."""
    found = {tensor.name: tensor for tensor in tensors}
    found.setdefault(OUTPUT, found[EMBEDDING])
    return found
