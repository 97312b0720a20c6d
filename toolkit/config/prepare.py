"""Every key of ``launch/prepare.py``. The string under a field is its documentation; ``--help`` shows it.

Keys that decide the bytes of the data are its recipe, kept in the manifest; the others say how they are made
or shown. What involves two keys, or what lies on disk, is checked in ``toolkit/data/prepare/plan.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from toolkit.config.checks import at_least, check
from toolkit.config.special_tokens import SpecialTokens


class InputFormat(Enum):
    """How documents lie in the input."""

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
    """What becomes of a row that has no document: broken JSON, no such field, a field that is no text."""

    refuse = "refuse"
    skip = "skip"


@dataclass(kw_only=True, slots=True)
class TokenizerConfig:
    path: str | None = None
    """A folder or hub id that transformers' AutoTokenizer opens, or a tokenizer.json. Null: train one on the
    input.
    """
    trust_remote_code: bool = False
    """Python code that comes with a tokenizer may run on this machine. Without it such a tokenizer is
    refused.
    """
    end_of_text: str | None = None
    """The token that ends every document. Null: the tokenizer's own eos token."""
    vocab_size: int = 4096
    """Size of the byte-level BPE tokenizer that is trained where there is no tokenizer.path."""
    sample_mib: int = 64
    """Text to train it on, in MiB, taken evenly over the input; the whole input where that is smaller."""

    def __post_init__(self) -> None:
        at_least("tokenizer", 257, vocab_size=self.vocab_size)
        at_least("tokenizer", 1, sample_mib=self.sample_mib)


@dataclass(kw_only=True, slots=True)
class InputDatasetConfig:
    name: str | None = None
    """Configuration of the dataset, where it has several."""
    split: str = "train"
    """Split of the dataset that is read."""
    revision: str | None = None
    """Branch, tag or commit of a dataset on the hub. Null: its main branch."""


@dataclass(kw_only=True, slots=True)
class PrepareConfig:
    """What to make ready, or to inspect."""

    input: str | None = None
    """A file, a folder, a pattern ('corpus/**/*.jsonl.zst', in quotes), a folder in a store
    (s3://bucket/corpus), a dataset's folder or hub id, or stdlib: the embedded text.
    """
    format: InputFormat = InputFormat.auto
    """text (a file is a document), lines (a line is one), jsonl, json (an array, or JSON lines), csv and tsv
    (with a line of names), parquet, dataset (by the package datasets), or auto: by the files' endings. All
    but parquet may be compressed (.gz, .zst, .bz2, .xz) and in archives (.zip, .tar, .tar.gz and so on).
    Other files are refused.
    """
    text: str = "text"
    """Name of the field that holds a document's text, in all formats but text and lines; meta.body is the
    field body of the field meta.
    """
    on_bad_row: OnBadRow = OnBadRow.refuse
    """What a row becomes that is broken, lacks the field, or has no text in it: refuse stops with an error
    that names it (start again to continue after you corrected it), skip leaves it out and counts it.
    """
    dataset: InputDatasetConfig = field(default_factory=InputDatasetConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    special_tokens: SpecialTokens = SpecialTokens.refuse
    """What the string of one of the tokenizer's special tokens (<|user|>) becomes where a document contains
    it: parse makes it that token, text makes it ordinary text, refuse stops with an error that names the
    document.
    """
    output: str | None = None
    """Folder of the prepared data. Null: data/NAME, after the input's name."""
    validation: float = 0.005
    """Share of the documents that goes to the validation split, chosen by each document's own hash; 0: none.
    """
    deduplicate: bool = False
    """Keep one of equal documents."""
    seed: int = 0
    """Seed of the order in which documents are written."""
    shard_mib: int = 2048
    """Aimed size of one shard."""
    licence: str = "not stated"
    """Licence of the text, for the manifest."""
    workers: int | None = None
    """Processes. Null: as many as there are cores. The bytes do not depend on it."""
    memory_mib: int = 256
    """Tokens that one worker holds while it sorts them into shards. The bytes do not depend on it."""
    import_path: str | None = None
    """Megatron's .bin and .idx files that others made: a folder, one pair (with or without its ending), or a
    pattern. A manifest and tokenizer.path, which made the tokens, are put beside them; nothing is tokenised.
    ``import=PATH`` is short for it.
    """
    import_validation: str | None = None
    """import: which of such files are the validation split, in the same folder. Null: none."""
    inspect: str | None = None
    """A folder of prepared data, or its URL: verify every byte of it and show what it is. Makes nothing."""
    sequence_length: int = 2048
    """inspect: the window for which the waste of cutting documents is told."""
    samples: int = 3
    """inspect: how many documents are shown as text."""

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
            "something is prepared (input=), inspected (inspect=) or imported (import=)",
            "write one of input=FOLDER, inspect=FOLDER and import=FOLDER; --help shows all",
        )
        check(
            self.import_path is None or self.output is None,
            "output",
            self.output,
            "imported files are trained on where they lie",
            "leave out output",
        )
        check(
            self.import_path is not None or self.import_validation is None,
            "import_validation",
            self.import_validation,
            "it belongs to import=",
            "write import=PATH too",
        )
