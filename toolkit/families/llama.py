"""Llama 2 and 3: no biases, grouped-query attention, plain rotary embeddings (Touvron et al., 2307.09288; 2407.21783)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from toolkit.families.decoder import Decoder


class Llama(Decoder):
    name = "llama"
    namespace = "llama/1"
    architecture = "LlamaForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {"tie_word_embeddings": False, "norm_eps": 1e-5, "rope_theta": 10000.0}
    fixed: ClassVar[Mapping[str, Any]] = {"attention_bias": False, "mlp_bias": False}


LLAMA = Llama()
