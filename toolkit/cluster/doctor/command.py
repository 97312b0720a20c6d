"""One process of launch/doctor.py: a single process, the process that starts ranks, or a rank."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.cluster.attempt.attempt_spec import AttemptSpec
from toolkit.cluster.attempt.exit_handling import ExitHandler
from toolkit.cluster.attempt.rank_processes import ABORT_REAP_SECONDS, RankProcesses
from toolkit.cluster.doctor import cross_node, network, planned_run
from toolkit.cluster.doctor.data_access import DataReadResult, make_data_check
from toolkit.cluster.doctor.planned_run import DoctorTarget
from toolkit.cluster.doctor.preflight import (
    CHECKS,
    MachinesTimedOut,
    compare_clocks,
    gather_reports,
    run_checks,
)
from toolkit.cluster.doctor.timeout import call_with_timeout
from toolkit.cluster.doctor.types import CheckFinding, CheckVerdict, DoctorCheck, DoctorReport, MachineReport
from toolkit.cluster.stop.stop_request import StopRequest
from toolkit.cluster.world.environment import HANDOVER, Launch, Launcher
from toolkit.cluster.world.machine_info import MachineInfo, detect_machine
from toolkit.cluster.world.process_environment import set_defaults, set_thread_default
from toolkit.cluster.world.rendezvous import Rendezvous
from toolkit.commands import python_arguments
from toolkit.config.schema import RunConfig
from toolkit.errors import ExitCode
from toolkit.layout.axes import Axes
from toolkit.plan.types import BatchPlan, Device

if TYPE_CHECKING:
    import torch

JSON = "--json"
MACHINE_SECONDS = 30.0  # for detecting the GPUs
MAX_RENDEZVOUS_SECONDS = 120.0  # how long ranks wait for each other after their start
LINK_SECONDS = 120.0  # for the process group and all measurements on it
REPORT_HEAD_START_SECONDS = 5.0  # rank 0 reports first; then the others exit


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measurements from parts of the toolkit that this package does not import."""

    # toolkit/data/registry.py: check_data_read
    check_data_read: Callable[[RunConfig, int | None, BatchPlan | None], DataReadResult]
    # toolkit/observe/comm_benchmark.py: measure_links
    links: Callable[[Axes | None, torch.device, int, int], Sequence[Mapping[str, Any]]]


class DoctorCommand:
    """Runs the doctor in this process; it can report the findings so far at any time.

    Args:
        overrides: the user's arguments, without ``--json``.
        script: the file or module that every rank runs, if this process starts them.
    """

    def __init__(
        self,
        launch: Launch,
        overrides: Sequence[str],
        exit_handler: ExitHandler,
        measurements: Measurements,
        *,
        script: str,
        as_json: bool,
    ) -> None:
        self._launch, self._overrides, self._exit_handler, self._measurements = (
            launch,
            list(overrides),
            exit_handler,
            measurements,
        )
        self._script, self._as_json = script, as_json
        self._machines: list[MachineReport] = []
        self._cross_machine: list[CheckFinding] = []
        self._reported = threading.Lock()

    def run(self, stop: StopRequest) -> ExitCode:
        """Check the machines and report.

        Raises:
            UserError: a mistake in the arguments.
            PeerExited: another rank has reported the reason.
        """
        detected = call_with_timeout(detect_machine, MACHINE_SECONDS)
        machine: MachineInfo | None = detected.value
        nvml_error = (
            f"{detected.problem} (within {MACHINE_SECONDS:g} s)"
            if detected.timed_out
            else str(detected.problem)
        )
        if self._launch.ranks > 1:
            return self._run_rank(machine, nvml_error)
        target = planned_run.target_from_overrides(self._overrides, self._launch, machine, nvml_error)
        if target.world.ranks > 1 and target.plan is not None and self._launch.launcher is Launcher.NONE:
            return self._start_ranks(target, stop)
        self._machines = [run_checks(target.requirements(self._launch), checks=self._checks(target))]
        rendezvous_findings = (
            cross_node.report_single_rank()
            if target.plan is not None
            else cross_node.report_skipped("the run cannot be planned")
        )
        self._cross_machine = [*cross_node.check_plan(target.plan, target.problems), *rendezvous_findings]
        return self._report()

    # ---- one of several ranks

    def _run_rank(self, machine: MachineInfo | None, nvml_error: str) -> ExitCode:
        launch = self._launch
        # before the rendezvous imports torch
        set_thread_default(os.environ, launch.ranks_per_node, os.cpu_count() or 1)
        rendezvous = self._exit_handler.rendezvous = Rendezvous(
            launch, self._overrides, seconds=MAX_RENDEZVOUS_SECONDS
        )
        try:
            if launch.rank == 0:
                target = self._load_target(machine, nvml_error)
                # before the rendezvous opens and this process takes the port
                address_report = run_checks(
                    target.requirements(launch), checks=[network.MASTER_ADDRESS_CHECK]
                )
                self._machines, self._cross_machine = (
                    [address_report],
                    cross_node.check_plan(target.plan, target.problems),
                )
                if any(finding.verdict is CheckVerdict.FAIL for finding in address_report.findings):
                    self._machines = [self._check_this_machine(target)]
                    return self._report_failed_rendezvous("the rendezvous address cannot be used: see above")
                if launch.handover is None:
                    rendezvous.publish("doctor/start", target.spec().to_json())
            elif launch.handover is not None:
                target = planned_run.target_from_spec(AttemptSpec.read(launch.handover))
            else:
                target = planned_run.target_from_spec(
                    AttemptSpec.from_json(*rendezvous.receive("doctor/start"))
                )
            self._check_all_machines(rendezvous, target)
            return self._measure(rendezvous, target, machine)
        except TimeoutError as error:
            return self._report_failed_rendezvous(str(error))
        except RuntimeError as error:  # raised by torch.distributed
            first_line = str(error).partition("\n")[0]
            return self._report_failed_rendezvous(f"{type(error).__name__}: {first_line}")

    def _load_target(self, machine: MachineInfo | None, nvml_error: str) -> DoctorTarget:
        handover = self._launch.handover
        return (
            planned_run.target_from_spec(AttemptSpec.read(handover))
            if handover is not None
            else planned_run.target_from_overrides(self._overrides, self._launch, machine, nvml_error)
        )

    def _check_all_machines(self, rendezvous: Rendezvous, target: DoctorTarget) -> None:
        """Check each machine from its first rank. Raises MachinesTimedOut on rank 0, or errors of torch."""
        launch = self._launch
        if launch.local_rank == 0:
            self._machines = [self._check_this_machine(target)]
        # not all ranks have connected yet, since a machine may start late
        try:
            machines = gather_reports(
                self._machines[0] if launch.local_rank == 0 else None,
                launch,
                rendezvous,
                MAX_RENDEZVOUS_SECONDS,
            )
        except MachinesTimedOut as silent:
            self._machines = silent.reports
            raise
        if launch.rank == 0:
            self._machines = machines
        clock_findings = compare_clocks(machines, launch, rendezvous)
        self._cross_machine += [*cross_node.check_uniformity(machines), *clock_findings]

    def _check_this_machine(self, target: DoctorTarget) -> MachineReport:
        # rank 0 has already checked the rendezvous address
        known = tuple(finding for machine in self._machines for finding in machine.findings)
        checks = [
            check for check in self._checks(target) if not (known and check is network.MASTER_ADDRESS_CHECK)
        ]
        own = run_checks(target.requirements(self._launch), self._launch.node, checks)
        return replace(own, findings=(*own.findings, *known))

    def _measure(self, rendezvous: Rendezvous, target: DoctorTarget, machine: MachineInfo | None) -> ExitCode:
        """Create the process group, measure the links, and return the same exit code on all ranks."""
        launch = self._launch
        set_defaults(
            os.environ,
            launch,
            target.world,
            machine or MachineInfo(cores=os.cpu_count() or 1),
            target.config.debug.threads,
        )
        import torch

        guard = threading.Timer(LINK_SECONDS + (REPORT_HEAD_START_SECONDS if launch.rank else 0), self._hangs)
        guard.daemon = True
        guard.start()
        began = time.perf_counter()
        with rendezvous.process_group(target.world.device):
            device = (
                torch.device("cpu")
                if target.world.device is Device.CPU
                else torch.device("cuda", launch.local_rank)
            )
            torch.distributed.all_reduce(torch.zeros(1, device=device))
            met_seconds = time.perf_counter() - began
            rows = self._measurements.links(
                target.plan.axes if target.plan is not None else None, device, launch.rank, launch.ranks
            )
            guard.cancel()
            if launch.rank == 0:
                self._cross_machine += cross_node.check_links(rows, met_seconds)
                rendezvous.publish("doctor/end", {"code": int(self._report())})
            code = ExitCode(rendezvous.receive("doctor/end")[0]["code"])
            # rank 0 may serve the store
            torch.distributed.barrier(device_ids=None if device.type == "cpu" else [launch.local_rank])
        return code

    def _hangs(self) -> None:
        """Report a hang from a timer thread, since the main thread is blocked in a collective."""
        self._report_failed_rendezvous(f"no answer within {LINK_SECONDS:g} s")
        os._exit(int(ExitCode.USER))

    # ---- plain python: the ranks are started here

    def _start_ranks(self, target: DoctorTarget, stop: StopRequest) -> ExitCode:
        with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
            handover = Path(folder) / "handover.json"
            target.spec().write(handover)
            ranks = RankProcesses(
                [
                    *python_arguments(self._script),
                    f"{HANDOVER}{handover}",
                    *([JSON] if self._as_json else []),
                ],
                target.world,
            )

            def abort(reason: str, code: ExitCode) -> None:
                """Remove the folder here, since the process ends in this call."""
                ranks.kill(ABORT_REAP_SECONDS)
                handover.unlink(missing_ok=True)
                handover.parent.rmdir()
                self._exit_handler.abort(reason, code)

            stop.abort = abort
            try:
                return ranks.wait(stop, grace_seconds=REPORT_HEAD_START_SECONDS)
            finally:
                ranks.kill()

    def _checks(self, target: DoctorTarget) -> list[DoctorCheck]:
        def read() -> DataReadResult:
            plan = target.plan
            vocab_size = plan.vocab_size if plan is not None else None
            return self._measurements.check_data_read(
                target.config, vocab_size, plan.batch if plan is not None else None
            )

        return [*CHECKS, make_data_check(read)]

    # ---- report

    def _report_failed_rendezvous(self, why: str) -> ExitCode:
        self._cross_machine += cross_node.report_failed_rendezvous(why)
        return self._report()

    def _report(self) -> ExitCode:
        """Print the report once per process: on stdout on rank 0, else on stderr by the first rank of its
        machine.
        """
        report = DoctorReport(machines=tuple(self._machines), cross_machine=tuple(self._cross_machine))
        if self._launch.local_rank == 0 and self._reported.acquire(blocking=False):
            from toolkit.cluster.doctor.report import print_report, to_json

            stream = sys.stdout if self._launch.rank == 0 else sys.stderr
            if self._as_json:
                print(json.dumps(to_json(report), indent=1), file=stream, flush=True)
            else:
                print_report(report, stream)
        return ExitCode.USER if report.verdict is CheckVerdict.FAIL else ExitCode.DONE
