"""Train a model. The same file starts every way:

    deepspeed --num_gpus 2 launch/train.py +exp=quickstart train.steps=20 zero=stage3
    torchrun --nproc_per_node 2 launch/train.py +exp=quickstart
    python launch/train.py +exp=quickstart cluster.cpu_ranks=2
    python launch/train.py --frozen=RUN_DIR/jobs/001/config.yaml       a whole configuration, composed before: jobs start so
    python launch/train.py -m +exp=quickstart zero=stage1,stage2 train.micro_batch=2,4      a sweep: every combination is a run
    python launch/train.py --help

Exit code: 0 done, 2 a mistake in configuration or input, 65 a loss, gradient or weight is infinite or NaN, 75 stopped by a
signal after saving, else a failure. Launchers change it; <run.dir>/status.json has the truth.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from toolkit.cluster.environment import Launch, read_launch
from toolkit.cluster.exit_handling import ExitHandler, exit_now
from toolkit.cluster.launch_process import RunCallbacks, launch_process
from toolkit.cluster.start import Start
from toolkit.cluster.stop import StopRequest, launchers
from toolkit.errors import ExitCode
from toolkit.plan.types import RunPlan


def main(arguments: Sequence[str]) -> int:
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help

        return show_help(arguments)
    stop = StopRequest()
    with ExitHandler(stop) as exit_handler:
        launch, words = read_launch(os.environ, arguments)
        exit_handler.launch, stop.abort = launch, exit_handler.abort
        stop.install(launchers(launch))
        if {"-m", "--multirun"}.isdisjoint(words):
            work = RunCallbacks(make_data_ready=make_data_ready, train=train)
            exit_handler.code = launch_process(launch, words, exit_handler, stop, work, script=sys.argv[0])
        else:
            from toolkit.cluster.sweep.run import sweep

            exit_handler.code = sweep(words, launch, stop, sys.argv[0])
    stop.close()
    return exit_handler.code


def make_data_ready(plan: RunPlan) -> str:
    from toolkit.data.registry import prepare_data
    from toolkit.progress import Progress

    with Progress() as progress:
        return prepare_data(plan.config, plan.shape.vocab_size if plan.shape is not None else None, progress)


def train(plan: RunPlan, launch: Launch, start: Start, stop: StopRequest) -> ExitCode:
    from toolkit.train.run import run

    return run(
        plan,
        rank=launch.rank,
        local_rank=launch.local_rank,
        stop=stop,
        attempt=start.attempt,
        data=start.data,
        launcher=launch.launcher.value,
        seconds_left=stop.seconds_left,
    )


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
