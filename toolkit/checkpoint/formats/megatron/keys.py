"""Keys of Megatron-core's ``torch_dist`` checkpoints, and the tensors of the families' tables that they hold.

A key names a tensor of the whole model. By default those of all layers are stacked (``decoder.layers.mlp.linear_fc2.weight``
[L, H, F]) and those of all experts too ([L, E, ...]); "singleton" keys have the layer's and the expert's number in the name, and the
halves of a gated ``linear_fc1`` under two names, ``_w`` and ``_v``. State of the optimizer is ``optimizer.state.STATE.KEY``.

Sources, in megatron/core: ``transformer/transformer_block.py``, ``transformer/mlp.py`` (``apply_swiglu_sharded_factory``),
``transformer/moe/experts.py``, ``models/gpt/gpt_layer_specs.py`` (``sharded_state_dict_keys_map``), ``optimizer/optimizer.py`` and
``optimizer/distrib_optimizer.py`` (names of states), ``dist_checkpointing/mapping.py`` (``ShardedObject.unique_key``).
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
# The fp32 weights of the distributed optimizer, and of the one without: the same values under two names.
MASTERS = ("param", "fp32_param")
EXTRA = "_extra_state"

_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)$")
_LAYER = re.compile(r"^decoder\.layers\.(?:(\d+)\.)?(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.experts\.(?:(\d+)\.)?(.+)$")
_HALF = re.compile(r"^(.+\.linear_fc1\.(?:weight|bias))_([wv])$")


# ---- reading


@dataclass(frozen=True, slots=True)
class MegatronKey:
    """What a key means.

    Attributes:
        state: as ``shard.py`` names them.
        weight: the key of the model's own tensor; with ``state`` of the optimizer another than this one.
        source: this key without the name of a half: what two keys share that hold the two halves of one tensor.
        name: of Megatron-core's tensor, with ``{layer}`` and ``{expert}`` where it is one of a stack.
        stacked: which of these the key's first dims count.
        half: 0 the gate's rows only, 1 the up projection's; None: all.
    """

    state: str
    weight: str
    source: str
    name: str
    stacked: tuple[str, ...]
    half: int | None

    def whole_shape(self, own: tuple[int, ...], shape: ModelShape) -> tuple[int, ...]:
        """Of the key's tensor, where one of the stack is of ``own``."""
        counts = {"layer": shape.num_hidden_layers, "expert": shape.num_local_experts}
        rows = own if self.half is None else (own[0] // 2, *own[1:])
        return (*(counts[kind] for kind in self.stacked), *rows)

    def members(self, box: Box) -> Iterator[tuple[str, tuple[int, ...], Box]]:
        """Each of the stack that a box of the key's tensor has a part of: its name, its place among the box's first dims, and the box
        in it."""
        lead = len(self.stacked)
        inner = Box(box.offset[lead:], box.shape[lead:])
        for place in product(*map(range, box.shape[:lead])):
            numbers = {
                kind: first + index
                for kind, first, index in zip(self.stacked, box.offset, place, strict=False)
            }
            yield self.name.format(**numbers), place, inner


def parse_key(key: str) -> MegatronKey | None:
    """None: a key of the optimizer's of a state that has no meaning here. A name that no model has is not found out here."""
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
    """Where a tensor stands in the tensor of a key: ``place`` among the first dims, which are ``counts`` long."""

    key: str
    place: tuple[int, ...]
    counts: tuple[int, ...]


def key_slots(tensor: MegatronTensor, shape: ModelShape) -> Sequence[KeySlot]:
    """The keys, stacked, under which loaders of Megatron-core ask for ``tensor``: the same bytes serve all of them.

    Transformer Engine's layers do not fuse the norm before experts, and the local layer spec names it as if they did.
    """
    if tensor.layer is None:
        return (KeySlot(tensor.name, (), ()),)
    rest = tensor.name.removeprefix(f"decoder.layers.{tensor.layer}.")
    place: tuple[int, ...] = (tensor.layer,)
    counts: tuple[int, ...] = (shape.num_hidden_layers,)
    if tensor.expert is not None:
        rest = rest.replace(f"mlp.experts.local_experts.{tensor.expert}.", "mlp.experts.experts.")
        place, counts = (*place, tensor.expert), (*counts, shape.num_local_experts)
    names = [rest]
    for fused, norm in FUSED_NORMS.items():
        if rest.startswith(norm):
            kept = [rest] if shape.num_local_experts and norm == "pre_mlp_layernorm." else []
            names = [fused + rest.removeprefix(norm), *kept]
    return tuple(KeySlot(f"decoder.layers.{name}", place, counts) for name in names)


def object_keys(tensors: Sequence[MegatronTensor], shape: ModelShape) -> list[str]:
    """Keys of objects that loaders ask for, and which hold nothing here: of linear layers, of Transformer Engine's attention and norms
    (its state under fp8)."""
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
                place, counts = (".".join(map(str, numbers)) for numbers in (slot.place, slot.counts))
                found[f"{name}.{EXTRA}/shard_{place}_{counts}"] = None
    return list(found)
