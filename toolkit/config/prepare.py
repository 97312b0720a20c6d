"""The schema of ``launch/prepare.py``. The string below a field is its help text.

Keys that determine the bytes of the data are stored in the manifest as its recipe.
``toolkit/data/prepare/plan.py`` checks what involves two keys or files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from toolkit.config.checks import at_least, check
from toolkit.config.special_tokens import SpecialTokens


class InputFormat(Enum):
    """File format of the input."""

    auto = "auto"
    text = "text"
    lines = "lines"
    jsonl = "jsonl"
    json = "json"
    csv = "csv"
    tsv = "tsv"
    parquet = "parquet"
    dataset = "dataset"


class OnBadRow(Enum):
    """What to do with a row without a document: invalid JSON, a missing field, a field that is not text."""

    refuse = "refuse"
    skip = "skip"


@dataclass(kw_only=True, slots=True)
class TokenizerConfig:
    path: str | None = None
    """A folder or hub id for transformers' AutoTokenizer, or a tokenizer.json. Null: train a tokenizer on the
    input.
    """
    trust_remote_code: bool = False
    """Allow Python code of a tokenizer to run on this machine. If false, such a tokenizer is refused."""
    end_of_text: str | None = None
    """The token that ends every document. Null: the tokenizer's eos token."""
    vocab_size: int = 4096
    """Size of the byte-level BPE tokenizer that is trained if there is no tokenizer.path."""
    sample_mib: int = 64
    """MiB of text to train the tokenizer on, sampled evenly from the input; all of it if the input is
    smaller.
    """

    def __post_init__(self) -> None:
        at_least("tokenizer", 257, vocab_size=self.vocab_size)
        at_least("tokenizer", 1, sample_mib=self.sample_mib)


@dataclass(kw_only=True, slots=True)
class InputDatasetConfig:
    name: str | None = None
    """Configuration of the dataset, if it has several."""
    split: str = "train"
    """Split of the dataset to read."""
    revision: str | None = None
    """Branch, tag or commit of a dataset on the hub. Null: its main branch."""


@dataclass(kw_only=True, slots=True)
class PrepareConfig:
    """What to prepare, import or inspect."""

    input: str | None = None
    """A file, a folder, a pattern ('corpus/**/*.jsonl.zst', in quotes), a folder in an object store
    (s3://bucket/corpus), a dataset's folder or hub id, or stdlib: the source of Python's standard library.
    """
    format: InputFormat = InputFormat.auto
    """text (a file is a document), lines (a line is a document), jsonl, json (an array, or JSON lines), csv
    and tsv (with a header), parquet, dataset (read by the package datasets), or auto: by file extension. All
    but parquet may be compressed (.gz, .zst, .bz2, .xz) and in archives (.zip, .tar, .tar.gz and so on).
    Other files are refused.
    """
    text: str = "text"
    """Name of the field with a document's text, in all formats but text and lines; meta.body is the field
    body of the field meta.
    """
    on_bad_row: OnBadRow = OnBadRow.refuse
    """What to do with a row that is invalid, lacks the field, or has no text: refuse stops with an error that
    names the row (correct it and start again to continue), skip leaves it out and counts it.
    """
    dataset: InputDatasetConfig = field(default_factory=InputDatasetConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    special_tokens: SpecialTokens = SpecialTokens.refuse
    """How to tokenise the string of a special token (<|user|>) in a document: parse makes it that token, text
    makes it ordinary text, refuse stops with an error that names the document.
    """
    output: str | None = None
    """Folder of the prepared data. Null: data/NAME, with the input's name."""
    validation: float = 0.005
    """Share of the documents in the validation split, chosen by each document's hash; 0: none."""
    deduplicate: bool = False
    """Keep only one of several equal documents."""
    seed: int = 0
    """Seed of the order in which documents are written."""
    shard_mib: int = 2048
    """Target size of a shard, in MiB."""
    licence: str = "not stated"
    """Licence of the text, for the manifest."""
    workers: int | None = None
    """Number of processes. Null: the number of cores. It does not change the output."""
    memory_mib: int = 256
    """MiB of tokens that a worker buffers while it sorts them into shards. It does not change the output."""
    import_path: str | None = None
    """Existing .bin and .idx files in Megatron's format: a folder, one pair (with or without extension), or a
    pattern. A manifest and tokenizer.path, which created the tokens, are added to the folder; nothing is
    tokenised. Short form: ``import=PATH``.
    """
    import_validation: str | None = None
    """import: the files in the same folder that are the validation split. Null: none."""
    inspect: str | None = None
    """A folder of prepared data, or its URL: verify every byte and describe the data. Writes nothing."""
    sequence_length: int = 2048
    """inspect: the window for which the share of cut documents is reported."""
    samples: int = 3
    """inspect: number of documents to show as text."""

    def __post_init__(self) -> None:
        check(
            0 <= self.validation < 1,
            "validation",
            self.validation,
            "validation is a share of the documents, from 0 to below 1",
            "write validation=0.005",
        )
        at_least("", 0, seed=self.seed, samples=self.samples)
        at_least(
            "",
            1,
            shard_mib=self.shard_mib,
            workers=self.workers,
            memory_mib=self.memory_mib,
            sequence_length=self.sequence_length,
        )
        given = [value for value in (self.input, self.inspect, self.import_path) if value is not None]
        seen = (
            f"{self.input or 'null'}, inspect={self.inspect or 'null'}, import={self.import_path or 'null'}"
        )
        check(
            len(given) == 1,
            "input",
            seen,
            "exactly one of input=, inspect= and import= is given",
            "write one of input=FOLDER, inspect=FOLDER and import=FOLDER; --help shows all keys",
        )
        check(
            self.import_path is None or self.output is None,
            "output",
            self.output,
            "imported files stay in their folder",
            "leave out output",
        )
        check(
            self.import_path is not None or self.import_validation is None,
            "import_validation",
            self.import_validation,
            "it needs import=",
            "write import=PATH too",
        )
