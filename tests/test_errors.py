"""What an error shows of what a person wrote, and what it does not.

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
def test_a_secret_value_is_not_shown(word: str) -> None:
    assert VALUE not in without_secrets(word)
    assert VALUE not in str(Problem("key", word, f"it is not {word}", f"write +{word}, or leave it out"))


@pytest.mark.parametrize("key", ["hf_" + "a" * 34, "sk-" + "b" * 40, "ghp_" + "c" * 36, "AKIA" + "D" * 16])
def test_a_key_of_a_known_service_is_not_shown(key: str) -> None:
    assert without_secrets(f"run.name={key} is odd") == "run.name=*** is odd"


@pytest.mark.parametrize("text", SHOWN)
def test_what_is_no_secret_is_shown_whole(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize("word", [word for word in SECRET if not word.startswith("data.path")])
def test_no_error_of_a_command_shows_a_secret(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["+exp=quickstart", word]) == ExitCode.USER
    said = capsys.readouterr()
    assert VALUE not in said.out + said.err
    assert word.lstrip("+").partition("=")[0].rpartition(".")[2] in said.err, "the key itself is named"


def test_a_secret_is_not_shown_by_the_error_itself() -> None:
    with pytest.raises(ConfigError) as caught:
        compose([f"monitor.api_key={VALUE}"])
    assert VALUE not in str(caught.value)


def test_every_command_answers_a_file_that_cannot_be_read_with_rule_and_remedy(
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
            said = capsys.readouterr().err
            assert "rule:" in said, (name, words, said)
            assert "remedy:" in said, (name, words, said)


def test_an_error_of_no_file_goes_through() -> None:
    with pytest.raises(TimeoutError, match="no answer"), file_errors():
        raise TimeoutError("no answer")
