"""Measure the machines of a run, so that the plan predicts its step time better.

    python launch/calibrate.py                                       one device: operators, memory, copies
    torchrun --nproc-per-node 8 launch/calibrate.py                  also collectives between ranks
    python launch/calibrate.py runs/mine-1635fc16 runs/other-0a1b2c3d        adds finished runs
    python launch/plan.py +exp=quickstart cluster.calibration=calibration.json   uses the file

Measurements take one or two minutes and are written to calibration.json, or to out=FILE. Finished runs
refine the file: a few factors are fitted to their steps, and what the factors do not explain is printed. A
run counts once, however often it is added. Exit code: 0 if the file was written, 2 for invalid arguments,
which are named with their rule and remedy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.commands import command_line, in_this_form
from toolkit.errors import ExitCode, InputError, Problem, run_command
from toolkit.logs import configure_logging

if TYPE_CHECKING:
    from toolkit.cluster.world.environment import Launch
    from toolkit.estimate.measurements import MachineTimings
    from toolkit.plan.types import World

FILE = Path("calibration.json")
RENDEZVOUS_SECONDS = 120.0  # how long ranks wait for each other after their start


@dataclass(frozen=True, slots=True)
class CalibrateArguments:
    runs: tuple[Path, ...]  # none: measure
    out: Path


def main(arguments: Sequence[str]) -> int:
    if not {"--help", "-h"}.isdisjoint(arguments):
        print(in_this_form(__doc__ or "").strip())
        return ExitCode.DONE
    return run_command(partial(calibrate, arguments))


def calibrate(arguments: Sequence[str]) -> None:
    """Add the runs that the arguments name, or measure this machine. Raises UserError."""
    from toolkit.cluster.world.environment import read_launch

    launch, rest = read_launch(os.environ, arguments)
    configure_logging(launch.rank)
    options = parse_arguments(rest)
    if options.runs:
        add_runs(options)
    else:
        measure(options, launch)


def parse_arguments(arguments: Sequence[str]) -> CalibrateArguments:
    """Parse the command line. Raises InputError with all mistakes."""
    from toolkit.rundir.find import find_run

    pairs = [word for word in arguments if "=" in word and not Path(word).exists()]
    runs = tuple(find_run(word, "run") for word in arguments if word not in pairs)
    options = dict(word.split("=", 1) for word in pairs)
    problems = [
        Problem(
            name,
            f"{name}={value}",
            "calibrate has only the option out=",
            f"see {command_line('calibrate', '--help')}",
        )
        for name, value in options.items()
        if name != "out"
    ]
    problems += [
        Problem("run", f"run={run}", "the run directory exists", "pass the folder that training printed")
        for run in runs
        if not run.is_dir()
    ]
    out = Path(options.get("out") or FILE)
    if not out.absolute().parent.is_dir():
        problems.append(
            Problem("out", f"out={out}", "the folder of the file exists", "create it, or name another file")
        )
    if problems:
        raise InputError(*problems)
    return CalibrateArguments(runs, out)


def add_runs(options: CalibrateArguments) -> None:
    """Add runs to the file, fit its factors, and print what they explain."""
    from toolkit.estimate.calibration_file import write_calibration
    from toolkit.monitor.calibration_runs import add_measured_runs, format_residuals

    calibration, residuals = add_measured_runs(options.out, options.runs)
    write_calibration(options.out, calibration)
    print(format_residuals(calibration, residuals))
    print(f"the calibration is in {options.out}")


def measure(options: CalibrateArguments, launch: Launch) -> None:
    """Measure the devices of this launch and their links, and write the file on rank 0. Collective."""
    from toolkit.cluster.world.environment import detect_world
    from toolkit.cluster.world.machine_info import detect_machine
    from toolkit.cluster.world.process_environment import set_defaults
    from toolkit.config.cluster import ClusterConfig

    machine = detect_machine()
    world = detect_world(ClusterConfig(), launch, machine)
    set_defaults(os.environ, launch, world, machine, None)
    measured = _measure(launch, world)
    if launch.rank == 0:
        from toolkit.monitor.calibration_runs import add_measurements, format_measurements

        calibration = add_measurements(options.out, measured, world, machine.cores)
        print(format_measurements(measured, calibration))
        print(f"the calibration is in {options.out}: set cluster.calibration={options.out}")


def _measure(launch: Launch, world: World) -> MachineTimings:
    import torch

    from toolkit.estimate.measurements import MachineTimings
    from toolkit.observe.collective_benchmark import measure_machine
    from toolkit.observe.device_benchmark import measure_device, stages
    from toolkit.plan.types import Device
    from toolkit.progress import Progress

    on_gpu = world.device is Device.CUDA
    device = torch.device("cuda", launch.local_rank) if on_gpu else torch.device("cpu")
    progress = Progress() if launch.rank == 0 else Progress.silent()
    with progress, progress.task("measuring the device", total=stages(device), unit="stages") as task:
        if launch.ranks == 1:
            return MachineTimings(ranks_per_node=1, device=measure_device(device, task.advance))
        from toolkit.cluster.world.rendezvous import Rendezvous

        rendezvous = Rendezvous(launch, [], seconds=RENDEZVOUS_SECONDS)
        with rendezvous.process_group(world.device):
            return measure_machine(device, launch.rank, launch.ranks, launch.ranks_per_node, task.advance)


if __name__ == "__main__":
    from toolkit.cluster.attempt.exit_handling import exit_now

    exit_now(main(sys.argv[1:]))
