"""Several folders of tokens as one: ``data=mixture``."""

from __future__ import annotations

from functools import cache

from toolkit.config.mixture import SourceSetting, parse_phases, parse_sources
from toolkit.config.schema import RunConfig
from toolkit.data.manifest import DataManifest, read_manifest
from toolkit.data.order.mixture import Mixture, Phase
from toolkit.data.order.samples import TokenWindows
from toolkit.data.order.stream import Stream, source_seed
from toolkit.data.registry import DataKind, RunData
from toolkit.data.remote.cache import cache_of
from toolkit.data.remote.tokens import survey
from toolkit.data.sources import documents_problem, special_tokens_problem, split_problem, vocabulary_problem
from toolkit.data.text import text_sets, unigram
from toolkit.data.tokens.documents import waste_of
from toolkit.data.tokens.token_array import open_split
from toolkit.errors import InputError, Problem
from toolkit.plan.types import BatchPlan
from toolkit.progress import Progress


def mixture_of(config: RunConfig, batch: BatchPlan) -> Mixture:
    """Of ``data.sources``, sorted by name, and ``data.phases``, whose steps become samples through the batch plan."""
    phases = parse_phases(config.data.sources, config.data.phases)
    table = [Phase(batch.at(phase.from_step).first_sample, tuple(phase.weights.values())) for phase in phases]
    return Mixture(table, config.data.shuffle_seed)


def _ready(config: RunConfig, vocab_size: int | None, progress: Progress) -> str:
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
                    f"{key}={source.path}: {one.seen.removeprefix(f'data.path={source.path}: ')}",
                    one.rule,
                    one.remedy.replace("data.path=", f"{key}="),
                )
                for one in error.problems
            ]
    problems += _problems(config, sources, manifests, vocab_size)
    if problems:
        raise InputError(*problems)
    for name, manifest in manifests.items():
        if manifest.url is not None:
            sets = [
                one.partition("/")[2]
                for one in config.eval.sets
                if config.eval.every and one.partition("/")[0] == name
            ]
            survey(manifest, ["train", *sets])
    return next(iter(manifests.values())).place


def _problems(
    config: RunConfig,
    sources: dict[str, SourceSetting],
    manifests: dict[str, DataManifest],
    vocab_size: int | None,
) -> list[Problem]:
    """Of the sources whose manifests could be read."""
    found: list[Problem | None] = []
    first: DataManifest | None = None
    for name, manifest in manifests.items():
        key, path = f"data.sources.{name}.path", sources[name].path
        first = first or manifest
        if manifest.tokenizer.hash != first.tokenizer.hash:
            found.append(
                Problem(
                    key,
                    f"{key}={path}, made with the tokenizer {manifest.tokenizer.hash}, that of "
                    f"{next(iter(manifests))} with {first.tokenizer.hash}",
                    "all sources are made with one tokenizer",
                    "prepare them again with one tokenizer",
                )
            )
        found += [
            vocabulary_problem(config, manifest, path, vocab_size),
            documents_problem(config, manifest, key, path),
            split_problem(config, manifest, "train", key, path),
            special_tokens_problem(config, manifest, path),
        ]
    for name in config.eval.sets if config.eval.every else []:
        source, _, split = name.partition("/")
        if source not in sources or not split:
            known = ",".join(f"{one}/validation" for one in sources)
            found.append(
                Problem(
                    "eval.sets",
                    f"eval.sets has {name}",
                    "an evaluation set of a mixture is a source and a split of it",
                    f"write eval.sets=[{known}], or some of these",
                )
            )
        elif source in manifests:
            found.append(split_problem(config, manifests[source], split, "eval.sets", sources[source].path))
    return [problem for problem in found if problem is not None]


def _open(config: RunConfig, batch: BatchPlan, data_rank: int, folder: str) -> RunData:
    """``folder`` is of the first source; the others are not in it."""
    sources, seed = parse_sources(config.data.sources), config.data.shuffle_seed
    manifests = {name: read_manifest(source.path) for name, source in sources.items()}
    kept = cache_of(config.data.cache)
    training = {
        name: open_split(manifest.place, "train", cache=kept, surveyed=True)
        for name, manifest in manifests.items()
    }
    windows = {
        name: TokenWindows(split, config.train.sequence_length, source_seed(seed, name))
        for name, split in training.items()
    }
    stream = Stream(windows, mixture_of(config, batch), seed=seed, batch=batch, data_rank=data_rank)
    sets = {}
    for name in config.eval.sets if config.eval.every else []:
        source, _, split = name.partition("/")
        sets[name] = open_split(manifests[source].place, split, cache=kept, repeated=True, surveyed=True)
    text = training[next(iter(sets)).partition("/")[0]] if sets else next(iter(training.values()))
    first = next(iter(manifests.values()))  # all have one tokenizer
    end_of_text, length = first.tokenizer.end_of_text, config.train.sequence_length
    return RunData(
        stream,
        text_sets(sets, config, batch, data_rank),
        first.tokenizer_folder,
        cache(lambda: unigram(config, batch, text, sets)),
        end_of_text=end_of_text,
        waste=lambda: {name: waste_of(split, end_of_text, length) for name, split in training.items()},
    )


MIXTURE = DataKind(_ready, _open)
