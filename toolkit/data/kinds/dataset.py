"""Training directly on a ``datasets`` source: ``data=dataset``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.config.schema import RunConfig
from toolkit.data.checks import check_split, check_vocabulary
from toolkit.data.dataset.data_folder import TrainingSource, ensure_dataset_folder
from toolkit.data.dataset.documents import ArrowDocuments, DocumentSource, StreamedDocuments
from toolkit.data.dataset.lanes import rank_lanes
from toolkit.data.dataset.source import open_source
from toolkit.data.dataset.stream import DatasetStream
from toolkit.data.dataset.tokenizer_pool import TokenizerPool
from toolkit.data.kinds.text import build_eval_sets
from toolkit.data.manifest import read_manifest
from toolkit.data.registry import DataKind, RunData
from toolkit.data.tokens.token_array import open_split
from toolkit.data.tokens.tokenizer import TOKENIZER_FILE
from toolkit.errors import InputError
from toolkit.plan.types import BatchPlan
from toolkit.progress import Progress


def _prepare(config: RunConfig, vocab_size: int | None, progress: Progress) -> str:
    manifest = ensure_dataset_folder(config, progress)
    tokenizer = str(config.data.dataset.tokenizer)
    problems = [check_vocabulary(config, manifest, tokenizer, vocab_size)]
    problems += [
        check_split(config, manifest, name, "eval.sets", str(config.data.dataset.path))
        for name in config.eval.sets
        if config.eval.every
    ]
    errors = [problem for problem in problems if problem is not None]
    if errors:
        raise InputError(*errors)
    return str(manifest.folder)


def _open(config: RunConfig, batch: BatchPlan, data_rank: int, folder: str) -> RunData:
    data, seed = config.data.dataset, config.data.shuffle_seed
    manifest, opened = read_manifest(folder), TrainingSource.read(folder)
    if opened.files:
        documents: DocumentSource = ArrowDocuments(opened.files, data.text, seed)
    else:
        pinned = replace(data, revision=opened.revision)
        documents = StreamedDocuments(
            lambda: open_source(pinned).stream(data.split),
            data.text,
            rank_lanes(batch, data_rank),
            batch.global_batch,
        )
    dtype = np.dtype(np.uint16 if manifest.tokenizer.size <= 1 << 16 else np.uint32)
    encoders = partial(
        TokenizerPool,
        manifest.tokenizer_folder / TOKENIZER_FILE,
        end_of_text=manifest.tokenizer.end_of_text,
        dtype=dtype,
        held_out=data.validation,
        special_tokens=config.data.special_tokens,
        count=data.workers,
    )
    stream = DatasetStream(
        documents,
        encoders,
        fingerprint=opened.fingerprint,
        sequence_length=config.train.sequence_length,
        seed=seed,
        batch=batch,
        data_rank=data_rank,
        gather=all_gather_states,
    )
    sets = {name: open_split(manifest.folder, name) for name in config.eval.sets} if config.eval.every else {}
    return RunData(
        stream,
        build_eval_sets(sets, config, batch, data_rank),
        Path(manifest.tokenizer_folder),
        lambda: None,
        end_of_text=manifest.tokenizer.end_of_text,
    )


def all_gather_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the states of all ranks; a collective if there is more than one rank."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [state]
    states = [state] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


DATASET = DataKind(_prepare, _open)
