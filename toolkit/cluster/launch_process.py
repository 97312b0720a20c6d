"""What one process does in a run: be its only rank, start the ranks, or be one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from toolkit.cluster.environment import Launch, set_defaults, set_thread_default
from toolkit.cluster.exit_handling import ExitHandler
from toolkit.cluster.output_log import tee_output
from toolkit.cluster.machine_info import MachineInfo, detect_machine
from toolkit.cluster.preemption import watch_preemption as watch_notices
from toolkit.cluster.supervisor import supervise_ranks, needs_supervisor
from toolkit.cluster.rendezvous import Rendezvous
from toolkit.cluster.attempt_spec import AttemptSpec, log_start, start_attempt
from toolkit.cluster.stop_request import StopRequest
from toolkit.errors import ExitCode, file_errors
from toolkit.plan.types import RunPlan
from toolkit.rundir.directory import RunDirectory

DATA_SECONDS = 3600.0  # that ranks wait for one of them to make the data


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCallbacks:
    """What is done by parts of the toolkit that this one does not import: launch/train.py hands it in."""

    prepare_data: Callable[
        [RunPlan], str
    ]  # the folder of the run's data, made and checked; once a machine
    train: Callable[[RunPlan, Launch, AttemptSpec, StopRequest], ExitCode]  # within the process group


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
    machine, meeting = detect_machine(), Rendezvous(launch, words)
    if launch.ranks > 1:
        exit_handler.rendezvous = meeting
        set_thread_default(
            os.environ, launch.ranks_per_node, machine.cores
        )  # before the meeting imports torch
    with file_errors():
        start, plan, directory = _exchange_spec(launch, words, machine, meeting, exit_handler)
        start = _prepare_data(start, plan, launch, meeting, work)
    stop.on_signal = exit_handler.log_signal
    if needs_supervisor(launch, plan.world, plan.config.cluster):
        return supervise_ranks(script, start, directory, stop, exit_handler, plan.config.cluster)
    if plan.config.cluster.preflight:
        _run_preflight(plan, launch, meeting)
    set_defaults(os.environ, launch, plan.world, machine, plan.config.debug.threads)
    stop.arm(plan.config.cluster.grace_seconds)
    if launch.local_rank == 0:
        watch_notices(plan.config.cluster.notice, stop.request)
    with meeting.process_group(plan.world.device):
        return work.train(plan, launch, start, stop)


def _exchange_spec(
    launch: Launch, words: Sequence[str], machine: MachineInfo, meeting: Rendezvous, exit_handler: ExitHandler
) -> tuple[AttemptSpec, RunPlan, RunDirectory]:
    """The start, which rank 0 composes and the others are told, or which our parent has handed over."""
    composes = launch.rank == 0 and launch.handover is None
    if composes:
        start, plan, directory = start_attempt(words, launch, machine)
    else:
        start = (
            AttemptSpec.read(launch.handover)
            if launch.handover is not None
            else AttemptSpec.from_json(*meeting.receive("start"))
        )
        plan = start.plan()
        directory = RunDirectory(plan.run_dir)
    exit_handler.directory, exit_handler.attempt = directory, start.attempt
    if launch.rank == 0:
        tee_output(directory.log_file(start.attempt))
    if composes:
        log_start(plan, start.attempt, launch)
        if launch.ranks > 1:
            meeting.publish("start", start.to_json())
    return start, plan, directory


def _prepare_data(start: AttemptSpec, plan: RunPlan, launch: Launch, meeting: Rendezvous, work: RunCallbacks) -> AttemptSpec:
    """``start``, once the data are ready on every machine: by each one's first rank, or by our parent before there are ranks."""
    if launch.handover is not None:
        return start
    if launch.ranks == 1:
        return replace(start, data=work.prepare_data(plan))
    if launch.local_rank == 0:
        meeting.publish(f"data/{launch.node}", {"folder": work.prepare_data(plan)})
    ready = meeting.receive(*(f"data/{node}" for node in range(launch.nodes)), seconds=DATA_SECONDS)
    return replace(start, data=ready[launch.node]["folder"])


def _run_preflight(plan: RunPlan, launch: Launch, meeting: Rendezvous) -> None:
    """By every rank. Raises InputError with what would make the run fail, before anything of an engine is started."""
    from toolkit.cluster.doctor.preflight import run_preflight
    from toolkit.cluster.doctor.report import print_report

    report = run_preflight(plan, launch, meeting)
    if report is not None:
        print_report(report, sys.stdout)
