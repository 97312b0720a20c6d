"""Parse model descriptions in files: ``config.json``, a run's ``plan.json``, the scalars of a checkpoint.

Such a file may be untrusted. Sizes must be integers within the bounds of ``ModelConfig``: a billion layers
would keep planning busy for hours and exhaust memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from toolkit.config.model import ModelConfig
from toolkit.errors import InputError, Problem
from toolkit.families.base import Family, ModelShape

RULE = "a model's file has all sizes, as whole numbers within the bounds of a model"
REMEDY = "correct the file, or download or export it again"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "num_local_experts",
    "num_experts_per_tok",
)


def parse_model_config(family: Family, config: Mapping[str, Any], file: object) -> ModelConfig:
    """Parse a ``config.json``. ``file`` is its path, for errors.

    Raises:
        InputError: a size is missing, not an integer or out of bounds, or the family does not support this
            variant.
    """
    return _check_sizes(lambda: family.from_hugging_face_config(config), file)


def parse_model_shape(sizes: Mapping[str, Any], file: object) -> ModelShape:
    """Parse a recorded shape, ignoring fields of later versions. ``file`` is its path, for errors.

    Raises:
        InputError: a size is missing, not an integer or out of bounds.
    """
    known = {name: value for name, value in sizes.items() if name in ModelShape.__dataclass_fields__}
    # A shape without experts has 0 of them, a configuration None.
    experts = ("num_local_experts", "num_experts_per_tok")
    given: dict[str, Any] = {
        name: value or None if name in experts else value for name, value in known.items()
    }
    _check_sizes(lambda: ModelConfig(**given), file)
    try:
        shape = ModelShape(**known)
    except TypeError as error:
        raise _invalid_file(file, str(error)) from error
    missing = [name for name in SIZES if getattr(shape, name) is None]
    if missing:
        raise _invalid_file(file, f"{missing[0]} is missing")
    return shape


def _check_sizes(make: Callable[[], ModelConfig], file: object) -> ModelConfig:
    try:
        model = make()
    except InputError:
        raise
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:  # includes ConfigError
        problem = next(iter(getattr(error, "problems", ())), None)
        seen = (
            f"{problem.seen} ({problem.rule})" if problem is not None else f"{type(error).__name__}: {error}"
        )
        raise _invalid_file(file, seen) from error
    for name in SIZES:
        value = getattr(model, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise _invalid_file(file, f"{name}={value!r:.80}")
    return model


def _invalid_file(file: object, seen: str) -> InputError:
    return InputError(Problem(str(file), f"{file}: {seen}", RULE, REMEDY))
