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

from toolkit.cluster.rank_processes import find_free_port

ROOT = Path(__file__).resolve().parents[2]
SIDES = ROOT / "benchmarks" / "sides"
ON_CPU = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


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
            str(Path(sys.executable).parent / "torchrun"),
            "--nproc_per_node",
            str(ranks),
            "--master_port",
            str(find_free_port()),
            str(SIDES / script),
            str(spec_file),
        ]
        self.started = time.perf_counter()
        self._log = (self.folder / "log.txt").open("w")
        self.process = subprocess.Popen(
            argv,
            env={**os.environ, **environ, "PYTHONPATH": str(SIDES)},
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
