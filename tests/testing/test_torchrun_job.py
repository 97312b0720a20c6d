"""Jobs of benchmarks: what their processes inherit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.plan.devices import HIDE_GPUS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_jobs_on_cpus_hide_gpus_and_keep_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from harness import torchrun_job

    started: list[dict[str, str]] = []

    class Process:
        def __init__(self, argv: list[str], env: dict[str, str], **_: Any) -> None:
            assert argv[:3] == [sys.executable, "-m", "torch.distributed.run"]
            started.append(env)

        def terminate(self) -> None:
            pass

        def wait(self, timeout: float) -> None:
            pass

    monkeypatch.setattr(torchrun_job.subprocess, "Popen", Process)
    monkeypatch.setenv("PYTHONPATH", "/packages")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with torchrun_job.TorchrunJob("job", "baseline.py", {}, tmp_path, ranks=2):
        pass
    assert started[0].items() >= HIDE_GPUS.items()
    assert started[0]["PYTHONPATH"].split(os.pathsep)[-1] == "/packages"
