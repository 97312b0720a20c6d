"""Rules of the axes: what divides what, and which ranks may share it."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.schema import EngineName
from toolkit.errors import Problem
from toolkit.plan.case import Case, Rule, refuse, warn
from toolkit.plan.devices import memory_bytes
from toolkit.plan.types import Device

AXES = ("tensor", "pipeline", "context", "expert")


def axes_are_for_later(case: Case) -> Iterator[Problem]:
    if case.config.engine.name is EngineName.megatron:
        return
    for axis in AXES:
        size = getattr(case.config.parallel, axis)
        if size > 1:
            yield refuse(case.config, f"parallel.{axis} engine.name", f"in this release every engine has parallel.{axis}=1",
                         f"write parallel.{axis}=1 and shard with zero=stage3; the {axis} axis arrives in a later release")


def heads_divide(case: Case) -> Iterator[Problem]:
    tensor, shape = case.config.parallel.tensor, case.shape
    if shape is None or tensor == 1:
        return
    for name in ("num_attention_heads", "intermediate_size", "vocab_size"):
        if getattr(shape, name) % tensor:
            yield _divides(case, f"model.{name}", "parallel.tensor", getattr(shape, name), tensor)
    keys = shape.num_key_value_heads
    if keys % tensor and tensor % keys:
        yield Problem("model.num_key_value_heads", f"model.num_key_value_heads={keys}, parallel.tensor={tensor}",
                      "one of the two divides the other: a rank has whole key-value heads, or shares one with its neighbours",
                      f"write parallel.tensor={_divisor_near(keys, tensor)}")


def layers_divide(case: Case) -> Iterator[Problem]:
    stages, shape = case.config.parallel.pipeline, case.shape
    if shape is not None and stages > 1 and shape.num_hidden_layers % stages:
        yield _divides(case, "model.num_hidden_layers", "parallel.pipeline", shape.num_hidden_layers, stages)


def sequence_divides(case: Case) -> Iterator[Problem]:
    context, length = case.config.parallel.context, case.config.train.sequence_length
    if context > 1 and length % (2 * context):
        yield refuse(case.config, "train.sequence_length parallel.context",
                     "train.sequence_length is divisible by 2 x parallel.context: a rank has one piece of each half of a causal sequence",
                     f"write train.sequence_length={-(-length // (2 * context)) * 2 * context}")


def experts_divide(case: Case) -> Iterator[Problem]:
    expert, shape = case.config.parallel.expert, case.shape
    if expert == 1 or shape is None:
        return
    if not shape.num_local_experts:
        yield refuse(case.config, "parallel.expert model.family", "an expert axis needs a model with experts",
                     "write parallel.expert=1, or model.family=mixtral")
    elif shape.num_local_experts % expert:
        yield _divides(case, "model.num_local_experts", "parallel.expert", shape.num_local_experts, expert)
    if case.axes is not None and (case.axes.data * case.axes.context) % expert:
        yield Problem("parallel.expert", f"parallel.expert={expert} over {case.axes.data * case.axes.context} data and context ranks",
                      "the expert axis regroups data and context ranks, so it divides their number",
                      f"write parallel.expert={_divisor_near(case.axes.data * case.axes.context, expert)}")


def stages_against_pipeline(case: Case) -> Iterator[Problem]:
    if case.deepspeed and case.config.parallel.pipeline > 1 and case.config.zero.stage > 1:
        yield refuse(case.config, "zero.stage parallel.pipeline", "under DeepSpeed a pipeline goes with ZeRO stages 0 and 1",
                     "write zero=stage1, or parallel.pipeline=1")
    if case.deepspeed and case.config.parallel.pipeline > 1 and case.config.zero.stage == 0 and case.config.optim.clip > 0:
        yield refuse(case.config, "zero.stage parallel.pipeline optim.clip",
                     "DeepSpeed's pipeline with stage 0 clips by a wrong norm (measured: 3e-3 in the loss)", "write zero=stage1")


def tensor_axis_stays_in_a_node(case: Case) -> Iterator[Problem]:
    tensor, per_node = case.config.parallel.tensor, case.world.ranks_per_node
    if tensor > 1 and per_node % tensor:
        yield Problem("parallel.tensor", f"parallel.tensor={tensor}, {per_node} ranks a node",
                      "the ranks that share a matrix are on one node: they talk several times a layer",
                      f"write parallel.tensor={_divisor_near(per_node, tensor)} and raise parallel.pipeline or zero.stage instead")


def model_parallelism_without_need(case: Case) -> Iterator[Problem]:
    """States in 16 bits sharded over all ranks (18 bytes a parameter with fp32 gradients) would leave half the device free."""
    parallel, memory = case.config.parallel, memory_bytes(case.world)
    if parallel.tensor * parallel.pipeline == 1 or memory is None or case.world.device is not Device.CUDA or not case.numel:
        return
    if 18 * case.numel / case.world.ranks < memory / 2:
        yield warn(case.config, "parallel.tensor parallel.pipeline",
                   "the model's states fit without model parallelism, which costs communication in every layer",
                   "write parallel.tensor=1 parallel.pipeline=1 with zero=stage3, and compare tokens/s")


def _divides(case: Case, whole: str, part: str, size: int, by: int) -> Problem:
    return Problem(part, f"{part}={by}, {whole}={size}", f"{whole} is divisible by {part}",
                   f"write {part}={_divisor_near(size, by)}, or {whole}={-(-size // by) * by}")


def _divisor_near(size: int, wanted: int) -> int:
    return max(divisor for divisor in range(1, wanted + 1) if size % divisor == 0)


RULES: tuple[Rule, ...] = (
    axes_are_for_later, heads_divide, layers_divide, sequence_divides, experts_divide, stages_against_pipeline,
    tensor_axis_stays_in_a_node, model_parallelism_without_need,
)
