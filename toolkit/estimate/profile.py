"""Measured speed of a kind of hardware, from which step times are predicted.

The shipped profiles are ``profiles/NAME.json``, one for each kind of GPU with published measurements, with
the source of each value. A GPU without a profile has the fractions of ``profiles/other.json`` and the figures
of its data sheet, and CPU ranks have ``profiles/cpu.json``; both are guesses, with a wide interval.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.commands import command_line
from toolkit.config.cluster import ClusterConfig
from toolkit.errors import InputError, Problem
from toolkit.estimate.calibration_file import KEY, damaged_file, read_calibration
from toolkit.plan.devices import GPUS, normalise_gpu_name
from toolkit.plan.types import Device, World

FORMAT_VERSION = 1
FOLDER = Path(__file__).parent / "profiles"
# Kinds of GPU with the chip of another kind, whose profile they use.
SAME_CHIP = {
    "a100-40gb": "a100",
    "a100-80gb": "a100",
    "h200-nvl": "h200",
    "h100-pcie": "h100",
    "h100-nvl": "h100",
    "gh200": "h200",
    "gb200": "b200",
    "b300": "b200",
    "gb300": "b200",
    "mi325x": "mi300x",
}
OTHER, CPU = "other", "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """Speed of one rank's device, and of the host and the network around it.

    Attributes:
        name: of the GPU, as in plan/devices.py; ``cpu`` for CPU ranks.
        peak_flops: dense 16-bit FLOP/s, from the data sheet.
        fp32_flops: FLOP/s of fp32 matrix products, from the data sheet.
        bandwidth: memory bandwidth in bytes per second, from the data sheet.
        processors: streaming multiprocessors or compute units, over which matrix products are divided.
        matmul_fraction: of the peak, that large 16-bit matrix products reach in a training run.
        matmul_fraction_fp8: the same of twice the peak, in fp8.
        attention_forward, attention_backward: fractions of the peak of fused attention with long sequences
            and heads of 128.
        narrow_heads: exponent with which its rate falls for narrower heads.
        bandwidth_fraction: of ``bandwidth``, that elementwise kernels reach.
        launch_seconds: of the device for the shortest kernel.
        host_seconds: of the host to start one operator. A CPU rank then executes the operator, so both times
            add up; a GPU executes while the host starts the next ones.
        call_seconds: that a collective or a message takes besides the network: the engine's code around
            it, and waiting for a rank that starts it later. 0 on GPUs, which wait in the host's place.
        module_seconds: of the host when a pass enters and leaves a module under ZeRO 3, whose hooks fetch and
            release parameters. 0 where it is not known.
        torch_layers: factor of the time of layers that are torch modules, as under DeepSpeed, over that of
            Megatron-core's.
        local_layers_of_2022: share of the time of Megatron-core's own layers that is that of 2022. The
            published runs on A100 without Transformer Engine are from then: attention stored its weights and
            applied dropout, and norms were not divided among tensor ranks. 0 once it is calibrated.
        contention: seconds that computing loses for each second of a collective that runs behind it.
        inside_factor, between_factor: measured over assumed bandwidth of collectives within the fast domain
            of a node and between nodes (estimate/interconnects.py); 1 unless calibrated.
        inside_latency_factor, between_latency_factor: the same of their latencies.
        host_factor: measured over assumed bandwidth between device and host; 1 unless calibrated.
        optimizer_factor: measured over assumed time of the optimizer's update; 1 unless calibrated.
        step_seconds: that a step takes besides its operators and collectives.
        uncertainty: standard deviation of the logarithm of predicted over measured step time.
    """

    name: str
    peak_flops: float
    bandwidth: float
    fp32_flops: float
    processors: int
    matmul_fraction: float
    matmul_fraction_fp8: float
    attention_forward: float
    attention_backward: float
    narrow_heads: float
    bandwidth_fraction: float
    launch_seconds: float
    host_seconds: float
    call_seconds: float = 0.0
    module_seconds: float = 0.0
    torch_layers: float = 1.0
    local_layers_of_2022: float = 0.0
    contention: float = 0.15
    inside_factor: float = 1.0
    between_factor: float = 1.0
    inside_latency_factor: float = 1.0
    between_latency_factor: float = 1.0
    host_factor: float = 1.0
    optimizer_factor: float = 1.0
    step_seconds: float = 1e-3
    uncertainty: float = 0.3

    @property
    def effective_bandwidth(self) -> float:
        """Bytes per second of elementwise kernels."""
        return self.bandwidth * self.bandwidth_fraction

    @property
    def executes_on_host(self) -> bool:
        """Whether the device is a CPU, on which the host's work and the device's take turns."""
        return self.processors == 1

    def rate(self, element: int) -> float:
        """Peak FLOP/s of matrix products with elements of ``element`` bytes."""
        return self.peak_flops if element == 2 else self.fp32_flops

    def matmul_rate(self, element: int, *, fp8: bool = False) -> float:
        """FLOP/s of large matrix products."""
        if fp8:
            return 2 * self.peak_flops * self.matmul_fraction_fp8
        return self.rate(element) * self.matmul_fraction


def load_profile(cluster: ClusterConfig, world: World) -> HardwareProfile | None:
    """Return the profile of ``world``'s devices, calibrated if ``cluster.calibration`` names a file; None if
    the kind of GPU is not known.

    Raises:
        InputError: the calibration cannot be read, or is of another kind of device.
    """
    device = device_name(world)
    if device is None:
        return None
    if cluster.calibration is None:
        return shipped_profile(device)
    file = Path(cluster.calibration).expanduser()
    calibration = read_calibration(file)
    if calibration.device != device:
        raise InputError(
            Problem(
                KEY,
                f"{KEY}={file}, of {calibration.device}, for a run on {device}",
                "a calibration is of the same kind of device as the run",
                f"write {KEY}=null, or measure there: {command_line('calibrate')}",
            )
        )
    try:
        return profile_from_json(device, calibration.values)
    except TypeError as error:
        raise damaged_file(file, str(error)) from None


def device_name(world: World) -> str | None:
    """Return the name of the profile of ``world``'s devices; None for an unknown kind of GPU."""
    if world.device is Device.CPU:
        return CPU
    return normalise_gpu_name(world.gpu) if world.gpu is not None else None


def profile_from_json(name: str, values: Mapping[str, Any]) -> HardwareProfile:
    """Return the profile of ``values``, which may leave out what the data sheet of GPU ``name`` has.

    Raises:
        TypeError: a value is missing or has an unknown name.
    """
    sheet = GPUS.get(name)
    known = {} if sheet is None else {"peak_flops": sheet.peak_flops, "bandwidth": sheet.bandwidth}
    return HardwareProfile(name=name, **{**known, **values})


def values_of(profile: HardwareProfile) -> dict[str, float]:
    """Return the values of a profile, as :func:`profile_from_json` takes them."""
    return {field.name: getattr(profile, field.name) for field in fields(profile) if field.name != "name"}


@cache
def shipped_profile(device: str) -> HardwareProfile:
    """Return the profile of a kind of GPU in plan/devices.py, or of ``cpu``, before any calibration."""
    path = FOLDER / f"{SAME_CHIP.get(device, device)}.json"
    content = json.loads((path if path.exists() else FOLDER / f"{OTHER}.json").read_text())
    assert content["format_version"] == FORMAT_VERSION, f"{path} has another format"
    return profile_from_json(device, content["values"])
