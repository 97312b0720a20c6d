"""Look at the machines of a run before it is started: what would make it fail, or slow, and what to do about it.

    python launch/doctor.py                                                      this machine, and the run of all defaults
    python launch/doctor.py +exp=quickstart cluster.cpu_ranks=2                  and its ranks meet
    torchrun --nnodes 2 ... launch/doctor.py +exp=gpt2_125m                      every machine; started as launch/train.py will be
    python launch/doctor.py --json +exp=gpt2_125m > report.json
    python launch/doctor.py --help

The words are those of launch/train.py, which looks by itself too where cluster.preflight=true. Every check has a bound: a file system or
driver that hangs is told. Exit code: 0 ready (perhaps with warnings), 2 something fails; a launcher may change it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.cluster.doctor import network, together
from toolkit.cluster.doctor.bounded import ask
from toolkit.cluster.doctor.data import FirstRead, data_check
from toolkit.cluster.doctor.examine import CHECKS, compare_clocks, gather, look
from toolkit.cluster.doctor.gpus import HANGS
from toolkit.cluster.doctor.types import Check, Finding, MachineReport, Need, Report, Verdict, need_of
from toolkit.cluster.ends import Ending, leave
from toolkit.cluster.environment import (
    HANDOVER,
    Launch,
    Launcher,
    check_startable,
    detect_world,
    read_launch,
    set_defaults,
    set_thread_default,
)
from toolkit.cluster.machine import Machine, this_machine
from toolkit.cluster.parent import Ranks
from toolkit.cluster.rendezvous import Left, Meeting
from toolkit.cluster.start import Start, configuration
from toolkit.cluster.stop import StopRequest, launchers
from toolkit.config.schema import RunConfig
from toolkit.errors import ExitCode, Problem, UserError
from toolkit.plan.types import Device, RunPlan, World

JSON = "--json"
MACHINE_SECONDS = 10.0  # in which a machine says which GPUs it has
MEET_SECONDS = 120.0  # that ranks wait for each other, once they are started
LINK_SECONDS = 120.0  # for the process group and all of its measurements
ENDS_SECONDS = 5.0  # rank 0 says why; then the others go


@dataclass(frozen=True, slots=True)
class Subject:
    """The run that is looked at. ``plan`` is None where it breaks rules; ``problems`` are these, else the plan's warnings."""

    config: RunConfig
    world: World
    plan: RunPlan | None
    problems: tuple[Problem, ...]


def main(arguments: Sequence[str]) -> int:
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help

        return show_help(arguments, above=__doc__ or "")
    stop = StopRequest()
    with Ending(stop) as ending:
        launch, words = read_launch(os.environ, [word for word in arguments if word != JSON])
        ending.launch, stop.abort = launch, ending.abort
        stop.install(launchers(launch))
        ending.code = Doctor(launch, words, ending, as_json=JSON in arguments).examine(stop)
    stop.close()
    return ending.code


class Doctor:
    """One process: the only one, a parent of ranks, or a rank. What it knows so far can be told at any time."""

    def __init__(self, launch: Launch, words: Sequence[str], ending: Ending, *, as_json: bool) -> None:
        self._launch, self._words, self._ending, self._as_json = launch, list(words), ending, as_json
        self._machines: list[MachineReport] = []
        self._together: list[Finding] = []
        self._why: str | None = None  # this machine cannot be looked at for GPUs
        self._told = threading.Lock()

    def examine(self, stop: StopRequest) -> ExitCode:
        asked = ask(this_machine, MACHINE_SECONDS)
        machine, self._why = asked.value, asked.problem
        if self._launch.ranks > 1:
            return self._among_ranks(machine)
        subject = self._subject(machine)
        if subject.world.ranks > 1 and subject.plan is not None and self._launch.launcher is Launcher.NONE:
            return self._start_ranks(subject, stop)
        self._machines = [look(self._need(subject), checks=self._checks(subject))]
        met = together.nobody_to_meet() if subject.plan is not None else together.not_tried("the run cannot be planned")
        self._together = [*together.of_plan(subject.plan, subject.problems), *met]
        return self._tell()

    # ---- one of several ranks

    def _among_ranks(self, machine: Machine | None) -> ExitCode:
        launch = self._launch
        set_thread_default(os.environ, launch.ranks_per_node, os.cpu_count() or 1)  # before the meeting imports torch
        meeting = self._ending.meeting = Meeting(launch, self._words, seconds=MEET_SECONDS)
        try:
            return self._meet(meeting, machine)
        except Left:
            raise
        except (TimeoutError, RuntimeError) as error:  # a rank that does not come; torch.distributed's own
            return self._not_met(f"{type(error).__name__}: {str(error).splitlines()[0]}")

    def _meet(self, meeting: Meeting, machine: Machine | None) -> ExitCode:
        launch, checks = self._launch, None
        if launch.rank == 0:
            subject = self._subject(machine)
            # Before the meeting opens: after that the port is taken by this process.
            place = look(self._need(subject), checks=[network.PLACE])
            self._machines, self._together = [place], together.of_plan(subject.plan, subject.problems)
            if any(finding.verdict is Verdict.FAIL for finding in place.findings):
                return self._not_met("there is no place to meet at: see above")
            checks = [check for check in self._checks(subject) if check is not network.PLACE]
            if launch.handover is None:
                meeting.publish("doctor/start", self._start(subject).to_json())
        else:
            subject = self._handed_over(launch.handover) if launch.handover is not None else \
                _subject(Start.from_json(*meeting.receive("doctor/start")))
        if launch.local_rank == 0:
            own = look(self._need(subject), launch.node, checks or self._checks(subject))
            self._machines = [replace(own, findings=(*own.findings, *(one for machine in self._machines for one in machine.findings)))]
        machines = gather(self._machines[0] if launch.local_rank == 0 else None, launch, meeting)
        if launch.rank == 0:
            self._machines = machines
        times = compare_clocks(machines, launch, meeting)
        self._together += [*together.alike(machines), *times]
        return self._measure(meeting, subject, machine)

    def _measure(self, meeting: Meeting, subject: Subject, machine: Machine | None) -> ExitCode:
        """The process group, the links, and the same exit code on all ranks."""
        launch = self._launch
        set_defaults(os.environ, launch, subject.world, machine or Machine(cores=os.cpu_count() or 1), subject.config.debug.threads)
        import torch

        guard = threading.Timer(LINK_SECONDS + (ENDS_SECONDS if launch.rank else 0), self._hangs)
        guard.daemon = True
        guard.start()
        began = time.perf_counter()
        with meeting.process_group(subject.world.device):
            device = torch.device("cpu") if subject.world.device is Device.CPU else torch.device("cuda", launch.local_rank)
            torch.distributed.all_reduce(torch.zeros(1, device=device))
            met_seconds = time.perf_counter() - began
            from toolkit.train.links import measure_links

            axes = subject.plan.axes if subject.plan is not None else None
            rows = measure_links(axes, device, launch.rank, launch.ranks)
            guard.cancel()
            code = ExitCode.DONE
            if launch.rank == 0:
                self._together += together.links(rows, met_seconds)
                code = self._tell()
                meeting.publish("doctor/end", {"code": int(code)})
            code = ExitCode(meeting.receive("doctor/end")[0]["code"])
            torch.distributed.barrier()  # rank 0 may be the one that serves the store
        return code

    def _hangs(self) -> None:
        """From a thread of its own: the main one waits in a collective."""
        self._not_met(f"no answer within {LINK_SECONDS:g} s")
        os._exit(int(ExitCode.USER))

    # ---- plain python: the ranks are started here

    def _start_ranks(self, subject: Subject, stop: StopRequest) -> ExitCode:
        with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
            handover = Path(folder) / "handover.json"
            self._start(subject).write(handover)
            ranks = Ranks([sys.argv[0], f"{HANDOVER}{handover}", *([JSON] if self._as_json else [])], subject.world)
            stop.abort = lambda reason, code: ranks.kill()
            try:
                return ranks.wait(stop, grace_seconds=ENDS_SECONDS)
            finally:
                ranks.kill()

    # ---- what is looked at

    def _subject(self, machine: Machine | None) -> Subject:
        launch = self._launch
        if launch.handover is not None:
            return self._handed_over(launch.handover)
        config = configuration(self._words, launch)
        if machine is None:
            world = World(ranks=launch.ranks, ranks_per_node=launch.ranks_per_node, device=Device.CUDA)
            return Subject(config, world, None, (Problem("the machine", f"NVML: {self._why} (within {MACHINE_SECONDS:g} s)",
                                                         "what GPUs there are decides the plan", HANGS),))
        check_startable(config.cluster, launch, replace(machine, torch_has_cuda=True))  # a torch without CUDA is a check of its own
        return _planned(config, detect_world(config.cluster, launch, machine))

    def _handed_over(self, path: Path) -> Subject:
        return _subject(Start.read(path))

    def _start(self, subject: Subject) -> Start:
        from toolkit.config.compose import to_yaml

        return Start(to_yaml(subject.config), subject.world, attempt=0)

    def _need(self, subject: Subject) -> Need:
        launch = self._launch
        serves = launch.rank == 0 and not launch.agent_store  # else the launcher does
        return need_of(subject.config, subject.world, subject.plan, address=launch.address if launch.ranks > 1 else None,
                       serves_port=launch.port if serves else None, arguments=tuple(sys.argv))

    def _checks(self, subject: Subject) -> list[Check]:
        def read() -> FirstRead:
            from toolkit.data.first_read import first_read

            plan = subject.plan
            vocab_size = plan.shape.vocab_size if plan is not None and plan.shape is not None else None
            return first_read(subject.config, vocab_size, plan.batch if plan is not None else None)

        return [*CHECKS, data_check(read)]

    # ---- telling

    def _not_met(self, why: str) -> ExitCode:
        self._together += together.not_met(why)
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


def _subject(start: Start) -> Subject:
    from toolkit.config.compose import from_yaml

    return _planned(from_yaml(start.yaml), start.world)


def _planned(config: RunConfig, world: World) -> Subject:
    from toolkit.plan import make_plan
    from toolkit.plan.target import check_target

    try:
        plan = make_plan(config, world)
        check_target(config.model)
    except UserError as error:
        return Subject(config, world, None, error.problems)
    return Subject(config, world, plan, plan.warnings)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
