"""Recorded environment: git state without diffs, versions, and no environment variables.

pytest tests/monitor/test_environment.py
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

import toolkit
from toolkit.monitor.sinks import environment


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-b", "trunk")
    (folder / "code.py").write_text("one\n")
    git(folder, "add", "code.py")
    git(folder, "commit", "-m", "first")
    return folder


def test_git_state_has_commit_branch_and_dirty(tree: Path) -> None:
    commit = git(tree, "rev-parse", "HEAD")
    assert environment.read_git_state(tree) == {"commit": commit, "branch": "trunk", "dirty": False}
    (tree / "code.py").write_text("secret = 1\n")
    assert environment.read_git_state(tree) == {"commit": commit, "branch": "trunk", "dirty": True}
    git(tree, "checkout", "code.py")
    git(tree, "checkout", "--detach")
    assert environment.read_git_state(tree) == {"commit": commit, "branch": None, "dirty": False}


def test_untracked_folder_has_no_git_state(tree: Path, tmp_path: Path) -> None:
    installed = tree / "environment" / "site-packages"  # like a virtual environment inside a project
    installed.mkdir(parents=True)
    (installed / "module.py").touch()
    assert environment.read_git_state(installed) is None
    assert environment.read_git_state(tmp_path) is None


@pytest.mark.parametrize("script", ["sleep 60", None])
def test_hanging_or_missing_git_gives_no_state(
    script: str | None, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    if script is not None:
        (programs / "git").write_text(f"#!/bin/sh\nexec /bin/{script}\n")
        (programs / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    began = time.monotonic()
    assert environment.read_git_state(tree, seconds=0.3) is None
    assert time.monotonic() - began < 2.0


def test_environment_has_versions_but_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-key")
    found = environment.collect_environment("torchrun")
    assert found["toolkit"] == toolkit.__version__
    assert found["launcher"] == "torchrun"
    assert found["packages"]["numpy"].count(".") == 2
    assert set(found["packages"]) == set(environment.PACKAGES)
    text = json.dumps(found)
    assert "a-secret-key" not in text
    assert os.environ["PATH"] not in text


def test_missing_packages_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    monkeypatch.setattr(environment, "DRIVER_VERSION_FILE", tmp_path / "version")
    found = environment.collect_environment(None)
    assert (found["packages"], found["driver"], found["launcher"]) == ({"no-such-package": None}, None, None)
    (tmp_path / "version").write_text("575.57.08\n")
    assert environment.collect_environment(None)["driver"] == "575.57.08"
