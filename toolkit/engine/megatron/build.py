"""Build the process groups, model, gradient buffers and optimizer of one rank of Megatron-core."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
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
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from toolkit.config.kernels import AttentionKernel
from toolkit.config.optim import OptimizerKernel
from toolkit.engine.megatron.attention import mask_arguments
from toolkit.engine.megatron.model import attention_kernel, build_chunks, transformer_config
from toolkit.engine.megatron.state import MegatronState, inner_optimizers
from toolkit.engine.precision import LossScaler
from toolkit.engine.protocol import MicroBatch
from toolkit.engine.step_read import StepRead
from toolkit.plan.types import RunPlan


class MegatronModel:
    """This rank's part of the model and its optimizer.

    ``chunks`` are its stages in Megatron-core's DistributedDataParallel.
    """

    def __init__(self, plan: RunPlan, read: StepRead, device: torch.device) -> None:
        assert plan.megatron is not None
        assert plan.shape is not None
        config = transformer_config(plan)
        models = build_chunks(plan, config, device)
        sixteen_bits = config.bf16 or config.fp16
        wrapped = [Float16Module(config, model) for model in models] if sixteen_bits else models
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
        _skip_nonfinite_steps(self.optimizer, read, device)
        if plan.kernels.optimizer.name == OptimizerKernel.fused.value:
            _use_fused_kernel(self.optimizer)
        self.state = MegatronState(plan, models, self.optimizer, sixteen_bits=sixteen_bits)
        self.uses_dropout = plan.shape.dropout > 0  # whether training draws random numbers
        self._parallel_context = plan.axes.context > 1
        self._kernel = attention_kernel(plan)
        self._data_ranks = plan.axes.data
        self._weight_decay = settings["weight_decay"]
        self._config, self._device = config, device
        _set_schedule_functions(config, ddp, self.chunks)

    def set_learning_rate(self, lr: float) -> None:
        """Set learning rate and weight decay, with Megatron-core's multipliers for groups without decay."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self._weight_decay * group["wd_mult"]

    def use_loss_scaler(self, scaler: LossScaler) -> None:
        """Use the run's loss scaler, whose rules are the same in every engine."""
        for part in inner_optimizers(self.optimizer):
            part.grad_scaler = _DividedLossScale(scaler, self._data_ranks, self._device)
            part._unscale_main_grads_and_check_for_nan = partial(_unscale, part)
        self._config.grad_scale_func = self.optimizer.scale_loss

    def slice_for_context_rank(self, batch: MicroBatch) -> dict[str, Any]:
        """This context rank's part of a micro-batch, with position ids and the mask of documents.

        Position ids count in the sequence, or in documents if the batch has any. Rotary positions always
        count in the sequence, since only their differences matter.
        """
        tokens = batch["input_ids"]
        group = parallel_state.get_context_parallel_group() if self._parallel_context else None
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        inputs = {"position_ids": positions, **batch}
        masked = "position_ids" in batch or self._kernel is AttentionKernel.flex
        masks = mask_arguments(self._kernel, inputs["position_ids"], group) if masked else {}
        return {**(get_batch_on_this_cp_rank(inputs) if self._parallel_context else inputs), **masks}

    def wait_for_weights(self) -> None:
        """Wait for weights that are still being gathered. Collective if the gather overlaps."""
        for chunk in self.chunks:
            if chunk.use_forward_hook:
                chunk.start_param_sync(force_sync=True)

    def optimizer_step(self) -> int | None:
        """Return the number of Adam's steps; None before the first step and for optimizers that do not
        count.
        """
        for master in self.state.masters:
            step = master.inner.state.get(master.tensor, {}).get("step", master.group.get("step"))
            if step is not None:
                return int(step)
        return None

    def reset_state(self, step: int | None) -> None:
        """Remove the optimizer state, or with ``step`` zero it as after that many steps, to be filled."""
        for master in self.state.masters:
            master.inner.state.pop(master.tensor, None)
            counts_in_group = (
                not type(master.inner).__module__.startswith("torch.") and "betas" in master.inner.defaults
            )
            if counts_in_group:  # Transformer Engine's and Apex's
                master.group["step"] = step or 0
            if step is None:
                continue
            state: dict[str, torch.Tensor] = {
                name: torch.zeros_like(master.tensor, requires_grad=False)
                for name in self.state.states.tensors
            }
            if "betas" in master.inner.defaults and not counts_in_group:
                # Not shared: torch increments it for each parameter. The fused kernel reads it on the device.
                device = master.tensor.device if master.group.get("fused") else None
                state["step"] = torch.tensor(float(step), device=device)
            master.inner.state[master.tensor] = state

    def release(self) -> None:
        """Break the reference cycles of hooks and configuration, so that memory is freed."""
        for name in (
            "finalize_model_grads_func",
            "no_sync_func",
            "grad_sync_func",
            "param_sync_func",
            "grad_scale_func",
        ):
            setattr(self._config, name, None)
        RotaryEmbedding.forward.cache_clear()  # the class-level cache references modules and their groups
        for module in (module for chunk in self.chunks for module in chunk.modules()):
            # It references the last batch's probabilities, hence the autograd graph with hooks that gc cannot
            # see.
            vars(module).pop("token_dispatcher", None)
        self.chunks.clear()
        del self.optimizer, self.state


def _set_schedule_functions(
    config: TransformerConfig, ddp: DistributedDataParallelConfig, chunks: list[DistributedDataParallel]
) -> None:
    """Set the functions that the schedules call: one, or with virtual stages one per chunk."""
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
    if ddp.overlap_grad_reduce and len(chunks) > 1:
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if ddp.overlap_param_gather and ddp.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])


def _one_or_all(functions: list[Callable[..., Any]]) -> Any:
    return functions if len(functions) > 1 else functions[0]


def _skip_nonfinite_steps(optimizer: Any, read: StepRead, device: torch.device) -> None:
    """Skip a step whose gradient norm is not finite, and read the norm once, with the values of ``read``.

    ``optimizer.step()`` returns False as its first value if it skipped. Megatron-core checks gradients in
    fp16 only. It reads one norm for each of its optimizers, and one for each parameter without Transformer
    Engine.
    """
    update, norm = optimizer.step_with_ready_grads, 0.0

    def get_grad_norm() -> float:
        nonlocal norm
        norms = [square**0.5 for square in read.norms(*_squared_norms(optimizer, device))]
        norm = norms[0] if len(norms) == 1 else math.sqrt(sum(part**2 for part in norms))
        return norm

    optimizer.get_grad_norm = get_grad_norm
    optimizer.step_with_ready_grads = lambda: math.isfinite(norm) and update()


@torch.no_grad()
def _squared_norms(optimizer: Any, device: torch.device) -> list[torch.Tensor]:
    """Return the squared gradient norms of a ``ChainedOptimizer``, fp32 [1] over all ranks of each.

    There is one for all its optimizers if they reduce over the same ranks. Collective.
    """
    parts = optimizer.chained_optimizers
    if optimizer.grads_states_parallel_group_is_shared():
        gradients = [[gradient for part in parts for gradient in part.get_main_grads_for_grad_norm()]]
    else:
        gradients = [part.get_main_grads_for_grad_norm() for part in parts]
    squares = []
    for part, own in zip(parts, gradients, strict=False):
        square = torch.zeros(1, device=device)
        if own:
            overflow = torch.zeros(1, dtype=torch.int, device=device)
            norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [own], False)
            square = norm.square()
        dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
        squares.append(square)
    return squares


@torch.no_grad()
def _unscale(optimizer: Any) -> bool:
    """Divide fp16 gradients by the loss scale; return False, because the norm shows whether one overflowed.

    Megatron-core would read a flag here.
    """
    if not optimizer.is_stub_optimizer:
        torch._amp_foreach_non_finite_check_and_unscale_(
            optimizer._collect_main_grad_data_for_unscaling(),
            optimizer.found_inf,
            optimizer.grad_scaler.inv_scale,
        )
    return False


def _use_fused_kernel(optimizer: Any) -> None:
    """Update all parameters of a group in one kernel.

    Megatron-core creates torch's optimizers without a way to ask for it; they read the key of their groups.
    """
    for part in inner_optimizers(optimizer):
        for group in part.optimizer.param_groups:
            group.update(fused=True, foreach=False)


class _DividedLossScale:
    """The run's loss scale divided by the data ranks, in the interface of Megatron-core's scalers.

    Megatron-core averages over data ranks, and the engine multiplies the loss by their number. With the whole
    scale on top, gradients would overflow earlier than in the local engine. The engine updates the scale once
    per step; Megatron-core would update it once for each of its optimizers.
    """

    def __init__(self, scaler: LossScaler, data_ranks: int, device: torch.device) -> None:
        self._scaler, self._data_ranks, self._device = scaler, data_ranks, device

    def update(self, found_inf: bool) -> None:
        pass

    @property
    def scale(self) -> torch.Tensor:
        # Not ``torch.tensor``, whose copy from the host would wait for the device in every micro-batch.
        return torch.full((1,), self._scaler.cur_scale / self._data_ranks, device=self._device)

    @property
    def inv_scale(self) -> torch.Tensor:
        return self.scale.double().reciprocal().float()


def initialize_process_groups(plan: RunPlan) -> None:
    """Create Megatron-core's process groups for the plan's axes. Collective.

    Groups of an earlier engine of this process, which Megatron-core keeps in module globals, are destroyed
    first.
    """
    assert dist.is_initialized(), "the process group is created before the engine"
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
    """Destroy the groups, because each gloo group has threads that would otherwise wait forever."""
    if not parallel_state.model_parallel_is_initialized():
        return
    groups = parallel_state._global_process_group_list or ()
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
