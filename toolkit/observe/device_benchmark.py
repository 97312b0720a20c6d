"""Measure the speed of one device: matrix products, attention, memory, copies, the optimizer's update.

Each figure is the typical time of operations that are repeated for ``SECONDS``. Ranks that measure at the
same time slow each other down as in training: CPU ranks share memory, GPUs share power and host links.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from toolkit.estimate.measurements import ADAMW_BYTES, AttentionTiming, DeviceTimings, GemmTiming

SECONDS = {"cuda": 0.1, "cpu": 0.08}  # for each figure, without warm-up
WARM_UP, MIN_REPEATS, MAX_REPEATS = 2, 5, 2000
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Tokens of a micro-batch, and [in, out] features of layers: square, up and down projections, projections that
# tensor parallelism has cut, and the head. CPUs train much smaller models.
TOKENS = {"cuda": (1024, 4096, 16384), "cpu": (128, 512)}
FEATURES = {
    "cuda": (
        (1024, 1024),
        (4096, 512),
        (4096, 4096),
        (4096, 16384),
        (16384, 4096),
        (8192, 8192),
        (4096, 32768),
    ),
    "cpu": ((128, 128), (256, 256), (256, 704), (704, 256), (512, 1024)),
}
# [batch, heads, sequence, head_dim]
ATTENTION = {
    "cuda": ((4, 16, 2048, 64), (4, 16, 2048, 128), (1, 32, 4096, 128), (1, 32, 16384, 128)),
    "cpu": ((2, 4, 64, 32), (2, 4, 256, 64), (8, 8, 128, 64)),
}
LARGE_BYTES = {"cuda": 2**30, "cpu": 64 * 2**20}  # beyond all caches
OPTIMIZER_TENSORS, OPTIMIZER_ELEMENTS = 8, {"cuda": 2**24, "cpu": 2**17}  # of each tensor
TINY_OPERATORS = 100  # of one forward and backward pass


def measure_device(device: torch.device, advance: Callable[[], object] = lambda: None) -> DeviceTimings:
    """Measure ``device`` in about half a minute.

    Args:
        advance: called ``stages(device)`` times, for progress.
    """
    gemms: list[GemmTiming] = []
    attentions: list[AttentionTiming] = []
    for dtype in dtypes(device):
        gemms += _gemms(dtype, device)
        advance()
        attentions += _attentions(dtype, device)
        advance()
    on_gpu = device.type == "cuda"
    timings = DeviceTimings(
        gemms=tuple(gemms),
        attentions=tuple(attentions),
        memory_bandwidth=_memory_bandwidth(device),
        operator_seconds=_operator_seconds(device),
        to_device=_copy_bandwidth(device, to_device=True) if on_gpu else None,
        to_host=_copy_bandwidth(device, to_device=False) if on_gpu else None,
        optimizer_bandwidth=_optimizer_bandwidth(device),
    )
    advance()
    return timings


def stages(device: torch.device) -> int:
    """Return how often :func:`measure_device` advances its progress."""
    return 2 * len(dtypes(device)) + 1


def dtypes(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes that are measured. CPUs emulate fp16; fp8 needs compute capability 8.9."""
    if device.type == "cpu":
        return ("fp32", "bf16")
    fp8 = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
    return ("bf16", "fp16", "fp32", *(("fp8",) if fp8 else ()))


def _gemms(dtype: str, device: torch.device) -> Iterator[GemmTiming]:
    for tokens in TOKENS[device.type]:
        for inputs, outputs in FEATURES[device.type]:
            seconds = _gemm_seconds(dtype, tokens, outputs, inputs, device)
            yield GemmTiming(dtype=dtype, m=tokens, n=outputs, k=inputs, seconds=seconds)


def _gemm_seconds(dtype: str, m: int, n: int, k: int, device: torch.device) -> float:
    """Time a linear layer's product: the weight is [n, k] and transposed in the product."""
    if dtype == "fp8":
        a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
        scale_a, scale_b = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
        return typical_seconds(
            lambda: torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16), device
        )
    x = torch.randn(m, k, device=device, dtype=DTYPES[dtype])
    weight = torch.randn(n, k, device=device, dtype=DTYPES[dtype])
    with torch.no_grad():
        return typical_seconds(lambda: torch.nn.functional.linear(x, weight), device)


def _attentions(dtype: str, device: torch.device) -> Iterator[AttentionTiming]:
    """Yield nothing for fp8, which has no kernel in torch, and for fp32 on GPUs, which is unusual."""
    if dtype == "fp8" or (dtype == "fp32" and device.type == "cuda"):
        return
    for shape in ATTENTION[device.type]:
        forward, backward = _attention_seconds(dtype, shape, device)
        batch, heads, sequence, head_dim = shape
        yield AttentionTiming(
            dtype=dtype,
            batch=batch,
            heads=heads,
            sequence=sequence,
            head_dim=head_dim,
            forward=forward,
            backward=backward,
        )


def _attention_seconds(
    dtype: str, shape: tuple[int, int, int, int], device: torch.device
) -> tuple[float, float]:
    query, key, value = (
        torch.randn(shape, device=device, dtype=DTYPES[dtype], requires_grad=True) for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    output = forward()
    gradient = torch.randn_like(output)

    def backward() -> object:
        return torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)

    return typical_seconds(forward, device), typical_seconds(backward, device)


def _memory_bandwidth(device: torch.device) -> float:
    """Return bytes per second of ``a = b + s c``, the triad of STREAM (McCalpin 1995): 2 reads, 1 write."""
    elements = LARGE_BYTES[device.type] // 4
    a, b, c = (torch.ones(elements, device=device) for _ in range(3))
    return 3 * 4 * elements / typical_seconds(lambda: torch.add(b, c, alpha=0.5, out=a), device)


def _operator_seconds(device: torch.device) -> float:
    start = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        value = start
        for _ in range(TINY_OPERATORS):
            value = value * 1.0001
        value.sum().backward()

    return typical_seconds(chain, device) / (2 * TINY_OPERATORS)


def _copy_bandwidth(device: torch.device, *, to_device: bool) -> float:
    elements = LARGE_BYTES["cpu"]
    host = torch.empty(elements, dtype=torch.uint8, pin_memory=True)
    other = torch.empty(elements, dtype=torch.uint8, device=device)
    source, target = (host, other) if to_device else (other, host)
    return elements / typical_seconds(lambda: target.copy_(source, non_blocking=True), device)


def _optimizer_bandwidth(device: torch.device) -> float:
    elements = OPTIMIZER_ELEMENTS[device.type]
    parameters = [torch.nn.Parameter(torch.zeros(elements, device=device)) for _ in range(OPTIMIZER_TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=device.type == "cuda")
    return ADAMW_BYTES * elements * OPTIMIZER_TENSORS / typical_seconds(optimizer.step, device)


def typical_seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return the median time of ``action``, on a CPU the lower quartile, of repeats for about ``SECONDS``.

    On a GPU the repeats are enqueued together and timed by events, so that the host's launches count only
    where the device waits for them.
    """
    for _ in range(WARM_UP):
        action()
    start = time.perf_counter()
    action()
    _synchronize(device)
    once = max(time.perf_counter() - start, 1e-7)
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(SECONDS[device.type] / once)))
    if device.type == "cpu":
        # Other processes take the cores for some of the repeats, which lasts longer than an operation.
        return statistics.quantiles((_host_seconds(action) for _ in range(repeats)), n=4)[0]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        action()
        event.record()
    _synchronize(device)
    spans = [before.elapsed_time(after) for before, after in pairwise(events)]
    return statistics.median(spans) / 1e3


def _host_seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
