"""Targets of the Makefile on machines without a package index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("python", "installs"), [(sys.executable, False), ("false", True)], ids=["ready", "bare"]
)
def test_gpu_tests_install_packages_only_if_some_are_missing(
    python: str, installs: bool, tmp_path: Path
) -> None:
    """Dry runs, with packages that the given Python finds."""
    words = ["make", "-n", "test-gpu", f"PYTHON={python}", f"VENV={tmp_path / 'absent'}"]
    plan = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ("pip install" in plan) == installs
    assert "-m pytest tests/gpu -m gpu" in plan
