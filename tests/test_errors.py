"""Errors hide secrets, and every command reports unreadable files with rule and remedy.

pytest tests/test_errors.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launch import generate, plan, prepare, report, reshard, submit
from toolkit.config.compose import compose
from toolkit.errors import ConfigError, ExitCode, Problem, file_errors, without_secrets

VALUE = "VALUE-of-mine-123"
SECRET = [
    f"+engine.deepspeed.wandb.api_key={VALUE}",
    f"+engine.deepspeed.comet.api_key={VALUE}",
    f"monitor.wandb_api_key={VALUE}",
    f"+engine.deepspeed.comet={{enabled: true, api_key: {VALUE}}}",
    f"+engine.deepspeed.comet={{enabled: true, api_key: {VALUE}",
    f"+model.arguments.password='{VALUE} and more'",
    f"data.token={VALUE}",
    f"data.hf_token={VALUE}",
    f"data.aws_secret_access_key={VALUE}",
    f"data.AWS_SECRET_ACCESS_KEY={VALUE}",
    f"monitor.credentials={VALUE}",
    f"run.name.private_key={VALUE}",
    f"data.path=s3://user:{VALUE}@bucket/x",
    f"data.path=https://host/x?sig={VALUE}",
]
SHOWN = [
    "tokenizer.end_of_text=<|end|>",
    "model.eos_token=</s>",
    "data.vocab_size=4096",
    "cluster.kubernetes.secrets.WANDB_API_KEY=my-secret",
    "train.tokens_per_second=3",
    "unexpected token: 'x'",
    "model.arguments.key=3",
    "tokens: 3",
    "optim.betas=[0.9,0.95]",
]


@pytest.mark.parametrize("word", SECRET)
def test_secret_values_are_hidden(word: str) -> None:
    assert VALUE not in without_secrets(word)
    assert VALUE not in str(Problem("key", word, f"it is not {word}", f"write +{word}, or leave it out"))


@pytest.mark.parametrize("key", ["hf_" + "a" * 34, "sk-" + "b" * 40, "ghp_" + "c" * 36, "AKIA" + "D" * 16])
def test_keys_of_known_services_are_hidden(key: str) -> None:
    assert without_secrets(f"run.name={key} is odd") == "run.name=*** is odd"


@pytest.mark.parametrize("text", SHOWN)
def test_other_values_are_shown_unchanged(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize("word", [word for word in SECRET if not word.startswith("data.path")])
def test_errors_of_commands_hide_secrets(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["+exp=quickstart", word]) == ExitCode.USER
    printed = capsys.readouterr()
    assert VALUE not in printed.out + printed.err
    assert word.lstrip("+").partition("=")[0].rpartition(".")[2] in printed.err, "the key is shown"


def test_config_error_hides_secrets() -> None:
    with pytest.raises(ConfigError) as caught:
        compose([f"monitor.api_key={VALUE}"])
    assert VALUE not in str(caught.value)


def test_commands_report_unreadable_files_with_rule_and_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, long = tmp_path / "file", str(tmp_path / ("a" * 300))
    file.touch()
    commands: dict[str, tuple[Callable[[list[str]], int], list[list[str]]]] = {
        "prepare": (
            prepare.main,
            [
                [f"input={long}", f"output={tmp_path}/out"],
                [f"inspect={long}"],
                ["input=stdlib", f"output={file}/x"],
                ["input=stdlib", "output=/proc/x"],
            ],
        ),
        "reshard": (
            reshard.main,
            [[f"source={long}", "action=inspect"], [f"source={file}/x", "action=inspect"]],
        ),
        "report": (report.main, [[long], [f"{file}/x"], [str(file)]]),
        "generate": (generate.main, [[long, "text"], [f"{file}/x", "text"]]),
        "submit": (
            submit.main,
            [
                ["+exp=quickstart", "run.dir=/proc/x"],
                ["+exp=quickstart", f"run.dir={file}/x"],
                ["+exp=quickstart", f"run.dir={long}"],
                ["+exp=quickstart", f"run.dir={tmp_path}"],
            ],
        ),
        "plan": (
            plan.main,
            [["model=pretrained", f"model.pretrained={long}"], [f"--config-dir={long}", "+exp=quickstart"]],
        ),
    }
    for name, (main, cases) in commands.items():
        for words in cases:
            assert main(words) == ExitCode.USER, (name, words)
            printed = capsys.readouterr().err
            assert "rule:" in printed, (name, words, printed)
            assert "remedy:" in printed, (name, words, printed)


def test_errors_without_a_file_are_not_converted() -> None:
    with pytest.raises(TimeoutError, match="no answer"), file_errors():
        raise TimeoutError("no answer")
