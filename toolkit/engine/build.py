"""Build the engine of a plan, and read the weights that a new run starts from."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from toolkit.checkpoint.shard import StateReader
from toolkit.config.schema import EngineName
from toolkit.engine.protocol import Engine, Objective
from toolkit.plan.types import RunPlan
from toolkit.step_parts import NULL_RECORDER, Recorder


def build_engine(
    plan: RunPlan, objective: Objective, *, rank: int, local_rank: int, recorder: Recorder = NULL_RECORDER
) -> Engine:
    """Build the engine with uninitialized weights. Collective.

    Call ``engine.load(reader)`` next, with :func:`open_initial_weights` or a checkpoint.

    Args:
        recorder: receives the time that each part of a step takes.
    """
    # torch 2.13 renames these collectives; DeepSpeed and Megatron-core still call them by their old names.
    warnings.filterwarnings(
        "ignore",
        r".*torch\.distributed\.\w+` is deprecated\. Please use `torch\.distributed\.\w+_single`",
        category=FutureWarning,
    )
    return ENGINES[plan.config.engine.name](plan, objective, rank, local_rank, recorder)


def open_initial_weights(plan: RunPlan) -> StateReader:
    """Open the weights that a new run starts from: ``model.pretrained``, or random ones.

    Raises:
        InputError: the pretrained weights cannot be downloaded.
        CheckpointError: they are damaged, or belong to another family.
    """
    if plan.config.model.pretrained is None:
        from toolkit.models.initial_weights import InitialWeights

        return InitialWeights(plan)
    from toolkit.models.pretrained import open_pretrained

    return open_pretrained(plan)


# Engines are imported lazily: DeepSpeed alone takes two seconds.
def _local(plan: RunPlan, objective: Objective, rank: int, local_rank: int, recorder: Recorder) -> Engine:
    from toolkit.engine.local import LocalEngine

    return LocalEngine(plan, objective, rank=rank, local_rank=local_rank, recorder=recorder)


def _deepspeed(plan: RunPlan, objective: Objective, rank: int, local_rank: int, recorder: Recorder) -> Engine:
    if plan.axes.pipeline > 1:
        from toolkit.engine.deepspeed.pipeline import DeepSpeedPipelineEngine

        return DeepSpeedPipelineEngine(plan, objective, rank=rank, local_rank=local_rank, recorder=recorder)
    from toolkit.engine.deepspeed.engine import DeepSpeedEngine

    return DeepSpeedEngine(plan, objective, rank=rank, local_rank=local_rank, recorder=recorder)


def _megatron(plan: RunPlan, objective: Objective, rank: int, local_rank: int, recorder: Recorder) -> Engine:
    from toolkit.engine.megatron.engine import MegatronEngine

    return MegatronEngine(plan, objective, rank=rank, local_rank=local_rank, recorder=recorder)


ENGINES: dict[EngineName, Callable[[RunPlan, Objective, int, int, Recorder], Engine]] = {
    EngineName.local: _local,
    EngineName.deepspeed: _deepspeed,
    EngineName.megatron: _megatron,
}
