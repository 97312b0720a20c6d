"""Seconds of operators on one device.

A matrix product takes as long as its tiles need in whole waves over the device's processors, or as its
operands need from memory, whichever is longer (a roofline with tile and wave quantisation: NVIDIA, "Matrix
Multiplication Background User's Guide", sections 3 and 4). Everything else is limited by memory bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from toolkit.estimate.operators import Elementwise, FusedAttention, Matmul, Operator, TracedCalls
from toolkit.estimate.profile import HardwareProfile

# Rows and columns of the tiles of cuBLAS's kernels, and the fraction of the largest tile's rate that a
# processor reaches with them ("Matrix Multiplication Background User's Guide", figure 4).
TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.6))
# Rate if all dims are multiples of 8, 4, 2 or 1 elements: loads of 16 bytes down to 2 ("Matrix Multiplication
# Background User's Guide", section 2.1 and figure 2).
ALIGNED = {8: 1.0, 4: 0.8, 2: 0.5, 1: 0.3}
# Batched products of odd sizes, such as those of heads of 225: fitted to BLOOM's trials (data of
# benchmarks/planner.py).
UNALIGNED_BATCH = 0.04
TILE_DEPTH = 250  # elements of the inner dim that the start and the end of a tile cost
SPLIT_DEPTH = 1024  # the shortest inner dim that several processors share for one tile
SHORT_FORWARD, SHORT_BACKWARD = 500, 700  # keys at which fused attention reaches half of its rate
# Calls of torch in a trace for one operator of operators.py, whose host time is fitted. A layer of Llama has
# 113 calls in both passes that are not views, and 61 operators.
TRACED_CALLS = 2


def device_seconds(operators: Iterable[Operator], profile: HardwareProfile, element: int) -> float:
    """Return the seconds of the device for the operators one after another.

    Args:
        element: bytes of an element.
    """
    return sum(_seconds(operator, profile, element) for operator in operators)


def host_seconds(operators: Iterable[Operator], profile: HardwareProfile) -> float:
    """Return the seconds of the host to start the operators, which it does ahead of the device unless they
    are short.
    """
    return sum(map(_started, operators)) * profile.host_seconds


def _started(operator: Operator) -> float:
    if isinstance(operator, TracedCalls):
        return operator.work.calls / TRACED_CALLS
    return operator.kernels if isinstance(operator, Elementwise) else 1


def pass_seconds(
    operators: Sequence[Operator],
    profile: HardwareProfile,
    element: int,
    *,
    slower: float = 1.0,
    hooks: float = 0.0,
    waits: float = 0.0,
) -> float:
    """Return the seconds of computing in one pass, without waiting for collectives.

    A GPU executes operators while the host starts the next ones, also during collectives. A CPU rank does one
    after the other.

    Args:
        slower: factor of the device's time.
        hooks: seconds of the host between operators.
        waits: seconds of the collectives that the device waits for.
    """
    device = device_seconds(operators, profile, element) * slower
    host = host_seconds(operators, profile) + hooks
    return device + host if profile.executes_on_host else max(device, host - waits)


def _seconds(operator: Operator, profile: HardwareProfile, element: int) -> float:
    if isinstance(operator, Matmul):
        return matmul_seconds(operator, profile, element)
    if isinstance(operator, FusedAttention):
        return attention_seconds(operator, profile, element)
    if isinstance(operator, TracedCalls):
        return traced_seconds(operator, profile, element)
    return operator.moved_bytes / profile.effective_bandwidth + operator.kernels * profile.launch_seconds


def matmul_seconds(product: Matmul, profile: HardwareProfile, element: int) -> float:
    """Return the seconds of the product, launch included."""
    rate = profile.matmul_rate(element, fp8=product.fp8)
    size = 1 if product.fp8 else element
    rows, columns, inner = product.rows, product.columns, product.inner
    if profile.executes_on_host:  # a CPU's library packs the operands into caches, whatever the shape
        return product.flops / rate + profile.launch_seconds
    moved_bytes = product.count * (size * (rows * inner + inner * columns) + max(2, size) * rows * columns)
    aligned = min(math.gcd(int(dim), 8) for dim in (rows, columns, inner))
    rate *= UNALIGNED_BATCH if aligned == 1 and product.count > 1 else ALIGNED[aligned]
    best = math.inf
    for high, wide, relative in TILES:
        tiles = math.ceil(rows / high) * math.ceil(columns / wide) * product.count
        depth = inner
        if tiles < profile.processors and inner >= 2 * SPLIT_DEPTH:
            splits = min(int(profile.processors / tiles), int(inner / SPLIT_DEPTH))
            if splits > 1:
                tiles, depth = tiles * splits, inner / splits
        waves = math.ceil(tiles / profile.processors)
        per_processor = rate * relative / profile.processors
        best = min(best, waves * 2.0 * high * wide * (depth + TILE_DEPTH) / per_processor)
    return max(best, moved_bytes / profile.effective_bandwidth) + profile.launch_seconds


def attention_seconds(operator: FusedAttention, profile: HardwareProfile, element: int) -> float:
    """Return the seconds of a fused attention kernel.

    Its rate rises with the length, because the start and the end of a row of tiles cost the same, and falls
    with heads narrower than 128, because the softmax then costs more of the time.
    """
    fraction = profile.attention_backward if operator.backward else profile.attention_forward
    short = SHORT_BACKWARD if operator.backward else SHORT_FORWARD
    narrow = min(1.0, (operator.width / 128) ** profile.narrow_heads)
    rate = profile.rate(element) * fraction * narrow * operator.length / (operator.length + short)
    moved_bytes = operator.moved_bytes * (2 if operator.backward else 1)
    return max(operator.flops / rate, moved_bytes / profile.effective_bandwidth) + profile.launch_seconds


def traced_seconds(operator: TracedCalls, profile: HardwareProfile, element: int) -> float:
    """Return the seconds of the calls at the rate of large products, or at the bandwidth, whichever takes
    longer.

    A trace has no shapes, so tiles and waves do not count.
    """
    rate = profile.matmul_rate(element)
    if operator.attention:
        fraction = profile.attention_backward if operator.backward else profile.attention_forward
        rate = profile.rate(element) * fraction
    work = operator.work
    device_seconds = max(work.flops / rate, work.moved_bytes / profile.effective_bandwidth)
    return device_seconds + work.calls * profile.launch_seconds
