"""Model families: shapes, parameter counts, FLOPs, canonical names and invertible name maps. No torch.

To add a family, add one file with one object, and one entry in ``BUILT_IN``; a user's package
registers its families by entry points (``registry.py``).
"""

from __future__ import annotations

from dataclasses import replace

from toolkit.config.model import ModelConfig
from toolkit.errors import PlanError, Problem
from toolkit.families.base import Family, ModelShape
from toolkit.families.gpt2 import GPT2
from toolkit.families.llama import LLAMA
from toolkit.families.mixtral import MIXTRAL
from toolkit.families.qwen2 import QWEN2
from toolkit.families.qwen3 import QWEN3
from toolkit.families.qwen3_moe import QWEN3_MOE
from toolkit.families.registry import FamilyRegistry

BUILT_IN: tuple[Family, ...] = (GPT2, LLAMA, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE)
FAMILIES = FamilyRegistry(BUILT_IN)

# Sizes of well-known models as their authors published them: reference points for parameter counts, plans and
# tests.
PUBLISHED: dict[str, ModelConfig] = {
    name: model for family in BUILT_IN for name, model in family.published.items()
}


def load_family(name: str) -> Family:
    """Return the family called ``name``, or the one at the dotted path ``name``, which is registered.

    Raises:
        ConfigError: there is nothing at the dotted path.
        PlanError: there is no such family, or the object is not one.
    """
    return FAMILIES.load(name) if "." in name else get_family(name)


def resolve_shape_of(family: Family, model: ModelConfig) -> ModelShape:
    """Return the shape of ``model`` in ``family``. The family's name replaces a dotted path in the model's
    configuration.

    Raises:
        PlanError: lists every missing or impossible size.
    """
    return family.resolve_shape(replace(model, family=family.name))


def get_family(name: str) -> Family:
    """Return the family called ``name``. Raises PlanError that lists the families."""
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise PlanError(
            Problem(
                "model.family",
                f"model.family={name}",
                f"a family is one of {known}",
                f"write model.family={known.split(', ')[1]}, install the package that registers {name}, name "
                "the object itself: model.family=my_package.mine.MINE, or train it without a family: "
                "model=huggingface",
            )
        )
    return FAMILIES[name]


__all__ = ["FAMILIES", "PUBLISHED", "get_family", "load_family", "resolve_shape_of"]
