"""Megatron-core's process groups, of the plan's axes."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from toolkit.plan.types import RunPlan


def make(plan: RunPlan) -> None:
    """Collective. Megatron-core keeps its groups in module globals: those of an earlier engine of this process are let go."""
    assert dist.is_initialized(), "the process group is made before the engine"
    assert plan.megatron is not None
    drop()
    axes = plan.axes
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=axes.tensor,
        pipeline_model_parallel_size=axes.pipeline,
        virtual_pipeline_model_parallel_size=plan.megatron["transformer"].get(
            "virtual_pipeline_model_parallel_size"
        ),
        context_parallel_size=axes.context,
        expert_model_parallel_size=axes.expert,
        expert_tensor_parallel_size=plan.megatron["transformer"].get("expert_tensor_parallel_size"),
        create_gloo_process_groups=False,
        order="tp-cp-ep-dp-pp",
    )
    assert parallel_state.get_data_parallel_rank() == axes.coordinates(dist.get_rank()).data, (
        "both count ranks in the same order"
    )
    model_parallel_cuda_manual_seed(plan.config.train.seed)


def drop() -> None:
    """End the groups, not only the names for them: under gloo each is a handful of threads, which wait for ever else."""
    if not parallel_state.model_parallel_is_initialized():
        return
    made = parallel_state._global_process_group_list or ()
    parallel_state.destroy_model_parallel()
    for group in made:
        if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
