"""A ``torchrun`` job: one side of a comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from toolkit.plan.devices import HIDE_GPUS
from toolkit.testing.dist import find_free_port

ROOT = Path(__file__).resolve().parents[2]
CONTENDERS = ROOT / "benchmarks" / "harness"
ON_CPU = {**HIDE_GPUS, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def _search_path() -> str:
    """The folders of the scripts and the toolkit, and those of this process, which may have the packages."""
    return os.pathsep.join([str(CONTENDERS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


class TorchrunJob:
    """Run a script of this folder on ``ranks`` ranks with a spec file, as a context manager.

    Args:
        folder: of the benchmark; ``folder / name`` is created with the job's ``spec.json`` and ``log.txt``.
    """

    def __init__(
        self,
        name: str,
        script: str,
        spec: Mapping[str, Any],
        folder: Path,
        *,
        ranks: int,
        environ: Mapping[str, str] = ON_CPU,
    ) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir(exist_ok=True)
        spec_file = self.folder / "spec.json"
        spec_file.write_text(json.dumps(spec))
        argv = [
            *(sys.executable, "-m", "torch.distributed.run"),
            "--nproc_per_node",
            str(ranks),
            "--master_port",
            str(find_free_port()),
            str(CONTENDERS / script),
            str(spec_file),
        ]
        self.started = time.perf_counter()
        self._log = (self.folder / "log.txt").open("w")
        self.process = subprocess.Popen(
            argv,
            env={**os.environ, **environ, "PYTHONPATH": _search_path()},
            cwd=ROOT,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def log_tail(self) -> str:
        """Return the end of its output."""
        return (self.folder / "log.txt").read_text()[-3000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        self._log.close()
