"""What one process does in a run: be its only rank, start the ranks, or be one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from toolkit.cluster.environment import Launch, set_cuda_defaults, set_defaults, set_thread_default
from toolkit.cluster.exit_handling import ExitHandler
from toolkit.cluster.log import log_to
from toolkit.cluster.machine import Machine, this_machine
from toolkit.cluster.notice import watch as watch_notices
from toolkit.cluster.parent import start_ranks, watches
from toolkit.cluster.rendezvous import Meeting
from toolkit.cluster.start import Start, announce, begin
from toolkit.cluster.stop import StopRequest
from toolkit.errors import ExitCode, file_errors
from toolkit.logs import configure_logging
from toolkit.plan.types import RunPlan
from toolkit.rundir.directory import RunDirectory

DATA_SECONDS = 3600.0  # that ranks wait for one of them to make the data


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCallbacks:
    """What is done by parts of the toolkit that this one does not import: launch/train.py hands it in."""

    make_data_ready: Callable[
        [RunPlan], str
    ]  # the folder of the run's data, made and checked; once a machine
    train: Callable[[RunPlan, Launch, Start, StopRequest], ExitCode]  # within the process group


def launch_process(
    launch: Launch,
    words: Sequence[str],
    exit_handler: ExitHandler,
    stop: StopRequest,
    work: RunCallbacks,
    *,
    script: str,
) -> ExitCode:
    """
    Args:
        script: what every rank runs, where this process starts them.

    Raises:
        UserError: a mistake in the words or the input.
        Left: another rank has said why.
    """
    configure_logging(launch.rank)
    machine, meeting = this_machine(), Meeting(launch, words)
    if launch.ranks > 1:
        exit_handler.meeting = meeting
        set_thread_default(
            os.environ, launch.ranks_per_node, machine.cores
        )  # before the meeting imports torch
    with file_errors():
        start, plan, directory = _agree(launch, words, machine, meeting, exit_handler)
        start = _with_data(start, plan, launch, meeting, work)
    stop.heard = exit_handler.hear
    if watches(launch, plan.world, plan.config.cluster):
        return start_ranks(script, start, directory, stop, exit_handler, plan.config.cluster)
    set_cuda_defaults(os.environ, plan)  # before the preflight check, which uses the GPUs
    if plan.config.cluster.preflight:
        _look_at_machines(plan, launch, meeting)
    set_defaults(os.environ, launch, plan.world, machine, plan.config.debug.threads)
    stop.arm(plan.config.cluster.grace_seconds)
    if launch.local_rank == 0:
        watch_notices(plan.config.cluster.notice, stop.request)
    with meeting.process_group(plan.world.device):
        return work.train(plan, launch, start, stop)


def _agree(
    launch: Launch, words: Sequence[str], machine: Machine, meeting: Meeting, exit_handler: ExitHandler
) -> tuple[Start, RunPlan, RunDirectory]:
    """The start, which rank 0 composes and the others are told, or which our parent has handed over."""
    composes = launch.rank == 0 and launch.handover is None
    if composes:
        start, plan, directory = begin(words, launch, machine)
    else:
        start = (
            Start.read(launch.handover)
            if launch.handover is not None
            else Start.from_json(*meeting.receive("start"))
        )
        plan = start.plan()
        directory = RunDirectory(plan.run_dir)
    exit_handler.directory, exit_handler.attempt = directory, start.attempt
    if launch.rank == 0:
        log_to(directory.log_file(start.attempt))
    if composes:
        announce(plan, start.attempt, launch)
        if launch.ranks > 1:
            meeting.publish("start", start.to_json())
    return start, plan, directory


def _with_data(start: Start, plan: RunPlan, launch: Launch, meeting: Meeting, work: RunCallbacks) -> Start:
    """``start``, once the data are ready on every machine: by each one's first rank, or by our parent before there are ranks."""
    if launch.handover is not None:
        return start
    if launch.ranks == 1:
        return replace(start, data=work.make_data_ready(plan))
    if launch.local_rank == 0:
        meeting.publish(f"data/{launch.node}", {"folder": work.make_data_ready(plan)})
    ready = meeting.receive(*(f"data/{node}" for node in range(launch.nodes)), seconds=DATA_SECONDS)
    return replace(start, data=ready[launch.node]["folder"])


def _look_at_machines(plan: RunPlan, launch: Launch, meeting: Meeting) -> None:
    """By every rank. Raises InputError with what would make the run fail, before anything of an engine is started."""
    from toolkit.cluster.doctor.examine import preflight
    from toolkit.cluster.doctor.show import show

    report = preflight(plan, launch, meeting)
    if report is not None:
        show(report, sys.stdout)
