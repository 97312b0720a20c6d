"""Model, gradient buffers and optimizer of one rank, put together, and what the engine asks of them as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from toolkit.config.schema import Precision
from toolkit.engine.megatron.attention import document_mask
from toolkit.engine.megatron.model import build_chunks, transformer_config
from toolkit.engine.megatron.state import MegatronState, inner_optimizers, state_names
from toolkit.engine.precision import LossScaler
from toolkit.engine.protocol import MicroBatch
from toolkit.plan.types import RunPlan


class MegatronModel:
    """``chunks`` are this rank's stages of the model in Megatron-core's data parallelism."""

    def __init__(self, plan: RunPlan) -> None:
        assert plan.megatron is not None
        assert plan.shape is not None
        config = transformer_config(plan)
        models = build_chunks(plan, config)
        wrapped = (
            models
            if plan.config.precision.name is Precision.fp32
            else [Float16Module(config, model) for model in models]
        )
        ddp = DistributedDataParallelConfig(**plan.megatron["ddp"])
        self.chunks = [
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(wrapped)
        ]
        settings = dict(plan.megatron["optimizer"])
        settings["params_dtype"] = getattr(torch, settings["params_dtype"])
        self.optimizer: Any = get_megatron_optimizer(
            OptimizerConfig(**settings), self.chunks, use_gloo_process_groups=False
        )
        _skip_nonfinite_steps(self.optimizer)
        self.state = MegatronState(plan, models, self.optimizer)
        self.draws = plan.shape.dropout > 0  # whether training draws random numbers
        self._parallel_context = plan.axes.context > 1
        self._data_ranks = plan.axes.data
        self._weight_decay = plan.config.optim.weight_decay
        self._config = config
        _set_schedule_functions(config, ddp, self.chunks)

    @property
    def kept(self) -> set[str]:
        """States that the optimizer keeps; of this rank's parameters, which are never none."""
        return {name for master in self.state.masters for name in state_names(master.inner)}

    def set_rates(self, lr: float) -> None:
        """Megatron-core marks the groups that do not decay; elsewhere its scheduler multiplies."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self._weight_decay * group["wd_mult"]

    def scale_by(self, scaler: LossScaler) -> None:
        """The run's own loss scale, whose rules are the same in every engine, in place of Megatron-core's."""
        for part in inner_optimizers(self.optimizer):
            part.grad_scaler = _DividedLossScale(scaler, self._data_ranks)
        self._config.grad_scale_func = self.optimizer.scale_loss

    def cut(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """This context rank's part of a micro-batch: with the places of its tokens in the sequence, or where documents are kept apart
        in those, and the mask of its attention. Rotary positions run on in any case: only their differences count."""
        tokens = batch["input_ids"]
        group = parallel_state.get_context_parallel_group() if self._parallel_context else None
        mask = (
            {"attention_mask": document_mask(batch["position_ids"], group)} if "position_ids" in batch else {}
        )
        found = {
            "position_ids": torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens),
            **batch,
        }
        return {**(get_batch_on_this_cp_rank(found) if self._parallel_context else found), **mask}

    def settle_weights(self) -> None:
        """Wait for weights that are still on their way from the ranks that stepped them. Collective where the gather overlaps."""
        for chunk in self.chunks:
            if chunk.use_forward_hook:
                chunk.start_param_sync(force_sync=True)

    def optimizer_step(self) -> int | None:
        """Steps that Adam has taken; None before the first, and for optimizers that do not count."""
        for master in self.state.masters:
            step = master.inner.state.get(master.tensor, {}).get("step", master.group.get("step"))
            if step is not None:
                return int(step)
        return None

    def reset_state(self, step: int | None) -> None:
        """No optimizer state; with ``step``, zeroed state as after that many steps, to be filled."""
        for master in self.state.masters:
            master.inner.state.pop(master.tensor, None)
            counts_in_group = (
                not type(master.inner).__module__.startswith("torch.") and "betas" in master.inner.defaults
            )
            if counts_in_group:  # Transformer Engine's and Apex's
                master.group["step"] = step or 0
            if step is None:
                continue
            found: dict[str, torch.Tensor] = {
                name: torch.zeros_like(master.tensor, requires_grad=False)
                for name in state_names(master.inner)
            }
            if "betas" in master.inner.defaults and not counts_in_group:
                found["step"] = torch.tensor(float(step))  # each its own: torch advances it once a parameter
            master.inner.state[master.tensor] = found

    def forget(self) -> None:
        """Let go of memory: hooks and configuration refer to each other."""
        for name in (
            "finalize_model_grads_func",
            "no_sync_func",
            "grad_sync_func",
            "param_sync_func",
            "grad_scale_func",
        ):
            setattr(self._config, name, None)
        RotaryEmbedding.forward.cache_clear()  # a cache of the class, which keeps every module that ever asked, and its groups
        for module in (module for chunk in self.chunks for module in chunk.modules()):
            # It keeps the last batch's probabilities; with them the autograd graph, which holds hooks where no collector looks.
            vars(module).pop("token_dispatcher", None)
        self.chunks.clear()
        del self.optimizer, self.state


def _set_schedule_functions(
    config: TransformerConfig, ddp: DistributedDataParallelConfig, chunks: list[DistributedDataParallel]
) -> None:
    """The schedules find what they call in the configuration: one function, or with virtual stages one a chunk."""
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
    if ddp.overlap_grad_reduce and len(chunks) > 1:
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if ddp.overlap_param_gather and ddp.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])


def _one_or_all(functions: list[Callable[..., Any]]) -> Any:
    return functions if len(functions) > 1 else functions[0]


def _skip_nonfinite_steps(optimizer: Any) -> None:
    """Skip a step whose gradient norm is not finite; ``optimizer.step()`` then returns False as its first value.

    Megatron-core checks gradients in fp16 only, and applies those that are not finite in fp32 and bf16. The norm is
    global, and on the host already, when the update is due.
    """
    norm_of, update = optimizer.get_grad_norm, optimizer.step_with_ready_grads
    norm = 0.0

    def get_grad_norm() -> float:
        nonlocal norm
        norm = norm_of()
        return norm

    optimizer.get_grad_norm = get_grad_norm
    optimizer.step_with_ready_grads = lambda: math.isfinite(norm) and update()


class _DividedLossScale:
    """The run's loss scale as Megatron-core reads it: divided by the data ranks.

    The engine multiplies the loss by their number, because Megatron-core averages over them; with the run's whole scale
    on top of it, gradients would overflow that much earlier than those of the local engine. The engine updates the
    scale, once a step; Megatron-core would update it once for each of its optimizers, those of the experts and of the rest.
    """

    def __init__(self, scaler: LossScaler, data_ranks: int) -> None:
        self._scaler, self._data_ranks = scaler, data_ranks

    def update(self, found_inf: bool) -> None:
        pass

    @property
    def scale(self) -> torch.Tensor:
        return torch.tensor(
            [self._scaler.cur_scale / self._data_ranks], device="cuda" if torch.cuda.is_available() else "cpu"
        )

    @property
    def inv_scale(self) -> torch.Tensor:
        return self.scale.double().reciprocal().float()


def initialize_process_groups(plan: RunPlan) -> None:
    """Collective. Megatron-core keeps its groups in module globals: those of an earlier engine of this process are let go."""
    assert dist.is_initialized(), "the process group is made before the engine"
    assert plan.megatron is not None
    destroy_process_groups()
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


def destroy_process_groups() -> None:
    """End the groups, not only the names for them: under gloo each is a handful of threads, which wait for ever else."""
    if not parallel_state.model_parallel_is_initialized():
        return
    made = parallel_state._global_process_group_list or ()
    parallel_state.destroy_model_parallel()
    for group in made:
        if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
