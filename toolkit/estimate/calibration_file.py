"""A calibration file: what was measured on one kind of machine, the runs that were added, and the fit.

``launch/calibrate.py`` writes it and ``cluster.calibration=FILE`` uses it. It is JSON:

    format_version, device ("h100-80gb", "cpu"), toolkit, machine (cores, date)
    values          the profile: that of toolkit/estimate/profiles, changed by what follows
    measurements    of operators and collectives, or null: toolkit/estimate/measurements.py
    runs            by id: configuration, world, seconds of the median step and its parts
    factors         by name, fitted to all runs: toolkit/estimate/calibration_fit.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from toolkit.commands import command_line
from toolkit.errors import InputError, Problem, file_errors
from toolkit.estimate.measurements import MachineTimings, measurements_from_json
from toolkit.files import write_whole

FORMAT_VERSION = 1
KEY = "cluster.calibration"
FACTOR_RANGE = (1e-3, 1e3)  # a factor beyond it is a damaged file rather than a machine
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run that was added to a calibration.

    Attributes:
        name: of its folder, for people.
        config: its configuration as YAML.
        world: as in plan.json.
        toolkit: version that ran it.
        steps: that were measured.
        seconds: of the median step after warm-up, without evaluation, saving and logging.
        parts: seconds of the median rank in the median step, by the names of the ledger's parts.
    """

    name: str
    config: str
    world: Mapping[str, Any]
    toolkit: str
    steps: int
    seconds: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The content of a calibration file; see the module's docstring.

    Attributes:
        device: a name in plan/devices.py, or ``cpu``.
        toolkit: the version whose predictions were fitted; those of another version may differ.
        values: of the calibrated profile.
    """

    device: str
    toolkit: str
    machine: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    measurements: MachineTimings | None = None
    runs: Mapping[str, RecordedRun] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)


def write_calibration(file: Path, calibration: Calibration) -> None:
    """Write a calibration file atomically. Raises InputError if the folder cannot be written."""
    content = {
        "format_version": FORMAT_VERSION,
        "device": calibration.device,
        "toolkit": calibration.toolkit,
        "machine": dict(calibration.machine),
        "values": dict(calibration.values),
        "measurements": None if calibration.measurements is None else asdict(calibration.measurements),
        "runs": {key: asdict(run) for key, run in calibration.runs.items()},
        "factors": dict(calibration.factors),
    }
    with file_errors("out"):
        write_whole(file, json.dumps(content, indent=1) + "\n")


def read_calibration(file: Path) -> Calibration:
    """Read a calibration file. A search reads it for every layout, so its content is cached until it changes.

    Raises:
        InputError: it is absent, damaged, of a newer format, or a number is out of range.
    """
    with file_errors(KEY, f"write the file with {command_line('calibrate', f'out={file}')}"):
        state = file.stat()
        return _read(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _read(file: Path, changed: int, size: int) -> Calibration:
    """``changed`` and ``size`` are keys of the cache."""
    if size > MAX_BYTES:
        raise damaged_file(file, f"{size} bytes")
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        content = json.loads(text)
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version={version!r}")
        return _parse(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged_file(file, f"{type(error).__name__}: {error}") from None


def _parse(content: Mapping[str, Any]) -> Calibration:
    """Parse a calibration file. Raises ValueError, TypeError or KeyError if the content is malformed."""
    measured = content["measurements"]
    return Calibration(
        device=_text(content["device"]),
        toolkit=_text(content["toolkit"]),
        machine=dict(content["machine"]),
        values={str(name): _number(value, name, 0.0) for name, value in content["values"].items()},
        measurements=None if measured is None else measurements_from_json(measured),
        runs={str(key): _parse_run(row) for key, row in content["runs"].items()},
        factors={
            str(name): _number(value, name, *FACTOR_RANGE) for name, value in content["factors"].items()
        },
    )


def _parse_run(row: Mapping[str, Any]) -> RecordedRun:
    return RecordedRun(
        name=_text(row["name"]),
        config=_text(row["config"]),
        world=dict(row["world"]),
        toolkit=_text(row["toolkit"]),
        steps=int(_number(row["steps"], "steps", 1)),
        seconds=_number(row["seconds"], "seconds", 1e-6),
        parts={str(name): _number(value, name, 0.0) for name, value in row["parts"].items()},
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} must be a text")
    return value


def _number(value: object, name: str, low: float, high: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} must be a number from {low:g} to {high:g}")
    return float(value)


def damaged_file(file: Path, seen: str) -> InputError:
    """Return the error of a calibration that cannot be used."""
    return InputError(
        Problem(
            KEY,
            f"{KEY}={file}: {seen}",
            f"a calibration is a file of format {FORMAT_VERSION} with positive numbers",
            f"write it again with {command_line('calibrate', f'out={file}')}",
        )
    )
