"""From ``data.*`` to a data folder that is ready, and the rules that only the data itself can answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from toolkit.config.data import DataConfig, DocumentMasking
from toolkit.config.mixture import parse_sources
from toolkit.config.schema import RunConfig
from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.manifest import DataManifest, read_manifest
from toolkit.data.order.samples import too_short
from toolkit.data.tokens.stdlib import ensure
from toolkit.errors import Problem
from toolkit.progress import Progress

_READY: dict[str, Callable[[DataConfig, Progress], DataManifest]] = {
    "stdlib": lambda data, progress: ensure(data.path, data.vocab_size, progress),
    "prepared": lambda data, progress: read_manifest(data.path),
}


def ready(data: DataConfig, progress: Progress) -> DataManifest:
    """The data of a run, made first where it is the embedded set. Read its splits from ``manifest.folder``.

    Raises:
        InputError: the folder is absent or cannot be read.
    """
    return _READY[data.name](data, progress)


def text_folder(data: DataConfig) -> str:
    """The folder whose tokenizer made a run's text: of a mixture any source's, since all have one."""
    return parse_sources(data.sources)[min(data.sources)].path if data.sources else data.path


def special_tokens_of(data: DataConfig, folder: str | Path) -> SpecialTokens:
    """What special tokens in a run's text were made into, so that a prompt is treated alike.

    Args:
        folder: the data folder whose tokenizer is used; not read for data=dataset, where the run itself makes tokens.
    """
    if data.name == "dataset":
        return data.special_tokens
    return SpecialTokens[read_manifest(folder).recipe.get("special_tokens", SpecialTokens.text.name)]


def data_problems(config: RunConfig, manifest: DataManifest, vocab_size: int | None = None) -> list[Problem]:
    """What a run asks of its data folder and does not find.

    Args:
        vocab_size: rows of the embedding, where the plan knows better than ``model.vocab_size`` (``model.pretrained``).
    """
    path = config.data.path
    problems = [
        vocabulary_problem(config, manifest, path, vocab_size),
        documents_problem(config, manifest, "data.path", path),
        split_problem(config, manifest, "train", "data.path", path),
    ]
    problems += [
        split_problem(config, manifest, name, "eval.sets", path)
        for name in config.eval.sets
        if config.eval.every
    ]
    problems.append(special_tokens_problem(config, manifest, path))
    return [problem for problem in problems if problem is not None]


def vocabulary_problem(
    config: RunConfig, manifest: DataManifest, path: str, vocab_size: int | None
) -> Problem | None:
    rows = config.model.vocab_size if vocab_size is None else vocab_size
    size = manifest.tokenizer.size
    if rows is None or size <= rows:
        return None
    seen = f"model.vocab_size={rows}, the tokenizer of {path} has {size} tokens"
    remedies = []
    if config.model.pretrained is None:
        remedies.append(f"write model.vocab_size={size} or more")
    if config.data.name == "stdlib":
        remedies.append(f"write data.vocab_size={rows}")
    elif config.model.pretrained is not None:
        remedies.append(f"prepare the data with the tokenizer of {config.model.pretrained}")
    return Problem("model.vocab_size", seen, "every token has a row in the embedding", ", or ".join(remedies))


def documents_problem(config: RunConfig, manifest: DataManifest, key: str, path: str) -> Problem | None:
    """Of the folder ``path`` that ``key`` names: windows are tokens alone, so documents end where a token says so."""
    if config.data.documents is DocumentMasking.joined or manifest.tokenizer.ends_documents:
        return None
    return Problem(
        "data.documents",
        f"data.documents=separate, {key}={path}, where not every document ends with end-of-text",
        "documents are kept apart where each ends with the tokenizer's end-of-text, which stands nowhere else",
        "prepare the data again with launch/prepare.py, or write data.documents=joined",
    )


def special_tokens_problem(config: RunConfig, manifest: DataManifest, path: str) -> Problem | None:
    """Of data that was tokenised before: it cannot be made otherwise now."""
    asked, made = config.data.special_tokens, manifest.recipe.get("special_tokens", SpecialTokens.text.name)
    if asked is SpecialTokens.refuse or asked.name == made:
        return None
    return Problem(
        "data.special_tokens",
        f"data.special_tokens={asked.name}, and {path} was prepared with special_tokens={made}",
        "what special tokens become is decided when text is tokenised",
        f"leave out data.special_tokens, or prepare the data again with special_tokens={asked.name}",
    )


def split_problem(
    config: RunConfig, manifest: DataManifest, split: str, key: str, path: str
) -> Problem | None:
    """Of one split of the folder ``path`` that ``key`` asks for: there, and long enough."""
    if split not in manifest.splits:
        there = ", ".join(sorted(manifest.splits))
        seen = f"{key}={path if key != 'eval.sets' else config.eval.sets}, no split {split}"
        rule = "the data folder holds the training split and every evaluation set"
        return Problem(key, seen, rule, f"there are: {there}; choose among them, or prepare the data again")
    tokens = manifest.splits[split].tokens
    if key != "eval.sets" and tokens < config.train.sequence_length + 1:
        return too_short(tokens, config.train.sequence_length)
    if tokens < 2:
        seen = f"split {split} of {path} has {tokens} tokens"
        return Problem(
            key,
            seen,
            "an evaluation set has a token to predict",
            "leave it out of eval.sets, or prepare more text",
        )
    return None
