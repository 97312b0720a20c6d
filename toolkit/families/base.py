"""The interface of a model family. Canonical names are ``state_dict`` names of the pinned transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from toolkit.config.model import ModelConfig
from toolkit.families.megatron import MegatronTensor
from toolkit.optimizers.base import uses_weight_decay


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model configuration with every size resolved, in elements. Fields are those of ``ModelConfig``."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    router_aux_loss_coef: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter as stored in memory. ``layer`` is the number of its block, None outside blocks."""

    name: str
    shape: tuple[int, ...]
    layer: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        return uses_weight_decay(len(self.shape))


@dataclass(frozen=True, slots=True)
class HubTensor:
    """A tensor of a published checkpoint: a box of a canonical tensor, reshaped to ``shape``.

    ``aliases`` are other names of the tensor in published checkpoints; writing uses ``name``.
    """

    name: str
    shape: tuple[int, ...]
    canonical: str
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    aliases: tuple[str, ...] = ()


class NormKind(StrEnum):
    layer = "LayerNorm"  # with mean and bias
    rms = "RMSNorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """Features of a family's blocks, so that plans and engines need not depend on a family's name.

    Attributes:
        norm: the kind of all norms.
        rotary: rotary position embeddings; otherwise learned positions are added to the token embedding.
        gated: the feed-forward is ``down(silu(gate(x)) * up(x))``; otherwise ``down(gelu(up(x)))`` with tanh
            gelu.
        biases: every linear layer of a block has a bias.
        qkv_bias: the query, key and value projections have a bias.
        qk_norm: queries and keys are normalized per head before the rotation.
        experts: the feed-forward consists of a router and experts.
        linear_layers: projections are torch's linear layers, which DeepSpeed replaces under ZeRO 3.
        hidden_dropout: ``model.dropout`` also applies to the embedding's output and to what is added to the
            residual stream.
        unsupported_optimizers: optimizers that cannot train this family with DeepSpeed, and why.
    """

    norm: NormKind = NormKind.rms
    rotary: bool = True
    gated: bool = True
    biases: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    linear_layers: bool = True
    hidden_dropout: bool = False
    unsupported_optimizers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFlops:
    """FLOPs of the forward pass per token, summed over all blocks; a multiply-add counts as two.

    Only matrix multiplications count. Embedding lookups, norms, biases, activations, rotations, softmax and
    the loss are left out.

    Attributes:
        projections: of queries, keys, values and the attention output.
        scores: queries times keys, and the result times values, over the whole sequence although attention is
            causal.
        up: the feed-forward except its last matrix, including the router. With experts, those that one token
            visits.
        down: the last matrix of the feed-forward.
        head: the logits.
    """

    projections: float
    scores: float
    up: float
    down: float
    head: float

    @property
    def blocks(self) -> float:
        return self.projections + self.scores + self.up + self.down

    @property
    def total(self) -> float:
        return self.blocks + self.head


class Family(Protocol):
    """The interface through which the rest of the toolkit uses an architecture.

    Attributes:
        namespace: the version of its canonical names, recorded in manifests: ``llama/1``.
        published: sizes of well-known models, as their authors published them.
        tiny: sizes of the family's model in ``toolkit/testing/tiny.py`` in addition to those of all families.
    """

    name: str
    namespace: str
    traits: FamilyTraits
    published: ClassVar[Mapping[str, ModelConfig]]
    tiny: ClassVar[Mapping[str, Any]]

    def resolve_shape(self, model: ModelConfig) -> ModelShape:
        """Fill in optional sizes. Raises PlanError that lists every missing or impossible size."""

    def parameters(self, shape: ModelShape) -> tuple[ParameterSpec, ...]:
        """Return every stored parameter in ``state_dict`` order, without tied aliases."""

    def tied_weights(self, shape: ModelShape) -> Mapping[str, str]:
        """Tied aliases: alias -> the canonical name under which the weight is stored."""

    def hub_tensors(self, shape: ModelShape) -> tuple[HubTensor, ...]:
        """Return the tensors of the family's checkpoints on the hub."""

    def megatron_tensors(self, shape: ModelShape) -> tuple[MegatronTensor, ...]:
        """Return every parameter of the Megatron-core model, with the boxes of canonical tensors in it."""

    def megatron_config(self, shape: ModelShape) -> dict[str, Any]:
        """Return fields of Megatron-core's ``TransformerConfig`` that describe the architecture.

        ``activation_func`` is a name: ``silu`` or ``gelu_tanh``. ``position_embedding_type`` and
        ``rotary_base`` are arguments of ``GPTModel``.
        """

    def forward_flops(self, shape: ModelShape, sequence_length: int) -> ForwardFlops:
        """Implementations state formula, source and convention in their docstrings."""

    def hugging_face_config(self, shape: ModelShape) -> dict[str, Any]:
        """Return the keys of the family's ``config.json`` (with ``model_type`` and ``architectures``)."""

    def from_hugging_face_config(self, config: Mapping[str, Any]) -> ModelConfig:
        """Parse a ``config.json``. Raises InputError for a variant that this family does not support."""
