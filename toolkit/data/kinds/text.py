"""One folder of tokens: ``data=stdlib`` and ``data=prepared``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

from toolkit.config.schema import RunConfig
from toolkit.data.checks import check_documents, check_special_tokens, check_split, check_vocabulary
from toolkit.data.evaluation import EvalSet, eval_batches, eval_targets, unigram_loss
from toolkit.data.manifest import DataManifest, read_manifest
from toolkit.data.order.samples import TokenWindows
from toolkit.data.order.stream import Stream
from toolkit.data.registry import DataKind, RunData
from toolkit.data.remote.cache import open_cache
from toolkit.data.remote.tokens import check_remote_files
from toolkit.data.tokens.documents import estimate_waste
from toolkit.data.tokens.stdlib import ensure_stdlib
from toolkit.data.tokens.token_array import TokenSource, open_split
from toolkit.errors import InputError, Problem
from toolkit.plan.types import BatchPlan
from toolkit.progress import Progress


def _prepare(config: RunConfig, vocab_size: int | None, progress: Progress) -> str:
    data = config.data
    if data.name == "stdlib":
        manifest = ensure_stdlib(data.path, data.vocab_size, progress)
    else:
        manifest = read_manifest(data.path)
    problems = check_data(config, manifest, vocab_size)
    if problems:
        raise InputError(*problems)
    if manifest.url is not None:
        check_remote_files(manifest, ["train", *(config.eval.sets if config.eval.every else [])])
    return manifest.location


def check_data(config: RunConfig, manifest: DataManifest, vocab_size: int | None = None) -> list[Problem]:
    """Return the requirements of the run that its data folder does not meet.

    Args:
        vocab_size: embedding rows, if the plan determines them rather than ``model.vocab_size``
            (``model.pretrained``).
    """
    path = config.data.path
    problems = [
        check_vocabulary(config, manifest, path, vocab_size),
        check_documents(config, manifest, "data.path", path),
        check_split(config, manifest, "train", "data.path", path),
    ]
    problems += [
        check_split(config, manifest, name, "eval.sets", path)
        for name in config.eval.sets
        if config.eval.every
    ]
    problems.append(check_special_tokens(config, manifest, path))
    return [problem for problem in problems if problem is not None]


def _open(config: RunConfig, batch: BatchPlan, data_rank: int, folder: str) -> RunData:
    manifest = read_manifest(folder)
    block_cache = open_cache(config.data.cache)
    training = open_split(manifest.location, "train", cache=block_cache, files_checked=True)
    sets = {
        name: open_split(manifest.location, name, cache=block_cache, repeated=True, files_checked=True)
        for name in (config.eval.sets if config.eval.every else [])
    }
    seed = config.data.shuffle_seed
    windows = TokenWindows(training, config.train.sequence_length, seed, max_samples=config.data.max_samples)
    stream = Stream({"train": windows}, None, seed=seed, batch=batch, data_rank=data_rank)
    end_of_text = manifest.tokenizer.end_of_text
    return RunData(
        stream,
        build_eval_sets(sets, config, batch, data_rank),
        manifest.tokenizer_folder,
        cache(lambda: unigram_baseline(config, batch, training, sets)),
        end_of_text=end_of_text,
        waste=lambda: {"train": estimate_waste(training, end_of_text, config.train.sequence_length)},
    )


def build_eval_sets(
    sources: Mapping[str, TokenSource], config: RunConfig, batch: BatchPlan, data_rank: int
) -> dict[str, EvalSet]:
    length, batches = config.train.sequence_length, config.eval.batches
    return {
        name: EvalSet(source.data_hash, partial(eval_batches, source, length, batches, batch, data_rank))
        for name, source in sources.items()
    }


def unigram_baseline(
    config: RunConfig, batch: BatchPlan, training: TokenSource, sets: Mapping[str, TokenSource]
) -> float | None:
    """Compute ``RunData.unigram``."""
    for source in sets.values():
        targets = eval_targets(source, config.train.sequence_length, config.eval.batches, batch.global_batch)
        return unigram_loss(training, targets)
    return None


TEXT = DataKind(_prepare, _open)
