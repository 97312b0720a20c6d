"""Check that prepared data fits a run: vocabulary, document boundaries, special tokens and splits."""

from __future__ import annotations

from pathlib import Path

from toolkit.commands import command_line
from toolkit.config.data import DataConfig, DocumentMasking
from toolkit.config.mixture import parse_sources
from toolkit.config.schema import RunConfig
from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.manifest import DataManifest, read_manifest
from toolkit.data.order.samples import split_too_short
from toolkit.errors import Problem


def tokenizer_folder(data: DataConfig) -> str:
    """Return the folder of the tokenizer that encoded a run's text; sources of a mixture have the same."""
    return parse_sources(data.sources)[min(data.sources)].path if data.sources else data.path


def special_tokens_mode(data: DataConfig, folder: str | Path) -> SpecialTokens:
    """Return how special tokens in a run's text were encoded, so that prompts are encoded alike.

    Args:
        folder: the data folder of the tokenizer; not read for data=dataset, where the run encodes text
            itself.
    """
    if data.name == "dataset":
        return data.special_tokens
    return SpecialTokens[read_manifest(folder).recipe.get("special_tokens", SpecialTokens.text.name)]


def check_vocabulary(
    config: RunConfig, manifest: DataManifest, path: str, vocab_size: int | None
) -> Problem | None:
    rows = config.model.vocab_size if vocab_size is None else vocab_size
    size = manifest.tokenizer.size
    if rows is None or size <= rows:
        return None
    key = "model.hf.config.vocab_size" if config.model.hf.architecture else "model.vocab_size"
    seen = f"{key}={rows}, the tokenizer of {path} has {size} tokens"
    remedies = []
    if config.model.pretrained is None:
        remedies.append(f"write {'+' * ('.hf.' in key)}{key}={size} or more")
    if config.data.name == "stdlib":
        remedies.append(f"write data.vocab_size={rows}")
    elif config.model.pretrained is not None:
        remedies.append(f"prepare the data with the tokenizer of {config.model.pretrained}")
    return Problem(key, seen, "every token must have a row in the embedding", ", or ".join(remedies))


def check_documents(config: RunConfig, manifest: DataManifest, key: str, path: str) -> Problem | None:
    """Check that documents in the folder ``path`` can be separated at end-of-text tokens."""
    if config.data.documents is DocumentMasking.joined or manifest.tokenizer.ends_documents:
        return None
    return Problem(
        "data.documents",
        f"data.documents=separate, {key}={path}, where not every document ends with end-of-text",
        "documents can be separated if each ends with the tokenizer's end-of-text, which occurs nowhere else",
        f"prepare the data again with {command_line('prepare')}, or write data.documents=joined",
    )


def check_special_tokens(config: RunConfig, manifest: DataManifest, path: str) -> Problem | None:
    """Check ``data.special_tokens`` against how prepared data was encoded."""
    requested, used = (
        config.data.special_tokens,
        manifest.recipe.get("special_tokens", SpecialTokens.text.name),
    )
    if requested is SpecialTokens.refuse or requested.name == used:
        return None
    return Problem(
        "data.special_tokens",
        f"data.special_tokens={requested.name}, and {path} was prepared with special_tokens={used}",
        "the treatment of special tokens is decided when text is tokenised",
        f"leave out data.special_tokens, or prepare the data again with special_tokens={requested.name}",
    )


def check_split(config: RunConfig, manifest: DataManifest, split: str, key: str, path: str) -> Problem | None:
    """Check that the folder ``path``, named by ``key``, has the split, and that it is long enough."""
    if split not in manifest.splits:
        available = ", ".join(sorted(manifest.splits))
        seen = f"{key}={path if key != 'eval.sets' else config.eval.sets}, no split {split}"
        rule = "the data folder holds the training split and every evaluation set"
        return Problem(
            key, seen, rule, f"available: {available}; choose among them, or prepare the data again"
        )
    tokens = manifest.splits[split].tokens
    if key != "eval.sets" and tokens < config.train.sequence_length + 1:
        return split_too_short(tokens, config.train.sequence_length)
    if tokens < 2:
        seen = f"split {split} of {path} has {tokens} tokens"
        return Problem(
            key,
            seen,
            "an evaluation set has a token to predict",
            "leave it out of eval.sets, or prepare more text",
        )
    return None
