"""The common base of Llama-like families.

They have RMS norms, rotary embeddings, grouped-query attention and a gated feed-forward. A family overrides
what differs: defaults, biases, its feed-forward, its ``config.json``.

Shapes: H hidden, F feed-forward, D head_dim, A query heads, K key-value heads, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar

from toolkit.config.model import ModelConfig
from toolkit.families import megatron_tables, resolve_shape
from toolkit.families.base import FamilyTraits, ForwardFlops, HubTensor, ModelShape, ParameterSpec
from toolkit.families.megatron import EMBEDDING, OUTPUT, MegatronTensor, TensorCut, TensorPart


class Decoder:
    """A decoder-only family with the canonical names ``model.layers.N. ...``.

    Attributes:
        architecture: the class in transformers.
        defaults: values of sizes that may be left out.
        fixed: switches of ``config.json`` that must have this value.
        published_norm_eps, published_rope_theta: what transformers assumes if a ``config.json`` lacks the
            key.
    """

    name: str
    namespace: str
    architecture: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    required: ClassVar[tuple[str, ...]] = ("intermediate_size",)
    traits: FamilyTraits = FamilyTraits()
    published: ClassVar[Mapping[str, ModelConfig]]
    tiny: ClassVar[Mapping[str, Any]]
    fixed: ClassVar[Mapping[str, Any]] = {}
    published_norm_eps: ClassVar[float] = 1e-6
    published_rope_theta: ClassVar[float] = 10000.0

    def resolve_shape(self, model: ModelConfig) -> ModelShape:
        return resolve_shape.resolve_model_shape(model, required=self.required, **self.defaults)

    # The planner of layouts asks hundreds of times for the same shape. Families live as long as the process.
    @lru_cache(maxsize=8)  # noqa: B019
    def parameters(self, shape: ModelShape) -> tuple[ParameterSpec, ...]:
        hidden = shape.hidden_size
        specs = [ParameterSpec("model.embed_tokens.weight", (shape.vocab_size, hidden))]
        for layer in range(shape.num_hidden_layers):
            inside = (
                *self.attention(shape),
                *self.feed_forward(shape),
                ("input_layernorm.weight", (hidden,)),
                ("post_attention_layernorm.weight", (hidden,)),
            )
            specs += [ParameterSpec(f"model.layers.{layer}.{name}", size, layer) for name, size in inside]
        specs.append(ParameterSpec("model.norm.weight", (hidden,)))
        if not shape.tie_word_embeddings:
            specs.append(ParameterSpec("lm_head.weight", (shape.vocab_size, hidden)))
        return tuple(specs)

    def attention(self, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes within a block: q [A*D, H], k and v [K*D, H], o [H, A*D]."""
        query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        for letter, width in (("q", query), ("k", key), ("v", key)):
            yield f"self_attn.{letter}_proj.weight", (width, shape.hidden_size)
            if self.traits.qkv_bias:
                yield f"self_attn.{letter}_proj.bias", (width,)
        yield "self_attn.o_proj.weight", (shape.hidden_size, query)

    def feed_forward(self, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes within a block: gate and up [F, H], down [H, F]."""
        for name in ("gate", "up"):
            yield f"mlp.{name}_proj.weight", (shape.intermediate_size, shape.hidden_size)
        yield "mlp.down_proj.weight", (shape.hidden_size, shape.intermediate_size)

    def feed_forward_weights_used(self, shape: ModelShape) -> tuple[int, int]:
        """Return the elements of the feed-forward multiplied with one token: before the last matrix, and in
        it.
        """
        matrix = shape.hidden_size * shape.intermediate_size
        return 2 * matrix, matrix

    def tied_weights(self, shape: ModelShape) -> Mapping[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if shape.tie_word_embeddings else {}

    def hub_tensors(self, shape: ModelShape) -> tuple[HubTensor, ...]:
        return tuple(tensor for spec in self.parameters(shape) for tensor in self.split_for_hub(spec, shape))

    def split_for_hub(self, spec: ParameterSpec, shape: ModelShape) -> Iterator[HubTensor]:
        """Yield the hub's tensors for one canonical tensor; here the tensor itself."""
        yield HubTensor(spec.name, spec.shape, spec.name, (0,) * len(spec.shape), spec.shape)

    @lru_cache(maxsize=8)  # noqa: B019
    def megatron_tensors(self, shape: ModelShape) -> tuple[MegatronTensor, ...]:
        return tuple(self._iter_megatron_tensors(shape))

    def megatron_config(self, shape: ModelShape) -> dict[str, Any]:
        return megatron_tables.transformer_config(shape, self.traits)

    def _iter_megatron_tensors(self, shape: ModelShape) -> Iterator[MegatronTensor]:
        table, norm = (shape.vocab_size, shape.hidden_size), (shape.hidden_size,)
        block = (
            megatron_tables.renamed_tensor("input_layernorm.weight", "input_layernorm.weight", norm),
            *self.megatron_attention(shape),
            megatron_tables.renamed_tensor(
                "pre_mlp_layernorm.weight", "post_attention_layernorm.weight", norm
            ),
            *self.megatron_feed_forward(shape),
        )
        yield megatron_tables.renamed_tensor(
            EMBEDDING, "model.embed_tokens.weight", table, TensorCut.vocabulary
        )
        for layer in range(shape.num_hidden_layers):
            for tensor in block:
                yield megatron_tables.at_layer(tensor, layer, f"model.layers.{layer}.")
        yield megatron_tables.renamed_tensor("decoder.final_layernorm.weight", "model.norm.weight", norm)
        if not shape.tie_word_embeddings:
            yield megatron_tables.renamed_tensor(OUTPUT, "lm_head.weight", table, TensorCut.vocabulary)

    def megatron_attention(self, shape: ModelShape) -> Iterator[MegatronTensor]:
        """Yield the names within a block: linear_qkv [(A + 2K) * D, H] by query groups, and linear_proj [H,
        A*D].
        """
        rows = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
        for kind, rest in (("weight", (shape.hidden_size,)), ("bias", ())):
            if kind == "weight" or self.traits.qkv_bias:
                origin = (0,) * len(rest)
                parts = tuple(
                    TensorPart(
                        f"self_attn.{letter}_proj.{kind}", (first, *origin), (count, *rest), (row, *origin)
                    )
                    for letter, first, count, row in megatron_tables.query_groups(shape)
                )
                yield MegatronTensor(
                    f"self_attention.linear_qkv.{kind}", (rows, *rest), parts, TensorCut.rows
                )
        yield megatron_tables.renamed_tensor(
            "self_attention.linear_proj.weight",
            "self_attn.o_proj.weight",
            (shape.hidden_size, shape.num_attention_heads * shape.head_dim),
            TensorCut.columns,
        )

    def megatron_feed_forward(self, shape: ModelShape) -> Iterator[MegatronTensor]:
        """Yield the names within a block: linear_fc1 [2F, H], the gate above up, and linear_fc2 [H, F]."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        yield megatron_tables.stacked_rows(
            "mlp.linear_fc1.weight",
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            (inner, hidden),
            TensorCut.gated,
        )
        yield megatron_tables.renamed_tensor(
            "mlp.linear_fc2.weight", "mlp.down_proj.weight", (hidden, inner), TensorCut.columns
        )

    def forward_flops(self, shape: ModelShape, sequence_length: int) -> ForwardFlops:
        """Two per weight that multiplies the token, and ``4 s A D`` per layer for the attention matrix.

        A layer has ``2 (2 H A D + 2 H K D)`` in projections (grouped-query attention shrinks those of keys
        and values, but not the attention matrix, in which all A heads take part) and ``6 H F`` in its
        feed-forward; the output layer has ``2 H V``. The whole attention matrix counts although it is causal,
        as in PaLM (2204.02311, appendix B) and Megatron-LM (2104.04473, appendix).
        """
        layers, width = shape.num_hidden_layers, shape.num_attention_heads * shape.head_dim
        up, down = self.feed_forward_weights_used(shape)
        return ForwardFlops(
            projections=2.0
            * layers
            * sum(size[0] * size[1] for _, size in self.attention(shape) if len(size) == 2),
            scores=4.0 * layers * sequence_length * width,
            up=2.0 * layers * up,
            down=2.0 * layers * down,
            head=2.0 * shape.hidden_size * shape.vocab_size,
        )

    def hugging_face_config(self, shape: ModelShape) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "model_type": self.name,
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_hidden_layers,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": shape.max_position_embeddings,
            "initializer_range": shape.initializer_range,
            "rms_norm_eps": shape.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
            "rope_theta": shape.rope_theta,  # for transformers 4 and other readers
            "tie_word_embeddings": shape.tie_word_embeddings,
            "attention_dropout": shape.dropout,
        }

    def from_hugging_face_config(self, config: Mapping[str, Any]) -> ModelConfig:
        resolve_shape.check_supported(config, self.name, hidden_act="silu", **self.fixed)
        return ModelConfig(
            family=self.name,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config.get("num_key_value_heads"),
            head_dim=config.get("head_dim"),
            max_position_embeddings=config["max_position_embeddings"],
            initializer_range=config.get("initializer_range", 0.02),
            norm_eps=config.get("rms_norm_eps", self.published_norm_eps),
            rope_theta=resolve_shape.read_rope_theta(config, self.name, self.published_rope_theta),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            dropout=config.get("attention_dropout", 0.0),
        )
