"""Data and runs that the tests of whole runs share."""

from __future__ import annotations

import email
from pathlib import Path

import pytest

from tests.train.tiny_run import TinyRun
from toolkit.data.tokens.stdlib import ensure_stdlib
from toolkit.errors import ExitCode

LINES = 100


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The email package, split into parts so that both splits have documents."""
    texts = tmp_path_factory.mktemp("texts")
    for file in sorted(Path(email.__file__).parent.rglob("*.py")):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        for part, first in enumerate(range(0, len(lines), LINES)):
            text = "".join(lines[first : first + LINES])
            (texts / f"{file.stem}_{part}.py").write_text(text, encoding="utf-8")
    return texts


@pytest.fixture(scope="session")
def data(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "email"
    ensure_stdlib(folder, 264, root=texts)
    return folder


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> TinyRun:
    """A run that was never stopped, with the plot and the export."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return TinyRun(folder, data, plot=True, checkpoint__export=True)


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The folder of a run that was stopped after three steps. Tests copy it."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    run = TinyRun(folder, data, stop_after=3)
    assert run.code is ExitCode.STOPPED
    assert run.status.step == 3
    assert run.status.checkpoint == str(folder / "checkpoints" / "step-00000003")
    assert [row["step"] for row in run.rows()] == [1, 2, 3]
    return folder
