"""FLOPs of training on one token by the formulas of other tools.

PYTHONPATH=. python tests/plan/conventions.py        # prints the table of docs/monitoring.md
"""

from __future__ import annotations

from collections.abc import Callable

from toolkit.families import PUBLISHED, get_family
from toolkit.families.base import ModelShape
from toolkit.plan.flops import FORWARD_AND_BACKWARD

MODELS = {"GPT-2": "gpt2", "Llama 3 8B": "llama-3-8b", "Mixtral 8x7B": "mixtral-8x7b"}
LENGTH = {"GPT-2": 1024, "Llama 3 8B": 8192, "Mixtral 8x7B": 8192}


def ours(shape: ModelShape, length: int) -> float:
    return FORWARD_AND_BACKWARD * get_family(shape.family).forward_flops(shape, length).total


def megatron_lm_2024(shape: ModelShape, length: int) -> float:
    """``num_floating_point_operations`` of Megatron-LM with mcore 0.8: 12 l h^2 ((1 + K/A + s/h) AD/h + f/h *
    experts * 1.5 if gated + V/2lh); the attention matrix whole, no router.
    """
    return _megatron(shape, length, 1.0)


def megatron_lm_2025(shape: ModelShape, length: int) -> float:
    """A later version, with half of the attention matrix."""
    return _megatron(shape, length, 0.5)


def _megatron(shape: ModelShape, length: int, attention_share: float) -> float:
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    width = shape.num_attention_heads * shape.head_dim / hidden
    attention = (
        1 + shape.num_key_value_heads / shape.num_attention_heads + attention_share * length / hidden
    ) * width
    gated = 1.5 if get_family(shape.family).traits.gated else 1.0
    feed_forward = shape.intermediate_size / hidden * max(1, shape.num_experts_per_tok) * gated
    return 12 * layers * hidden**2 * (attention + feed_forward + shape.vocab_size / (2 * layers * hidden))


def palm(shape: ModelShape, length: int) -> float:
    """6 N + 12 L H Q T (Chowdhery et al., 2204.02311, appendix B): N is every parameter, of which the input
    embedding is one that multiplies nothing unless it is the output layer's too. Experts that a token does
    not visit are left out here.
    """
    return (
        6 * _numel(shape) + 12 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * length
    )


def nanogpt(shape: ModelShape, length: int) -> float:
    """``estimate_mfu``: PaLM's, without the table of positions in N."""
    table = 0 if get_family(shape.family).traits.rotary else shape.max_position_embeddings * shape.hidden_size
    return palm(shape, length) - 6 * table


def llm_foundry(shape: ModelShape, length: int) -> float:
    """``scripts/train/benchmarking``: 3 (2 N + 4 L d T): all parameters, attention as wide as the model."""
    return 3 * (2 * _numel(shape) + 4 * shape.num_hidden_layers * shape.hidden_size * length)


def six_n(shape: ModelShape, length: int) -> float:
    """6 N (Kaplan et al., 2001.08361): no attention matrix."""
    return 6 * _numel(shape)


def _numel(shape: ModelShape) -> int:
    """Parameters without the experts that a token does not visit."""
    idle = (
        (shape.num_local_experts - shape.num_experts_per_tok)
        * 3
        * shape.hidden_size
        * shape.intermediate_size
        * shape.num_hidden_layers
    )
    return sum(spec.numel for spec in get_family(shape.family).parameters(shape)) - idle


CONVENTIONS: dict[str, Callable[[ModelShape, int], float]] = {
    "this toolkit": ours,
    "Megatron-LM, mcore 0.8": megatron_lm_2024,
    "Megatron-LM, mid 2025": megatron_lm_2025,
    "PaLM": palm,
    "nanoGPT": nanogpt,
    "llm-foundry": llm_foundry,
    "6 N": six_n,
}


def flops(convention: str, name: str) -> float:
    model = PUBLISHED[MODELS[name]]
    assert model.family is not None
    return CONVENTIONS[convention](get_family(model.family).resolve_shape(model), LENGTH[name])


def cell(convention: str, name: str) -> str:
    """GFLOPs per token, and the difference to this toolkit."""
    found = flops(convention, name)
    ours = flops("this toolkit", name)
    return f"{found / 1e9:.3f}" + (f" ({found / ours - 1:+.2%})" if found != ours else "")


def table() -> str:
    head = [
        " | ".join(["counted as by", *(f"{name}, {LENGTH[name]:,} tokens" for name in MODELS)]),
        "|".join(["---"] * (len(MODELS) + 1)),
    ]
    rows = [
        " | ".join([convention, *(cell(convention, name) for name in MODELS)]) for convention in CONVENTIONS
    ]
    return "\n".join([f"| {head[0]} |", f"|{head[1]}|", *(f"| {row} |" for row in rows)])


if __name__ == "__main__":
    print(table())
