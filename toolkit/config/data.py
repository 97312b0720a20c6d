"""The section ``data`` of the schema: which samples a run is trained on, and where they lie."""

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
    """What attention makes of documents that lie in one window."""

    joined = "joined"
    separate = "separate"


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    path: str | None = None
    """dataset: a folder, a file or pattern ('corpus/*.jsonl.gz', in quotes), a folder by save_to_disk, or an
    id on the Hugging Face hub.
    """
    name: str | None = None
    """dataset: its configuration, where it has several."""
    split: str = "train"
    """dataset: the split that is trained on, whole."""
    revision: str | None = None
    """dataset: branch, tag or commit of a dataset on the hub. Null: its main branch as it is when the run
    starts.
    """
    text: list[str] = field(default_factory=lambda: ["text"])
    """dataset: the column that holds a document's text, or several, [title,body], joined by an empty line;
    null is left out.
    """
    tokenizer: str | None = None
    """dataset: a tokenizer.json, its folder, a data folder that has one, or a hub id that transformers'
    AutoTokenizer opens.
    """
    trust_remote_code: bool = False
    """dataset: Python code that comes with a tokenizer may run on this machine. Without it such a tokenizer
    is refused.
    """
    end_of_text: str | None = None
    """dataset: the token that ends every document. Null: the tokenizer's own eos token."""
    validation: float = 0.0
    """dataset: share of the documents that training leaves out, by each document's own hash: the evaluation
    set named validation.
    """
    streaming: bool = False
    """dataset: fetch it piece by piece while training, in its own order and not shuffled; every rank reads
    the whole stream.
    """
    workers: int = 2
    """dataset: tokenizer processes of each rank. The samples do not depend on it."""

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
    """Where blocks of data in a store are kept on this machine, for all its ranks: a local disk, or a folder
    under /dev/shm for memory. Null: none, and exactly the windows that are needed are fetched.
    """
    gib: float = 16.0
    """The most that is kept, in GiB; the oldest blocks go first. A folder has one size: another one empties
    it.
    """

    def __post_init__(self) -> None:
        check(
            self.folder is None or not is_url(self.folder),
            "data.cache.folder",
            shown(self.folder or ""),
            "a cache lies on this machine",
            "write data.cache.folder=FOLDER",
        )
        check(
            self.gib > 0,
            "data.cache.gib",
            self.gib,
            "a cache has some size",
            "write data.cache.gib=16, or data.cache.folder=null",
        )


@dataclass(kw_only=True, slots=True)
class DataConfig:
    name: str = "stdlib"
    """stdlib (the running Python's own source files, made ready on first use), prepared (a folder by
    launch/prepare.py), mixture (several of these), dataset (straight from a local or hub dataset, tokenised
    while training) or arrays (labelled images in a folder of records).
    """
    path: str = "data/stdlib"
    """Folder with train and validation shards, tokenizer and manifest; prepared: also a URL, s3://, gs://,
    az:// or http(s)://.
    """
    vocab_size: int = 4096
    """stdlib: size of the byte-level BPE tokenizer that is trained on the text."""
    shuffle_seed: int = 0
    """Seed of the sample order; apart from train.seed, so that two runs can differ in weights and share their
    order.
    """
    documents: DocumentMasking = DocumentMasking.joined
    """joined: tokens see all that is before them in their window; separate: only their own document, and
    positions begin anew in it.
    """
    special_tokens: SpecialTokens = SpecialTokens.refuse
    """dataset: what the string of one of the tokenizer's special tokens (<|user|>) becomes where a document
    contains it: parse makes it that token, text makes it ordinary text, refuse stops with an error that names
    the document. A prepared folder was made with special_tokens of launch/prepare.py.
    """

    sources: dict[str, Any] = field(default_factory=dict)
    """mixture: NAME: {path: FOLDER, weight: 0.7} of each source, given as +data.sources.NAME.path=FOLDER
    +data.sources.NAME.weight=0.7. Only the ratios of weights matter; without one it is 1.
    """
    phases: list[Any] = field(default_factory=list)
    """mixture: other weights from a step on, [{from_step: 1000, weights: {NAME: 0.5, ...}}, ...]; 0 lets a
    source rest.
    """
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    cache: DataCacheConfig = field(default_factory=DataCacheConfig)

    def __post_init__(self) -> None:
        kinds = ("stdlib", "prepared", "mixture", "dataset", "arrays")
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
            "data=stdlib is made on this machine",
            "write data.path=FOLDER, or data=prepared for data in a store",
        )
        at_least("data", 257, vocab_size=self.vocab_size)

    @property
    def images(self) -> bool:
        """Samples are labelled images, not text."""
        return self.name == "arrays"
