"""``dmt new``: a project that trains at once, with tests that pass.

pytest tests/launch/test_new.py
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from tests.launch.processes import ROOT
from toolkit import TrainResult, load_config, train
from toolkit.data.tokens import stdlib
from toolkit.errors import InputError
from toolkit.launch import new
from toolkit.new import create_project

SHORT = ("+exp=first", "cluster.gpus_per_node=0", "debug.threads=1", "eval.every=0", "train.global_batch=8")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project, the working folder; its modules are not imported yet. Its text is that of one folder
    instead of the standard library, which takes ten times longer to prepare.
    """
    folder = tmp_path / "mine"
    create_project(folder)
    read = stdlib.read_source_texts
    monkeypatch.setattr(stdlib, "read_source_texts", lambda _: read(ROOT / "toolkit/checkpoint"))
    monkeypatch.chdir(folder)
    importlib.invalidate_caches()  # of folders, whose time may be too coarse to show the new modules
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def test_files_have_the_name_of_the_project(project: Path) -> None:
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert files == {
        *(".gitignore", "Makefile", "README.md", "pyproject.toml"),
        *("conf/exp/first.yaml", "mine/__init__.py", "mine/model.py", "mine/task.py", "tests/test_first.py"),
    }
    for file in files:
        assert "project_name" not in (project / file).read_text(), file


@pytest.mark.timeout(200)
def test_own_test_of_the_project_passes(project: Path, tmp_path: Path) -> None:
    """Run it in this process, which has imported torch."""
    spec = importlib.util.spec_from_file_location("mine_test_first", project / "tests/test_first.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.test_first_experiment_learns_and_resumes(tmp_path)


def losses(result: TrainResult) -> list[float]:
    return result.metrics["loss"].to_pylist()


@pytest.mark.full
@pytest.mark.parametrize("engine", ["engine=local", "zero=stage2", "zero=stage3"])
def test_generated_project_trains_on_each_engine(engine: str, project: Path, tmp_path: Path) -> None:
    reference = train(
        load_config(*SHORT, "engine=local", f"run.dir={tmp_path / 'reference'}", "train.steps=6")
    )
    first = train(load_config(*SHORT, engine, f"run.dir={tmp_path / 'run'}", "train.steps=3"))
    resumed = train(load_config(*SHORT, "engine=local", f"run.dir={first.directory}", "train.steps=6"))
    assert losses(resumed) == pytest.approx(losses(reference), abs=1e-5)
    control = ("engine=local", "task.arguments.smoothing=0", f"run.dir={tmp_path / 'control'}")
    other = train(load_config(*SHORT, *control, "train.steps=1"))
    assert losses(other)[0] != pytest.approx(losses(reference)[0], abs=1e-3), (
        "the loss is that of mine/task.py"
    )


def test_existing_files_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/README.md").write_text("mine")
    assert new.main(["mine"]) == 2
    assert "mine/README.md exist" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["README.md"]
    assert new.main(["other"]) == 0
    assert "train it: cd other && " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a-b", "1st", "class", "torch", "toolkit", "json", "tests", "größe"])
def test_names_that_are_no_packages_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=name):
        create_project(tmp_path / name)
    assert not any(tmp_path.iterdir())
