"""One folder of records: ``data=arrays``; labelled images, unless ``task.target`` reads other fields."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from toolkit.config.schema import RunConfig
from toolkit.data.evaluation import EvalSet, eval_sample_batches
from toolkit.data.order.stream import Stream
from toolkit.data.records.reader import RecordManifest, check_record_files, open_records, read_record_manifest
from toolkit.data.registry import DataKind, RunData
from toolkit.data.remote.cache import open_cache
from toolkit.errors import InputError, Problem
from toolkit.plan.types import BatchPlan
from toolkit.progress import Progress

IMAGE, LABEL = "image", "label"


def _prepare(config: RunConfig, vocab_size: int | None, progress: Progress) -> str:
    manifest = read_record_manifest(config.data.path)
    problems = list(check_records(config, manifest))
    if problems:
        raise InputError(*problems)
    check_record_files(manifest, ["train", *(config.eval.sets if config.eval.every else [])])
    return config.data.path


def _open(config: RunConfig, batch: BatchPlan, data_rank: int, folder: str) -> RunData:
    block_cache = open_cache(config.data.cache)
    training = open_records(folder, "train", cache=block_cache, files_checked=True)
    training.limit(config.data.max_samples)
    sets = {
        name: open_records(folder, name, cache=block_cache, files_checked=True)
        for name in (config.eval.sets if config.eval.every else [])
    }
    stream = Stream(
        {"train": training}, None, seed=config.data.shuffle_seed, batch=batch, data_rank=data_rank
    )
    batches = {
        name: EvalSet(
            str(records.fingerprint()["data"]),
            partial(eval_sample_batches, records, config.eval.batches, batch, data_rank),
        )
        for name, records in sets.items()
    }
    return RunData(stream, batches, tokenizer=None, unigram=lambda: None, records=training.manifest)


def check_records(config: RunConfig, manifest: RecordManifest) -> Iterator[Problem]:
    """Yield the requirements of the run that its records do not meet."""
    required = ["train", *(name for name in config.eval.sets if config.eval.every)]
    available = [name for name in required if name in manifest.splits]
    for name in dict.fromkeys(required):
        if name not in available:
            key = "data.path" if name == "train" else "eval.sets"
            yield Problem(
                key,
                f"{key}={config.data.path if name == 'train' else config.eval.sets}, no split {name}",
                "the data folder holds the training split and every evaluation set",
                f"available: {', '.join(sorted(manifest.splits))}; use these, or write the records again",
            )
    if config.task.target is not None:  # which decides what it reads
        return
    fields = {field.name: field for field in manifest.fields}
    for name, ndim, kinds, description in (
        (IMAGE, 3, "biuf", "numbers [bands, height, width]"),
        (LABEL, 0, "iu", "a whole number"),
    ):
        field = fields.get(name)
        if field is None or len(field.shape) != ndim or manifest.dtype[name].base.kind not in kinds:
            seen = ", ".join(f"{field.name}: {field.dtype} {list(field.shape)}" for field in manifest.fields)
            yield Problem(
                "data.path",
                f"data.path={config.data.path} has records of {seen}",
                f"the vision task requires the fields {IMAGE} and {LABEL}: {name} must be {description}",
                f"write the records with {name}, or train on text: data=stdlib",
            )
            continue
        least = min((manifest.splits[split].statistics[name].least for split in available), default=0)
        if name == LABEL and least < 0:
            yield Problem(
                "data.path",
                f"data.path={config.data.path} has a {LABEL} of {least:g}",
                "classes are numbered from 0",
                "leave out records without a class, and number the others from 0",
            )


def count_classes(manifest: RecordManifest) -> int:
    """Return the number of classes that the labels of all splits need."""
    return 1 + int(max(split.statistics[LABEL].most for split in manifest.splits.values()))


ARRAYS = DataKind(_prepare, _open)
