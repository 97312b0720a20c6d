"""Run one process of a training run: its only rank, the supervisor of its ranks, or one of several ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from toolkit.cluster.attempt.attempt_spec import AttemptSpec, log_start, start_attempt
from toolkit.cluster.attempt.exit_handling import ExitHandler
from toolkit.cluster.attempt.node_snapshot_folder import agent_snapshot_folder, supervised_snapshot_folder
from toolkit.cluster.attempt.output_log import tee_output
from toolkit.cluster.cpu_affinity import bind_to_gpu
from toolkit.cluster.standbys.standby_server import count_standbys_of_launch, start_standbys_after_first_step
from toolkit.cluster.stop.elastic_stop import SAVE_SECONDS, agree_after_stop
from toolkit.cluster.stop.preemption import watch_preemption
from toolkit.cluster.stop.stop_request import StopRequest
from toolkit.cluster.supervisor import needs_supervisor, supervise_ranks
from toolkit.cluster.world.environment import Launch, Launcher
from toolkit.cluster.world.machine_info import MachineInfo, detect_machine
from toolkit.cluster.world.process_environment import set_cuda_defaults, set_run_defaults, set_thread_default
from toolkit.cluster.world.rendezvous import Rendezvous
from toolkit.commands import python_arguments
from toolkit.config.cluster import ClusterBackend
from toolkit.config.schema import RunConfig
from toolkit.errors import ExitCode, file_errors
from toolkit.logs import configure_logging
from toolkit.plan.types import Device, RunPlan
from toolkit.restart_phases import RestartPhase
from toolkit.rundir.directory import RunDirectory

DATA_SECONDS = 3600.0  # how long ranks wait for one of them to prepare the data


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCallbacks:
    """Functions from parts of the toolkit that this package does not import; launch/train.py provides
    them.
    """

    # prepares and checks the data once per machine; returns its folder
    prepare_data: Callable[[RunPlan], str]
    train: Callable[[RunPlan, Launch, AttemptSpec, StopRequest], ExitCode]  # called within the process group
    # imports what the ranks of a plan need, in a standby process
    warm_up: Callable[[RunPlan], None]


def launch_process(
    launch: Launch,
    overrides: Sequence[str],
    exit_handler: ExitHandler,
    stop: StopRequest,
    callbacks: RunCallbacks,
    *,
    script: str,
    config: RunConfig | None = None,
    environ: Mapping[str, str] | None = None,
) -> ExitCode:
    """Run this process's part of a training run.

    Args:
        overrides: the user's arguments; the same on every rank.
        config: the configuration, if it is already composed.
        script: the file or module that every rank runs, if this process starts them.
        environ: the environment with which this process was started; None: it is a program of the user, whose
            place no standby can take.

    Raises:
        UserError: a mistake in the configuration or input.
        PeerExited: another rank has reported the reason.
    """
    configure_logging(launch.rank)
    machine, rendezvous = detect_machine(), Rendezvous(launch, overrides)
    if launch.ranks > 1:
        exit_handler.rendezvous = rendezvous
        # before the rendezvous imports torch
        set_thread_default(os.environ, launch.ranks_per_node, machine.cores)
    with file_errors():
        spec, plan, directory = _exchange_spec(
            launch, overrides if config is None else config, machine, rendezvous, exit_handler
        )
        spec = _prepare_data(spec, plan, launch, rendezvous, callbacks)
    stop.on_signal = exit_handler.log_signal
    if needs_supervisor(launch, plan.world, plan.config.cluster):
        return supervise_ranks(script, spec, directory, stop, exit_handler, plan)
    set_cuda_defaults(os.environ, plan)  # before the preflight check, which uses the GPUs
    if plan.world.device is Device.CUDA and plan.config.cluster.numa_binding:
        bind_to_gpu(machine.gpus, launch.local_rank)
    if plan.config.cluster.preflight:
        _run_preflight(plan, launch, rendezvous)
    set_run_defaults(os.environ, launch, plan, machine)
    _arm(stop, launch, plan.config.cluster.grace_seconds)
    if launch.local_rank == 0:
        watch_preemption(plan.config.cluster.notice, partial(stop.request, leaves=True))
    if environ is not None and (count := count_standbys_of_launch(plan.config.cluster, plan.world, launch)):
        start_standbys_after_first_step(python_arguments(script), count, launch, spec, directory, environ)
    spec = spec.restart_phase_ended(RestartPhase.START)
    code = ExitCode.DONE
    with (
        supervised_snapshot_folder(launch, spec.memory),
        agent_snapshot_folder(plan, launch, lambda: (code, exit_handler.after_stop)) as snapshot_folder,
        rendezvous.process_group(plan.world.device),
    ):
        if snapshot_folder is not None:
            spec = replace(spec, memory=str(snapshot_folder))
        code = callbacks.train(plan, launch, spec.restart_phase_ended(RestartPhase.RENDEZVOUS), stop)
        if code is ExitCode.STOPPED and launch.node_range is not None:
            pods = plan.config.cluster.where is ClusterBackend.kubernetes
            exit_handler.after_stop = agree_after_stop(launch, rendezvous, stop, evictions=pods)
    return code


def _arm(stop: StopRequest, launch: Launch, grace_seconds: float) -> None:
    if launch.node_range is not None and grace_seconds > SAVE_SECONDS:
        stop.arm(SAVE_SECONDS, "the seconds that torchrun leaves before a restart")
    else:
        stop.arm(grace_seconds)


def _exchange_spec(
    launch: Launch,
    overrides: Sequence[str] | RunConfig,
    machine: MachineInfo,
    rendezvous: Rendezvous,
    exit_handler: ExitHandler,
) -> tuple[AttemptSpec, RunPlan, RunDirectory]:
    """Return the attempt spec: rank 0 composes and publishes it, or the supervisor has written it to a
    file.
    """
    composes = launch.rank == 0 and launch.handover is None
    began = _earliest_agent_start(launch, rendezvous)
    if composes:
        spec, plan, directory = start_attempt(overrides, launch, machine, began)
    else:
        spec = (
            AttemptSpec.read(launch.handover)
            if launch.handover is not None
            else AttemptSpec.from_json(*rendezvous.receive("start"))
        )
        plan = spec.plan()
        directory = RunDirectory(plan.run_dir)
    exit_handler.directory, exit_handler.attempt = directory, spec.attempt
    exit_handler.requeued = plan.config.cluster.where is not ClusterBackend.local
    if launch.rank == 0:
        tee_output(directory.log_file(spec.attempt))
    if composes:
        log_start(plan, spec.attempt, launch)
        if launch.ranks > 1:
            rendezvous.publish("start", spec.to_json())
    return spec, plan, directory


def _earliest_agent_start(launch: Launch, rendezvous: Rendezvous) -> float | None:
    """Return on rank 0 when torchrun's first agent started, in seconds since 1970; None without torchrun, and
    on other ranks.

    The first agent is on this node, unless the number of nodes changes. Then the first rank of each node
    publishes when its agent started.
    """
    if launch.launcher is not Launcher.TORCHELASTIC or launch.local_rank != 0:
        return None
    import psutil

    began = psutil.Process(launch.launcher_pid).create_time()
    if launch.node_range is None or launch.nodes == 1:
        return began
    if launch.rank != 0:
        rendezvous.publish(f"agent/{launch.node}", {"began": began})
        return None
    others = rendezvous.receive(*(f"agent/{node}" for node in range(1, launch.nodes)))
    return min([began, *(other["began"] for other in others)])


def _prepare_data(
    spec: AttemptSpec, plan: RunPlan, launch: Launch, rendezvous: Rendezvous, callbacks: RunCallbacks
) -> AttemptSpec:
    """Return ``spec`` once the data are ready on every machine.

    The first rank of each machine prepares them, or the supervisor before it starts the ranks.
    """
    if launch.handover is not None:
        return spec
    if launch.ranks == 1:
        return replace(spec, data=callbacks.prepare_data(plan))
    if launch.local_rank == 0:
        rendezvous.publish(f"data/{launch.node}", {"folder": callbacks.prepare_data(plan)})
    ready = rendezvous.receive(*(f"data/{node}" for node in range(launch.nodes)), seconds=DATA_SECONDS)
    return replace(spec, data=ready[launch.node]["folder"])


def _run_preflight(plan: RunPlan, launch: Launch, rendezvous: Rendezvous) -> None:
    """Check the machines; every rank calls this. Raises InputError before the engine starts if a check
    fails.
    """
    from toolkit.cluster.doctor.preflight import run_preflight
    from toolkit.cluster.doctor.report import print_report

    report = run_preflight(plan, launch, rendezvous)
    if report is not None:
        print_report(report, sys.stdout)
