"""A run of a language model of transformers without a family: train, export, and train on from the export.

pytest tests/train/test_hugging_face_run.py
"""

from __future__ import annotations

from pathlib import Path

from tests.models.test_hugging_face import PHI3
from tests.train.tiny_run import TinyRun, read_jsonl
from toolkit.config.model import HuggingFaceConfig, ModelConfig
from toolkit.config.schema import RunConfig
from toolkit.plan import pretrained


def test_export_opens_with_its_tokenizer_and_is_a_start_for_training(tmp_path: Path, data: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def phi3(config: RunConfig) -> None:
        config.model = ModelConfig(
            hf=HuggingFaceConfig(architecture="AutoModelForCausalLM", model_type="phi3", config=dict(PHI3))
        )
        config.checkpoint.export = True

    first = TinyRun(tmp_path / "first", data, config=phi3)
    losses = [row["loss"] for row in first.rows()]
    assert losses[-1] < losses[0]
    folder = first.directory.export
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "phi3"
    assert AutoTokenizer.from_pretrained(folder)("import os").input_ids

    def from_export(config: RunConfig) -> None:
        config.model = pretrained.resolve_model(ModelConfig(pretrained=str(folder)))

    tuned = TinyRun(tmp_path / "tuned", data, config=from_export)
    assert tuned.rows()[0]["loss"] < losses[0] - 0.05
    again = TinyRun(tmp_path / "first", data, config=phi3, train__steps=8)
    assert [row["step"] for row in again.rows()] == list(range(1, 9))


def test_masked_language_model_resumes_with_the_same_masks(tmp_path: Path, data: Path) -> None:
    def bert(config: RunConfig) -> None:
        sizes = {name: value for name, value in PHI3.items() if name not in ("num_key_value_heads",)}
        config.model = ModelConfig(
            hf=HuggingFaceConfig(
                architecture="AutoModelForMaskedLM",
                model_type="bert",
                config={**sizes, "vocab_size": 265, "hidden_dropout_prob": 0.0},
            )
        )
        config.task.target = "toolkit.tasks.MaskedLanguageModelTask"
        config.task.arguments = {"mask_token": 264, "vocab_size": 264}

    whole = TinyRun(tmp_path / "whole", data, config=bert)
    stopped = TinyRun(tmp_path / "stopped", data, config=bert, stop_after=3)
    assert len(stopped.rows()) == 3
    resumed = TinyRun(tmp_path / "stopped", data, config=bert)
    assert [row["loss"] for row in resumed.rows()] == [row["loss"] for row in whole.rows()]
    assert whole.rows()[0]["tokens"] < 0.3 * 8 * 32, "only masked tokens count"
    evaluations = read_jsonl(whole.directory.eval_file)
    assert len(evaluations) == 3
    assert all(0 <= row["accuracy"] <= 1 for row in evaluations)
