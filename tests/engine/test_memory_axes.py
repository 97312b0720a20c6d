"""The plan's memory of every pipeline stage compared with Megatron-core and DeepSpeed's axes, and saved
activations.

    pytest tests/engine/test_memory_axes.py
    pytest tests/engine/test_memory_axes.py -m full

toolkit/plan/memory_megatron.py defines what each figure counts. Storages are counted once, regardless of the
number of views.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.cases import quick
from tests.engine.memory_measures import SIZES, Bytes, storages
from toolkit.config.data import DocumentMasking
from toolkit.config.kernels import AttentionKernel
from toolkit.config.schema import EngineName, Precision
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.families import get_family
from toolkit.families.base import ModelShape
from toolkit.plan.activations_megatron import ActivationLayout, block_bytes
from toolkit.plan.attention import has_dense_mask, repeats_keys
from toolkit.plan.memory import stage_memory
from toolkit.plan.types import Device, MemoryPlan, RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import train_steps
from toolkit.testing.tiny import LENGTH, MICRO_BATCH, micro_batches, tiny_plan
from toolkit.train.task import text_task

BF16 = {"precision__name": Precision.bf16}
EAGER = {"model__attention": AttentionKernel.eager}
APART = {"data__documents": DocumentMasking.separate}
LAYERS = {"num_layers_in_first_pipeline_stage": 2}
EXPERTS = {
    "model__hidden_size": 64,
    "model__intermediate_size": 96,
    "model__num_hidden_layers": 4,
    "model__vocab_size": 1501,
}


def megatron(
    family: str = "llama", ranks: int = 2, own: dict[str, Any] | None = None, **changes: Any
) -> RunPlan:
    sizes = EXPERTS if family == "mixtral" else SIZES
    changes = {**sizes, "train__global_batch": 8, "engine__name": EngineName.megatron, **changes}
    return tiny_plan(family, ranks=ranks, engine__megatron=own or {}, **changes)


CASES: dict[str, RunPlan] = {
    "tp2": megatron(parallel__tensor=2),
    "tp2-tied-bf16": megatron("qwen2", parallel__tensor=2, **BF16),
    "pp2": megatron(parallel__pipeline=2),
    "pp2-tied": megatron("gpt2", parallel__pipeline=2),
    "ep2": megatron("mixtral", parallel__expert=2),
    "distopt": megatron(zero__stage=1),
    "distopt-bf16": megatron(zero__stage=2, **BF16),
}
FULL: dict[str, RunPlan] = {
    "one-rank": megatron(ranks=1),
    "one-rank-bf16": megatron(ranks=1, **BF16),
    "pp2-uneven-distopt": megatron(ranks=4, parallel__pipeline=2, zero__stage=1, own=LAYERS),
    "pp2-tied-distopt-bf16": megatron("gpt2", ranks=4, parallel__pipeline=2, zero__stage=1, **BF16),
    "pp2-vpp3": megatron(parallel__pipeline=2, own={"virtual_pipeline_model_parallel_size": 3}),
    "tp2-pp2": megatron(ranks=4, parallel__tensor=2, parallel__pipeline=2),
    "tp4-two-kv-heads": megatron(ranks=4, parallel__tensor=4),
    "cp2-distopt": megatron(ranks=4, parallel__context=2, zero__stage=1),
    "ep2-distopt": megatron("mixtral", ranks=4, parallel__expert=2, zero__stage=1),
    "ep2-tp2-bf16": megatron(
        "mixtral", ranks=4, parallel__expert=2, parallel__tensor=2, zero__stage=1, **BF16
    ),
}


def planned(plan: RunPlan) -> list[MemoryPlan]:
    shape = plan.shape
    assert isinstance(shape, ModelShape)
    return stage_memory(
        plan.config,
        shape,
        plan.parameters,
        plan.axes,
        plan.batch,
        plan.world.device,
        plan.deepspeed,
        kernels=plan.kernels,
    )


def measure(rank: int, ranks: int, plan: RunPlan) -> Bytes:
    engine: Any = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    train_steps(engine, plan, range(2), rank=rank)
    built = engine._model
    parameters = [parameter for chunk in built.chunks for parameter in chunk.parameters()]
    buffers = [
        buffer for chunk in built.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    weights = storages(parameters)
    gradients = storages(
        [*(buffer.grad_data for buffer in buffers), *(parameter.grad for parameter in parameters)]
    )
    kept = [
        tensor
        for master in built.state.masters
        for tensor in (master.tensor, *master.inner.state[master.tensor].values())
        if torch.is_tensor(tensor) and tensor.dim()
    ]  # not the step count
    states = {address: size for address, size in storages(kept).items() if address not in weights}
    engine.close()
    return Bytes(sum(weights.values()), sum(gradients.values()), sum(states.values()))


@pytest.mark.parametrize("name", quick(CASES, 0, 3, 4))
def test_memory_on_two_ranks_matches_the_plan(name: str, pool: RankPool) -> None:
    check(CASES[name], pool)


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_memory_of_more_layouts_matches_the_plan(name: str, pool: RankPool) -> None:
    check(FULL[name], pool)


def check(plan: RunPlan, pool: RankPool) -> None:
    """Compare the fullest rank of each stage."""
    found = pool.run(measure, plan, ranks=plan.world.ranks)
    stages = planned(plan)
    assert len(stages) == plan.axes.pipeline
    assert plan.memory in stages
    for stage, memory in enumerate(stages):
        here = [stored for rank, stored in enumerate(found) if plan.axes.coordinates(rank).pipeline == stage]
        for name in ("parameters", "gradients", "optimizer"):
            most = max(getattr(stored, name) for stored in here)
            assert most == pytest.approx(getattr(memory, name), rel=0.01), (
                f"stage {stage}, {name}: {most}, planned {getattr(memory, name)}"
            )


# -- activations


def saved_bytes(rank: int, ranks: int, plans: tuple[RunPlan, ...]) -> list[int]:
    """For each plan, the bytes of storages that autograd saves in a forward pass, without weights."""
    return [_saved(plan, rank) for plan in plans]


def _saved(plan: RunPlan, rank: int) -> int:
    engine: Any = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    found = _kept_bytes(engine, plan)
    engine.close()  # nothing references the model or its graph here, so its groups are freed
    return found


def _kept_bytes(engine: Any, plan: RunPlan) -> int:
    (chunk,) = engine._model.chunks
    weights = storages(chunk.parameters())
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(
            tensor.untyped_storage().data_ptr(), tensor.untyped_storage()
        )  # stored, so that no address comes again
        return tensor.detach()  # the tensor itself would keep the graph alive

    batch = engine._model.slice_for_context_rank(micro_batches(plan, 0)[0])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = chunk(
            batch["input_ids"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"]
        )
    assert losses.requires_grad
    return sum(storage.nbytes() for address, storage in kept.items() if address not in weights)


BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bf16": ("llama", BF16),
    "gpt2": ("gpt2", {}),
    "qwen3-bf16": ("qwen3", BF16),
    "mixtral": ("mixtral", {}),
    "tp2-sp": ("llama", {"parallel__tensor": 2}),
    "llama-fused": ("llama", {"engine__megatron": {"bias_activation_fusion": True}}),
    "mixtral-fused": ("mixtral", {"engine__megatron": {"bias_activation_fusion": True}}),
    "mixtral-tp2": ("mixtral", {"parallel__tensor": 2}),
    "tp2": ("llama", {"parallel__tensor": 2, "engine__megatron": {"sequence_parallel": False}}),
    "cp2": ("llama", {"parallel__context": 2}),
    "documents": ("llama", APART),
    "documents-bf16": ("llama", BF16 | APART),
    "documents-gpt2": ("gpt2", APART),
    "documents-qwen3": ("qwen3", APART),
    "documents-qwen3-bf16": ("qwen3", BF16 | APART),
    "documents-tp2-sp": ("llama", {"parallel__tensor": 2, **APART}),
    "documents-cp2": ("llama", {"parallel__context": 2, **APART}),
    "eager-bf16": ("llama", BF16 | EAGER),
    "documents-eager": ("llama", APART | EAGER),
    "cp2-flash": ("llama", {"parallel__context": 2, "model__attention": AttentionKernel.flash}),
}


QUICK = ("llama-bf16", "mixtral-fused", "tp2-sp", "documents-bf16")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in BLOCKS]
)
def test_saved_activations_of_a_block_match_the_formula(name: str, pool: RankPool) -> None:
    """The difference of two depths is one block, independent of the ends of the model."""
    family, changes = BLOCKS[name]
    ranks = 2 if any(key.startswith("parallel") for key in changes) else 1
    plans = tuple(
        tiny_plan(
            family,
            ranks=ranks,
            engine__name=EngineName.megatron,
            model__num_hidden_layers=layers,
            train__global_batch=2,
            **changes,
        )
        for layers in (1, 3)
    )
    shallow, deep = pool.run(saved_bytes, plans, ranks=ranks)[0]
    axes, shape = plans[0].axes, plans[0].shape
    assert shape is not None
    layout = ActivationLayout(
        traits=get_family(shape.family).traits,
        tokens=MICRO_BATCH * LENGTH // axes.context,
        sequences=MICRO_BATCH,
        context=axes.context,
        tensor=axes.tensor,
        sequence_ranks=axes.tensor if name != "tp2" else 1,
        element=2 if "bf16" in name else 4,
        fused_norms=False,
        attention=plans[0].kernels.attention.name,
        has_mask=has_dense_mask(plans[0].config, plans[0].kernels.attention.name),
        repeats_keys=repeats_keys(plans[0].config, plans[0].kernels.attention.name, Device.CPU),
        fused_activation="fused" in name,
        documents="documents" in name,
    )
    measured = (deep - shallow) / 2
    if name == "cp2-flash":  # on CPUs attention of the second chunk on its prefix stores a mask
        measured -= 4 * layout.positions // 2 * LENGTH
    assert block_bytes(shape, layout) == pytest.approx(measured, rel=0.01)
