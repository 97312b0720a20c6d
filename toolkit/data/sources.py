"""From ``data.*`` to a data folder that is ready, and the rules that only the data itself can answer."""

from __future__ import annotations

from collections.abc import Callable

from toolkit.config.schema import DataConfig, RunConfig
from toolkit.data.manifest import DataManifest, read_manifest
from toolkit.data.samples import too_short
from toolkit.data.stdlib import ensure
from toolkit.errors import InputError, Problem
from toolkit.progress import Progress

_SOURCES: dict[str, Callable[[DataConfig, Progress], DataManifest]] = {
    "stdlib": lambda data, progress: ensure(data.path, data.vocab_size, progress),
    "prepared": lambda data, progress: read_manifest(data.path),
}


def ready(data: DataConfig, progress: Progress) -> DataManifest:
    """The data of a run, made first where it is the embedded set. Read its splits from ``manifest.folder``.

    Raises:
        InputError: the folder is absent or cannot be read.
    """
    return _SOURCES[data.name](data, progress)


def ready_for(config: RunConfig, vocab_size: int | None, progress: Progress) -> DataManifest:
    """The data of a run, ready and fit for it.

    Args:
        vocab_size: see ``data_problems``.

    Raises:
        InputError: the folder is absent or cannot be read, or the data lack what the run asks of them.
    """
    manifest = ready(config.data, progress)
    problems = data_problems(config, manifest, vocab_size)
    if problems:
        raise InputError(*problems)
    return manifest


def data_problems(config: RunConfig, manifest: DataManifest, vocab_size: int | None = None) -> list[Problem]:
    """What a run asks of its data and does not find.

    Args:
        vocab_size: rows of the embedding, where the plan knows better than ``model.vocab_size`` (``model.pretrained``).
    """
    problems: list[Problem] = []
    rows = config.model.vocab_size if vocab_size is None else vocab_size
    size = manifest.tokenizer.size
    if rows is not None and size > rows:
        seen = f"model.vocab_size={rows}, the tokenizer of {config.data.path} has {size} tokens"
        remedy = f"write model.vocab_size={size} or more"
        if config.data.name == "stdlib":
            remedy += f", or data.vocab_size={rows}"
        problems.append(Problem("model.vocab_size", seen, "every token has a row in the embedding", remedy))
    wanted = ["train", *(name for name in config.eval.sets if config.eval.every)]
    for name in wanted:
        key = "data.path" if name == "train" else "eval.sets"
        if name not in manifest.splits:
            there = ", ".join(sorted(manifest.splits))
            seen = f"{key}={config.data.path if name == 'train' else config.eval.sets}, no split {name}"
            rule = "the data folder holds the training split and every evaluation set"
            problems.append(Problem(key, seen, rule, f"there are: {there}; choose among them, or prepare the data again"))
        elif name == "train" and manifest.splits[name].tokens < config.train.sequence_length + 1:
            problems.append(too_short(manifest.splits[name].tokens, config.train.sequence_length))
        elif manifest.splits[name].tokens < 2:
            seen = f"split {name} of {config.data.path} has {manifest.splits[name].tokens} tokens"
            remedy = "leave it out of eval.sets, or prepare more text"
            problems.append(Problem(key, seen, "an evaluation set has a token to predict", remedy))
    return problems
