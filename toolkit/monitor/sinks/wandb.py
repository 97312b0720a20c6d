"""The Weights & Biases sink, which runs in a separate process. The only module that imports wandb."""

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
from toolkit.monitor.sink import Kind, Row, Sink
from toolkit.monitor.sinks.columns import metric_columns
from toolkit.monitor.system.metrics import without_wandb_metrics

STEP = "step"
START_SECONDS = 90.0
UPLOAD_SECONDS = 45.0  # at the end; the rest stays on disk for `wandb sync`
MAX_TITLE_CHARACTERS = 63  # characters of an alert's title


@dataclass(frozen=True, slots=True)
class WandbRun:
    """The W&B run that one node writes to.

    Attributes:
        run_id: the same for every attempt, so that a resumed run continues its curves.
        shared: whether several nodes write to the run.
    """

    run_id: str
    name: str
    folder: Path
    node: int
    shared: bool = False


def wandb_run(run_dir: str | Path, identity: str, mode: WandbMode, node: int, nodes: int) -> WandbRun:
    """Choose a node's W&B run: one for all nodes online, one per node offline, where W&B's shared mode is not
    supported.

    The shared run has a separate id: if one run is written in both modes, W&B overwrites rows of one with
    rows of the other (https://github.com/wandb/wandb/issues/12269), and a run may continue on another number
    of nodes.
    """
    folder = Path(run_dir)
    own_id = run_id(folder, identity)
    # W&B names folders by second and run id
    own = folder if node == 0 else folder / "nodes" / f"node-{node}"
    if mode is WandbMode.online and nodes > 1:
        return WandbRun(f"{own_id}-shared", folder.name, own, node, shared=True)
    if node == 0:
        return WandbRun(own_id, folder.name, own, node)
    return WandbRun(f"{own_id}-node-{node}", f"{folder.name} node {node}", own, node)


def run_id(run_dir: Path, identity: str) -> str:
    """Return the id of node 0's run and of the group. It contains the directory's name, because the same
    training in another layout has the same identity.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.name)
    return name if name.endswith(identity) else f"{name}-{identity}"


class WandbSink(Sink):
    """Args:
    wandb_run: the W&B run of this node.
    entity, group, tags: as in ``MonitorConfig``; the default group is the id of the first node's run.
    config: the recorded configuration, plain JSON types.
    trainer: id of the training process, which W&B measures and which is interrupted by a stop on the
        run's page.
    command: the command line shown by W&B.
    """

    def __init__(
        self,
        wandb_run: WandbRun,
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
        os.environ.pop("WANDB_SERVICE", None)  # a service that the user started would outlive this process
        if mode is WandbMode.offline:
            # otherwise W&B resolves its server's name at the start
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        sys.argv = list(command)  # where W&B looks for the command
        import wandb

        self._wandb: Any = wandb
        self._node = wandb_run.node
        wandb_run.folder.mkdir(parents=True, exist_ok=True)
        # The attempt's log has the console output, and publishing code is the user's decision. After a crash
        # all but the last second is on disk.
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
            "x_label": f"node-{wandb_run.node}",
        }
        if wandb_run.shared:
            wanted |= {"x_primary": wandb_run.node == 0, "x_update_finish_state": wandb_run.node == 0}
        settings = wandb.Settings(
            **{name: wanted[name] for name in wanted if name in wandb.Settings.model_fields}
        )
        # offline, W&B joins runs of one id when they are synced
        self._run = wandb.init(
            settings=settings,
            dir=str(wandb_run.folder),
            project=project,
            entity=entity,
            group=group,
            tags=list(tags),
            id=wandb_run.run_id,
            name=wandb_run.name,
            config=dict(config),
            mode="shared" if wandb_run.shared else mode.value,
            resume="allow" if mode is WandbMode.online else None,
        )
        # W&B's own step never goes back, but a run that resumes from an earlier checkpoint does.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self._best: set[str] = set()  # losses whose summary has the minimum as well as the last value

    def log(self, kind: Kind, row: Row) -> None:
        if kind is Kind.ALERT:
            self._alert(row)
        found = wandb_columns(kind, row, self._node)
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
            self._run.mark_preempting()  # shown as "preempted" instead of "failed", because it will continue
        self._run.finish(exit_code=exit_code)
        self._wandb.teardown()

    def _alert(self, row: Row) -> None:
        where = f" ({row['where']})" if row["where"] else ""
        levels = self._wandb.AlertLevel
        self._run.alert(
            title=f"{row['name']}{where}"[:MAX_TITLE_CHARACTERS],
            level=levels.ERROR if row["level"] == Level.ERROR else levels.WARN,
            text=f"step {row['step']}: {row['cause']}\n\nEvidence: {row['evidence']}\n\nNext step: "
            f"{row['next_step']}",
        )


def wandb_columns(kind: Kind, row: Row, node: int) -> dict[str, float]:
    """Return a row's columns with its step, which is W&B's axis, without the system metrics that W&B collects
    itself.
    """
    kept = without_wandb_metrics(row) if kind is Kind.SYSTEM else row
    return {STEP: row[STEP], **metric_columns(kind, kept, node)}
