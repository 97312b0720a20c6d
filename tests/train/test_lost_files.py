"""A run that lost its newest checkpoint stops, and the words of its error continue it or begin it again.

pytest tests/train/test_lost_files.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.train.test_run import STEPS, Start, data, texts
from toolkit.checkpoint_folder import step_name
from toolkit.errors import CheckpointError, ExitCode

__all__ = ["data", "texts"]  # the fixtures


def test_the_words_of_the_error_continue_or_begin_again(data: Path, tmp_path: Path) -> None:
    first = Start(tmp_path / "run", data, stop_after=4, checkpoint__every="2")
    checkpoints = first.directory.checkpoints
    (checkpoints / step_name(4) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=f"resume={checkpoints / step_name(2)}"):
        Start(tmp_path / "run", data)
    for number, (resume, moved) in enumerate({str(checkpoints / step_name(2)): [4], "never": [2, 4]}.items()):
        folder = Path(shutil.copytree(tmp_path / "run", tmp_path / f"copy-{number}"))
        chosen = resume.replace(str(tmp_path / "run"), str(folder))
        again = Start(
            folder, data, stop_after=1, config=lambda config, chosen=chosen: setattr(config, "resume", chosen)
        )  # type: ignore[misc]
        begins = 1 if resume == "never" else 3
        assert [row["step"] for row in again.rows()] == list(range(1, begins + 1))
        assert again.rows() == first.rows()[:begins], "each of them trains as the first attempt did"
        aside = again.directory.folder_of_older(again.attempt) / "checkpoints"
        assert sorted(path.name for path in aside.iterdir()) == [step_name(step) for step in moved]
        last = Start(folder, data)
        assert last.code is ExitCode.DONE
        assert [row["step"] for row in last.rows()] == list(range(1, STEPS + 1))
