"""What a run asks of its data and does not find.

pytest tests/data/test_sources.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.made import make_folder
from toolkit.config.data import DataConfig, DocumentMasking
from toolkit.config.schema import EvalConfig, ModelConfig, RunConfig, TrainConfig
from toolkit.data.manifest import DataManifest
from toolkit.data.open import ready_for
from toolkit.data.sources import data_problems, ready
from toolkit.errors import InputError
from toolkit.progress import Progress


@pytest.fixture
def manifest(tmp_path: Path) -> DataManifest:
    return make_folder(
        tmp_path / "data",
        {"train": [np.arange(100)], "validation": [np.arange(3)], "tiny": [np.arange(1)]},
        vocab_size=300,
    )


def run_config(
    manifest: DataManifest,
    *,
    vocab_size: int | None = 300,
    length: int = 99,
    every: int = 1,
    sets: list[str] | None = None,
    name: str = "prepared",
) -> RunConfig:
    return RunConfig(
        data=DataConfig(name=name, path=str(manifest.folder)), model=ModelConfig(vocab_size=vocab_size),
        train=TrainConfig(sequence_length=length), eval=EvalConfig(every=every, sets=sets or ["validation"]),
    )  # fmt: skip


def test_nothing_wrong(manifest: DataManifest) -> None:
    assert data_problems(run_config(manifest), manifest) == []
    assert data_problems(run_config(manifest, vocab_size=None), manifest) == []
    assert data_problems(run_config(manifest, every=0, sets=["absent"]), manifest) == []
    assert ready(run_config(manifest).data, Progress.silent()) == manifest
    assert ready_for(run_config(manifest), None, Progress.silent()) == str(manifest.folder)


def test_each_problem_has_value_rule_remedy(manifest: DataManifest) -> None:
    cases = {
        "model.vocab_size=299": (run_config(manifest, vocab_size=299), "model.vocab_size=300"),
        "train.sequence_length=100, split train has 100 tokens": (
            run_config(manifest, length=100),
            "train.sequence_length=99",
        ),
        "eval.sets=['test'], no split test": (run_config(manifest, sets=["test"]), "tiny, train, validation"),
        "split tiny of": (run_config(manifest, sets=["tiny"]), "leave it out"),
    }
    for seen, (config, remedy) in cases.items():
        (problem,) = data_problems(config, manifest)
        assert seen in problem.seen
        assert remedy in problem.remedy
    (problem,) = data_problems(run_config(manifest, vocab_size=290, name="stdlib"), manifest)
    assert "or write data.vocab_size=290" in problem.remedy
    (problem,) = data_problems(run_config(manifest, vocab_size=None), manifest, vocab_size=200)
    assert "model.vocab_size=200" in problem.seen
    many = run_config(manifest, vocab_size=299, length=100, sets=["test", "tiny"])
    assert len(data_problems(many, manifest)) == 4
    with pytest.raises(InputError) as caught:
        ready_for(many, None, Progress.silent())
    assert len(caught.value.problems) == 4


def test_documents_are_kept_apart_where_a_token_ends_them(manifest: DataManifest) -> None:
    config = run_config(manifest)
    config.data.documents = DocumentMasking.separate
    assert data_problems(config, manifest) == []
    silent = replace(manifest, tokenizer=replace(manifest.tokenizer, ends_documents=False))
    (problem,) = data_problems(config, silent)
    assert problem.key == "data.documents"
    assert str(manifest.folder) in problem.seen
    assert "data.documents=joined" in problem.remedy
    assert data_problems(run_config(manifest), silent) == []


def test_no_training_split(tmp_path: Path) -> None:
    manifest = make_folder(tmp_path / "data", {"validation": [np.arange(100)]})
    (problem,) = data_problems(run_config(manifest), manifest)
    assert problem.key == "data.path"


def test_a_folder_without_data(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"manifest\.json"):
        ready(DataConfig(name="prepared", path=str(tmp_path)), Progress.silent())
