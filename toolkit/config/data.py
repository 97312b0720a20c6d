"""The section ``data`` of the schema: the samples of a run and their location."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from toolkit.config import mixture
from toolkit.config.checks import at_least, check
from toolkit.config.special_tokens import SpecialTokens
from toolkit.config.urls import is_url, shown, url_problem
from toolkit.errors import ConfigError


class DocumentMasking(Enum):
    """Whether tokens attend to other documents in the same window."""

    joined = "joined"
    separate = "separate"


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    path: str | None = None
    """dataset: a folder, a file or pattern ('corpus/*.jsonl.gz', in quotes), a save_to_disk folder, or a
    Hugging Face hub id.
    """
    name: str | None = None
    """dataset: its configuration, if it has several."""
    split: str = "train"
    """dataset: the split to train on."""
    revision: str | None = None
    """dataset: branch, tag or commit of a dataset on the hub. Null: its main branch at the start of the run.
    """
    text: list[str] = field(default_factory=lambda: ["text"])
    """dataset: the column with a document's text, or several, [title,body], joined by an empty line; null
    values are skipped.
    """
    tokenizer: str | None = None
    """dataset: a tokenizer.json, its folder, a data folder with a tokenizer, or a hub id for transformers'
    AutoTokenizer.
    """
    trust_remote_code: bool = False
    """dataset: allow Python code of a tokenizer to run on this machine. If false, such a tokenizer is
    refused.
    """
    end_of_text: str | None = None
    """dataset: the token that ends every document. Null: the tokenizer's eos token."""
    validation: float = 0.0
    """dataset: share of the documents reserved for the evaluation set named validation, chosen by each
    document's hash.
    """
    streaming: bool = False
    """dataset: fetch the data during training, in its own order and not shuffled; every rank reads the whole
    stream.
    """
    workers: int = 2
    """dataset: tokenizer processes per rank. They do not change the samples."""

    def __post_init__(self) -> None:
        at_least("data.dataset", 1, workers=self.workers)
        check(
            0 <= self.validation <= 0.5,
            "data.dataset.validation",
            self.validation,
            "data.dataset.validation is a share, from 0 to 0.5",
            "write data.dataset.validation=0.005",
        )


@dataclass(kw_only=True, slots=True)
class DataCacheConfig:
    folder: str | None = None
    """Cache folder for data in an object store, shared by the ranks of a machine: on a local disk, or under
    /dev/shm for memory. Null: no cache, and only the needed windows are fetched.
    """
    gib: float = 16.0
    """Size limit of the cache in GiB; the oldest blocks are removed first. Changing the limit empties the
    folder.
    """

    def __post_init__(self) -> None:
        check(
            self.folder is None or not is_url(self.folder),
            "data.cache.folder",
            shown(self.folder or ""),
            "a cache is a folder on this machine",
            "write data.cache.folder=FOLDER",
        )
        check(
            self.gib > 0,
            "data.cache.gib",
            self.gib,
            "the size of a cache is positive",
            "write data.cache.gib=16, or data.cache.folder=null",
        )


@dataclass(kw_only=True, slots=True)
class DataConfig:
    name: str = "stdlib"
    """stdlib (the source files of Python's standard library, prepared on first use), prepared (a folder from
    launch/prepare.py), mixture (several of these), dataset (a local or hub dataset, tokenised during
    training), arrays (labelled images in a folder of records) or custom (data.target).
    """
    path: str = "data/stdlib"
    """Folder with train and validation shards, tokenizer and manifest; prepared: also a URL, s3://, gs://,
    az:// or http(s)://.
    """
    vocab_size: int = 4096
    """stdlib: size of the byte-level BPE tokenizer that is trained on the text."""
    shuffle_seed: int = 0
    """Seed of the sample order, independent of train.seed: two runs can have different weights and the same
    order.
    """
    max_samples: int | None = None
    """stdlib, prepared, arrays: train on the first samples of the data only, 1000 or 10k. Null: on all."""
    documents: DocumentMasking = DocumentMasking.joined
    """joined: tokens attend to all earlier tokens of their window; separate: only to their own document, and
    positions restart in each document.
    """
    special_tokens: SpecialTokens = SpecialTokens.refuse
    """dataset: how to tokenise the string of a special token (<|user|>) in a document: parse makes it that
    token, text makes it ordinary text, refuse stops with an error that names the document. For a prepared
    folder, special_tokens of launch/prepare.py decided it.
    """

    target: str | None = None
    """custom: dotted path to a dataset class of your own, with __len__ and __getitem__, or iterable:
    my.package.Dataset.
    """
    arguments: dict[str, Any] = field(default_factory=dict)
    """custom: keyword arguments of data.target, each given as +data.arguments.NAME=VALUE."""
    workers: int = 0
    """custom: processes per rank that read the training samples of a map-style dataset ahead; 0: the training
    process reads them when they are needed. They do not change the samples.
    """
    sources: dict[str, Any] = field(default_factory=dict)
    """mixture: NAME: {path: FOLDER, weight: 0.7} for each source, given as +data.sources.NAME.path=FOLDER
    +data.sources.NAME.weight=0.7. Only the ratios of weights matter; the default is 1."""
    phases: list[Any] = field(default_factory=list)
    """mixture: other weights from a step on, [{from_step: 1000, weights: {NAME: 0.5, ...}}, ...]; 0 pauses a
    source.
    """
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    cache: DataCacheConfig = field(default_factory=DataCacheConfig)

    def __post_init__(self) -> None:
        kinds = ("stdlib", "prepared", "mixture", "dataset", "arrays", "custom")
        remedy = "write data=stdlib, data=prepared data.path=FOLDER, or data=mixture and its data.sources"
        check(self.name in kinds, "data.name", self.name, f"data is one of {', '.join(kinds)}", remedy)
        mistakes = [
            *filter(None, [url_problem("data.path", self.path)]),
            *mixture.problems(self.sources, self.phases),
        ]
        if mistakes:
            raise ConfigError(*mistakes)
        check(
            self.name != "stdlib" or not is_url(self.path),
            "data.path",
            self.path,
            "data=stdlib is prepared on this machine",
            "write data.path=FOLDER, or data=prepared for data in an object store",
        )
        at_least("data", 257, vocab_size=self.vocab_size)
        at_least("data", 0, workers=self.workers)
        at_least("data", 1, max_samples=self.max_samples)
        check(
            self.max_samples is None or self.name in ("stdlib", "prepared", "arrays"),
            "data.max_samples",
            f"{self.max_samples}, data.name={self.name}",
            "the first samples are defined for stdlib, prepared and arrays",
            "write data.max_samples=null",
        )

    @property
    def is_arrays(self) -> bool:
        """Whether samples are records of arrays: labelled images, unless the run has its own task."""
        return self.name == "arrays"

    @property
    def is_text(self) -> bool:
        """Whether samples are tokens."""
        return self.name not in ("arrays", "custom")

    @property
    def is_custom(self) -> bool:
        """Whether samples come from a dataset of the user's own code."""
        return self.name == "custom"
