"""The section ``model`` of the schema. The string below a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from toolkit.config.checks import at_least, at_most, check
from toolkit.config.kernels import AttentionKernel


@dataclass(kw_only=True, slots=True)
class HuggingFaceConfig:
    architecture: str | None = None
    """Class of transformers that builds the model: an auto class (AutoModelForCausalLM, AutoModelForMaskedLM,
    ...) or a model class (T5ForConditionalGeneration). Use model=huggingface.
    """
    model_type: str | None = None
    """Architecture of a model with random weights, as model_type in a config.json: phi3, bert. Null with
    model.pretrained.
    """
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's configuration in transformers, each given as +model.hf.config.NAME=VALUE. With
    model.pretrained they replace those of its config.json.
    """


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    family: str | None = None
    """The architecture, as in the options of this group (model=llama). Null with model.target,
    model.pretrained or model.hf.
    """
    target: str | None = None
    """Dotted path to a torch.nn.Module whose forward(input_ids, labels) returns a mean loss:
    my.package.Model.
    """
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of model.target, each given as +model.arguments.NAME=VALUE."""
    pretrained: str | None = None
    """A folder or hub id in Hugging Face's format with the configuration and initial weights. Use
    model=pretrained, or model=huggingface.
    """
    hf: HuggingFaceConfig = field(default_factory=HuggingFaceConfig)
    hidden_size: int | None = None
    """Width of the residual stream."""
    intermediate_size: int | None = None
    """Width of the feed-forward layer, or of one expert. Null: 4 x hidden_size in gpt2."""
    num_hidden_layers: int | None = None
    """Number of transformer blocks."""
    num_attention_heads: int | None = None
    """Query heads; divides hidden_size unless head_dim is given."""
    num_key_value_heads: int | None = None
    """Key and value heads (grouped-query attention); divides num_attention_heads. Null: as many as query
    heads.
    """
    head_dim: int | None = None
    """Width of one head. Null: hidden_size / num_attention_heads."""
    vocab_size: int | None = None
    """Rows of the embedding; at least the tokenizer's size."""
    max_position_embeddings: int | None = None
    """Maximum sequence length; the size of the position embedding in gpt2."""
    tie_word_embeddings: bool | None = None
    """The output layer shares the embedding's weights."""
    num_local_experts: int | None = None
    """Experts per layer, in families with experts (mixtral)."""
    num_experts_per_tok: int | None = None
    """Experts per token, in families with experts."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of families with experts: that of Switch Transformers, averaged over
    the layers, in every engine. It is computed per micro-batch, so losses depend on train.micro_batch if it
    is not 0.
    """
    rope_theta: float | None = None
    """Base of the rotary position embedding."""
    norm_eps: float | None = None
    """Epsilon of the norms."""
    attention: AttentionKernel = AttentionKernel.auto
    """The attention kernel. sdpa: torch's scaled_dot_product_attention; flash: only its flash kernels, or an
    error; flex: FlexAttention, which separates documents without a mask of all pairs of tokens; eager: matrix
    products, for comparisons. auto: the fastest that the run can use, on CPUs sdpa.
    """
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""
    dropout: float = 0.0
    """Dropout probability in [0, 1) of embeddings, attention and residuals, as far as the family has them."""

    @property
    def source_key(self) -> str:
        """The key that selects the model: model.family, model.target or model.hf.architecture."""
        if self.target is not None:
            return "model.target"
        return "model.family" if self.hf.architecture is None else "model.hf.architecture"

    def __post_init__(self) -> None:
        at_least(
            "model",
            1,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            head_dim=self.head_dim,
        )
        at_least(
            "model", 1, num_hidden_layers=self.num_hidden_layers, num_attention_heads=self.num_attention_heads
        )
        at_least("model", 1, num_key_value_heads=self.num_key_value_heads, vocab_size=self.vocab_size)
        at_least("model", 1, max_position_embeddings=self.max_position_embeddings)
        at_least(
            "model", 1, num_local_experts=self.num_local_experts, num_experts_per_tok=self.num_experts_per_tok
        )
        # Far above every published model. The cost of planning grows with these sizes, which may come from
        # untrusted files.
        at_most(
            "model",
            4096,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
        )
        at_most(
            "model",
            4096,
            num_key_value_heads=self.num_key_value_heads,
            num_local_experts=self.num_local_experts,
        )
        at_most("model", 2**20, hidden_size=self.hidden_size, head_dim=self.head_dim)
        at_most("model", 2**24, intermediate_size=self.intermediate_size)
        at_most(
            "model", 2**31, vocab_size=self.vocab_size, max_position_embeddings=self.max_position_embeddings
        )
        layers, experts = self.num_hidden_layers or 1, self.num_local_experts or 1
        check(
            layers * experts <= 2**18,
            "model.num_local_experts",
            f"{experts} model.num_hidden_layers={layers}",
            "all layers together have at most 262144 experts",
            "write fewer layers or experts",
        )
        check(
            0 <= self.dropout < 1,
            "model.dropout",
            self.dropout,
            "a probability is in [0, 1)",
            "write model.dropout=0.1",
        )
