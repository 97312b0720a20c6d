"""Add measurements and finished runs to a calibration file, and show what they say.

All runs of a file are fitted together whenever one is added, so the result depends neither on their order nor
on how often a run is added.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.commands import command_line
from toolkit.config.compose import from_yaml
from toolkit.errors import InputError, Problem, UserError
from toolkit.estimate.calibrated_profile import FACTORS, MEANING, measured_profile, scale_profile
from toolkit.estimate.calibration_file import Calibration, RecordedRun, read_calibration, write_calibration
from toolkit.estimate.calibration_fit import (
    FACTOR_WIDTH,
    CalibrationRun,
    PartResidual,
    fit_factors,
    run_residuals,
)
from toolkit.estimate.measurements import MachineTimings
from toolkit.estimate.profile import CPU, HardwareProfile, device_name, shipped_profile, values_of
from toolkit.estimate.step import estimate_step
from toolkit.estimate.types import StepEstimate
from toolkit.monitor.measured_steps import MeasuredSteps, read_measured_steps
from toolkit.monitor.report.elements import UNKNOWN, format_seconds
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World

UNCERTAIN = 1.5  # width of a factor's prior over the profile's uncertainty, which is smaller for whole steps


def add_measurements(file: Path, measured: MachineTimings, world: World, cores: int) -> Calibration:
    """Write ``measured`` to the file, in place of an earlier measurement.

    Raises:
        InputError: the file is of another kind of machine, or damaged.
    """
    today = time.strftime("%Y-%m-%d", time.gmtime())
    calibration = replace(
        _open(file, _device(world), cores), machine={"cores": cores, "measured": today}, measurements=measured
    )
    calibration, _ = _fitted(calibration)
    write_calibration(file, calibration)
    return calibration


def add_measured_runs(file: Path, runs: Sequence[Path]) -> tuple[Calibration, list[PartResidual]]:
    """Return the calibration of the file with these runs, fitted to all of its runs, and the residuals.

    Raises:
        InputError: a run is not finished, of other hardware, or cannot be predicted.
    """
    calibration: Calibration | None = None
    for folder in runs:
        steps = read_measured_steps(folder)
        world, cores = _world(folder, steps), int(steps.environment.get("cores") or 0)
        if calibration is None:
            calibration = _open(file, _device(world), cores)
        _check_hardware(folder, calibration, world, cores)
        record = RecordedRun(
            name=folder.absolute().name,
            config=steps.config,
            world=dict(steps.plan["world"]),
            toolkit=str(steps.environment.get("toolkit", "unknown")),
            steps=steps.steps,
            seconds=steps.seconds,
            parts=steps.parts,
        )
        known = sorted({**calibration.runs, steps.id: record}.items())
        calibration = replace(calibration, runs=dict(known))
    assert calibration is not None, "at least one run"
    return _fitted(calibration)


def _open(file: Path, device: str, cores: int) -> Calibration:
    """Return the calibration of ``file``, or an empty one of ``device``."""
    if not file.exists():
        return Calibration(device=device, toolkit=__version__, machine={"cores": cores})
    calibration = read_calibration(file)
    if calibration.device != device:
        raise InputError(
            Problem(
                "out",
                f"out={file}, a calibration of {calibration.device}; this is {device}",
                "a calibration is of one kind of device",
                "write another file with out=FILE",
            )
        )
    return calibration


def _check_hardware(run: Path, calibration: Calibration, world: World, cores: int) -> None:
    known = calibration.machine.get("cores")
    if _device(world) != calibration.device or (calibration.device == CPU and known not in (None, cores)):
        raise InputError(
            Problem(
                "run",
                f"{run}: {_device(world)} with {cores} cores",
                f"a calibration is of one kind of machine, here {calibration.device} with {known} cores",
                f"add it to a file of its own: {command_line('calibrate', str(run), 'out=FILE')}",
            )
        )


def _device(world: World) -> str:
    device = device_name(world)
    if device is None:
        raise InputError(
            Problem(
                "cluster.gpu",
                f"GPU {world.gpu or 'of unknown kind'}",
                "a calibration is of a GPU in toolkit/plan/devices.py, whose data sheet it refines",
                "add the GPU to that file",
            )
        )
    return device


def _world(run: Path, steps: MeasuredSteps) -> World:
    try:
        return world_of(steps.plan["world"])
    except (KeyError, TypeError, ValueError) as error:
        raise _unusable(run, f"plan.json: {type(error).__name__}: {error}") from error


def world_of(content: Mapping[str, Any]) -> World:
    """Return the world of plan.json. Raises KeyError, TypeError or ValueError if it is of another version."""
    known = {name: value for name, value in content.items() if name != "nodes"}
    return World(
        **{
            **known,
            "device": Device(known["device"]),
            "lacking_for_compile": tuple(known["lacking_for_compile"]),
        }
    )


def _fitted(calibration: Calibration) -> tuple[Calibration, list[PartResidual]]:
    """Fit the factors of the runs, on top of the measurements."""
    profile = _measured(calibration)
    runs = [_measured_run(record, profile) for record in calibration.runs.values()]
    calibration = replace(calibration, toolkit=__version__)
    if not runs:
        return replace(calibration, values=values_of(profile), factors={}), []
    guessed = calibration.measurements is None
    width = max(FACTOR_WIDTH, UNCERTAIN * profile.uncertainty) if guessed else FACTOR_WIDTH
    fitted = fit_factors(FACTORS, runs, width)
    profile = replace(scale_profile(profile, fitted.factors), uncertainty=fitted.deviation)
    return (
        replace(calibration, values=values_of(profile), factors=fitted.factors),
        list(run_residuals(runs, fitted.factors)),
    )


def _measured(calibration: Calibration) -> HardwareProfile:
    """Return the shipped profile with the calibration's measurements, without its factors."""
    # Megatron-core's own layers are today's on these machines, not those of the published runs.
    profile = replace(shipped_profile(calibration.device), local_layers_of_2022=0.0)
    measured = calibration.measurements
    return profile if measured is None else measured_profile(profile, measured)


def _measured_run(record: RecordedRun, profile: HardwareProfile) -> CalibrationRun:
    plan = _plan(record)

    def estimate(factors: Mapping[str, float]) -> StepEstimate:
        predicted = estimate_step(plan, scale_profile(profile, factors))
        if predicted is None:
            raise _unusable(record.name, "the time of its model is not predicted")
        return predicted

    return CalibrationRun(name=record.name, seconds=record.seconds, parts=record.parts, estimate=estimate)


def _plan(record: RecordedRun) -> RunPlan:
    try:
        return make_plan(from_yaml(record.config), world_of(record.world))
    except UserError as error:
        raise _unusable(record.name, f"this version cannot plan it: {error.problems[0].seen}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise _unusable(record.name, f"its world is of another version: {error}") from error


def _unusable(run: str | Path, seen: str) -> InputError:
    return InputError(
        Problem(
            "run",
            f"{run}: {seen}",
            "a calibration needs runs that this version predicts",
            "leave it out, or train it again with this version",
        )
    )


def format_residuals(calibration: Calibration, residuals: Sequence[PartResidual]) -> str:
    """Format the factors, and of each run the measured and predicted seconds before and after the fit."""
    count = len(calibration.runs)
    lines = [
        f"{count} run{'s' * (count > 1)} on {calibration.device}. Factors on the seconds of:",
        *(f"  {MEANING[name]:<28} {factor:6.2f}" for name, factor in calibration.factors.items()),
        "",
        f"  {'':<40} {'measured':>10} {'before':>10} {'after':>10} {'error':>7}",
    ]
    for one in residuals:
        name = f"{one.run}{_mark(calibration, one.run)}" if one.part == "" else f"  {one.part}"
        error = f"{one.after / one.measured - 1:+7.0%}" if one.measured else f"{UNKNOWN:>7}"
        seconds = " ".join(f"{format_seconds(value):>10}" for value in (one.measured, one.before, one.after))
        lines.append(f"  {name:<40} {seconds} {error}")
    whole = [abs(one.after / one.measured - 1) for one in residuals if one.part == ""]
    lines.append(f"mean error of a step after the fit: {sum(whole) / len(whole):.1%}")
    return "\n".join(lines)


def _mark(calibration: Calibration, name: str) -> str:
    """Mark a run that another version of the toolkit has trained."""
    versions = {run.toolkit for run in calibration.runs.values() if run.name == name} - {__version__}
    return f" (toolkit {', '.join(sorted(versions))})" if versions else ""


def format_measurements(measured: MachineTimings, calibration: Calibration) -> str:
    """Format the measured speeds of the device and its links."""
    device = measured.device
    best: dict[str, float] = {}
    for gemm in device.gemms:
        best[gemm.dtype] = max(best.get(gemm.dtype, 0.0), gemm.flops_per_second)
    lines = [
        f"{calibration.device}, {measured.ranks_per_node} ranks per node at the same time:",
        *(
            f"  matrix products in {dtype:<5} up to {value / 1e12:9.3f} TFLOP/s"
            for dtype, value in best.items()
        ),
        f"  memory                     {device.memory_bandwidth / 1e9:9.1f} GB/s",
        f"  update of the optimizer    {device.optimizer_bandwidth / 1e9:9.1f} GB/s",
        f"  starting an operator       {device.operator_seconds * 1e6:9.1f} µs",
    ]
    if device.to_device is not None and device.to_host is not None:
        lines.append(
            f"  host to device, and back   {device.to_device / 1e9:9.1f}, {device.to_host / 1e9:.1f} GB/s"
        )
    groups = {(one.operation, one.ranks, one.per_node): one for one in measured.collectives}
    for (operation, ranks, per_node), largest in groups.items():
        lines.append(
            f"  {operation:<14} over {ranks} ranks, {per_node} per node: "
            f"{largest.size / largest.seconds / 1e9:.2f} GB/s of {largest.size / 2**20:g} MiB"
        )
    return "\n".join(lines)
