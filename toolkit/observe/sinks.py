"""Which sinks a run has."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from toolkit.config.monitor import WandbMode
from toolkit.errors import ExitCode
from toolkit.files import write_whole
from toolkit.monitor.sink import CompositeSink, FilteredSink, Kind, NullSink, Sink
from toolkit.monitor.sinks import environment
from toolkit.monitor.sinks.console import AlertConsoleSink, ConsoleSink, StepTable
from toolkit.monitor.sinks.jsonl import JsonlSink
from toolkit.monitor.sinks.queued import QueuedSink
from toolkit.monitor.sinks.rate_limit import RateLimitedSink
from toolkit.monitor.sinks.subprocess_sink import CLOSE_SECONDS, SubprocessSink
from toolkit.monitor.sinks.wandb import WandbSink, run_id, wandb_run
from toolkit.plan.flops import peak_flops
from toolkit.plan.types import Device, RunPlan
from toolkit.progress import Progress
from toolkit.rundir.directory import RunDirectory

log = logging.getLogger(__name__)

WANDB = "W&B"
SHOWN = (Kind.STEP, Kind.EVAL, Kind.ALERT)  # on the console
FILE_LAG_SECONDS = 0.5  # a thread that is woken for each row costs training more by that than by the work
WANDB_LAG_SECONDS = 1.0  # a row makes six threads of three processes do something


def open_sinks(
    plan: RunPlan,
    directory: RunDirectory,
    done: int,
    rank: int,
    *,
    attempt: int,
    data: Mapping[str, str | int],
    launcher: str | None = None,
) -> Sink:
    """Rank 0's has the run, the first of each other node what is of that node; nothing on the rest. None of them is waited for.

    Args:
        done: steps that were made before.
        data: fingerprints of what the run reads.
        launcher: who started the ranks.
    """
    node, place = divmod(rank, plan.world.ranks_per_node)
    if place != 0:
        return NullSink()
    monitor = plan.config.monitor
    known = {
        "git": environment.read_git_state(),
        "environment": environment.collect_environment(launcher),
        "data": dict(data),
    }
    files = {Kind.SYSTEM: directory.system_file(node), Kind.ALERT: directory.node_alerts_file(node)}
    if node == 0:
        _keep(directory, attempt, known)
        files |= {
            Kind.STEP: directory.metrics_file,
            Kind.EVAL: directory.eval_file,
            Kind.LEDGER: directory.ledger_file,
        }
    sinks: list[Sink] = [QueuedSink(lambda: JsonlSink(files), "JSONL", lag_seconds=FILE_LAG_SECONDS)]
    if monitor.wandb is not WandbMode.disabled:
        arguments = wandb_arguments(plan, known, node)
        process = QueuedSink(
            lambda: SubprocessSink(WandbSink, arguments, WANDB),
            WANDB,
            lag_seconds=WANDB_LAG_SECONDS,
            close_seconds=CLOSE_SECONDS + 5.0,
        )
        sinks.append(RateLimitedSink(process))
    console = QueuedSink(lambda: _console(plan, done, node), "console", lag_seconds=FILE_LAG_SECONDS)
    sinks.append(FilteredSink(console, lambda kind, row: kind in SHOWN))
    whole = CompositeSink(sinks)
    if node == 0:
        return whole
    return FilteredSink(
        whole, lambda kind, row: kind in files
    )  # every rank knows the run's rows, and they are told once


def wandb_arguments(plan: RunPlan, known: Mapping[str, Any], node: int) -> dict[str, Any]:
    """Of ``WandbSink``, on one node.

    In a run that several nodes write, node 0 says what it is and each other node adds itself under its name; configuration and plan are
    every node's, so that nothing is lost whoever is the last to write.
    """
    monitor, world = plan.config.monitor, plan.world
    mine = wandb_run(plan.run_dir, plan.identity, monitor.wandb, node, world.nodes)
    own = {name: known[name] for name in ("git", "environment")}
    config = {
        **described(plan),
        "data": known["data"],
        **({f"node-{node}": own} if mine.shared and node else own),
    }
    return {
        "wandb_run": mine,
        "mode": monitor.wandb,
        "project": monitor.project,
        "entity": monitor.entity,
        "tags": list(monitor.tags),
        "group": monitor.group or run_id(Path(plan.run_dir), plan.identity),
        "config": config,
        "trainer": os.getpid(),
        "command": sys.argv,
    }


def described(plan: RunPlan) -> dict[str, Any]:
    """Configuration and plan, as plain JSON types."""
    from toolkit.plan.present import to_json

    def plain(value: object) -> object:
        assert isinstance(value, Enum), f"{value!r} in a configuration"
        return value.value

    return {"config": json.loads(json.dumps(asdict(plan.config), default=plain)), "plan": to_json(plan)}


@contextmanager
def closed_with_code(sink: Sink) -> Iterator[Callable[[ExitCode], None]]:
    """The sink is closed in any case, with the code that was told, or as a failure."""
    told = [ExitCode.FAILURE]
    try:
        yield told.append
    finally:
        sink.close(int(told[-1]))


def _console(plan: RunPlan, done: int, node: int) -> Sink:
    if node != 0:
        return AlertConsoleSink()
    on_gpus = plan.world.device is Device.CUDA
    table = StepTable(plan.unit, device=on_gpus, utilisation=on_gpus and peak_flops(plan) is not None)
    return CompositeSink(
        [
            ConsoleSink(
                Progress(), table, steps=plan.config.train.steps, done=done, every=plan.config.monitor.every
            ),
            AlertConsoleSink(),
        ]
    )


def _keep(directory: RunDirectory, attempt: int, known: Mapping[str, Any]) -> None:
    try:
        write_whole(directory.environment_file(attempt), json.dumps(known, indent=1) + "\n", durable=False)
    except OSError as error:
        log.warning(f"{directory.environment_file(attempt)} could not be written: {error}")
