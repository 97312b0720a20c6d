"""A run whose newest checkpoint is damaged stops with an error that names how to continue or restart it.

pytest tests/train/test_lost_files.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.train.tiny_run import STEPS, TinyRun
from toolkit.checkpoint_folder import step_name
from toolkit.errors import CheckpointError, ExitCode


def test_remedies_of_a_damaged_checkpoint_continue_or_restart_the_run(data: Path, tmp_path: Path) -> None:
    first = TinyRun(tmp_path / "run", data, stop_after=4, checkpoint__every="2")
    checkpoints = first.directory.checkpoints
    (checkpoints / step_name(4) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=f"resume={checkpoints / step_name(2)}"):
        TinyRun(tmp_path / "run", data)
    for number, (resume, moved) in enumerate({str(checkpoints / step_name(2)): [4], "never": [2, 4]}.items()):
        folder = Path(shutil.copytree(tmp_path / "run", tmp_path / f"copy-{number}"))
        rolled_back = folder / "attempts" / "002" / "checkpoints" / step_name(4)
        rolled_back.mkdir(parents=True)
        (rolled_back / "manifest.json").touch()  # as if a rollback had set this step aside before
        chosen = resume.replace(str(tmp_path / "run"), str(folder))
        again = TinyRun(
            folder, data, stop_after=1, config=lambda config, chosen=chosen: setattr(config, "resume", chosen)
        )  # type: ignore[misc]
        begins = 1 if resume == "never" else 3
        assert [row["step"] for row in again.rows()] == list(range(1, begins + 1))
        assert again.rows() == first.rows()[:begins], "each trains like the first attempt"
        aside = again.directory.previous_attempt_folder(again.attempt) / "checkpoints-2"
        assert sorted(path.name for path in aside.iterdir()) == [step_name(step) for step in moved]
        last = TinyRun(folder, data)
        assert last.code is ExitCode.DONE
        assert [row["step"] for row in last.rows()] == list(range(1, STEPS + 1))
