"""Keys of Megatron-core's ``torch_dist`` checkpoints, and the tensors of the families' tables that they
contain.

A key names a tensor of the whole model. By default the tensors of all layers are stacked
(``decoder.layers.mlp.linear_fc2.weight`` [L, H, F]), and those of all experts too ([L, E, ...]). "Singleton"
keys have the layer's and the expert's number in the name, and the halves of a gated ``linear_fc1`` in two
keys, ``_w`` and ``_v``. Optimizer state is ``optimizer.state.STATE.KEY``.

Sources, in megatron/core: ``transformer/transformer_block.py``, ``transformer/mlp.py``
(``apply_swiglu_sharded_factory``), ``transformer/moe/experts.py``, ``models/gpt/gpt_layer_specs.py``
(``sharded_state_dict_keys_map``), ``optimizer/optimizer.py`` and ``optimizer/distrib_optimizer.py`` (names of
states), ``dist_checkpointing/mapping.py`` (``ShardedObject.unique_key``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTUM, WEIGHT, Box
from toolkit.families.base import ModelShape
from toolkit.families.megatron import FUSED_NORMS, MegatronTensor

STATE_OF = {
    "param": MASTER,
    "fp32_param": MASTER,
    EXP_AVG: EXP_AVG,
    EXP_AVG_SQ: EXP_AVG_SQ,
    MOMENTUM: MOMENTUM,
}
# fp32 weights of the distributed optimizer, and of the other one: the same values under two names
MASTERS = ("param", "fp32_param")
EXTRA = "_extra_state"

_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)$")
_LAYER = re.compile(r"^decoder\.layers\.(?:(\d+)\.)?(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.experts\.(?:(\d+)\.)?(.+)$")
_HALF = re.compile(r"^(.+\.linear_fc1\.(?:weight|bias))_([wv])$")


# ---- reading


@dataclass(frozen=True, slots=True)
class MegatronKey:
    """A parsed key.

    Attributes:
        state: As ``shard.py`` names states.
        weight: Key of the model's own tensor; a different key if ``state`` is an optimizer state.
        source: This key without the suffix of a half, which is common to the two halves of a tensor.
        name: Name of Megatron-core's tensor, with ``{layer}`` and ``{expert}`` if it is stacked.
        stacked: Which of these the first dims of the tensor count.
        half: 0 for the gate's rows, 1 for the up projection's, None for all.
    """

    state: str
    weight: str
    source: str
    name: str
    stacked: tuple[str, ...]
    half: int | None

    def whole_shape(self, own: tuple[int, ...], shape: ModelShape) -> tuple[int, ...]:
        """Return the shape of the key's tensor, given the shape ``own`` of one member of the stack."""
        counts = {"layer": shape.num_hidden_layers, "expert": shape.num_local_experts}
        rows = own if self.half is None else (own[0] // 2, *own[1:])
        return (*(counts[kind] for kind in self.stacked), *rows)

    def members(self, box: Box) -> Iterator[tuple[str, tuple[int, ...], Box]]:
        """Yield each member of the stack that overlaps a box of the key's tensor.

        Yields the member's name, its index in the box's first dims, and the box within it.
        """
        lead = len(self.stacked)
        inner = Box(box.offset[lead:], box.shape[lead:])
        for position in product(*map(range, box.shape[:lead])):
            numbers = {
                kind: first + index
                for kind, first, index in zip(self.stacked, box.offset, position, strict=False)
            }
            yield self.name.format(**numbers), position, inner


def parse_key(key: str) -> MegatronKey | None:
    """Return the parsed key, or None for an optimizer state without a counterpart here. Does not check
    that the model has the tensor.
    """
    state, rest = WEIGHT, key
    if found := _STATE.match(key):
        if found[1] not in STATE_OF:
            return None
        state, rest = STATE_OF[found[1]], found[2]
    weight, half = rest, None
    if halved := _HALF.match(rest):
        rest, half = halved[1], "wv".index(halved[2])
    source = key if half is None else key[:-2]
    stacked: list[str] = []
    layered = _LAYER.match(rest)
    if layered is None:
        return MegatronKey(state, weight, source, rest, (), half)
    number, rest = layered.groups()
    if number is None:
        stacked.append("layer")
    for fused, norm in FUSED_NORMS.items():
        if rest.startswith(fused):
            rest = norm + rest.removeprefix(fused)
    if expert := _EXPERT.match(rest):
        if expert[1] is None:
            stacked.append("expert")
        rest = f"mlp.experts.local_experts.{'{expert}' if expert[1] is None else expert[1]}.{expert[2]}"
    return MegatronKey(
        state,
        weight,
        source,
        f"decoder.layers.{'{layer}' if number is None else number}.{rest}",
        tuple(stacked),
        half,
    )


# ---- writing


@dataclass(frozen=True, slots=True)
class KeySlot:
    """Position of a tensor in a key's tensor: ``place`` is its index in the first dims, whose sizes are
    ``counts``.
    """

    key: str
    index: tuple[int, ...]
    counts: tuple[int, ...]


def key_slots(tensor: MegatronTensor, shape: ModelShape) -> Sequence[KeySlot]:
    """Return the stacked keys under which Megatron-core's loaders request ``tensor``; all of them name the
    same bytes.

    Transformer Engine's layers do not fuse the norm before experts, but the local layer spec names it as if
    they did.
    """
    if tensor.layer is None:
        return (KeySlot(tensor.name, (), ()),)
    rest = tensor.name.removeprefix(f"decoder.layers.{tensor.layer}.")
    index: tuple[int, ...] = (tensor.layer,)
    counts: tuple[int, ...] = (shape.num_hidden_layers,)
    if tensor.expert is not None:
        rest = rest.replace(f"mlp.experts.local_experts.{tensor.expert}.", "mlp.experts.experts.")
        index, counts = (*index, tensor.expert), (*counts, shape.num_local_experts)
    names = [rest]
    for fused, norm in FUSED_NORMS.items():
        if rest.startswith(norm):
            kept = [rest] if shape.num_local_experts and norm == "pre_mlp_layernorm." else []
            names = [fused + rest.removeprefix(norm), *kept]
    return tuple(KeySlot(f"decoder.layers.{name}", index, counts) for name in names)


def object_keys(tensors: Sequence[MegatronTensor], shape: ModelShape) -> list[str]:
    """Return keys of objects that loaders request and that are empty here.

    These are the extra states of linear layers and of Transformer Engine's attention and norms (its state
    under fp8).
    """
    found: dict[str, None] = {"decoder.final_layernorm._extra_state/shard_0_1": None}
    for tensor in tensors:
        if tensor.layer is None:
            continue
        for slot in key_slots(tensor, shape):
            module = re.sub(r"\.(?:layer_norm_)?(?:weight|bias)$", "", slot.key)
            modules = [module] if "linear_" in module else []
            if module.endswith("self_attention.linear_qkv"):
                modules.append("decoder.layers.self_attention.core_attention")
            if module.endswith("layernorm"):
                modules.append(module)
            for name in modules:
                index, counts = (".".join(map(str, numbers)) for numbers in (slot.index, slot.counts))
                found[f"{name}.{EXTRA}/shard_{index}_{counts}"] = None
    return list(found)
