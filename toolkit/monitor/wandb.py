"""Weights & Biases: one run of rank 0, offline unless asked otherwise. The only file that imports wandb.

A thread does the talking. Training hands rows over and goes on; W&B may be slow to start, be missing or hang, and then it is
told once (``CompositeSink``) and the run goes on without it.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.config.schema import WandbMode
from toolkit.monitor.sink import Kind, NullSink, Row

START_SECONDS = 90.0
CLOSE_SECONDS = 60.0
SERVICE = "wandb-core"
WAITING = 100_000  # rows that may wait for a W&B that does not take them


def run_id(run_dir: str | Path, identity: str) -> str:
    """The same for every start of a run, so that a resumed run continues its curve; the directory tells apart runs of one
    identity (the same training in another layout, say)."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(run_dir).name)
    return name if name.endswith(identity) else f"{name}-{identity}"


class WandbSink(NullSink):
    """
    Args:
        run_dir: W&B's files go to ``wandb/`` there.
        config: what is recorded of the run, plain JSON types.
    """

    def __init__(self, *, run_dir: Path, identity: str, project: str, mode: WandbMode, config: Mapping[str, Any],
                 start_seconds: float = START_SECONDS, close_seconds: float = CLOSE_SECONDS) -> None:
        self._start_seconds, self._close_seconds = start_seconds, close_seconds
        self._calls: queue.Queue[Callable[[Any], None] | None] = queue.Queue(WAITING)
        self._error: BaseException | None = None
        self._exit_code = 0
        self._started = threading.Event()
        self._begun_at = time.monotonic()
        settings = {"project": project, "id": run_id(run_dir, identity), "name": run_dir.name, "dir": str(run_dir),
                    "mode": mode.value, "config": dict(config)}
        if mode is WandbMode.online:
            settings["resume"] = "allow"  # offline, W&B joins the parts of one id when they are synced
        self._thread = threading.Thread(target=self._work, args=(settings,), name="wandb", daemon=True)
        self._thread.start()

    def log(self, kind: Kind, row: Row) -> None:
        if kind is Kind.STEP:
            self._put(lambda run: run.log({"step": row["step"], **{f"train/{name}": row[name] for name in row if name != "step"}}))
        elif kind is Kind.EVAL:
            means = {f"eval/{row['set']}/{name}": row[name] for name in ("loss", "accuracy") if name in row}
            self._put(lambda run: run.log({"step": row["step"], **means}))

    def log_text(self, name: str, text: str) -> None:
        self._put(lambda run: run.summary.update({name: text}))

    def log_image(self, name: str, path: Path) -> None:
        import wandb

        self._put(lambda run: run.log({name: wandb.Image(str(path))}))

    def close(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._put(None)
        self._thread.join(self._close_seconds)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            _end_service()
            raise TimeoutError(f"W&B did not finish within {self._close_seconds:g} s")

    def _put(self, call: Callable[[Any], None] | None) -> None:
        if self._error is not None:
            raise self._error
        if not self._started.is_set() and time.monotonic() - self._begun_at > self._start_seconds:
            raise TimeoutError(f"W&B did not start within {self._start_seconds:g} s")
        self._calls.put_nowait(call)

    def _work(self, settings: dict[str, Any]) -> None:
        try:
            run = _begin(settings)
            self._started.set()
            while (call := self._calls.get()) is not None:
                call(run)
            run.finish(exit_code=self._exit_code)
        except BaseException as error:  # noqa: BLE001  it is raised in the thread that uses this sink
            self._error = error
            _leave()


def _begin(settings: dict[str, Any]) -> Any:
    if settings["mode"] == WandbMode.offline.value:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else it looks up its server's name at the start
    import wandb

    # The log of the attempt has the console; git and code are the user's to publish. A killed run keeps all but its last second.
    wanted: dict[str, Any] = {"console": "off", "silent": True, "save_code": False, "disable_git": True,
                              "init_timeout": START_SECONDS, "x_transaction_log_flush_interval": 1.0}
    quiet = wandb.Settings(**{name: wanted[name] for name in wanted if name in wandb.Settings.model_fields})
    run = wandb.init(settings=quiet, **settings)
    # W&B's own count of calls never goes back, but a run may: from a checkpoint before its last row.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _leave() -> None:
    """Take back W&B's hook at the end of the process, which would raise the same error again, with a traceback."""
    with suppress(Exception):  # the error is told; this only tidies up
        import wandb

        wandb.teardown()


def _end_service() -> None:
    """Kill W&B's process, a child of this one: the hook at the end of the process would wait for it without bound."""
    for child in Path("/proc/self/task").glob("*/children"):
        for pid in child.read_text().split():
            with suppress(ProcessLookupError, FileNotFoundError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == SERVICE:
                    os.kill(int(pid), signal.SIGKILL)
