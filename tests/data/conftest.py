"""Fixtures shared by the tests of data preparation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.sample_texts import TEXTS, small_tokenizer, write_histogram, write_jsonl
from toolkit.data.prepare import report


@pytest.fixture(autouse=True, scope="module")
def fast_preparation() -> Iterator[None]:
    """Most of a small preparation's time is spent on drawing its histogram, then on waiting for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw_histogram", write_histogram)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 300 documents, three of them twice and one empty, in two files."""
    folder = tmp_path_factory.mktemp("corpus")
    write_jsonl(folder / "a.jsonl", [*TEXTS[:100], "", *TEXTS[:3]])
    write_jsonl(folder / "b" / "c.jsonl", TEXTS[100:])
    return folder
