"""Training goes on from a checkpoint of any format: each that can be written is, and a run continues from it.

pytest tests/train/test_resume_source.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train import test_run as runs
from tests.train.test_run import Start, same
from toolkit.checkpoint import manifest
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.offline.reshard import WRITERS, lay_out
from toolkit.checkpoint.source import open_source
from toolkit.config.reshard import TargetConfig, TargetFormat
from toolkit.config.schema import RunConfig
from toolkit.engine.local import LocalEngine
from toolkit.errors import CheckpointError

texts, data, whole, stopped = runs.texts, runs.data, runs.whole, runs.stopped  # fixtures


def written(run: Path, path: Path, form: TargetFormat, *, optimizer: bool = True) -> Path:
    """The newest checkpoint of ``run`` in another format, as the vendor would have left it: without our manifest."""
    source = open_source(run)
    target = lay_out(source, TargetConfig(format=form, optimizer=optimizer))
    Conversion(source, target, path).run()
    (path / manifest.FOREIGN_NAME).unlink(missing_ok=True)
    return path


def resuming(path: Path) -> Any:
    return lambda config: setattr(config, "resume", str(path))


@pytest.mark.parametrize("form", [TargetFormat.native, *WRITERS])
def test_a_run_continues_and_finds_its_beginning_again_though_it_died_before_its_first_save(
    whole: Start,
    stopped: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: TargetFormat,
) -> None:
    """Bitwise as never stopped. Control: from the weights alone it is another run."""
    path = written(stopped, tmp_path / "out", form)

    def dies(self: LocalEngine, *arguments: Any) -> None:
        raise RuntimeError("died")

    with monkeypatch.context() as context:
        context.setattr(LocalEngine, "train_step", dies)
        with pytest.raises(RuntimeError, match="died"):
            Start(tmp_path / "run", data, config=resuming(path))
    resumed = Start(tmp_path / "run", data)
    assert resumed.rows() == whole.rows()[3:]
    assert same(resumed.state(), whole.state())


def test_without_the_optimizers_state_it_is_another_run(
    whole: Start, stopped: Path, data: Path, tmp_path: Path
) -> None:
    path = written(stopped, tmp_path / "out", TargetFormat.native, optimizer=False)
    resumed = Start(tmp_path / "run", data, config=resuming(path))
    assert resumed.rows()[0] == whole.rows()[3], "the forward pass of the fourth step knows of no moments"
    assert abs(resumed.rows()[-1]["loss"] - whole.rows()[-1]["loss"]) > 1e-4


def test_a_fork_from_another_format(stopped: Path, data: Path, tmp_path: Path) -> None:
    path = written(stopped, tmp_path / "out", TargetFormat.native)

    def forked(config: RunConfig) -> None:
        config.run.fork, config.optim.lr = str(path), 5e-4

    fork = Start(tmp_path / "fork", data, config=forked)
    assert [row["step"] for row in fork.rows()] == [4, 5, 6]


def test_published_weights_are_of_no_step_and_refused_with_the_way_to_use_them(
    data: Path, tmp_path: Path
) -> None:
    exported = Start(tmp_path / "first", data, checkpoint__export=True).directory.export
    with pytest.raises(
        CheckpointError, match=r"of no training step[\s\S]*model=pretrained model.pretrained="
    ):
        Start(tmp_path / "run", data, config=resuming(exported))


def test_a_beginning_that_is_gone_is_refused_by_name(stopped: Path, data: Path, tmp_path: Path) -> None:
    """Never random weights instead."""
    path = written(stopped, tmp_path / "out", TargetFormat.native)
    start = Start(tmp_path / "run", data, config=resuming(path), checkpoint__at_end=False)
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="out', which does not exist"):
        Start(start.directory.path, data)


def test_text_is_generated_with_the_weights_of_another_format(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from launch.generate import main

    words = [str(stopped), "def main(", "--tokens", "6", "--temperature", "0"]
    assert main(words) == 0
    first = capsys.readouterr().out
    path = written(stopped, tmp_path / "out", TargetFormat.deepspeed)
    assert main([*words, "--weights", str(path)]) == 0
    assert capsys.readouterr().out == first
    assert main([*words, "--weights", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
