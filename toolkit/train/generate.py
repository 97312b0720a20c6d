"""Continue a text with trained weights of any engine and layout, on one process with a plain model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit import families
from toolkit.checkpoint.shard import WEIGHT, Box, Shard, StateReader, TensorKey
from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.manifest import find_generation, read_manifest
from toolkit.data.tokens.special_tokens import SpecialTokenFinder, configure_tokenizer
from toolkit.data.tokens.tokenizer import read_tokenizer
from toolkit.errors import InputError, Problem
from toolkit.families.base import ModelShape
from toolkit.train.state import DATA

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_TOKENS = 64
TIME_LIMIT = 60.0  # seconds


def load_model(
    shape: ModelShape,
    reader: StateReader,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return the family's Hugging Face module with the reader's weights, in evaluation mode.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**families.get_family(shape.family).hugging_face_config(shape))
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    reader.read(
        [
            Shard(TensorKey(WEIGHT, name), tuple(parameter.shape), Box.whole(parameter.shape), parameter.data)
            for name, parameter in model.named_parameters()
        ]
    )
    return model.to(device or torch.device("cpu"))


def load_tokenizer(data_folder: str | Path, reader: StateReader) -> Tokenizer:
    """Return the tokenizer that the reader's weights were trained with, or if unknown the data folder's
    current one.

    Raises:
        InputError: the data folder no longer has that tokenizer.
    """
    data = reader.scalars.get(DATA)
    trained_on = data.get("tokenizer") if isinstance(data, Mapping) else None
    manifest = read_manifest(data_folder) if trained_on is None else find_generation(data_folder, trained_on)
    return read_tokenizer(manifest.tokenizer_folder)


@torch.no_grad()
def continue_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int = DEFAULT_TOKENS,
    temperature: float = 0.8,
    seed: int = 0,
    context: int | None = None,
    seconds: float = TIME_LIMIT,
    special_tokens: SpecialTokens = SpecialTokens.refuse,
    stop: Callable[[], object] = lambda: None,
) -> str:
    """Sample up to ``tokens`` further tokens and return them as text.

    Sampling ends early after ``seconds`` or when ``stop`` returns a true value. The same seed gives the same
    text on the same device.

    Args:
        temperature: 0 always takes the most likely token.
        context: the model's longest sequence. A prompt that does not fit loses its beginning, but keeps at
            least half of ``context``.
        special_tokens: how to treat the string of a special token in the prompt.

    Raises:
        InputError: the prompt has no tokens, or contains the string of a special token that
            ``special_tokens`` refuses.
    """
    if special_tokens is SpecialTokens.refuse:
        SpecialTokenFinder(tokenizer).check(prompt, location="the prompt", key="--special-tokens")
    configure_tokenizer(tokenizer, special_tokens)
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise InputError(
            Problem(
                "prompt", f"prompt={prompt!r}", "a prompt must have at least one token", "write some text"
            )
        )
    if context is not None:
        ids = ids[-max(1, context // 2, context - tokens) :]
        tokens = min(tokens, context - len(ids))
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    deadline = time.monotonic() + seconds
    new: list[int] = []
    inputs, past = torch.tensor([ids], device=device), None
    while len(new) < tokens and time.monotonic() < deadline and not stop():
        output = model(input_ids=inputs, past_key_values=past, use_cache=True)
        # The embedding may have more rows than the tokenizer has tokens.
        logits = output.logits[0, -1, : tokenizer.get_vocab_size()].float()
        if temperature == 0:
            inputs = logits.argmax().reshape(1, 1)
        else:
            inputs = torch.multinomial(
                torch.softmax(logits / temperature, dim=-1), 1, generator=generator
            ).reshape(1, 1)
        past = output.past_key_values
        new.append(int(inputs))
    return tokenizer.decode(new)
