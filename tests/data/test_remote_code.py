"""Code that comes with a tokenizer runs only if a key allows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from toolkit.data.tokens import tokenizer
from toolkit.errors import InputError

CODE = """
from pathlib import Path

Path({mark!r}).write_text("ran")

from transformers import PreTrainedConfig, PreTrainedTokenizerFast


class Config(PreTrainedConfig):
    model_type = "unknown"


class Tokenizer(PreTrainedTokenizerFast):
    def __init__(self, **given):
        from tokenizers import Tokenizer, models
        model = models.WordLevel({{"a": 0, "<end>": 1}}, unk_token="a")
        super().__init__(tokenizer_object=Tokenizer(model), eos_token="<end>")
"""


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a tokenizer without tokenizer.json whose class is in a separate file."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "code.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "Tokenizer",
                "auto_map": {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]},
            }
        )
    )
    (folder / "config.json").write_text(
        json.dumps({"model_type": "unknown", "auto_map": {"AutoConfig": "code.Config"}})
    )
    (tmp_path / "out").mkdir()
    return folder


@pytest.mark.parametrize("answer", ["y\n", "n\n", ""])
def test_remote_code_of_a_tokenizer_does_not_run_by_default(
    published: Path, tmp_path: Path, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or answer.strip())
    with pytest.raises(InputError, match="needs Python code") as caught:
        tokenizer.install_tokenizer(
            str(published), None, tmp_path / "out", key="tokenizer.path", end_key="tokenizer.end_of_text"
        )
    assert "tokenizer.trust_remote_code=true" in caught.value.problems[0].remedy
    assert not asked
    assert not (tmp_path / "mark").exists()


def test_trust_remote_code_allows_tokenizer_code(published: Path, tmp_path: Path) -> None:
    made = tokenizer.install_tokenizer(
        str(published),
        None,
        tmp_path / "out",
        key="tokenizer.path",
        end_key="tokenizer.end_of_text",
        trust_remote_code=True,
    )
    assert (tmp_path / "mark").exists()
    assert (made.size, made.end_of_text) == (2, 1)
