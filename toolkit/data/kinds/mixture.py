"""A mixture of several folders of tokens: ``data=mixture``."""

from __future__ import annotations

from functools import cache

from toolkit.config.mixture import SourceSetting, parse_phases, parse_sources
from toolkit.config.schema import RunConfig
from toolkit.data.checks import check_documents, check_special_tokens, check_split, check_vocabulary
from toolkit.data.kinds.text import build_eval_sets, unigram_baseline
from toolkit.data.manifest import DataManifest, read_manifest
from toolkit.data.order.mixture import Mixture, MixturePhase
from toolkit.data.order.samples import TokenWindows
from toolkit.data.order.stream import Stream, source_seed
from toolkit.data.registry import DataKind, RunData
from toolkit.data.remote.cache import open_cache
from toolkit.data.remote.tokens import check_remote_files
from toolkit.data.tokens.documents import estimate_waste
from toolkit.data.tokens.token_array import open_split
from toolkit.errors import InputError, Problem
from toolkit.plan.types import BatchPlan
from toolkit.progress import Progress


def build_mixture(config: RunConfig, batch: BatchPlan) -> Mixture:
    """Build the mixture of ``data.sources``, sorted by name, with the phases of ``data.phases``."""
    phases = parse_phases(config.data.sources, config.data.phases)
    table = [
        MixturePhase(batch.at(phase.from_step).first_sample, tuple(phase.weights.values()))
        for phase in phases
    ]
    return Mixture(table, config.data.shuffle_seed)


def _prepare(config: RunConfig, vocab_size: int | None, progress: Progress) -> str:
    sources, problems = parse_sources(config.data.sources), list[Problem]()
    manifests: dict[str, DataManifest] = {}
    for name, source in sources.items():
        try:
            manifests[name] = read_manifest(source.path)
        except InputError as error:
            key = f"data.sources.{name}.path"
            problems += [
                Problem(
                    key,
                    f"{key}={source.path}: {problem.seen.removeprefix(f'data.path={source.path}: ')}",
                    problem.rule,
                    problem.remedy.replace("data.path=", f"{key}="),
                )
                for problem in error.problems
            ]
    problems += _check_sources(config, sources, manifests, vocab_size)
    if problems:
        raise InputError(*problems)
    for name, manifest in manifests.items():
        if manifest.url is not None:
            sets = [
                set_name.partition("/")[2]
                for set_name in config.eval.sets
                if config.eval.every and set_name.partition("/")[0] == name
            ]
            check_remote_files(manifest, ["train", *sets])
    return next(iter(manifests.values())).location


def _check_sources(
    config: RunConfig,
    sources: dict[str, SourceSetting],
    manifests: dict[str, DataManifest],
    vocab_size: int | None,
) -> list[Problem]:
    """Check the sources whose manifests could be read."""
    found: list[Problem | None] = []
    first: DataManifest | None = None
    for name, manifest in manifests.items():
        key, path = f"data.sources.{name}.path", sources[name].path
        first = first or manifest
        if manifest.tokenizer.hash != first.tokenizer.hash:
            found.append(
                Problem(
                    key,
                    f"{key}={path} was encoded with the tokenizer {manifest.tokenizer.hash}, "
                    f"{next(iter(manifests))} with {first.tokenizer.hash}",
                    "all sources have the same tokenizer",
                    "prepare them again with the same tokenizer",
                )
            )
        found += [
            check_vocabulary(config, manifest, path, vocab_size),
            check_documents(config, manifest, key, path),
            check_split(config, manifest, "train", key, path),
            check_special_tokens(config, manifest, path),
        ]
    for name in config.eval.sets if config.eval.every else []:
        source, _, split = name.partition("/")
        if source not in sources or not split:
            choices = ",".join(f"{source_name}/validation" for source_name in sources)
            found.append(
                Problem(
                    "eval.sets",
                    f"eval.sets has {name}",
                    "an evaluation set of a mixture is a source and a split of it",
                    f"write eval.sets=[{choices}], or some of these",
                )
            )
        elif source in manifests:
            found.append(check_split(config, manifests[source], split, "eval.sets", sources[source].path))
    return [problem for problem in found if problem is not None]


def _open(config: RunConfig, batch: BatchPlan, data_rank: int, folder: str) -> RunData:
    # ``folder`` is the first source's; the others are read from the configuration.
    sources, seed = parse_sources(config.data.sources), config.data.shuffle_seed
    manifests = {name: read_manifest(source.path) for name, source in sources.items()}
    block_cache = open_cache(config.data.cache)
    training = {
        name: open_split(manifest.location, "train", cache=block_cache, files_checked=True)
        for name, manifest in manifests.items()
    }
    windows = {
        name: TokenWindows(split, config.train.sequence_length, source_seed(seed, name))
        for name, split in training.items()
    }
    stream = Stream(windows, build_mixture(config, batch), seed=seed, batch=batch, data_rank=data_rank)
    sets = {}
    for name in config.eval.sets if config.eval.every else []:
        source, _, split = name.partition("/")
        sets[name] = open_split(
            manifests[source].location, split, cache=block_cache, repeated=True, files_checked=True
        )
    text = training[next(iter(sets)).partition("/")[0]] if sets else next(iter(training.values()))
    first = next(iter(manifests.values()))  # all sources have the same tokenizer
    end_of_text, length = first.tokenizer.end_of_text, config.train.sequence_length
    return RunData(
        stream,
        build_eval_sets(sets, config, batch, data_rank),
        first.tokenizer_folder,
        cache(lambda: unigram_baseline(config, batch, text, sets)),
        end_of_text=end_of_text,
        waste=lambda: {name: estimate_waste(split, end_of_text, length) for name, split in training.items()},
    )


MIXTURE = DataKind(_prepare, _open)
