"""One process of a visit: the only one, a parent of ranks, or a rank. ``cluster.preflight`` is examine.py's."""

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

from toolkit.cluster.doctor import cross_node, network, requirements
from toolkit.cluster.doctor.data import FirstRead, data_check
from toolkit.cluster.doctor.examine import CHECKS, Silent, compare_clocks, gather, look
from toolkit.cluster.doctor.requirements import ExaminedRun
from toolkit.cluster.doctor.timeout import call_with_timeout
from toolkit.cluster.doctor.types import Check, Finding, MachineReport, Report, Verdict
from toolkit.cluster.environment import HANDOVER, Launch, Launcher, set_defaults, set_thread_default
from toolkit.cluster.exit_handling import ExitHandler
from toolkit.cluster.machine import Machine, this_machine
from toolkit.cluster.ranks import Ranks
from toolkit.cluster.rendezvous import Left, Meeting
from toolkit.cluster.start import Start
from toolkit.cluster.stop import StopRequest
from toolkit.config.schema import RunConfig
from toolkit.errors import ExitCode
from toolkit.layout.axes import Axes
from toolkit.plan.types import BatchPlan, Device

if TYPE_CHECKING:
    import torch

JSON = "--json"
MACHINE_SECONDS = 30.0  # in which a machine says which GPUs it has
MEET_SECONDS = 120.0  # that ranks wait for each other, once they are started
LINK_SECONDS = 120.0  # for the process group and all of its measurements
ENDS_SECONDS = 5.0  # rank 0 says why; then the others go


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What is measured by parts of the toolkit that this one does not import."""

    first_read: Callable[[RunConfig, int | None, BatchPlan | None], FirstRead]  # toolkit/data/registry.py
    links: Callable[
        [Axes | None, torch.device, int, int], Sequence[Mapping[str, Any]]
    ]  # toolkit/observe/comm_benchmark.py


class DoctorCommand:
    """What is known so far can be told at any time.

    Args:
        words: the user's; ``--json`` is not among them.
        script: what every rank runs, where this process starts them.
    """

    def __init__(
        self,
        launch: Launch,
        words: Sequence[str],
        exit_handler: ExitHandler,
        measurements: Measurements,
        *,
        script: str,
        as_json: bool,
    ) -> None:
        self._launch, self._words, self._exit_handler, self._measurements = (
            launch,
            list(words),
            exit_handler,
            measurements,
        )
        self._script, self._as_json = script, as_json
        self._machines: list[MachineReport] = []
        self._together: list[Finding] = []
        self._told = threading.Lock()

    def examine(self, stop: StopRequest) -> ExitCode:
        """
        Raises:
            UserError: a mistake in the words.
            Left: another rank has said why.
        """
        asked = call_with_timeout(this_machine, MACHINE_SECONDS)
        machine: Machine | None = asked.value
        silence = f"{asked.problem} (within {MACHINE_SECONDS:g} s)" if asked.hangs else str(asked.problem)
        if self._launch.ranks > 1:
            return self._among_ranks(machine, silence)
        found = requirements.from_words(self._words, self._launch, machine, silence)
        if found.world.ranks > 1 and found.plan is not None and self._launch.launcher is Launcher.NONE:
            return self._start_ranks(found, stop)
        self._machines = [look(found.need(self._launch), checks=self._checks(found))]
        met = (
            cross_node.single_rank()
            if found.plan is not None
            else cross_node.not_tried("the run cannot be planned")
        )
        self._together = [*cross_node.of_plan(found.plan, found.problems), *met]
        return self._tell()

    # ---- one of several ranks

    def _among_ranks(self, machine: Machine | None, silence: str) -> ExitCode:
        launch = self._launch
        set_thread_default(
            os.environ, launch.ranks_per_node, os.cpu_count() or 1
        )  # before the meeting imports torch
        meeting = self._exit_handler.meeting = Meeting(launch, self._words, seconds=MEET_SECONDS)
        try:
            if launch.rank == 0:
                found = self._own(machine, silence)
                place = look(
                    found.need(launch), checks=[network.PLACE]
                )  # before the meeting opens and this process takes the port
                self._machines, self._together = [place], cross_node.of_plan(found.plan, found.problems)
                if any(finding.verdict is Verdict.FAIL for finding in place.findings):
                    self._machines = [self._look_here(found)]
                    return self._not_met("there is no place to meet at: see above")
                if launch.handover is None:
                    meeting.publish("doctor/start", found.start().to_json())
            elif launch.handover is not None:
                found = requirements.from_start(Start.read(launch.handover))
            else:
                found = requirements.from_start(Start.from_json(*meeting.receive("doctor/start")))
            self._look_at_all(meeting, found)
            return self._measure(meeting, found, machine)
        except Left:
            raise
        except TimeoutError as error:
            return self._not_met(str(error))
        except RuntimeError as error:  # torch.distributed's own
            first_line = str(error).partition("\n")[0]
            return self._not_met(f"{type(error).__name__}: {first_line}")

    def _own(self, machine: Machine | None, silence: str) -> ExaminedRun:
        handover = self._launch.handover
        return (
            requirements.from_start(Start.read(handover))
            if handover is not None
            else requirements.from_words(self._words, self._launch, machine, silence)
        )

    def _look_at_all(self, meeting: Meeting, found: ExaminedRun) -> None:
        """Each machine by its first rank. Raises Silent on rank 0, or torch's errors."""
        launch = self._launch
        if launch.local_rank == 0:
            self._machines = [self._look_here(found)]
        try:  # not all need have met so far: a machine may start late
            machines = gather(
                self._machines[0] if launch.local_rank == 0 else None, launch, meeting, MEET_SECONDS
            )
        except Silent as silent:
            self._machines = silent.heard
            raise
        if launch.rank == 0:
            self._machines = machines
        times = compare_clocks(machines, launch, meeting)
        self._together += [*cross_node.alike(machines), *times]

    def _look_here(self, found: ExaminedRun) -> MachineReport:
        seen = tuple(
            finding for machine in self._machines for finding in machine.findings
        )  # of rank 0: the place
        checks = [check for check in self._checks(found) if not (seen and check is network.PLACE)]
        own = look(found.need(self._launch), self._launch.node, checks)
        return replace(own, findings=(*own.findings, *seen))

    def _measure(self, meeting: Meeting, found: ExaminedRun, machine: Machine | None) -> ExitCode:
        """The process group, the links, and the same exit code on all ranks."""
        launch = self._launch
        set_defaults(
            os.environ,
            launch,
            found.world,
            machine or Machine(cores=os.cpu_count() or 1),
            found.config.debug.threads,
        )
        import torch

        guard = threading.Timer(LINK_SECONDS + (ENDS_SECONDS if launch.rank else 0), self._hangs)
        guard.daemon = True
        guard.start()
        began = time.perf_counter()
        with meeting.process_group(found.world.device):
            device = (
                torch.device("cpu")
                if found.world.device is Device.CPU
                else torch.device("cuda", launch.local_rank)
            )
            torch.distributed.all_reduce(torch.zeros(1, device=device))
            met_seconds = time.perf_counter() - began
            rows = self._measurements.links(
                found.plan.axes if found.plan is not None else None, device, launch.rank, launch.ranks
            )
            guard.cancel()
            if launch.rank == 0:
                self._together += cross_node.links(rows, met_seconds)
                meeting.publish("doctor/end", {"code": int(self._tell())})
            code = ExitCode(meeting.receive("doctor/end")[0]["code"])
            torch.distributed.barrier()  # rank 0 may be the one that serves the store
        return code

    def _hangs(self) -> None:
        """From a thread of its own: the main one waits in a collective."""
        self._not_met(f"no answer within {LINK_SECONDS:g} s")
        os._exit(int(ExitCode.USER))

    # ---- plain python: the ranks are started here

    def _start_ranks(self, found: ExaminedRun, stop: StopRequest) -> ExitCode:
        with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
            handover = Path(folder) / "handover.json"
            found.start().write(handover)
            ranks = Ranks(
                [self._script, f"{HANDOVER}{handover}", *([JSON] if self._as_json else [])], found.world
            )

            def abort(reason: str, code: ExitCode) -> None:
                """The process ends in this call, so nothing else removes the folder."""
                ranks.kill()
                handover.unlink(missing_ok=True)
                handover.parent.rmdir()
                self._exit_handler.abort(reason, code)

            stop.abort = abort
            try:
                return ranks.wait(stop, grace_seconds=ENDS_SECONDS)
            finally:
                ranks.kill()

    def _checks(self, found: ExaminedRun) -> list[Check]:
        def read() -> FirstRead:
            plan = found.plan
            vocab_size = plan.shape.vocab_size if plan is not None and plan.shape is not None else None
            return self._measurements.first_read(
                found.config, vocab_size, plan.batch if plan is not None else None
            )

        return [*CHECKS, data_check(read)]

    # ---- telling

    def _not_met(self, why: str) -> ExitCode:
        self._together += cross_node.not_met(why)
        return self._tell()

    def _tell(self) -> ExitCode:
        """Once a process: rank 0 on stdout; where it comes to that, the first rank of another machine on stderr."""
        report = Report(machines=tuple(self._machines), together=tuple(self._together))
        if self._launch.local_rank == 0 and self._told.acquire(blocking=False):
            from toolkit.cluster.doctor.show import show, to_json

            stream = sys.stdout if self._launch.rank == 0 else sys.stderr
            if self._as_json:
                print(json.dumps(to_json(report), indent=1), file=stream, flush=True)
            else:
                show(report, stream)
        return ExitCode.USER if report.verdict is Verdict.FAIL else ExitCode.DONE
