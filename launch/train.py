"""Train a model. Every launcher starts this file:

    deepspeed --num_gpus 2 launch/train.py +exp=quickstart train.steps=20 zero=stage3
    torchrun --nproc_per_node 2 launch/train.py +exp=quickstart
    python launch/train.py +exp=quickstart cluster.cpu_ranks=2
    python launch/train.py --frozen=RUN_DIR/jobs/001/config.yaml   a job's configuration
    python launch/train.py -m +exp=quickstart zero=stage1,stage2 train.micro_batch=2,4   a sweep
    python launch/train.py --help

Exit code: 0 success, 2 an error in the configuration or the input, 65 a loss, gradient or weight is infinite
or NaN, 75 stopped by a signal after saving, any other a failure. Launchers change it; the original is in
<run.dir>/status.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from toolkit.cluster.attempt.attempt_spec import AttemptSpec
from toolkit.cluster.attempt.exit_handling import exit_now
from toolkit.cluster.entry_point import run_entry_point
from toolkit.cluster.launch_process import RunCallbacks
from toolkit.cluster.stop.elastic_stop import serves_rendezvous
from toolkit.cluster.stop.stop_request import StopRequest
from toolkit.cluster.world.environment import Launch
from toolkit.commands import entry_point
from toolkit.errors import ExitCode
from toolkit.plan.types import RunPlan


def main(arguments: Sequence[str]) -> int:
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help

        return show_help(arguments)
    return run_entry_point(arguments, make_callbacks(), script=entry_point("train"))


def make_data_ready(plan: RunPlan) -> str:
    """Prepare and check the data of the run, and check the user's own code. Returns the data's folder."""
    from toolkit.data.registry import prepare_data
    from toolkit.progress import Progress

    if plan.config.task.target is not None or plan.config.metrics:
        from toolkit.train.user_task import check_user_task

        check_user_task(plan.config)
    if plan.config.hooks:
        from toolkit.train.user_hooks import check_user_hooks

        check_user_hooks(plan.config)
    if plan.config.monitor.sinks:
        from toolkit.observe.sinks import check_user_sinks

        check_user_sinks(plan.config)
    with Progress() as progress:
        return prepare_data(plan.config, plan.vocab_size, progress)


def train(plan: RunPlan, launch: Launch, start: AttemptSpec, stop: StopRequest) -> ExitCode:
    """Train on this rank, within the process group."""
    from toolkit.train.departure import ElasticNodes
    from toolkit.train.run import run

    elastic = None
    if (nodes := launch.node_range) is not None:
        serves, leave = partial(serves_rendezvous, launch.launcher_pid), partial(stop.request, leaves=True)
        elastic = ElasticNodes(nodes.min_nodes, launch.restarts_left, serves, leave)
    return run(
        plan,
        rank=launch.rank,
        local_rank=launch.local_rank,
        stop=stop,
        attempt=start.attempt,
        data=start.data,
        launcher=launch.launcher.value,
        seconds_left=stop.seconds_left,
        snapshot_folder=None if start.memory is None else Path(start.memory),
        restart=start.restart,
        elastic=elastic,
    )


def import_training(plan: RunPlan) -> None:
    """Import everything that :func:`train` needs, which takes most of the time until the first step."""
    import toolkit.train.run  # noqa: F401
    from toolkit.engine.imports import import_engine

    import_engine(plan)


def make_callbacks() -> RunCallbacks:
    return RunCallbacks(prepare_data=make_data_ready, train=train, warm_up=import_training)


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
