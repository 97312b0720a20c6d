"""A small corpus as JSONL, parquet, splits and a save_to_disk folder, with its own tokenizer. No network."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.data import DataConfig, DatasetConfig
from toolkit.config.schema import EvalConfig, RunConfig, TrainConfig
from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.tokens import tokenizer as bpe

DOCUMENTS = 400


@dataclass(frozen=True)
class Corpus:
    """A corpus of ``rows`` of (title, text) in several formats."""

    folder: Path
    rows: list[tuple[str | None, str]]
    tokenizer: Path
    other_tokenizer: Path
    end_of_text: int

    @property
    def count(self) -> int:
        return len(self.rows)


def make_corpus(folder: Path, patch: pytest.MonkeyPatch) -> Corpus:
    """Put the cache of `datasets` below ``folder``."""
    import datasets

    patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))
    rows = make_rows()
    columns = {
        "title": [title for title, _ in rows],
        "text": [text for _, text in rows],
        "number": list(range(len(rows))),
    }
    write_jsonl(folder / "corpus.jsonl", rows)
    whole = datasets.Dataset.from_dict(columns)
    (folder / "parquet").mkdir()
    whole.select(range(250)).to_parquet(str(folder / "parquet" / "train-0.parquet"))
    whole.select(range(250, len(rows))).to_parquet(str(folder / "parquet" / "train-1.parquet"))
    (folder / "splits").mkdir()
    write_jsonl(folder / "splits" / "train.jsonl", rows)
    write_jsonl(folder / "splits" / "test.jsonl", rows[:20])
    whole.save_to_disk(str(folder / "saved"))
    made = []
    for name, size in (("first", 300), ("second", 290)):
        (folder / name).mkdir()
        made.append(
            (
                folder / name / bpe.TOKENIZER_FOLDER,
                bpe.save_tokenizer(bpe.train_bpe(columns["text"], size), folder / name),
            )
        )
    return Corpus(folder, rows, made[0][0], made[1][0], made[0][1].end_of_text)


def make_rows() -> list[tuple[str | None, str]]:
    draw = random.Random(0)
    rows: list[tuple[str | None, str]] = []
    for number in range(DOCUMENTS):
        words = " ".join(f"word{draw.randrange(20)}" for _ in range(draw.choice([0, 1, 3, 10, 40])))
        rows.append(
            (
                None if number % 3 == 0 else f"title {number}",
                f"{number}: {words} ü" + " <|endoftext|>" * (number % 50 == 0),
            )
        )
    return rows


def write_jsonl(file: Path, rows: list[tuple[str | None, str]]) -> None:
    lines = [
        json.dumps({"title": title, "text": text, "number": number})
        for number, (title, text) in enumerate(rows)
    ]
    file.write_text("\n".join(lines) + "\n")


def config_of(corpus: Corpus, **dataset: Any) -> RunConfig:
    """Return a configuration with windows of 16 tokens and batches of four."""
    settings = {"path": str(corpus.folder / "corpus.jsonl"), "tokenizer": str(corpus.tokenizer), **dataset}
    return RunConfig(
        data=DataConfig(
            name="dataset",
            path=str(corpus.folder / "data"),
            dataset=DatasetConfig(**settings),
            special_tokens=SpecialTokens.text,
        ),
        train=TrainConfig(global_batch=4, sequence_length=16),
        eval=EvalConfig(batches=3),
    )
