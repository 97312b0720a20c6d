"""Prepare a run on a dataset: the dataset itself, the tokenizer, and the evaluation sets.

    data/dataset/<fingerprint>/  source.json: training data; tokenizer/; evaluation shards; manifest.json

The folder has the form of launch/prepare.py's without a training split, so evaluation, export and generation
use it like any other data folder. It is small: evaluation sets have only the tokens that an evaluation reads.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import xxhash

from toolkit.config.data import DatasetConfig
from toolkit.config.schema import RunConfig
from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.dataset.documents import ArrowDocuments, join_columns, to_texts
from toolkit.data.dataset.source import DatasetSource, check_columns, check_split_exists, open_source
from toolkit.data.dataset.tokenizer_pool import Texts
from toolkit.data.dataset.tokenizer_worker import is_held_out
from toolkit.data.manifest import (
    DataManifest,
    DataOrigin,
    TokenizerInfo,
    TokenSplit,
    read_manifest,
    write_manifest,
)
from toolkit.data.manifest_file import MANIFEST_NAME
from toolkit.data.tokens.index import token_dtype
from toolkit.data.tokens.special_tokens import SpecialTokenFinder
from toolkit.data.tokens.tokenizer import TOKENIZER_FILE, encode_texts, install_tokenizer
from toolkit.data.tokens.writer import SplitWriter
from toolkit.errors import InputError, Problem
from toolkit.files import sync_folder, write_whole
from toolkit.progress import Progress

SOURCE_FILE = "source.json"
TOKENIZER_KEY = "data.dataset.tokenizer"
HELD_OUT = (
    "validation"  # the evaluation set of the documents that data.dataset.validation holds out of training
)
MAX_NAMED_FILES = (
    16  # up to this number of files, each has its hash in the fingerprint, so that a changed file is named
)
RECIPE_VERSION = 1  # increase it if the same settings would give other evaluation sets


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSource:
    """Content of ``source.json``: what a rank needs to read the training split without the hub.

    Attributes:
        files: arrow files of the training split, in the order of their rows; empty for a stream.
        revision: the commit of a dataset on the hub.
        fingerprint: of the dataset's bytes, its columns and the tokenizer.
    """

    files: tuple[str, ...]
    revision: str | None
    fingerprint: Mapping[str, str | int]

    @staticmethod
    def read(folder: str | Path) -> TrainingSource:
        content = json.loads((Path(folder) / SOURCE_FILE).read_text(encoding="utf-8"))
        return TrainingSource(
            files=tuple(content["files"]), revision=content["revision"], fingerprint=content["fingerprint"]
        )


def ensure_dataset_folder(config: RunConfig, progress: Progress) -> DataManifest:
    """Find or make the data folder of the run in ``data.path``.

    Any number of processes may call this function at once; the first that finishes names the folder.

    Raises:
        InputError: dataset, split, column or tokenizer are absent or unsuitable.
    """
    data, path = config.data.dataset, Path(config.data.path)
    if data.streaming and config.train.batch_ramp.start is not None:
        raise InputError(
            Problem(
                "train.batch_ramp",
                f"train.batch_ramp.start={config.train.batch_ramp.start}, data.dataset.streaming=true",
                "a batch ramp adds sequences later, and streaming would buffer their documents in memory",
                "leave out data.dataset.streaming or train.batch_ramp",
            )
        )
    source = open_source(data)
    check_split_exists(source, data, data.split, "data.dataset.split")
    eval_sets = list(config.eval.sets) if config.eval.every else []
    held_out = [HELD_OUT] if data.validation and HELD_OUT in eval_sets else []
    for name in eval_sets:
        if name not in held_out:
            _check_eval_set(source, data, name)
    partial = path / f".{os.urandom(4).hex()}.partial"
    try:
        partial.mkdir(parents=True)
        try:
            return _write_folder(
                config,
                source,
                [name for name in eval_sets if name not in held_out],
                held_out,
                partial,
                progress,
            )
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise InputError(
            Problem(
                "data.path",
                f"data.path={path}: {error}",
                "the tokenizer and the evaluation sets can be written there",
                "name a folder that can be written and has room: data.path=FOLDER",
            )
        ) from error


def _write_folder(
    config: RunConfig,
    source: DatasetSource,
    split_names: list[str],
    held_out: list[str],
    partial: Path,
    progress: Progress,
) -> DataManifest:
    data = config.data.dataset
    if data.tokenizer is None:
        raise InputError(
            Problem(
                TOKENIZER_KEY,
                f"{TOKENIZER_KEY} is null",
                "data=dataset tokenises text during training",
                f"write {TOKENIZER_KEY}=FOLDER, tokenizer.json or NAME/ON-THE-HUB",
            )
        )
    info = install_tokenizer(
        data.tokenizer,
        data.end_of_text,
        partial,
        key=TOKENIZER_KEY,
        end_key="data.dataset.end_of_text",
        trust_remote_code=data.trust_remote_code,
    )
    with progress.task(f"opening {data.path}", unit="splits") as task:
        digests = {split: source.digests(split) for split in {data.split, *split_names}}
        training = _training_source(
            source, data, data.split, digests[data.split], info, config.data.special_tokens
        )
        task.advance()
        evaluated = {name: _documents(source, data, name, config.data.shuffle_seed) for name in split_names}
        task.advance(len(split_names))
    special_tokens = config.data.special_tokens
    tokens = config.eval.batches * config.train.global_batch * config.train.sequence_length + 1
    fingerprint_parts = [
        RECIPE_VERSION,
        training.fingerprint,
        training.files,
        tokens,
        {name: digests[name] for name in split_names},
        held_out,
    ]
    if special_tokens is not SpecialTokens.text:
        # Evaluation sets made with `text` must not be reused for `refuse`.
        fingerprint_parts.append(special_tokens.name)
    generation = (
        partial.parent
        / xxhash.xxh3_128_hexdigest(json.dumps(fingerprint_parts, sort_keys=True).encode())[:12]
    )
    if not (generation / MANIFEST_NAME).is_file():
        splits = {
            name: _write_split(
                partial, name, documents.in_file_order(), info, tokens, special_tokens, progress, share=None
            )
            for name, documents in evaluated.items()
        }
        for name in held_out:
            texts = _training_texts(source, data, training, config.data.shuffle_seed)
            splits[name] = _write_split(
                partial, name, texts, info, tokens, special_tokens, progress, share=data.validation
            )
        write_whole(partial / SOURCE_FILE, json.dumps(asdict(training), indent=1) + "\n")
        origin = DataOrigin(
            f"the dataset {data.path}, read while training",
            "not stated",
            len(digests[data.split]),
            0,
            str(training.fingerprint["data"]),
        )
        manifest = DataManifest(
            folder=partial, dtype=token_dtype(info.size).name, origin=origin, tokenizer=info, splits=splits
        )
        write_manifest(manifest, partial)
        if (partial.parent / generation.name).exists() and not (generation / MANIFEST_NAME).is_file():
            shutil.rmtree(generation)  # incomplete: its manifest was deleted
        try:
            partial.replace(generation)
        except OSError:
            if not (generation / MANIFEST_NAME).is_file():
                raise
        sync_folder(generation.parent)
    # As in every data folder, the manifest at the top points to the newest generation.
    write_manifest(read_manifest(generation), generation.parent)
    return read_manifest(generation)


def _training_source(
    source: DatasetSource,
    data: DatasetConfig,
    split: str,
    digests: dict[str, str],
    info: TokenizerInfo,
    special_tokens: SpecialTokens,
) -> TrainingSource:
    """Describe the training split: fetch it and convert it to arrow files, or open it as a stream."""
    fingerprint: dict[str, str | int] = {
        "data": xxhash.xxh3_128_hexdigest(
            json.dumps([data.name, digests, data.streaming], sort_keys=True).encode()
        ),
        "split": split,
        "text": ",".join(data.text),
        "validation": str(data.validation),
        "tokenizer": info.hash,
        "end_of_text": info.end_of_text,
    }
    # `refuse` and `text` give the same tokens, so a run may change from one to the other.
    if special_tokens is SpecialTokens.parse:
        fingerprint["special_tokens"] = special_tokens.name
    if len(digests) <= MAX_NAMED_FILES:
        fingerprint |= {f"file {name}": value for name, value in digests.items()}
    if data.streaming:
        stream = source.stream(split)
        features = stream.features or stream._resolve_features().features
        check_columns(data, features)
        return TrainingSource(files=(), revision=source.revision, fingerprint=fingerprint)
    arrow = source.arrow(split)
    check_columns(data, arrow.features)
    return TrainingSource(files=arrow.files, revision=source.revision, fingerprint=fingerprint)


def _check_eval_set(source: DatasetSource, data: DatasetConfig, name: str) -> None:
    if name in source.splits:
        return
    remedy = f"available: {', '.join(source.splits)}"
    if name == HELD_OUT:
        remedy += "; or hold documents out of training: data.dataset.validation=0.005"
    rule = "an evaluation set is a split of the dataset"
    raise InputError(Problem("eval.sets", f"eval.sets={name} is absent from {data.path}", rule, remedy))


def _documents(source: DatasetSource, data: DatasetConfig, split: str, seed: int) -> ArrowDocuments:
    arrow = source.arrow(split)
    check_columns(data, arrow.features)
    return ArrowDocuments(arrow.files, data.text, seed)


def _training_texts(
    source: DatasetSource, data: DatasetConfig, training: TrainingSource, seed: int
) -> Iterator[Texts]:
    if training.files:
        yield from ArrowDocuments(training.files, data.text, seed).in_file_order()
        return
    for table in (
        source.stream(data.split).select_columns(list(data.text)).with_format("arrow").iter(batch_size=1000)
    ):
        yield to_texts(join_columns(table.combine_chunks().to_batches()[0]))


def _write_split(
    folder: Path,
    name: str,
    batches: Iterator[Texts],
    info: TokenizerInfo,
    tokens: int,
    special_tokens: SpecialTokens,
    progress: Progress,
    *,
    share: float | None,
) -> TokenSplit:
    """Write the first ``tokens`` tokens of a set as whole documents; with ``share`` only held-out ones."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / info.folder / TOKENIZER_FILE))
    finder, written = SpecialTokenFinder(tokenizer), 0
    dtype = token_dtype(info.size)
    with (
        progress.task(f"tokenising {name}", total=tokens, unit="tokens") as task,
        SplitWriter(folder, name, dtype) as writer,
    ):
        for text, ends in batches:
            documents = [bytes(text[first:last]) for first, last in pairwise([0, *ends.tolist()])]
            texts = [
                document.decode(errors="replace")
                for document in documents
                if share is None or is_held_out(document, share)
            ]
            if special_tokens is SpecialTokens.refuse:
                for document in texts:
                    finder.check(
                        document,
                        location=f"a document of the evaluation set {name}",
                        key="data.special_tokens",
                    )
            for document_tokens in encode_texts(tokenizer, texts, info.end_of_text, special_tokens):
                if written < tokens:
                    writer.add(document_tokens)
                    written += len(document_tokens)
            task.advance(min(written, tokens) - task.done)
            if written >= tokens:
                break
        return writer.close()
