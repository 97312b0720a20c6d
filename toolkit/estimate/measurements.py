"""The measurements of ``launch/calibrate.py`` on a machine, as stored in a calibration file.

All times are seconds, all sizes bytes. ``observe/device_benchmark.py`` and
``observe/collective_benchmark.py`` measure them; ``estimate/calibrated_profile.py`` uses them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

ADAMW_BYTES = 7 * 4  # an element: reads parameter, gradient and two moments, writes all but the gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTiming:
    """The product of [m, k] and [k, n] matrices. ``dtype`` is bf16, fp16, fp32 or fp8 (rowwise scaling)."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops_per_second(self) -> float:
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiming:
    """Causal attention of torch's ``scaled_dot_product_attention`` over [batch, heads, sequence, head_dim].

    ``backward`` is without the forward pass.
    """

    dtype: str
    batch: int
    heads: int
    sequence: int
    head_dim: int
    forward: float
    backward: float

    @property
    def forward_flops(self) -> float:
        """FLOPs of the causal half: each query takes two products of ``sequence / 2 x head_dim``."""
        return 2.0 * self.batch * self.heads * self.sequence**2 * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming:
    """A collective of estimate/network.py on the slowest of ``ranks`` ranks, ``per_node`` of them on a node.

    ``size`` is that of the whole tensor: the input of an all-reduce and of a reduce-scatter, the output of an
    all-gather, the message of a send.
    """

    operation: str
    ranks: int
    per_node: int
    size: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimings:
    """Measurements of one rank's own device.

    Attributes:
        gemms, attentions: over a grid of shapes.
        memory_bandwidth: bytes per second that a large element-wise operation reads and writes.
        operator_seconds: of an operator on a tiny tensor with its launch, forward and backward on average.
        to_device, to_host: bytes per second of copies from and to pinned host memory; None on a CPU.
        optimizer_bandwidth: bytes per second that an AdamW update of many parameters reads and writes.
    """

    gemms: tuple[GemmTiming, ...]
    attentions: tuple[AttentionTiming, ...]
    memory_bandwidth: float
    operator_seconds: float
    to_device: float | None
    to_host: float | None
    optimizer_bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTimings:
    """All that was measured in one start of the command; ``ranks_per_node`` ranks worked at the same time.

    On a CPU, each rank had an equal part of the cores as threads.
    """

    ranks_per_node: int
    device: DeviceTimings
    collectives: tuple[CollectiveTiming, ...] = ()


def slowest(timings: Sequence[DeviceTimings]) -> DeviceTimings:
    """Combine the ranks that measured at the same time: a synchronous step waits for the slowest one."""
    first = timings[0]
    return DeviceTimings(
        gemms=tuple(
            max(same, key=lambda timing: timing.seconds)
            for same in zip(*(one.gemms for one in timings), strict=True)
        ),
        attentions=tuple(
            max(same, key=lambda timing: timing.forward + timing.backward)
            for same in zip(*(one.attentions for one in timings), strict=True)
        ),
        memory_bandwidth=min(one.memory_bandwidth for one in timings),
        operator_seconds=max(one.operator_seconds for one in timings),
        to_device=None if first.to_device is None else min(one.to_device or math.inf for one in timings),
        to_host=None if first.to_host is None else min(one.to_host or math.inf for one in timings),
        optimizer_bandwidth=min(one.optimizer_bandwidth for one in timings),
    )


def measurements_from_json(content: Mapping[str, Any]) -> MachineTimings:
    """Build measurements from the JSON types of ``asdict``. Raises ValueError, TypeError or KeyError if the
    content is malformed.
    """
    device = dict(content["device"])
    device["gemms"] = tuple(_record(GemmTiming, row) for row in device["gemms"])
    device["attentions"] = tuple(_record(AttentionTiming, row) for row in device["attentions"])
    return MachineTimings(
        ranks_per_node=int(content["ranks_per_node"]),
        device=_record(DeviceTimings, device),
        collectives=tuple(_record(CollectiveTiming, row) for row in content["collectives"]),
    )


def _record(kind: Any, row: Mapping[str, Any]) -> Any:
    """Create a dataclass whose numbers must all be positive and finite."""
    for field in fields(kind):
        value = row[field.name]
        if isinstance(value, bool) or (isinstance(value, int | float) and not 0 < value < math.inf):
            raise ValueError(f"{field.name}={value!r} must be a positive number")
    return kind(**row)
