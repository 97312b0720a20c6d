"""Train a model. The same file starts every way:

    deepspeed --num_gpus 2 launch/train.py +exp=quickstart train.steps=20 zero=stage3
    torchrun --nproc_per_node 2 launch/train.py +exp=quickstart
    python launch/train.py +exp=quickstart cluster.cpu_ranks=2
    python launch/train.py --frozen=RUN_DIR/jobs/001/config.yaml       a whole configuration, composed before: jobs start so
    python launch/train.py -m +exp=quickstart zero=stage1,stage2 train.micro_batch=2,4      a sweep: every combination is a run
    python launch/train.py --help

Exit code: 0 done, 2 a mistake in configuration or input, 75 stopped by a signal after saving, else a failure. Launchers change
it; <run.dir>/status.json has the truth.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from toolkit.cluster.ends import Ending, leave
from toolkit.cluster.environment import Launch, read_launch, set_defaults, set_thread_default
from toolkit.cluster.log import log_to
from toolkit.cluster.machine import this_machine
from toolkit.cluster.notice import watch as watch_notices
from toolkit.cluster.parent import start_ranks
from toolkit.cluster.rendezvous import Meeting
from toolkit.cluster.start import Start, announce, begin
from toolkit.cluster.stop import StopRequest, launchers
from toolkit.errors import ExitCode
from toolkit.plan.types import RunPlan
from toolkit.rundir.directory import RunDirectory

DATA_SECONDS = 3600.0  # that ranks wait for one of them to make the data


def main(arguments: Sequence[str]) -> int:
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help

        return show_help(arguments)
    stop = StopRequest()
    with Ending(stop) as ending:
        launch, overrides = read_launch(os.environ, arguments)
        ending.launch, stop.abort = launch, ending.abort
        stop.install(launchers(launch))
        if {"-m", "--multirun"}.isdisjoint(overrides):
            ending.code = take_part(launch, overrides, ending, stop)
        else:
            from toolkit.cluster.sweep.run import sweep

            ending.code = sweep(overrides, launch, stop, sys.argv[0])
    stop.close()
    return ending.code


def take_part(launch: Launch, overrides: Sequence[str], ending: Ending, stop: StopRequest) -> ExitCode:
    """What this process does in the run: start the ranks, or be one of them."""
    machine = this_machine()
    meeting = Meeting(launch, overrides)
    composes = launch.rank == 0 and launch.handover is None
    if launch.ranks > 1:
        ending.meeting = meeting
        set_thread_default(os.environ, launch.ranks_per_node, machine.cores)  # before the meeting imports torch
    if composes:
        start, plan, directory = begin(overrides, launch, machine)
    else:
        start = Start.read(launch.handover) if launch.handover is not None else Start.from_json(*meeting.receive("start"))
        plan = start.plan()
        directory = RunDirectory(plan.run_dir)
    ending.directory, ending.attempt = directory, start.attempt
    if launch.rank == 0:
        log_to(directory.log_file(start.attempt))
    if composes:
        announce(plan, start.attempt)
    if launch.ranks > 1 and launch.handover is None:
        if composes:
            meeting.publish("start", start.to_json())
        if launch.local_rank == 0:
            meeting.publish(f"data/{launch.node}", {"folder": make_data_ready(plan)})
        ready = meeting.receive(*(f"data/{node}" for node in range(launch.nodes)), seconds=DATA_SECONDS)
        start = replace(start, data=ready[launch.node]["folder"])
    elif composes:
        start = replace(start, data=make_data_ready(plan))
    if plan.world.ranks > launch.ranks:
        return start_ranks(sys.argv[0], start, directory, stop, ending, plan.config.cluster)
    if plan.config.cluster.preflight:
        look_at_machines(plan, launch, meeting)
    set_defaults(os.environ, launch, plan.world, machine, plan.config.debug.threads)
    stop.arm(plan.config.cluster.grace_seconds)
    if launch.local_rank == 0:
        watch_notices(plan.config.cluster.notice, stop.request)
    with meeting.process_group(plan.world.device):
        from toolkit.train.run import run

        return run(plan, rank=launch.rank, local_rank=launch.local_rank, stop=stop, attempt=start.attempt, data=start.data,
                   launcher=launch.launcher.value, seconds_left=stop.seconds_left)


def look_at_machines(plan: RunPlan, launch: Launch, meeting: Meeting) -> None:
    """By every rank. Raises InputError with what would make the run fail, before anything of an engine is started."""
    from toolkit.cluster.doctor.examine import preflight
    from toolkit.cluster.doctor.show import show

    report = preflight(plan, launch, meeting, sys.argv)
    if report is not None:
        show(report, sys.stdout)


def make_data_ready(plan: RunPlan) -> str:
    """The folder of the run's data, which are there and are what the run needs; else nothing of an engine is started."""
    from toolkit.data.open import ready_for
    from toolkit.progress import Progress

    with Progress() as progress:
        return ready_for(plan.config, plan.shape.vocab_size if plan.shape is not None else None, progress)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
