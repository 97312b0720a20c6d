"""Published measurements of training steps, as overrides of a run.

A row names model, layout and GPU. What its source leaves out has the value that the system had when it was
measured; ``SYSTEMS`` states it.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.cluster.jobs.job import resolve_world
from toolkit.config.compose import compose
from toolkit.errors import PlanError
from toolkit.plan import make_plan
from toolkit.plan.flops import model_flops
from toolkit.plan.types import RunPlan

ROWS = Path(__file__).parent / "data" / "published_steps.csv"

# Sizes of models that a row gives by name only: layers, hidden size, heads, key-value heads, feed-forward,
# vocabulary.
# MPT: mosaicml/llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml. GPT-3: Brown et al., 2005.14165, with
# Megatron's padded vocabulary. Llama 3.1: 2407.21783. Nemotron-4 15B: 2402.16819; its feed-forward has two
# matrices of 24,576, which llama's three of 16,384 equal in parameters and FLOPs.
MODELS = {
    "mpt-125m": ("gpt2", 12, 768, 12, 12, 3072, 50368),
    "mpt-350m": ("gpt2", 24, 1024, 16, 16, 4096, 50368),
    "mpt-760m": ("gpt2", 24, 1536, 12, 12, 6144, 50368),
    "mpt-1b": ("gpt2", 24, 2048, 16, 16, 8192, 50368),
    "mpt-3b": ("gpt2", 32, 2560, 20, 20, 10240, 50368),
    "mpt-7b": ("gpt2", 32, 4096, 32, 32, 16384, 50368),
    "mpt-13b": ("gpt2", 40, 5120, 40, 40, 20480, 50368),
    "mpt-30b": ("gpt2", 48, 7168, 56, 56, 28672, 50368),
    "mpt-70b": ("gpt2", 80, 8192, 64, 64, 32768, 50368),
    "gpt3-175b": ("gpt2", 96, 12288, 96, 96, 49152, 51200),
    "llama3.1-8b": ("llama", 32, 4096, 32, 8, 14336, 128256),
    "llama3.1-70b": ("llama", 80, 8192, 64, 8, 28672, 128256),
    "llama3.1-405b": ("llama", 126, 16384, 128, 8, 53248, 128256),
    "nemotron4-15b": ("llama", 32, 6144, 48, 8, 16384, 256000),
    "nemotron4-340b": ("llama", 96, 18432, 96, 8, 49152, 256000),
}
MEGATRON, FSDP = "megatron", "deepspeed"
# Engine, ZeRO stage if the row has none, and whether the system has Transformer Engine.
SYSTEMS = {
    "vtrain_single": (MEGATRON, 0, False),
    "vtrain_multi": (MEGATRON, 0, False),
    "bloom": (MEGATRON, 1, False),
    "megascale": (MEGATRON, 1, True),
    "mcore": (MEGATRON, 1, True),
    "dgxc": (MEGATRON, 1, True),
    "llm_foundry": (FSDP, 3, False),
}
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Published:
    """One measurement.

    Attributes:
        system: whose measurement it is.
        overrides: of the run.
        plan: of the run.
        seconds: of a step, measured.
        memory: bytes, if measured.
    """

    system: str
    overrides: tuple[str, ...]
    plan: RunPlan
    seconds: float
    memory: float | None


def read_published(path: Path = ROWS) -> list[Published]:
    """Return the rows of a CSV file with the columns of ``data/published_steps.csv``.

    Raises:
        PlanError: a row cannot be planned, for reasons other than memory.
    """
    with path.open(newline="") as stream:
        return [_published(row) for row in csv.DictReader(stream)]


def overrides_of(row: dict[str, str]) -> list[str]:
    """Return the overrides of ``launch/plan.py`` for a row."""
    engine, stage, has_engine_kernels = SYSTEMS[row["system"]]
    name = _model_name(row)
    if row["layers"]:
        hidden, heads = int(row["hidden"]), int(row["heads"])
        family, layers, keys = "gpt2", int(row["layers"]), int(row["kv_heads"] or heads)
        inner, vocabulary = int(row["intermediate"] or 4 * hidden), int(row["vocab"])
        if keys != heads:
            family = "llama"
    else:
        family, layers, hidden, heads, keys, inner, vocabulary = MODELS[name]
    gpus = int(row["gpus"])
    stage = int(row["zero"]) if row["zero"] else stage
    pipeline, virtual = int(row["pp"] or 1), int(row["vp"] or 1)
    length = row["seq"]
    overrides = [
        f"model={family}",
        f"engine={engine}",
        f"zero=stage{stage}",
        f"precision={row['precision'].removeprefix('amp_') or 'bf16'}",
        f"cluster.nodes={max(1, gpus // GPUS_PER_NODE)}",
        f"cluster.gpus_per_node={min(gpus, GPUS_PER_NODE)}",
        f"cluster.gpu={row['gpu'].replace('_', '-')}",
        f"model.hidden_size={hidden}",
        f"model.intermediate_size={inner}",
        f"model.num_hidden_layers={layers}",
        f"model.num_attention_heads={heads}",
        f"model.num_key_value_heads={keys}",
        f"model.vocab_size={vocabulary}",
        f"model.max_position_embeddings={length}",
        f"train.sequence_length={length}",
        f"train.micro_batch={row['mbs'] or 1}",
        f"train.global_batch={row['gbs']}",
        f"train.activation_checkpointing={row['recompute'] or 'none'}",
        f"parallel.tensor={row['tp'] or 1}",
        f"parallel.pipeline={pipeline}",
        f"parallel.context={row['cp'] or 1}",
    ]
    if virtual > 1:
        overrides.append(f"+engine.megatron.virtual_pipeline_model_parallel_size={virtual}")
    if layers % pipeline:  # the embedding and the output layer count as a layer each
        end = (layers + 2) // pipeline - 1
        overrides += [
            f"+engine.megatron.num_layers_in_first_pipeline_stage={end}",
            f"+engine.megatron.num_layers_in_last_pipeline_stage={end}",
        ]
    if has_engine_kernels:
        overrides.append("cluster.transformer_engine=2.11.0")
    return overrides


def _model_name(row: dict[str, str]) -> str:
    if row["system"] == "llm_foundry":
        return "mpt-" + row["source"].partition("(")[2].partition(",")[0]
    return row["source"].rpartition(", ")[2]


def _published(row: dict[str, str]) -> Published:
    overrides = overrides_of(row)
    config = compose(overrides)
    world = resolve_world(config.cluster)
    try:
        plan = make_plan(config, world)
    except PlanError:  # the run that was measured did fit: memory is compared, not enforced
        plan = make_plan(config, replace(world, device_memory_bytes=10**15))
    memory = float(row["mem_gb"]) * 1e9 if row["mem_gb"] else None
    return Published(row["system"], tuple(overrides), plan, _seconds(row, plan), memory)


def _seconds(row: dict[str, str], plan: RunPlan) -> float:
    """Measured seconds, or those that follow from the measured FLOP/s in the row's convention."""
    if row["step_s"]:
        return float(row["step_s"])
    per_second = float(row["tflops_per_gpu"]) * 1e12 * plan.world.ranks
    if "8 x parameters" in row["flop_convention"]:
        return 8.0 * sum(spec.numel for spec in plan.parameters) * plan.units_per_step / per_second
    flops = model_flops(plan)
    assert flops is not None
    return flops * plan.units_per_step / per_second
