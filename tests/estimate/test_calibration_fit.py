"""The fit finds what differs between the profile and the machine that made the runs.

pytest tests/estimate/test_calibration_fit.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from toolkit.config.cluster import ClusterConfig
from toolkit.config.compose import compose
from toolkit.estimate.calibrated_profile import FACTORS, measured_profile, scale_profile
from toolkit.estimate.calibration_fit import CalibrationRun, FittedFactors, fit_factors, run_residuals
from toolkit.estimate.communication import measured_topology
from toolkit.estimate.interconnects import topology_of
from toolkit.estimate.measurements import (
    AttentionTiming,
    CollectiveTiming,
    DeviceTimings,
    GemmTiming,
    MachineTimings,
)
from toolkit.estimate.network import Collective, Group, collective_seconds
from toolkit.estimate.profile import HardwareProfile, shipped_profile
from toolkit.estimate.step import estimate_step
from toolkit.estimate.types import StepEstimate
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World

H100 = shipped_profile("h100")
LLAMA = (
    "model=llama",
    "model.hidden_size=8192",
    "model.intermediate_size=22016",
    "model.num_hidden_layers=8",
    "model.num_attention_heads=64",
    "model.num_key_value_heads=64",
    "model.vocab_size=32000",
    "model.max_position_embeddings=4096",
    "train.sequence_length=4096",
    "train.micro_batch=2",
    "train.global_batch=64",
    "precision=bf16",
)
LAYOUTS = (
    ("zero=stage1",),
    ("zero=stage3",),
    ("engine=megatron", "zero=stage1", "parallel.tensor=4"),
    ("engine=megatron", "zero=stage1", "parallel.tensor=2", "parallel.pipeline=2"),
    ("engine=megatron", "zero=stage1", "parallel.tensor=8"),
)
PLANTED = [{"between": 2.0}, {"matmul": 1.3}, {"inside": 1.6}, {"matmul": 0.9, "between": 1.5}]


@pytest.fixture(scope="module")
def plans() -> list[RunPlan]:
    world = World(
        ranks=32, ranks_per_node=8, device=Device.CUDA, gpu="h100", transformer_engine="2.11.0", has_nvcc=True
    )
    return [make_plan(compose((*LLAMA, *layout)), world) for layout in LAYOUTS]


def made_up_runs(
    plans: list[RunPlan], truth: Mapping[str, float], *, with_parts: bool = True
) -> list[CalibrationRun]:
    """Runs on a machine that differs from the profile by ``truth``."""
    runs = []
    for number, plan in enumerate(plans):

        def estimate(factors: Mapping[str, float], plan: RunPlan = plan) -> StepEstimate:
            predicted = estimate_step(plan, scale_profile(H100, factors))
            assert predicted is not None
            return predicted

        made = estimate(truth)
        runs.append(
            CalibrationRun(
                name=f"run-{number}",
                seconds=made.seconds,
                parts=made.parts if with_parts else {},
                estimate=estimate,
            )
        )
    return runs


def fit(runs: list[CalibrationRun]) -> FittedFactors:
    return fit_factors(FACTORS, runs)


@pytest.mark.parametrize("truth", PLANTED, ids=lambda truth: "+".join(truth))
def test_planted_factor_is_found(plans: list[RunPlan], truth: dict[str, float]) -> None:
    found = fit(made_up_runs(plans, truth)).factors
    for name, factor in found.items():
        assert factor == pytest.approx(truth.get(name, 1.0), rel=0.05), name


def test_without_a_planted_factor_the_profile_stays(plans: list[RunPlan]) -> None:
    """Control: the network of these runs is as fast as the profile's."""
    assert fit(made_up_runs(plans, {})).factors == pytest.approx(dict.fromkeys(FACTORS, 1.0), abs=1e-3)


def test_fit_reproduces_the_steps(plans: list[RunPlan]) -> None:
    runs = made_up_runs(plans, {"between": 2.0, "matmul": 1.2})
    fitted = fit(runs)
    whole = [one for one in run_residuals(runs, fitted.factors) if one.part == ""]
    assert len(whole) == len(runs)
    assert max(abs(one.before / one.measured - 1) for one in whole) > 0.1
    assert max(abs(one.after / one.measured - 1) for one in whole) < 0.03
    assert fitted.deviation < 0.04


def test_contradicting_runs_widen_the_interval(plans: list[RunPlan]) -> None:
    runs = made_up_runs(plans, {})
    disturbed = [
        replace(run, seconds=run.seconds * (1.3 if number % 2 else 1 / 1.3), parts={})
        for number, run in enumerate(runs)
    ]
    assert fit(disturbed).deviation > 3 * fit(runs).deviation


def test_one_run_without_a_network_moves_only_what_it_measured() -> None:
    """On a single GPU, the network's factors stay 1."""
    plan = make_plan(
        compose((*LLAMA, "model.num_hidden_layers=2", "engine=local", "train.global_batch=2")),
        World(ranks=1, ranks_per_node=1, device=Device.CUDA, gpu="h100"),
    )
    fitted = fit(made_up_runs([plan], {"matmul": 1.4, "between": 3.0}))
    assert fitted.factors["matmul"] > 1.1
    for name in ("inside", "between"):
        assert fitted.factors[name] == pytest.approx(1.0)


def test_runs_without_a_ledger_are_fitted_by_their_steps(plans: list[RunPlan]) -> None:
    runs = made_up_runs(plans, {"matmul": 1.3}, with_parts=False)
    fitted = fit(runs)
    for run in runs:
        assert run.estimate(fitted.factors).seconds == pytest.approx(run.seconds, rel=0.03)


def measured_by(profile: HardwareProfile) -> MachineTimings:
    """Measurements of a device with exactly this profile."""
    from toolkit.estimate.compute import matmul_seconds
    from toolkit.estimate.operators import Matmul

    def gemm(m: int, n: int, k: int, dtype: str) -> GemmTiming:
        element = 4 if dtype == "fp32" else 2
        seconds = matmul_seconds(Matmul(m, n, k), profile, element)
        return GemmTiming(dtype=dtype, m=m, n=n, k=k, seconds=seconds)

    shapes = [(4096, 4096, 4096), (16384, 4096, 16384), (1024, 8192, 8192)]
    device = DeviceTimings(
        gemms=tuple(gemm(*shape, dtype) for dtype in ("bf16", "fp32") for shape in shapes),
        attentions=(
            AttentionTiming(
                dtype="bf16", batch=1, heads=32, sequence=16384, head_dim=128, forward=0.005, backward=0.014
            ),
        ),
        memory_bandwidth=profile.effective_bandwidth,
        operator_seconds=profile.host_seconds,
        to_device=5e10,
        to_host=5e10,
        optimizer_bandwidth=2e12,
    )
    return MachineTimings(ranks_per_node=1, device=device)


def test_measurements_replace_the_profile() -> None:
    truth = replace(H100, matmul_fraction=0.5, bandwidth_fraction=0.6, fp32_flops=5e13)
    found = measured_profile(H100, measured_by(truth))
    for name in ("matmul_fraction", "bandwidth_fraction", "fp32_flops"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.02), name
    # 4 s^2 d heads FLOPs of the causal half, with a little more at shorter lengths
    rate = 2 * 32 * 16384**2 * 128 / 0.005
    assert found.attention_forward == pytest.approx(rate / H100.peak_flops, rel=0.05)
    assert found.attention_backward == pytest.approx(2.5 * rate * 0.005 / 0.014 / H100.peak_flops, rel=0.07)
    assert found.inside_factor == H100.inside_factor


@pytest.mark.parametrize("level", ["inside", "between"])
@pytest.mark.parametrize("truth", [(0.5, 1.0), (0.9, 4.0), (1.0, 1.0)])
def test_links_are_fitted_to_collectives(level: str, truth: tuple[float, float]) -> None:
    """Bandwidth and latency of one level, from collectives of all sizes; the other level stays."""
    bandwidth, latency = truth
    changed = replace(H100, **{f"{level}_factor": bandwidth, f"{level}_latency_factor": latency})
    ranks, per_node = (8, 8) if level == "inside" else (2, 1)
    world = World(ranks=ranks, ranks_per_node=per_node, device=Device.CUDA, gpu="h100")
    usual = topology_of(ClusterConfig(), world)
    timings = tuple(
        CollectiveTiming(
            operation=kind.value,
            ranks=ranks,
            per_node=per_node,
            size=size,
            seconds=collective_seconds(kind, size, Group(ranks, per_node), measured_topology(usual, changed)),
        )
        for kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.SEND)
        for size in (2**13, 2**18, 2**22, 2**26, 2**29)
    )
    measured = replace(measured_by(H100), ranks_per_node=per_node, collectives=timings)
    found = measured_profile(H100, measured)
    other = {"inside": "between", "between": "inside"}[level]
    assert getattr(found, f"{level}_factor") == pytest.approx(bandwidth, rel=0.05)
    assert getattr(found, f"{level}_latency_factor") == pytest.approx(latency, rel=0.1)
    assert getattr(found, f"{other}_factor") == getattr(H100, f"{other}_factor")


def test_factors_multiply_seconds() -> None:
    scaled = scale_profile(H100, {"matmul": 2.0, "operator": 3.0})
    assert scaled.matmul_fraction == pytest.approx(H100.matmul_fraction / 2)
    assert scaled.host_seconds == pytest.approx(3 * H100.host_seconds)
    assert math.isclose(scaled.inside_factor, H100.inside_factor)
    assert scale_profile(H100, {}) == H100
