"""The predicted step against textbook formulas, and against published measurements.

pytest tests/estimate/test_step.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.cases import CPU, h100s, run_config
from toolkit.config.model import ModelConfig
from toolkit.config.schema import EngineName, OffloadDevice, Precision
from toolkit.estimate.communication import Network, group_name, hidden_behind, state_exchanges
from toolkit.estimate.compute import matmul_seconds, pass_seconds
from toolkit.estimate.network import Link, Topology
from toolkit.estimate.operators import FusedAttention, Matmul, Work, head_work, layer_work, share_of_rank
from toolkit.estimate.profile import HardwareProfile, shipped_profile
from toolkit.estimate.step import estimate_step, why_no_estimate
from toolkit.estimate.types import StepEstimate
from toolkit.families import get_family
from toolkit.families.base import ParameterSpec
from toolkit.layout.axes import Axes, Axis, axis_name
from toolkit.plan import make_plan
from toolkit.plan.trace import ModuleTrace, OperatorWork
from toolkit.plan.types import RunPlan, World

H100 = shipped_profile("h100")
LARGE = ModelConfig(
    family="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)
# DeepSpeed then gathers every parameter in both passes, as the ZeRO paper counts.
KEEPS_NOTHING = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def large(world: World | None = None, **changes: object) -> RunPlan:
    settings: dict[str, object] = {
        "model": replace(LARGE),
        "precision__name": Precision.bf16,
        "train__sequence_length": 4096,
        "train__micro_batch": 1,
        "train__global_batch": 64,
        "engine__name": EngineName.megatron,
        "zero__stage": 1,
        "train__activation_checkpointing": "full",
        **changes,
    }
    return make_plan(run_config(**settings), world or h100s(16))


def predict(plan: RunPlan, profile: HardwareProfile = H100) -> StepEstimate:
    estimate = estimate_step(plan, profile)
    assert estimate is not None
    return estimate


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_operators_have_the_flops_of_the_family(family: str) -> None:
    """Causal attention is counted half, and the backward pass has twice the products of the forward pass."""
    small = replace(LARGE, family=family)
    if family in ("mixtral", "qwen3_moe"):
        small = replace(small, num_local_experts=8, num_experts_per_tok=2)
    if family == "gpt2":
        small = replace(small, num_key_value_heads=32)
    plan = large(
        model=small,
        train__activation_checkpointing="none",
        train__micro_batch=2,
        train__global_batch=128,
        train__sequence_length=1024,
        world=h100s(64),
        zero__stage=3,
        engine__name=EngineName.deepspeed,
    )
    assert plan.shape is not None
    shape, share = plan.shape, share_of_rank(plan, plan.shape)
    expected = get_family(family).forward_flops(shape, 1024)
    layer, head = layer_work(shape, share), head_work(shape, share)
    tokens = 2 * 1024
    assert products(layer) * shape.num_hidden_layers == pytest.approx(
        tokens * (expected.blocks - expected.scores), rel=1e-9
    )
    assert attention(layer) * 2 * shape.num_hidden_layers == pytest.approx(tokens * expected.scores, rel=1e-9)
    assert products(head) == pytest.approx(tokens * expected.head, rel=1e-9)
    assert products(Work(layer.backward, ())) == pytest.approx(2 * products(layer), rel=1e-9)


def products(work: Work) -> float:
    return sum(operator.flops for operator in work.forward if isinstance(operator, Matmul))


def attention(work: Work) -> float:
    return sum(operator.flops for operator in work.forward if isinstance(operator, FusedAttention))


def test_tensor_and_context_ranks_share_the_flops_of_a_layer() -> None:
    alone, shared = large(h100s(8)), large(h100s(8), parallel__tensor=2, parallel__context=4)
    assert alone.shape is not None
    whole = layer_work(alone.shape, share_of_rank(alone, alone.shape)).flops
    part = layer_work(alone.shape, share_of_rank(shared, alone.shape)).flops
    assert part * 8 == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize(
    ("engine", "stage", "own", "traffic"),
    [
        (EngineName.megatron, 0, {}, 2),
        (EngineName.deepspeed, 0, {}, 2),
        (EngineName.deepspeed, 1, {"use_multi_rank_bucket_allreduce": False}, 2),
        (EngineName.deepspeed, 2, {"use_multi_rank_bucket_allreduce": False}, 2),
        (EngineName.deepspeed, 2, {}, 3),  # buckets of several ranks are all-reduced
        (EngineName.deepspeed, 3, KEEPS_NOTHING, 3),
        (EngineName.deepspeed, 3, {}, 2),  # small enough to stay gathered until the backward pass
    ],
)
def test_traffic_of_parameters_and_gradients(
    engine: EngineName, stage: int, own: dict[str, object], traffic: int
) -> None:
    """In units of the parameters: Rajbhandari et al., 1910.02054, section 7."""
    changes: dict[str, object] = {
        "engine__name": engine,
        "zero__stage": stage,
        "precision__name": Precision.fp32,
        "train__global_batch": 16,
    }
    if own:
        changes["engine__deepspeed"] = {"zero_optimization": own}
    plan = make_plan(run_config(**changes), h100s(8))
    network = Network(plan, replace(H100, inside_factor=1.0))
    link = Link(bandwidth=1.0, latency=0.0)
    network.topology = Topology(domain=8, inside=link, between=link, host=link)
    found = state_exchanges(plan, network, 1000, 0, 4)
    total = found.gather_forward + found.gather_backward + found.reduce + found.gather_step
    assert total == pytest.approx(traffic * 4 * 1000 * 7 / 8)


@pytest.mark.parametrize("engine", [EngineName.deepspeed, EngineName.megatron])
@pytest.mark.parametrize("again", ["none", "selective", "full", "2"])
def test_parts_add_up_to_the_step(engine: EngineName, again: str) -> None:
    config = run_config(engine__name=engine, zero__stage=1, train__activation_checkpointing=again)
    plan = make_plan(config, CPU)
    estimate = predict(plan, shipped_profile("cpu"))
    assert sum(estimate.parts.values()) == pytest.approx(estimate.seconds)
    assert estimate.low < estimate.seconds < estimate.high


def test_a_step_takes_longer_with_recomputation_and_less_with_faster_memory() -> None:
    stored = predict(large(h100s(64), train__activation_checkpointing="none", parallel__tensor=8))
    again = predict(large(h100s(64), parallel__tensor=8))
    assert again.parts["backward"] > stored.parts["backward"] + 0.8 * stored.parts["forward"]
    assert again.parts["forward"] == pytest.approx(stored.parts["forward"])
    faster = predict(large(h100s(64), parallel__tensor=8), replace(H100, bandwidth=2 * H100.bandwidth))
    assert faster.seconds < again.seconds


def test_bubble_shrinks_with_micro_batches_and_virtual_stages() -> None:
    def bubble(**changes: object) -> float:
        estimate = predict(large(h100s(8), parallel__pipeline=8, **changes))
        return estimate.parts["bubble"] / estimate.seconds

    few, many = bubble(train__global_batch=8), bubble(train__global_batch=64)
    virtual = bubble(train__global_batch=8, engine__megatron={"virtual_pipeline_model_parallel_size": 4})
    assert few > many > 0
    assert virtual < few
    assert few == pytest.approx(7 / 15, rel=0.25)  # (p - 1) / (m + p - 1), but the stages are not equal


def test_zero_3_communicates_more_on_a_slower_network() -> None:
    changes = {"engine__name": EngineName.deepspeed, "zero__stage": 3, "train__micro_batch": 1}
    fast = predict(large(h100s(16), **changes))
    slow = predict(large(h100s(16), **changes), replace(H100, between_factor=0.05))
    assert slow.parts["communication/data"] > 5 * fast.parts["communication/data"]
    assert slow.parts["forward"] == fast.parts["forward"]
    assert slow.high / slow.low > fast.high / fast.low  # communication is less certain


def test_offload_moves_gradients_and_parameters_over_pcie() -> None:
    plan = large(
        h100s(8), engine__name=EngineName.deepspeed, zero__stage=3, offload__optimizer=OffloadDevice.cpu
    )
    offloaded = predict(plan)
    assert offloaded.parts["transfer"] > 0
    assert offloaded.parts["optimizer"] > 5 * predict(large(h100s(8))).parts["optimizer"]
    assert any("host" in assumption for assumption in offloaded.assumptions)


def test_matrix_products_of_odd_sizes_and_partial_waves_are_slower() -> None:
    def rate(rows: int, columns: int, inner: int) -> float:
        product = Matmul(rows, columns, inner)
        return product.flops / matmul_seconds(product, H100, 2)

    large_rate = rate(8192, 8192, 8192)
    assert 0.9 * H100.matmul_rate(2) < large_rate <= H100.matmul_rate(2)
    assert rate(8192, 8191, 8192) < 0.5 * large_rate
    assert rate(512, 512, 512) < 0.3 * large_rate
    assert rate(8192, 8192, 64) < 0.6 * large_rate  # limited by memory


def test_collectives_behind_computing_cost_what_computing_cannot_hide() -> None:
    assert hidden_behind(1.0, 3.0, 0.0) == 2.0
    assert hidden_behind(3.0, 1.0, 0.0) == 0.0
    assert hidden_behind(3.0, 1.0, 0.1) == pytest.approx(0.1)


@pytest.mark.parametrize("axes", [Axes(data=4), Axes(data=2, context=2), Axes(data=2, context=2, tensor=2)])
def test_group_names_are_those_of_the_ledger(axes: Axes) -> None:
    along = (Axis.CONTEXT, Axis.DATA)
    assert group_name(axes, along) == axis_name(axes.peers(0, along), axes)


def on_cpu(profile: HardwareProfile | None = None, **changes: object) -> StepEstimate:
    """The step of a small model on two CPU ranks."""
    world = replace(CPU, ranks=2, ranks_per_node=2)
    settings: dict[str, object] = {"train__global_batch": 8, "train__micro_batch": 2, **changes}
    return predict(make_plan(run_config(**settings), world), profile or shipped_profile("cpu"))


def test_a_cpu_rank_adds_the_hosts_time_and_a_gpu_hides_it() -> None:
    product = (Matmul(512, 512, 512),)
    for profile in (shipped_profile("cpu"), H100):
        short = replace(profile, host_seconds=1e-9)
        seconds = pass_seconds(product, replace(profile, host_seconds=2e-6), 4) - pass_seconds(
            product, short, 4
        )
        assert seconds == pytest.approx(2e-6 - 1e-9 if profile.name == "cpu" else 0.0, abs=1e-12)


def test_modules_under_zero_3_take_time_in_every_pass_of_every_micro_batch() -> None:
    """Two passes through each module, three with recomputation. Control: other stages have no such hooks."""
    slow = replace(shipped_profile("cpu"), module_seconds=1.0)
    fast = replace(slow, module_seconds=0.0)

    def visits(**changes: object) -> float:
        return on_cpu(slow, **changes).seconds - on_cpu(fast, **changes).seconds

    micro_batches, layers = 2, run_config().model.num_hidden_layers
    assert layers is not None
    twice = visits(zero__stage=3)
    assert twice % (2 * micro_batches) == pytest.approx(0, abs=1e-6)
    thrice = visits(zero__stage=3, train__activation_checkpointing="full")
    assert (thrice - twice) % (micro_batches * layers) == pytest.approx(0, abs=1e-6)
    assert thrice > twice > 0
    assert visits(zero__stage=2) == pytest.approx(0, abs=1e-9)


def test_every_collective_of_tensor_ranks_has_its_fixed_time() -> None:
    """Megatron-core's collectives of a micro-batch: four in a layer, one of the embedding, four of the output
    layer and the loss.
    """
    slow = replace(shipped_profile("cpu"), call_seconds=1.0)
    fast = replace(slow, call_seconds=0.0)
    own: dict[str, object] = {
        "engine__name": EngineName.megatron,
        "parallel__tensor": 2,
        "engine__megatron": {"sequence_parallel": False},
    }
    difference = on_cpu(slow, **own).seconds - on_cpu(fast, **own).seconds
    layers = run_config().model.num_hidden_layers
    assert layers is not None
    assert difference == pytest.approx(4 * (4 * layers + 1 + 4), rel=1e-3)


def test_recomputed_attention_costs_less_than_recomputed_layers() -> None:
    def backward(**changes: object) -> float:
        plan = large(h100s(64), parallel__tensor=8, **changes)
        return predict(plan).parts["backward"]

    nothing = {"train__activation_checkpointing": "none"}
    attention_only = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    stored = backward(**nothing)
    assert stored < backward(**nothing, engine__megatron=attention_only) < 0.9 * backward()


def test_model_without_a_family_is_predicted_from_its_trace() -> None:
    trace = ModuleTrace(
        micro_batch=2,
        parameters=(ParameterSpec("weight", (1000, 1000)),),
        saved_bytes=10**6,
        peak_bytes=10**6,
        forward_flops={"aten::mm": 1e15},
        backward_flops={"aten::mm": 2e15},
        forward_work={"aten::mm": OperatorWork(1e15, 0, 1), "aten::add": OperatorWork(0, 1e12, 1)},
        backward_work={"aten::mm": OperatorWork(2e15, 0, 2), "aten::add": OperatorWork(0, 2e12, 2)},
        recomputed_flops=0.0,
        operators=10,
    )
    own = replace(make_plan(run_config(model=ModelConfig(target="my.Model")), CPU), trace=trace)
    estimate = predict(own)
    micro_batches, rate = 2, H100.matmul_rate(4)
    forward = 1e15 / rate + 1e12 / H100.effective_bandwidth
    assert estimate.parts["forward"] == pytest.approx(micro_batches * forward, rel=1e-3)
    assert estimate.parts["backward"] == pytest.approx(2 * estimate.parts["forward"], rel=1e-3)


def test_reasons_without_an_estimate() -> None:
    own = make_plan(run_config(model=ModelConfig(target="my.Model")), CPU)
    assert estimate_step(own, H100) is None
    assert "model.target" in (why_no_estimate(own, H100) or "")
    assert "cluster.gpu" in (why_no_estimate(large(), None) or "")
    assert why_no_estimate(large(), H100) is None


@pytest.mark.full
def test_published_steps_are_predicted_within_ten_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with memory and matrix products twice as fast, the errors show it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import planner

    rows = planner.read_published()
    systems = planner._systems(rows, {})
    assert systems["all"]["step_mape"] < 10
    assert systems["all"]["inside_interval"] >= 80
    planted = {"a100/matmul_fraction": 1.56, "bandwidth_fraction": 1.7}
    assert planner._systems(rows, planted)["vtrain_multi"]["step_bias"] < -25
