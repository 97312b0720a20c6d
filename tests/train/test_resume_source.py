"""Training continues from a checkpoint in every format that can be written.

pytest tests/train/test_resume_source.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny_run import TinyRun, equal_tensors
from toolkit.checkpoint import manifest
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.offline.reshard import WRITERS, lay_out
from toolkit.checkpoint.source import open_source
from toolkit.config.reshard import TargetConfig, TargetFormat
from toolkit.config.schema import RunConfig
from toolkit.engine.local import LocalEngine
from toolkit.errors import CheckpointError


def convert(run: Path, path: Path, form: TargetFormat, *, optimizer: bool = True) -> Path:
    """Convert the newest checkpoint of ``run``, without our manifest, which other programs do not write."""
    source = open_source(run)
    target = lay_out(source, TargetConfig(format=form, optimizer=optimizer))
    Conversion(source, target, path).run()
    (path / manifest.FOREIGN_NAME).unlink(missing_ok=True)
    return path


def resuming(path: Path) -> Any:
    return lambda config: setattr(config, "resume", str(path))


@pytest.mark.parametrize(
    "form",
    [
        TargetFormat.native,
        *(
            pytest.param(form, marks=() if form is TargetFormat.deepspeed else pytest.mark.full)
            for form in WRITERS
        ),
    ],
)
def test_run_continues_from_any_format_and_finds_it_again_after_dying(
    whole: TinyRun,
    stopped: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: TargetFormat,
) -> None:
    """The result equals an unstopped run bitwise."""
    path = convert(stopped, tmp_path / "out", form)

    def dies(self: LocalEngine, *arguments: Any) -> None:
        raise RuntimeError("died")

    with monkeypatch.context() as context:
        context.setattr(LocalEngine, "train_step", dies)
        with pytest.raises(RuntimeError, match="died"):
            TinyRun(tmp_path / "run", data, config=resuming(path))
    resumed = TinyRun(tmp_path / "run", data)
    assert resumed.rows() == whole.rows()[3:]
    assert equal_tensors(resumed.state(), whole.state())


def test_resuming_without_optimizer_state_changes_the_losses(
    whole: TinyRun, stopped: Path, data: Path, tmp_path: Path
) -> None:
    path = convert(stopped, tmp_path / "out", TargetFormat.native, optimizer=False)
    resumed = TinyRun(tmp_path / "run", data, config=resuming(path))
    assert resumed.rows()[0] == whole.rows()[3], (
        "the forward pass of the fourth step does not depend on the moments"
    )
    assert abs(resumed.rows()[-1]["loss"] - whole.rows()[-1]["loss"]) > 1e-4


def test_fork_from_another_format(stopped: Path, data: Path, tmp_path: Path) -> None:
    path = convert(stopped, tmp_path / "out", TargetFormat.native)

    def forked(config: RunConfig) -> None:
        config.run.fork, config.optim.lr = str(path), 5e-4

    fork = TinyRun(tmp_path / "fork", data, config=forked)
    assert [row["step"] for row in fork.rows()] == [4, 5, 6]


def test_resume_from_published_weights_is_refused_with_a_remedy(
    whole: TinyRun, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        CheckpointError, match=r"records no training step[\s\S]*model=pretrained model.pretrained="
    ):
        TinyRun(tmp_path / "run", data, config=resuming(whole.directory.export))


def test_missing_resume_source_is_refused(stopped: Path, data: Path, tmp_path: Path) -> None:
    path = convert(stopped, tmp_path / "out", TargetFormat.native)
    start = TinyRun(tmp_path / "run", data, config=resuming(path), checkpoint__at_end=False)
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="out', which does not exist"):
        TinyRun(start.directory.path, data)


def test_generate_reads_weights_of_another_format(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from launch.generate import main

    words = [str(stopped), "def main(", "--tokens", "6", "--temperature", "0"]
    assert main(words) == 0
    first = capsys.readouterr().out
    path = convert(stopped, tmp_path / "out", TargetFormat.deepspeed)
    assert main([*words, "--weights", str(path)]) == 0
    assert capsys.readouterr().out == first
    assert main([*words, "--weights", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
