"""Run the contenders of benchmarks/streaming.py, each in its own process with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from harness.contenders import CONTENDERS
from harness.corpus import Corpus

PEERS = Path(__file__).resolve().parents[1] / "peers.txt"


class ContenderFailed(Exception):
    """A process of a contender failed or exceeded its time limit; the message is its last line."""


class ContenderRunner:
    """Run benchmarks/harness/read_contender.py for contenders."""

    def __init__(self, corpus: Corpus, python: Path, limit_seconds: float) -> None:
        self._corpus, self._python, self._limit = corpus, python, limit_seconds

    def files(self, name: str) -> Path:
        """Return the folder of the files; contenders with one format share it."""
        return self._corpus.folder / "formats" / CONTENDERS[name].open.__module__.rpartition(".")[2]

    def make(self, name: str) -> dict[str, Any]:
        files = self.files(name)
        done = files / "made.json"
        if not done.is_file():
            if files.exists() and any(files.iterdir()):
                raise SystemExit(f"{files} holds incomplete files: empty it")
            files.mkdir(parents=True, exist_ok=True)
            done.write_text(json.dumps(self.run(name, "make")))
        found: dict[str, Any] = json.loads(done.read_text())
        return {
            **found,
            "disk_bytes": sum(file.stat().st_size for file in files.rglob("*") if file.is_file()),
        }

    def run(
        self, name: str, task: str, *options: str, environ: dict[str, str] | None = None
    ) -> dict[str, Any]:
        return self.finish(self.start(name, task, *options, environ=environ))

    def start(
        self, name: str, task: str, *options: str, environ: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        script = str(Path(__file__).with_name("read_contender.py"))
        argv = [
            str(self._python),
            script,
            name,
            task,
            "--corpus",
            str(self._corpus.folder),
            "--files",
            str(self.files(name)),
            *options,
        ]
        settings = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "HF_DATASETS_CACHE": str(self._corpus.folder / "formats" / "hf-cache"),
        }
        return subprocess.Popen(
            argv,
            env={**os.environ, **settings, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        try:
            output, errors = process.communicate(timeout=self._limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own session, so workers end as well
            process.communicate()
            raise ContenderFailed(f"not done after {self._limit:.0f} s") from None
        if process.returncode:
            lines = [line.strip() for line in errors.splitlines() if line.strip()]
            raise ContenderFailed(lines[-1][:300] if lines else f"exit code {process.returncode}")
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
        return found


def peers_python(venv: Path | None) -> Path:
    """Return the Python that has the other loaders, after creating ``venv`` if it is absent."""
    if venv is None:
        return Path(sys.executable)
    python = venv / "bin" / "python"
    if not (venv / "made.txt").is_file():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        own_packages = sysconfig.get_path("purelib")
        query = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site_packages = subprocess.run(
            [str(python), "-c", query], check=True, capture_output=True, text=True
        ).stdout.strip()
        # Its own packages come first; addsitedir also reads our .pth files, so this toolkit is found.
        Path(site_packages, "zz_below.pth").write_text(f"import site; site.addsitedir({own_packages!r})\n")
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "-r", str(PEERS)], check=True)
        (venv / "made.txt").write_text(PEERS.read_text())
    return python
