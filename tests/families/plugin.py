"""A family of a user's own package, as docs/families.md describes it: Mistral without a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from toolkit.config.model import ModelConfig
from toolkit.families.decoder import Decoder


class Mistral(Decoder):
    name = "mistral"
    namespace = "mistral/1"
    architecture = "MistralForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": False,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    published: ClassVar[Mapping[str, ModelConfig]] = {}
    tiny: ClassVar[Mapping[str, Any]] = {}
    fixed: ClassVar[Mapping[str, Any]] = {"sliding_window": None}

    def hugging_face_config(self, shape: Any) -> dict[str, Any]:
        return super().hugging_face_config(shape) | {"sliding_window": None}


MISTRAL = Mistral()


class Unfinished:
    name = "unfinished"


UNFINISHED = Unfinished()
