"""Derive sizes that follow from others, and report all errors of a model at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.config.model import ModelConfig
from toolkit.errors import InputError, PlanError, Problem
from toolkit.families.base import ModelShape

ALWAYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")


def resolve_model_shape(
    model: ModelConfig, *, required: tuple[str, ...] = (), rotary: bool = True, **defaults: Any
) -> ModelShape:
    """Build a shape from the user's settings, then ``defaults``, then sizes that follow from others.

    Raises:
        PlanError: lists every missing size and every incompatible pair.
    """
    assert model.family is not None, "a family is chosen before its sizes are resolved"
    missing = [name for name in (*ALWAYS, *required) if getattr(model, name) is None]
    if missing:
        raise PlanError(*(_missing(model.family, name) for name in missing))
    sizes: dict[str, Any] = {name: getattr(model, name) for name in ModelShape.__dataclass_fields__}
    for name, value in defaults.items():
        if sizes[name] is None:
            sizes[name] = value
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    problems: list[Problem] = []
    derived = sizes["head_dim"] is None
    if derived and hidden % heads:
        problems.append(
            indivisible_heads(
                hidden,
                heads,
                "model.hidden_size must be divisible by model.num_attention_heads unless model.head_dim is "
                "given",
            )
        )
    if sizes["num_key_value_heads"] is None:
        sizes["num_key_value_heads"] = heads
    if heads % sizes["num_key_value_heads"]:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        problems.append(
            Problem(
                "model.num_key_value_heads",
                f"model.num_key_value_heads={sizes['num_key_value_heads']}, "
                f"model.num_attention_heads={heads}",
                "model.num_key_value_heads must divide model.num_attention_heads",
                f"write one of {divisors}",
            )
        )
    if derived:
        sizes["head_dim"] = max(1, hidden // heads)
    if rotary and sizes["head_dim"] % 2 and not (derived and hidden % heads):
        problems.append(
            Problem(
                "model.head_dim",
                f"model.head_dim={sizes['head_dim']}",
                "rotary position embedding pairs the elements of a head, so model.head_dim must be even",
                "change model.hidden_size or model.num_attention_heads so that their quotient is even"
                if derived
                else f"write model.head_dim={sizes['head_dim'] + 1}",
            )
        )
    if problems:
        raise PlanError(*problems)
    for name in ("num_local_experts", "num_experts_per_tok"):
        sizes[name] = sizes[name] or 0
    return ModelShape(**sizes)


def indivisible_heads(hidden: int, heads: int, rule: str) -> Problem:
    return Problem(
        "model.num_attention_heads",
        f"model.num_attention_heads={heads}, model.hidden_size={hidden}",
        rule,
        f"write model.hidden_size={-(-hidden // heads) * heads} or another number of heads",
    )


def _missing(family: str, name: str) -> Problem:
    return Problem(
        f"model.{name}",
        f"model.{name} is not given",
        f"the family {family} needs model.{name}",
        f"write model.{name}=NUMBER, or use the sizes of a published model: model=pretrained "
        "model.pretrained=FOLDER",
    )


def check_supported(config: Mapping[str, Any], family: str, **wanted: Any) -> None:
    """Refuse a ``config.json`` with a switch that the family's modules do not implement.

    A missing key means the default.

    A tuple lists several accepted values.

    Raises:
        InputError: lists every such key.
    """
    problems = []
    for key, value in wanted.items():
        accepted = value if isinstance(value, tuple) else (value,)
        if key in config and config[key] not in accepted:
            problems.append(
                Problem(
                    f"config.json: {key}",
                    f"{key}={config[key]!r}",
                    f"the family {family} supports {key}={' or '.join(map(repr, accepted))} only",
                    "train it without the family: model=huggingface model.pretrained=FOLDER",
                )
            )
    if problems:
        raise InputError(*problems)


def read_rope_theta(config: Mapping[str, Any], family: str, default: float) -> float:
    """Return the base of plain rotary embeddings, as transformers 5 (``rope_parameters``) or older ones write
    it.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise InputError(
            Problem(
                "config.json: rope_parameters",
                f"rope_type={kind!r}",
                f"the family {family} supports plain rotary embeddings (rope_type 'default') only",
                "train it without the family: model=huggingface model.pretrained=FOLDER",
            )
        )
    return float(rope.get("rope_theta", config.get("rope_theta", default)))
