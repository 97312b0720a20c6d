"""Requirements of a run that its data do not meet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.data_folders import make_folder
from toolkit.config.data import DataConfig, DocumentMasking
from toolkit.config.model import ModelConfig
from toolkit.config.schema import EvalConfig, RunConfig, TrainConfig
from toolkit.data.kinds.text import check_data
from toolkit.data.manifest import DataManifest, read_manifest
from toolkit.data.registry import prepare_data
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
        data=DataConfig(name=name, path=str(manifest.folder)),
        model=ModelConfig(vocab_size=vocab_size),
        train=TrainConfig(sequence_length=length),
        eval=EvalConfig(every=every, sets=sets or ["validation"]),
    )


def test_fitting_data_has_no_problems(manifest: DataManifest) -> None:
    assert check_data(run_config(manifest), manifest) == []
    assert check_data(run_config(manifest, vocab_size=None), manifest) == []
    assert check_data(run_config(manifest, every=0, sets=["absent"]), manifest) == []
    assert prepare_data(run_config(manifest), None, Progress.silent()) == str(manifest.folder)


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
        (problem,) = check_data(config, manifest)
        assert seen in problem.seen
        assert remedy in problem.remedy
    (problem,) = check_data(run_config(manifest, vocab_size=290, name="stdlib"), manifest)
    assert "or write data.vocab_size=290" in problem.remedy
    (problem,) = check_data(run_config(manifest, vocab_size=None), manifest, vocab_size=200)
    assert "model.vocab_size=200" in problem.seen
    many = run_config(manifest, vocab_size=299, length=100, sets=["test", "tiny"])
    assert len(check_data(many, manifest)) == 4
    with pytest.raises(InputError) as caught:
        prepare_data(many, None, Progress.silent())
    assert len(caught.value.problems) == 4


def test_separate_documents_need_end_of_text(manifest: DataManifest) -> None:
    config = run_config(manifest)
    config.data.documents = DocumentMasking.separate
    assert check_data(config, manifest) == []
    silent = replace(manifest, tokenizer=replace(manifest.tokenizer, ends_documents=False))
    (problem,) = check_data(config, silent)
    assert problem.key == "data.documents"
    assert str(manifest.folder) in problem.seen
    assert "data.documents=joined" in problem.remedy
    assert check_data(run_config(manifest), silent) == []


def test_missing_training_split_is_reported(tmp_path: Path) -> None:
    manifest = make_folder(tmp_path / "data", {"validation": [np.arange(100)]})
    (problem,) = check_data(run_config(manifest), manifest)
    assert problem.key == "data.path"


def test_folder_without_manifest_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"manifest\.json"):
        read_manifest(tmp_path)
