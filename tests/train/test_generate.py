"""Generating text from weights.

pytest tests/train/test_generate.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from toolkit.config.special_tokens import SpecialTokens
from toolkit.errors import InputError
from toolkit.estimate.plan_report import to_json
from toolkit.families.base import ModelShape
from toolkit.families.model_files import parse_model_shape
from toolkit.models.initial_weights import InitialWeights
from toolkit.testing.tiny import LENGTH, tiny_plan
from toolkit.train.generate import continue_text, load_model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def model() -> nn.Module:
    plan = tiny_plan()
    assert plan.shape is not None
    return load_model(plan.shape, InitialWeights(plan))


def test_greedy_decoding_equals_transformers(model: Any, tokenizer: Tokenizer) -> None:
    ids = torch.tensor([tokenizer.encode("def main").ids])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        suppress_tokens=list(range(256, 264)),
        eos_token_id=None,
    )
    assert continue_text(model, tokenizer, "def main", tokens=12, temperature=0) == tokenizer.decode(
        expected[0, 8:].tolist()
    )


def test_seed_determines_the_text(model: nn.Module, tokenizer: Tokenizer) -> None:
    texts = [continue_text(model, tokenizer, "import", tokens=16, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(5)
    assert continue_text(model, tokenizer, "import", tokens=16, seed=1) == texts[0]


def test_generation_is_limited_by_tokens_context_time_and_stop(
    model: nn.Module, tokenizer: Tokenizer
) -> None:
    def length(prompt: str, **limits: Any) -> int:
        calls: list[None] = []  # one per token
        continue_text(model, tokenizer, prompt, stop=lambda: calls.append(None), **limits)
        return len(calls)

    assert continue_text(model, tokenizer, "x", seconds=0) == ""
    assert continue_text(model, tokenizer, "x", stop=lambda: "SIGTERM") == ""
    assert length("x", tokens=5) == 5
    assert length("x" * 100, tokens=1000, context=LENGTH) == LENGTH // 2
    assert length("x" * 100, tokens=4, context=LENGTH) == 4
    assert length("xyz", tokens=1000, context=LENGTH) == LENGTH - 3
    with pytest.raises(InputError, match="at least one token"):
        continue_text(model, tokenizer, "")


def test_model_shape_is_restored_from_plan_json() -> None:
    plan = tiny_plan("mixtral")
    assert parse_model_shape({**to_json(plan)["model"], "of a later version": 1}, "plan.json") == plan.shape
    assert isinstance(plan.shape, ModelShape)


def test_special_token_in_the_prompt_is_refused_or_encoded(model: nn.Module, tokenizer: Tokenizer) -> None:
    special = Tokenizer.from_str(tokenizer.to_str())
    special.add_special_tokens(["<|user|>"])
    seen: list[list[int]] = []

    class Model(nn.Module):
        """Record the input tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: torch.Tensor, **given: Any) -> Any:
            seen.append(input_ids[0].tolist())
            return self.inner(input_ids=input_ids, **given)

    with pytest.raises(InputError, match=r"the prompt: '<\|user\|>hi'"):
        continue_text(Model(), special, "<|user|>hi", tokens=1)
    for mode in (SpecialTokens.parse, SpecialTokens.text):
        continue_text(Model(), special, "<|user|>hi", tokens=1, special_tokens=mode)
    assert seen[0] == [special.token_to_id("<|user|>"), *tokenizer.encode("hi").ids]
    assert seen[1] == tokenizer.encode("<|user|>hi").ids
