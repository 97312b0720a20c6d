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

from toolkit.cluster.entry_point import run_entry_point
from toolkit.cluster.environment import Launch
from toolkit.cluster.exit_handling import exit_now
from toolkit.cluster.launch_process import RunCallbacks
from toolkit.cluster.start import Start
from toolkit.cluster.stop import StopRequest
from toolkit.errors import ExitCode
from toolkit.plan.types import RunPlan


def main(arguments: Sequence[str]) -> int:
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help

        return show_help(arguments)
    callbacks = RunCallbacks(make_data_ready=make_data_ready, train=train)
    return run_entry_point(arguments, callbacks, script=sys.argv[0])


def make_data_ready(plan: RunPlan) -> str:
    """Prepare and check the data of the run. Returns their folder."""
    from toolkit.data.open import ready_for
    from toolkit.progress import Progress

    with Progress() as progress:
        return ready_for(plan.config, plan.shape.vocab_size if plan.shape is not None else None, progress)


def train(plan: RunPlan, launch: Launch, start: Start, stop: StopRequest) -> ExitCode:
    """Train on this rank, within the process group."""
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
