"""Open the sinks of a run: files, W&B and the console."""

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
from toolkit.config.schema import RunConfig
from toolkit.errors import ExitCode
from toolkit.files import write_whole
from toolkit.monitor.sink import CompositeSink, FilteredSink, Kind, Sink, SinkRun
from toolkit.monitor.sinks import environment
from toolkit.monitor.sinks.console import AlertConsoleSink, ConsoleSink, StepTable
from toolkit.monitor.sinks.jsonl import JsonlSink
from toolkit.monitor.sinks.queued import QueuedSink
from toolkit.monitor.sinks.rate_limit import RateLimitedSink
from toolkit.monitor.sinks.subprocess_sink import CLOSE_SECONDS, SubprocessSink
from toolkit.monitor.sinks.wandb import WandbSink, run_id, wandb_run
from toolkit.observe.context import RankContext
from toolkit.plan.flops import peak_flops
from toolkit.plan.types import Device, RunPlan
from toolkit.progress import Progress
from toolkit.user_code import (
    UserObject,
    build_user_object,
    check_arguments,
    check_kind,
    load_target,
    sink_objects,
    user_code,
)

log = logging.getLogger(__name__)

WANDB = "W&B"
CONSOLE_KINDS = (Kind.STEP, Kind.EVAL, Kind.ALERT)
FILE_LAG_SECONDS = 0.5  # waking a thread for every row costs training more than the thread's work
WANDB_LAG_SECONDS = 1.0  # a row wakes six threads of three processes


def open_sinks(
    context: RankContext, first_step: int, *, data: Mapping[str, str | int], launcher: str | None = None
) -> Sink:
    """Open this rank's sinks, none of which makes training wait.

    Rank 0 logs the run. The first rank of every other node logs that node's system samples and alerts. Other
    ranks log nothing.

    Args:
        first_step: steps completed by earlier attempts.
        data: fingerprints of the data.
        launcher: name of what started the ranks.
    """
    plan, directory, node = context.plan, context.directory, context.node
    if not context.first_on_node:
        return Sink()
    monitor = plan.config.monitor
    description = {
        "git": environment.read_git_state(),
        "environment": environment.collect_environment(launcher),
        "data": dict(data),
    }
    files = {Kind.SYSTEM: directory.system_file(node), Kind.ALERT: directory.node_alerts_file(node)}
    if node == 0:
        _write_environment(context, description)
        files |= {
            Kind.STEP: directory.metrics_file,
            Kind.EVAL: directory.eval_file,
            Kind.LEDGER: directory.ledger_file,
        }
        if plan.config.hooks:
            files[Kind.HOOK] = directory.hooks_file
    sinks: list[Sink] = [QueuedSink(lambda: JsonlSink(files), "JSONL", lag_seconds=FILE_LAG_SECONDS)]
    if monitor.wandb is not WandbMode.disabled:
        arguments = wandb_arguments(plan, description, node)
        process = QueuedSink(
            lambda: SubprocessSink(WandbSink, arguments, WANDB),
            WANDB,
            lag_seconds=WANDB_LAG_SECONDS,
            close_seconds=CLOSE_SECONDS + 5.0,
        )
        sinks.append(RateLimitedSink(process))
    console = QueuedSink(
        lambda: _open_console(plan, first_step, node), "console", lag_seconds=FILE_LAG_SECONDS
    )
    sinks.append(FilteredSink(console, lambda kind, row: kind in CONSOLE_KINDS))
    if node == 0:
        sinks += open_user_sinks(plan, first_step)
    sink = CompositeSink(sinks)
    if node == 0:
        return sink
    return FilteredSink(sink, lambda kind, row: kind in files)  # rank 0 logs the rows of the run


def open_user_sinks(plan: RunPlan, first_step: int) -> list[Sink]:
    """Return the sinks of ``monitor.sinks``, each behind a queue and built in its own thread.

    Raises:
        ConfigError: a target cannot be imported, is not derived from ``toolkit.Sink``, or does not accept
            its arguments.
    """
    check_user_sinks(plan.config)
    run = SinkRun(Path(plan.run_dir), first_step, plan_to_json(plan)["config"])
    return [_open_user_sink(given, run) for given in sink_objects(plan.config)]


def check_user_sinks(config: RunConfig) -> None:
    """Import the sinks of the configuration, and check them without building them.

    Raises:
        ConfigError: as :func:`open_user_sinks`.
    """
    for given in sink_objects(config):
        factory = load_target(given)
        check_kind(given, factory, (Sink,))
        check_arguments(given, factory)


def _open_user_sink(given: UserObject, run: SinkRun) -> Sink:
    def build() -> Sink:
        sink: Sink = build_user_object(given, Sink)
        with user_code(given.key, sink):
            sink.open(run)
        return sink

    return QueuedSink(build, given.key, lag_seconds=FILE_LAG_SECONDS)


def wandb_arguments(plan: RunPlan, description: Mapping[str, Any], node: int) -> dict[str, Any]:
    """Return the arguments of ``WandbSink`` on one node.

    If several nodes write one W&B run, node 0 writes its description at the top level and each other node
    under its name. Every node writes the configuration and the plan, so the last writer loses nothing.
    """
    monitor, world = plan.config.monitor, plan.world
    wandb_settings = wandb_run(plan.run_dir, plan.identity, monitor.wandb, node, world.nodes)
    own = {name: description[name] for name in ("git", "environment")}
    config = {
        **plan_to_json(plan),
        "data": description["data"],
        **({f"node-{node}": own} if wandb_settings.shared and node else own),
    }
    return {
        "wandb_run": wandb_settings,
        "mode": monitor.wandb,
        "project": monitor.project,
        "entity": monitor.entity,
        "tags": list(monitor.tags),
        "group": monitor.group or run_id(Path(plan.run_dir), plan.identity),
        "config": config,
        "trainer": os.getpid(),
        "command": sys.argv,
    }


def plan_to_json(plan: RunPlan) -> dict[str, Any]:
    """Return the configuration and the plan as plain JSON types."""
    from toolkit.estimate.plan_report import to_json

    def plain(value: object) -> object:
        assert isinstance(value, Enum), f"{value!r} in a configuration"
        return value.value

    return {"config": json.loads(json.dumps(asdict(plan.config), default=plain)), "plan": to_json(plan)}


@contextmanager
def close_with_exit_code(sink: Sink) -> Iterator[Callable[[ExitCode], None]]:
    """Close the sink at the end, with the code that was passed to the yielded function, or else as a
    failure.
    """
    codes = [ExitCode.FAILURE]
    try:
        yield codes.append
    finally:
        sink.close(int(codes[-1]))


def _open_console(plan: RunPlan, first_step: int, node: int) -> Sink:
    if node != 0:
        return AlertConsoleSink()
    on_gpus = plan.world.device is Device.CUDA
    table = StepTable(plan.unit, device=on_gpus, utilisation=on_gpus and peak_flops(plan) is not None)
    return CompositeSink(
        [
            ConsoleSink(
                Progress(),
                table,
                steps=plan.config.train.steps,
                done=first_step,
                every=plan.config.monitor.every,
            ),
            AlertConsoleSink(),
        ]
    )


def _write_environment(context: RankContext, description: Mapping[str, Any]) -> None:
    file = context.directory.environment_file(context.attempt)
    try:
        write_whole(file, json.dumps(description, indent=1) + "\n", durable=False)
    except OSError as error:
        log.warning(f"{file} could not be written: {error}")
