"""GPT-2 (Radford et al., 2019): layer norms with biases, learned positions, fused query-key-value.

Its projections are transformers' ``Conv1D``: weights are [in, out], the transpose of a linear layer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar

from toolkit.config.model import ModelConfig
from toolkit.errors import PlanError, Problem
from toolkit.families import megatron_tables, resolve_shape
from toolkit.families.base import FamilyTraits, ForwardFlops, HubTensor, ModelShape, NormKind, ParameterSpec
from toolkit.families.megatron import EMBEDDING, OUTPUT, MegatronTensor, TensorCut, TensorPart

PREFIX = "transformer."


class GPT2Family:
    name = "gpt2"
    namespace = "gpt2/1"
    traits = FamilyTraits(
        norm=NormKind.layer,
        rotary=False,
        gated=False,
        biases=True,
        linear_layers=False,
        hidden_dropout=True,
        unsupported_optimizers={
            "muon": "DeepSpeed's Muon recognizes embeddings by the name embed, and gpt2's are wte and wpe"
        },
    )
    published: ClassVar[Mapping[str, ModelConfig]] = {
        "gpt2": ModelConfig(
            family=name,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            vocab_size=50257,
            max_position_embeddings=1024,
        )
    }
    tiny: ClassVar[Mapping[str, Any]] = {}

    def resolve_shape(self, model: ModelConfig) -> ModelShape:
        inner = None if model.hidden_size is None else 4 * model.hidden_size
        shape = resolve_shape.resolve_model_shape(
            model,
            rotary=False,
            intermediate_size=inner,
            tie_word_embeddings=True,
            norm_eps=1e-5,
            rope_theta=10000.0,
        )
        problems = []
        if shape.num_key_value_heads != shape.num_attention_heads:
            problems.append(
                Problem(
                    "model.num_key_value_heads",
                    f"model.num_key_value_heads={shape.num_key_value_heads}",
                    "gpt2 has as many key-value heads as query heads",
                    "write model.num_key_value_heads=null, or model=llama for grouped-query attention",
                )
            )
        if shape.head_dim * shape.num_attention_heads != shape.hidden_size:
            problems.append(
                Problem(
                    "model.head_dim",
                    f"model.head_dim={shape.head_dim}",
                    "in gpt2 a head is model.hidden_size / model.num_attention_heads wide",
                    "write model.head_dim=null",
                )
            )
        if problems:
            raise PlanError(*problems)
        return shape

    @lru_cache(maxsize=8)  # noqa: B019  # as in families/decoder.py
    def parameters(self, shape: ModelShape) -> tuple[ParameterSpec, ...]:
        hidden, inner = shape.hidden_size, shape.intermediate_size
        specs = [
            ParameterSpec(f"{PREFIX}wte.weight", (shape.vocab_size, hidden)),
            ParameterSpec(f"{PREFIX}wpe.weight", (shape.max_position_embeddings, hidden)),
        ]
        block = (
            ("ln_1", (hidden,)),
            ("attn.c_attn", (hidden, 3 * hidden)),
            ("attn.c_proj", (hidden, hidden)),
            ("ln_2", (hidden,)),
            ("mlp.c_fc", (hidden, inner)),
            ("mlp.c_proj", (inner, hidden)),
        )
        for layer in range(shape.num_hidden_layers):
            for name, size in block:
                specs.append(ParameterSpec(f"{PREFIX}h.{layer}.{name}.weight", size, layer))
                specs.append(ParameterSpec(f"{PREFIX}h.{layer}.{name}.bias", size[-1:], layer))
        specs += [
            ParameterSpec(f"{PREFIX}ln_f.weight", (hidden,)),
            ParameterSpec(f"{PREFIX}ln_f.bias", (hidden,)),
        ]
        if not shape.tie_word_embeddings:
            specs.append(ParameterSpec("lm_head.weight", (shape.vocab_size, hidden)))
        return tuple(specs)

    def tied_weights(self, shape: ModelShape) -> Mapping[str, str]:
        return {"lm_head.weight": f"{PREFIX}wte.weight"} if shape.tie_word_embeddings else {}

    def hub_tensors(self, shape: ModelShape) -> tuple[HubTensor, ...]:
        """Return the tensors as they are in memory.

        The first releases were saved without the outer module, so their names lack its prefix.
        """
        return tuple(
            HubTensor(
                spec.name,
                spec.shape,
                spec.name,
                (0,) * len(spec.shape),
                spec.shape,
                aliases=(spec.name.removeprefix(PREFIX),) if spec.name.startswith(PREFIX) else (),
            )
            for spec in self.parameters(shape)
        )

    @lru_cache(maxsize=8)  # noqa: B019
    def megatron_tensors(self, shape: ModelShape) -> tuple[MegatronTensor, ...]:
        return tuple(self._iter_megatron_tensors(shape))

    def megatron_config(self, shape: ModelShape) -> dict[str, Any]:
        return megatron_tables.transformer_config(shape, self.traits)

    def _iter_megatron_tensors(self, shape: ModelShape) -> Iterator[MegatronTensor]:
        table, norm = (shape.vocab_size, shape.hidden_size), (shape.hidden_size,)
        block = tuple(self._megatron_block(shape))
        yield megatron_tables.renamed_tensor(EMBEDDING, f"{PREFIX}wte.weight", table, TensorCut.vocabulary)
        yield megatron_tables.renamed_tensor(
            "embedding.position_embeddings.weight",
            f"{PREFIX}wpe.weight",
            (shape.max_position_embeddings, shape.hidden_size),
        )
        for layer in range(shape.num_hidden_layers):
            for tensor in block:
                yield megatron_tables.at_layer(tensor, layer, f"{PREFIX}h.{layer}.")
        for kind in ("weight", "bias"):
            yield megatron_tables.renamed_tensor(
                f"decoder.final_layernorm.{kind}", f"{PREFIX}ln_f.{kind}", norm
            )
        if not shape.tie_word_embeddings:
            yield megatron_tables.renamed_tensor(OUTPUT, "lm_head.weight", table, TensorCut.vocabulary)

    def _megatron_block(self, shape: ModelShape) -> Iterator[MegatronTensor]:
        """Yield the names within a block, H hidden and F feed-forward.

        The fused projection's columns [H, 3H] (queries, keys, values) become rows [3H, H] by heads; other
        matrices are transposed.
        """
        hidden, inner = shape.hidden_size, shape.intermediate_size
        for ours, theirs in (("ln_1", "input_layernorm"), ("ln_2", "pre_mlp_layernorm")):
            for kind in ("weight", "bias"):
                yield megatron_tables.renamed_tensor(f"{theirs}.{kind}", f"{ours}.{kind}", (hidden,))
        groups = [
            ("qkv".index(letter) * hidden + first, count, row)
            for letter, first, count, row in megatron_tables.query_groups(shape)
        ]
        weight = tuple(
            TensorPart("attn.c_attn.weight", (0, column), (hidden, count), (row, 0), True)
            for column, count, row in groups
        )
        bias = tuple(
            TensorPart("attn.c_attn.bias", (column,), (count,), (row,)) for column, count, row in groups
        )
        yield MegatronTensor("self_attention.linear_qkv.weight", (3 * hidden, hidden), weight, TensorCut.rows)
        yield MegatronTensor("self_attention.linear_qkv.bias", (3 * hidden,), bias, TensorCut.rows)
        for ours, theirs, size, cut in (
            ("attn.c_proj", "self_attention.linear_proj", (hidden, hidden), TensorCut.columns),
            ("mlp.c_fc", "mlp.linear_fc1", (inner, hidden), TensorCut.rows),
            ("mlp.c_proj", "mlp.linear_fc2", (hidden, inner), TensorCut.columns),
        ):
            yield megatron_tables.renamed_tensor(
                f"{theirs}.weight", f"{ours}.weight", size, cut, transposed=True
            )
            yield megatron_tables.renamed_tensor(
                f"{theirs}.bias", f"{ours}.bias", size[:1], cut if cut is TensorCut.rows else TensorCut.whole
            )

    def forward_flops(self, shape: ModelShape, sequence_length: int) -> ForwardFlops:
        """``l (8 h^2 + 4 h f + 4 s h) + 2 h V``, where h is the width of all heads in attention.

        With ``f = 4h`` it is a third of ``72 l h^2 (1 + s/6h + V/12lh)`` (Megatron-LM, 2104.04473, equation 3
        without recomputation). The whole attention matrix counts although it is causal.
        """
        hidden, inner, layers = shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers
        width = shape.num_attention_heads * shape.head_dim
        return ForwardFlops(
            projections=8.0 * layers * hidden * width,
            scores=4.0 * layers * sequence_length * width,
            up=2.0 * layers * hidden * inner,
            down=2.0 * layers * hidden * inner,
            head=2.0 * hidden * shape.vocab_size,
        )

    def hugging_face_config(self, shape: ModelShape) -> dict[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": self.name,
            "vocab_size": shape.vocab_size,
            "n_positions": shape.max_position_embeddings,
            "n_embd": shape.hidden_size,
            "n_layer": shape.num_hidden_layers,
            "n_head": shape.num_attention_heads,
            "n_inner": shape.intermediate_size,
            "activation_function": "gelu_new",
            "resid_pdrop": shape.dropout,
            "embd_pdrop": shape.dropout,
            "attn_pdrop": shape.dropout,
            "layer_norm_epsilon": shape.norm_eps,
            "initializer_range": shape.initializer_range,
            "tie_word_embeddings": shape.tie_word_embeddings,
        }

    def from_hugging_face_config(self, config: Mapping[str, Any]) -> ModelConfig:
        resolve_shape.check_supported(
            config,
            self.name,
            activation_function="gelu_new",
            scale_attn_weights=True,
            scale_attn_by_inverse_layer_idx=False,
            reorder_and_upcast_attn=False,
            add_cross_attention=False,
        )
        rates = {config.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
        return ModelConfig(
            family=self.name,
            vocab_size=config["vocab_size"],
            hidden_size=config["n_embd"],
            intermediate_size=config.get("n_inner") or 4 * config["n_embd"],
            num_hidden_layers=config["n_layer"],
            num_attention_heads=config["n_head"],
            num_key_value_heads=config["n_head"],
            head_dim=config["n_embd"] // config["n_head"],
            max_position_embeddings=config.get("n_positions", config.get("n_ctx", 1024)),
            initializer_range=config.get("initializer_range", 0.02),
            norm_eps=config.get("layer_norm_epsilon", 1e-5),
            rope_theta=10000.0,
            tie_word_embeddings=config.get("tie_word_embeddings", True),
            dropout=max(rates),
        )


GPT2 = GPT2Family()
