"""Rules of the axes beside data under ``local`` and DeepSpeed: one at a time with data, and each with the ZeRO stages it goes with."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.schema import EngineName
from toolkit.errors import Problem
from toolkit.plan.case import Case, Rule, refuse

AXES = ("tensor", "pipeline", "context", "expert")


def local_has_no_axes(case: Case) -> Iterator[Problem]:
    if case.config.engine.name is EngineName.local:
        for axis in _used(case):
            yield refuse(case.config, f"parallel.{axis} engine.name", "the local engine is one process",
                         f"write parallel.{axis}=1, or engine=megatron")


def one_axis_beside_data(case: Case) -> Iterator[Problem]:
    """Each of DeepSpeed's is another engine inside: AutoTP, PipelineModule, Ulysses and its MoE layers do not know each other."""
    used = _used(case)
    if case.deepspeed and len(used) > 1:
        yield refuse(case.config, " ".join(f"parallel.{axis}" for axis in used) + " engine.name",
                     "DeepSpeed has one axis beside data at a time: its tensor, pipeline, context and expert parallelism do not combine",
                     "write engine=megatron, which combines them all")


def axes_need_a_family(case: Case) -> Iterator[Problem]:
    if case.deepspeed and case.config.model.target is not None:
        for axis in _used(case):
            yield refuse(case.config, f"parallel.{axis} model.target", "how to cut a model is known for the families' models only",
                         f"write parallel.{axis}=1 with zero=stage3, which shards any module")


def stages_against_pipeline(case: Case) -> Iterator[Problem]:
    config = case.config
    if not case.deepspeed or config.parallel.pipeline == 1:
        return
    if config.zero.stage > 1:
        yield refuse(config, "zero.stage parallel.pipeline", "under DeepSpeed a pipeline goes with ZeRO stages 0 and 1",
                     "write zero=stage1, or parallel.pipeline=1")
    if config.zero.stage == 0 and config.optim.clip > 0:
        yield refuse(config, "zero.stage parallel.pipeline optim.clip",
                     "DeepSpeed's pipeline with stage 0 clips by a wrong norm (measured: 3e-3 in the loss)", "write zero=stage1")


def stages_against_experts(case: Case) -> Iterator[Problem]:
    if case.deepspeed and case.config.parallel.expert > 1 and case.config.zero.stage not in (1, 2):
        yield refuse(case.config, "zero.stage parallel.expert", "under DeepSpeed an expert axis goes with ZeRO stages 1 and 2",
                     "write zero=stage1, or engine=megatron")


def heads_are_spread_over_context(case: Case) -> Iterator[Problem]:
    """Ulysses (Jacobs et al., 2309.14509): for attention a rank has whole sequences of some heads."""
    context, shape, length = case.config.parallel.context, case.shape, case.config.train.sequence_length
    if not case.deepspeed or context == 1:
        return
    if length % context:
        yield refuse(case.config, "train.sequence_length parallel.context", "each context rank has an equal part of a sequence",
                     f"write train.sequence_length={-(-length // context) * context}")
    for name in ("num_attention_heads", "num_key_value_heads") if shape is not None else ():
        if getattr(shape, name) % context:
            yield Problem("parallel.context", f"parallel.context={context}, model.{name}={getattr(shape, name)}",
                          f"DeepSpeed's context axis spreads heads over its ranks, so it divides model.{name}",
                          "write a divisor of both numbers of heads, or engine=megatron, which divides sequences alone")


def _used(case: Case) -> list[str]:
    return [axis for axis in AXES if getattr(case.config.parallel, axis) > 1]


RULES: tuple[Rule, ...] = (
    local_has_no_axes, one_axis_beside_data, axes_need_a_family, stages_against_pipeline, stages_against_experts,
    heads_are_spread_over_context,
)
