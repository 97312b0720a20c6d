"""Model families: shapes, parameter counts, FLOPs, canonical names and invertible name maps. No torch.

To add a family, add one file with one object, and one entry in ``FAMILIES``.
"""

from __future__ import annotations

from toolkit.config.schema import ModelConfig
from toolkit.errors import PlanError, Problem
from toolkit.families.base import Family
from toolkit.families.gpt2 import GPT2
from toolkit.families.llama import LLAMA
from toolkit.families.mixtral import MIXTRAL
from toolkit.families.qwen2 import QWEN2
from toolkit.families.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT2, LLAMA, QWEN2, QWEN3, MIXTRAL)}

# Sizes of well-known models as their authors published them: reference points for parameter counts, plans and
# tests.
PUBLISHED: dict[str, ModelConfig] = {
    name: model for family in FAMILIES.values() for name, model in family.published.items()
}


def get_family(name: str) -> Family:
    """The family called ``name``. Raises PlanError that lists the families."""
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise PlanError(
            Problem(
                "model.family",
                f"model.family={name}",
                f"a family is one of {known}",
                f"write model.family={known.split(', ')[1]}, or use any torch module: "
                "model.target=my.package.Model",
            )
        )
    return FAMILIES[name]


__all__ = ["FAMILIES", "PUBLISHED", "get_family"]
