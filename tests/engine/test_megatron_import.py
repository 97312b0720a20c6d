"""What the import of Megatron-core leaves alone.

pytest tests/engine/test_megatron_import.py
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.processes import ROOT

KILLED_AFTER_IMPORT = """
import os, signal, sys
from importlib.util import find_spec
from toolkit.engine.megatron.engine import import_megatron
from toolkit.plan.types import Device

import_megatron(Device.CPU)
assert "wandb" not in sys.modules
assert find_spec("wandb") is not None, "user code can import it"
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(600)
def test_rank_that_is_killed_leaves_no_temporary_folders(tmp_path: Path) -> None:
    environ = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AFTER_IMPORT], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    cache = "torchinductor_"  # one folder for each user, which further processes use
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(cache)] == []
