"""What a model family says about itself. Canonical names equal the ``state_dict`` names of the pinned transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from toolkit.config.schema import ModelConfig
from toolkit.families.megatron import MegatronTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model configuration with every size settled. Fields are those of ``ModelConfig``; sizes in elements."""

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
    """One parameter as it lies in memory. ``layer`` is the block it belongs to, None outside blocks."""

    name: str
    shape: tuple[int, ...]
    layer: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Weight decay applies to matrices only: never to one-dimensional tensors."""
        return len(self.shape) > 1


@dataclass(frozen=True, slots=True)
class HubTensor:
    """One tensor of a published checkpoint: the box ``offset, extent`` of a canonical tensor, reshaped to ``shape``.

    ``aliases`` are other names that published checkpoints have it under; writing uses ``name``.
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
    """How a family's blocks compute: what plans and engines ask instead of a family's name.

    Attributes:
        norm: of blocks and at the end.
        rotary: positions are rotations of queries and keys; else a table of learned positions is added to the embedding.
        gated: the feed-forward is ``down(silu(gate(x)) * up(x))``; else ``down(gelu(up(x)))``, gelu by its tanh formula.
        biases: every linear layer of a block has one.
        qkv_bias: the query, key and value projections have one.
        qk_norm: each head's queries and keys are normalised before they are rotated.
        experts: the feed-forward is a router and experts.
        linear: its projections are torch's linear layers, which DeepSpeed replaces under ZeRO 3.
        hidden_dropout: ``model.dropout`` is also that of the embedding's output and of what is added to the residual stream.
        muon: why DeepSpeed's Muon cannot train it; None where it can.
    """

    norm: NormKind = NormKind.rms
    rotary: bool = True
    gated: bool = True
    biases: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    linear: bool = True
    hidden_dropout: bool = False
    muon: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFlops:
    """FLOPs of the forward pass per token, over all blocks, by what spends them; a multiply-add is two.

    Only what multiplies matrices counts: looking up an embedding is nothing, and norms, biases, activations, rotations, softmax and
    the loss are left out.

    Attributes:
        projections: of queries, keys, values and the attention's output.
        scores: queries times keys, and the result times values, each token with the whole sequence although attention is causal.
        up: of the feed-forward, all but its last matrix; the router too. With experts, those that one token visits.
        down: its last matrix.
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
    """The one seam through which the rest of the toolkit knows an architecture."""

    name: str
    namespace: str  # of canonical names, recorded in manifests: "llama/1"
    traits: FamilyTraits
    published: ClassVar[
        Mapping[str, ModelConfig]
    ]  # well-known models, with the sizes that their authors published
    tiny: ClassVar[
        Mapping[str, Any]
    ]  # sizes that the family's model in toolkit/testing/tiny.py has besides those of all families

    def resolve_shape(self, model: ModelConfig) -> ModelShape:
        """Fill what may be left out; raise PlanError naming every size that is missing or impossible."""

    def parameters(self, shape: ModelShape) -> tuple[ParameterSpec, ...]:
        """Every stored parameter, in ``state_dict`` order; a tied alias is left out."""

    def tied_weights(self, shape: ModelShape) -> Mapping[str, str]:
        """Alias -> the canonical name that stores it."""

    def hub_tensors(self, shape: ModelShape) -> tuple[HubTensor, ...]:
        """How the hub stores the family: one entry a tensor. Mixtral is per expert there and fused in memory."""

    def megatron_tensors(self, shape: ModelShape) -> tuple[MegatronTensor, ...]:
        """Every parameter of the Megatron-core model, and which boxes of canonical tensors it is made of."""

    def megatron_config(self, shape: ModelShape) -> dict[str, Any]:
        """Fields of Megatron-core's ``TransformerConfig`` that say what the architecture is; ``activation_func`` by name: ``silu``
        or ``gelu_tanh``. ``position_embedding_type`` and ``rotary_base`` are arguments of its ``GPTModel``."""

    def forward_flops(self, shape: ModelShape, sequence_length: int) -> ForwardFlops:
        """The docstring states formula, source and convention."""

    def hugging_face_config(self, shape: ModelShape) -> dict[str, Any]:
        """The keys of the family's ``config.json`` (with ``model_type`` and ``architectures``)."""

    def from_hugging_face_config(self, config: Mapping[str, Any]) -> ModelConfig:
        """The inverse; raise InputError for a variant that this family does not cover."""
