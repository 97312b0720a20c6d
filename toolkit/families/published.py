"""Sizes of well-known models, as their authors published them: reference points for counts, plans and tests."""

from __future__ import annotations

from toolkit.config.schema import ModelConfig
from toolkit.families import FAMILIES

PUBLISHED: dict[str, ModelConfig] = {
    name: model for family in FAMILIES.values() for name, model in family.published.items()
}
