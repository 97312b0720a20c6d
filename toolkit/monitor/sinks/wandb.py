"""Weights & Biases, and nothing but talking to it: it belongs in a process of its own. The only file that imports wandb."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.config.monitor import WandbMode
from toolkit.errors import ExitCode
from toolkit.monitor.alert import Level
from toolkit.monitor.sink import Kind, NullSink, Row
from toolkit.monitor.sinks.wandb_columns import STEP, wandb_columns

START_SECONDS = 90.0
UPLOAD_SECONDS = 45.0  # at the end; what is left then is on the disk, for `wandb sync`
TITLE = 63  # characters of an alert's title


@dataclass(frozen=True, slots=True)
class WandbRun:
    """What one node is to W&B.

    Attributes:
        run_id: the same for every start of a run, so that a resumed one continues its curve.
        shared: several nodes write one run.
    """

    run_id: str
    name: str
    folder: Path
    node: int
    shared: bool = False


def wandb_run(run_dir: str | Path, identity: str, mode: WandbMode, node: int, nodes: int) -> WandbRun:
    """Online, all nodes of a run write one W&B run; offline, which W&B's shared mode is not made for, each its own.

    The shared run has an id of its own: where the same run is written in both modes, W&B overwrites rows of the one with rows of the
    other (https://github.com/wandb/wandb/issues/12269), and a run may go on with another number of nodes.
    """
    folder = Path(run_dir)
    own_id = run_id(folder, identity)
    own = (
        folder if node == 0 else folder / "nodes" / f"node-{node}"
    )  # W&B names folders by the second and the run
    if mode is WandbMode.online and nodes > 1:
        return WandbRun(f"{own_id}-shared", folder.name, own, node, shared=True)
    if node == 0:
        return WandbRun(own_id, folder.name, own, node)
    return WandbRun(f"{own_id}-node-{node}", f"{folder.name} node {node}", own, node)


def run_id(run_dir: Path, identity: str) -> str:
    """Of what node 0 writes, and of all parts of a run together. The directory tells apart runs of one identity: the same training in
    another layout, say."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.name)
    return name if name.endswith(identity) else f"{name}-{identity}"


class WandbSink(NullSink):
    """
    Args:
        part: which run, by which node.
        entity, group, tags: as in ``MonitorConfig``; without a group, the nodes' runs are together under the id of the first.
        config: what is recorded of the run, plain JSON types.
        trainer: the process that trains: W&B measures it, and asks it to stop where somebody does so on the run's page.
        command: its words, which W&B shows.
    """

    def __init__(
        self,
        part: WandbRun,
        *,
        mode: WandbMode,
        project: str,
        entity: str | None,
        group: str,
        tags: Sequence[str],
        config: Mapping[str, Any],
        trainer: int,
        command: Sequence[str],
        start_seconds: float = START_SECONDS,
        upload_seconds: float = UPLOAD_SECONDS,
    ) -> None:
        os.environ.pop("WANDB_SERVICE", None)  # a service of the user's would outlive this process
        if mode is WandbMode.offline:
            os.environ.setdefault(
                "WANDB_ERROR_REPORTING", "false"
            )  # else it looks up its server's name at the start
        sys.argv = list(command)  # that is where W&B looks
        import wandb

        self._wandb: Any = wandb
        self._part = part
        part.folder.mkdir(parents=True, exist_ok=True)
        # The log of the attempt has the console; code is the user's to publish. A killed machine keeps all but the last second.
        wanted: dict[str, Any] = {
            "console": "off",
            "silent": True,
            "save_code": False,
            "disable_git": True,
            "init_timeout": start_seconds,
            "finish_timeout": upload_seconds,
            "finish_timeout_raises": True,
            "stop_fn": partial(os.kill, trainer, signal.SIGINT),
            "program": command[0],
            "x_transaction_log_flush_interval": 1.0,
            "x_stats_pid": trainer,
            "x_label": f"node-{part.node}",
        }
        if part.shared:
            wanted |= {"x_primary": part.node == 0, "x_update_finish_state": part.node == 0}
        settings = wandb.Settings(
            **{name: wanted[name] for name in wanted if name in wandb.Settings.model_fields}
        )
        self._run = wandb.init(
            settings=settings,
            dir=str(part.folder),
            project=project,
            entity=entity,
            group=group,
            tags=list(tags),
            id=part.run_id,
            name=part.name,
            config=dict(config),
            mode="shared" if part.shared else mode.value,
            resume="allow" if mode is WandbMode.online else None,
        )  # offline, W&B joins the parts of one id when they are synced
        # W&B's own count of calls never goes back, but a run may: from a checkpoint before its last row.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self._best: set[str] = set()  # losses of which the summary has the lowest beside the last one

    def log(self, kind: Kind, row: Row) -> None:
        if kind is Kind.ALERT:
            self._alert(row)
        found = wandb_columns(kind, row, self._part.node)
        for name in found.keys() - self._best:
            if kind in (Kind.STEP, Kind.EVAL) and name.endswith("/loss"):
                self._best.add(name)
                self._run.define_metric(name, step_metric=STEP, summary="min,last")
        self._run.log(found)

    def log_summary(self, name: str, value: str | float) -> None:
        self._run.summary.update({name: value})

    def log_image(self, name: str, path: Path) -> None:
        self._run.log({name: self._wandb.Image(str(path))})

    def close(self, exit_code: int) -> None:
        if exit_code == ExitCode.STOPPED:
            self._run.mark_preempting()  # it is to go on: "preempted", not "failed"
        self._run.finish(exit_code=exit_code)
        self._wandb.teardown()

    def _alert(self, row: Row) -> None:
        where = f" ({row['where']})" if row["where"] else ""
        levels = self._wandb.AlertLevel
        self._run.alert(
            title=f"{row['name']}{where}"[:TITLE],
            level=levels.ERROR if row["level"] == Level.ERROR else levels.WARN,
            text=f"step {row['step']}: {row['cause']}\n\nEvidence: {row['evidence']}\n\nNext step: {row['next_step']}",
        )
