"""Which sinks a run has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from typing import Any

from toolkit.config.schema import WandbMode
from toolkit.errors import ExitCode
from toolkit.monitor.console import ConsoleSink
from toolkit.monitor.jsonl import JsonlSink
from toolkit.monitor.sink import CompositeSink, Kind, NullSink, Sink
from toolkit.plan.types import RunPlan
from toolkit.progress import Progress
from toolkit.rundir import RunDirectory


def open_sinks(plan: RunPlan, directory: RunDirectory, done: int, rank: int) -> Sink:
    """Rank 0's has the run, the first of each other node that node; nothing on the rest. ``done`` steps were made before."""
    node, place = divmod(rank, plan.world.ranks_per_node)
    if place != 0:
        return NullSink()
    files = {Kind.SYSTEM: directory.system_file(node)}
    if node != 0:
        return CompositeSink([JsonlSink(files)])
    files |= {Kind.STEP: directory.metrics_file, Kind.EVAL: directory.eval_file, Kind.LEDGER: directory.ledger_file,
              Kind.ALERT: directory.alerts_file}
    monitor, steps = plan.config.monitor, plan.config.train.steps
    sinks: list[Sink] = [JsonlSink(files)]
    if monitor.wandb is not WandbMode.disabled:
        from toolkit.monitor.wandb import WandbSink

        sinks.append(WandbSink(run_dir=directory.path, identity=plan.identity, project=monitor.project, mode=monitor.wandb,
                               config=described(plan)))
    sinks.append(ConsoleSink(Progress(), steps=steps, done=done, every=monitor.every, unit=plan.unit))
    return CompositeSink(sinks)


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
