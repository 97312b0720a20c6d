"""A calibration file is read back as written, and a damaged or foreign one is refused with a remedy.

pytest tests/estimate/test_calibration_file.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.cluster import ClusterConfig
from toolkit.config.compose import compose
from toolkit.config.identity import identity
from toolkit.errors import InputError
from toolkit.estimate.calibration_file import Calibration, RecordedRun, read_calibration, write_calibration
from toolkit.estimate.measurements import (
    AttentionTiming,
    CollectiveTiming,
    DeviceTimings,
    GemmTiming,
    MachineTimings,
)
from toolkit.estimate.profile import load_profile, shipped_profile, values_of
from toolkit.plan.types import Device, World

WORLD = World(ranks=8, ranks_per_node=8, device=Device.CUDA, gpu="h100")
MEASURED = MachineTimings(
    ranks_per_node=8,
    device=DeviceTimings(
        gemms=(GemmTiming(dtype="bf16", m=4096, n=4096, k=4096, seconds=2e-4),),
        attentions=(
            AttentionTiming(
                dtype="bf16", batch=1, heads=32, sequence=4096, head_dim=128, forward=1e-3, backward=3e-3
            ),
        ),
        memory_bandwidth=2.8e12,
        operator_seconds=6e-6,
        to_device=5e10,
        to_host=5e10,
        optimizer_bandwidth=2e12,
    ),
    collectives=(CollectiveTiming(operation="all_reduce", ranks=8, per_node=8, size=2**26, seconds=3e-4),),
)
RUN = RecordedRun(
    name="mine", config="{}", world={"ranks": 8}, toolkit="0.1.0", steps=9, seconds=1.5, parts={"forward": 1}
)


def a_calibration() -> Calibration:
    return Calibration(
        device="h100",
        toolkit="0.1.0",
        machine={"cores": 96},
        values={**values_of(shipped_profile("h100")), "matmul_fraction": 0.5},
        measurements=MEASURED,
        runs={"0123456789ab": RUN},
        factors={"between": 2.0},
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_calibration(tmp_path / "calibration.json", a_calibration())
    return tmp_path / "calibration.json"


def test_file_is_read_back(file: Path) -> None:
    assert read_calibration(file) == a_calibration()


def test_changed_file_is_read_again(file: Path) -> None:
    assert read_calibration(file).toolkit == "0.1.0"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "toolkit": "0.1.0.later"}))
    assert read_calibration(file).toolkit == "0.1.0.later"


def test_profile_of_the_run_is_the_calibrated_one(file: Path) -> None:
    calibrated = load_profile(ClusterConfig(calibration=str(file)), WORLD)
    shipped = load_profile(ClusterConfig(), WORLD)
    assert calibrated is not None
    assert shipped is not None
    assert calibrated.matmul_fraction == 0.5 != shipped.matmul_fraction
    assert calibrated.bandwidth == shipped.bandwidth


def test_calibration_of_another_device_is_refused(file: Path) -> None:
    a100 = World(ranks=8, ranks_per_node=8, device=Device.CUDA, gpu="a100-80gb")
    with pytest.raises(InputError, match=r"of h100, for a run on a100-80gb[\s\S]*remedy"):
        load_profile(ClusterConfig(calibration=str(file)), a100)


def test_absent_file_is_reported_with_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No such file[\s\S]*calibrate"):
        load_profile(ClusterConfig(calibration=str(tmp_path / "absent.json")), WORLD)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format_version",), 2),
        (("device",), 3),
        (("factors", "between"), 1e6),
        (("factors", "between"), float("nan")),
        (("values", "matmul_fraction"), -1),
        (("values", "matmul_fraction"), "fast"),
        (("values", "no_such_value"), 1),
        (("measurements", "device", "memory_bandwidth"), 0),
        (("measurements", "device", "gemms", 0, "seconds"), float("inf")),
        (("runs", "0123456789ab", "seconds"), None),
        (("runs",), []),
    ],
)
def test_damaged_file_is_refused(file: Path, path: tuple[Any, ...], value: object) -> None:
    content = json.loads(file.read_text())
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match="a calibration is a file of format 1"):
        load_profile(ClusterConfig(calibration=str(file)), WORLD)


def test_calibration_does_not_change_the_run(file: Path) -> None:
    plain, calibrated = compose([]), compose([f"cluster.calibration={file}"])
    assert identity(plain) == identity(calibrated)
    assert calibrated.cluster.calibration == str(file)
