"""A folder in which the documentation's commands work as they do in a clone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from toolkit.config.data import DataConfig
from toolkit.data.tokens.stdlib import ensure_stdlib

SHORT_SAMPLES = "train.sequence_length=32"  # instead of 128, in the experiment quickstart
LINKED = ("launch", "docs", "tests", "Makefile", "pyproject.toml", "constraints.txt", "README.md")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """``tmp_path`` with links to the repository and a .venv in which `make setup` has nothing to do."""
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    venv = tmp_path / ".venv"
    venv.mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != ".installed":
            (venv / path.name).symlink_to(path)
    (venv / ".installed").touch()
    return tmp_path


@pytest.fixture
def prepared_stdlib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of data=stdlib, which all pages and all workers of pytest share."""
    folder = tmp_path_factory.getbasetemp().parent / "stdlib"
    ensure_stdlib(folder, DataConfig().vocab_size)
    return folder


@pytest.fixture
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user's shell, without what a launcher around the tests set, and with ``dmt``, even
    if the installation is older than that command.
    """
    programs = tmp_path_factory.mktemp("bin")
    (programs / "dmt").write_text(
        f"#!{sys.executable}\nimport sys\nfrom toolkit.cli import main\nsys.exit(main())\n"
    )
    (programs / "dmt").chmod(0o755)
    ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"}
    paths = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **{name: value for name, value in os.environ.items() if name not in ranks},
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": str(ROOT),
        "ARGS": f"train.steps=40 {SHORT_SAMPLES}",  # of `make train`, which takes minutes otherwise
        "OMP_NUM_THREADS": "1",
    }
