"""The user's project is found from its folders, and its experiments compose without a flag.

pytest tests/config/test_project.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.config import search_path
from toolkit.config.compose import compose
from toolkit.config.multirun import read_sweep
from toolkit.config.project import find_project
from toolkit.errors import ConfigError


def write_project(folder: Path, table: str = "[tool.dmt]\n", conf: str = "conf") -> Path:
    (folder / conf / "exp").mkdir(parents=True)
    (folder / conf / "exp/mine.yaml").write_text("# @package _global_\nrun:\n  name: of_project\n")
    (folder / "pyproject.toml").write_text(f"[project]\nname = 'x'\n{table}")
    return folder


@pytest.mark.parametrize("below", [".", "conf/exp", "mine/deep"])
def test_experiment_is_found_in_the_project_and_below_it(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = write_project(tmp_path / "project")
    (project / "mine/deep").mkdir(parents=True)
    monkeypatch.chdir(project / below)
    assert compose(["+exp=mine"]).run.name == "of_project"
    found = find_project()
    assert found is not None
    assert (found.folder, found.conf) == (project, project / "conf")
    assert str(found) == f"project {project}: conf has its groups and experiments"
    assert "mine" in search_path.options(search_path.folders(None), "exp")
    monkeypatch.chdir(tmp_path)  # the control
    with pytest.raises(ConfigError):
        compose(["+exp=mine"])


def test_config_dir_replaces_the_folder_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_project(tmp_path / "a"))
    other = write_project(tmp_path / "b", conf="settings")
    (other / "settings/exp/mine.yaml").write_text("# @package _global_\nrun:\n  name: of_flag\n")
    assert compose(["+exp=mine", f"--config-dir={other / 'settings'}"]).run.name == "of_flag"


def test_points_of_a_sweep_name_the_folder_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs of points may run in another folder."""
    project = write_project(tmp_path / "project", '[tool.dmt]\nconf = "settings"\n', conf="settings")
    monkeypatch.chdir(project)
    sweep = read_sweep(["-m", "+exp=mine", "optim.lr=1e-3,2e-3"])
    assert sweep.options == (f"--config-dir={project / 'settings'}",)


def test_other_files_are_no_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path, "# [tool.dmt] is what a project has\n")
    monkeypatch.chdir(tmp_path)
    assert find_project() is None


@pytest.mark.parametrize(
    ("table", "seen"),
    [
        ("[tool.dmt]\nconf = 'nowhere'\n", "no folder below it"),
        ("[tool.dmt]\nconf = '..'\n", "no folder below it"),
        ("[tool.dmt]\nconf = 3\n", "conf = 3"),
        ("[tool.dmt]\nconfig = 'conf'\n", "config = 'conf'"),
        ("[tool.dmt\n", ""),
        ("[tool.dmt]\nconf = conf\n", "Invalid value"),
    ],
)
def test_mistakes_in_the_table_are_reported(
    table: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_project(tmp_path, table))
    if not seen:  # not the table, so another tool reports it
        assert find_project() is None
        return
    with pytest.raises(ConfigError, match=seen) as raised:
        compose([])
    assert str(tmp_path / "pyproject.toml") in str(raised.value)


def test_file_with_the_name_of_a_toolkit_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = write_project(tmp_path)
    (project / "conf/exp/quickstart.yaml").write_text("# @package _global_\n")
    monkeypatch.chdir(project)
    with pytest.raises(ConfigError, match=r"exp/quickstart\.yaml"):
        compose([])
