"""Trace the model of a plan with its task: what plan/trace.py describes, for one micro-batch of one rank.

Axes other than data do not matter here: the module is the whole model. Nothing is allocated, and no file is
read unless the caller allows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from toolkit.config.data import DocumentMasking
from toolkit.config.kernels import AttentionKernel, CompileMode
from toolkit.config.schema import OffloadDevice
from toolkit.data.registry import open_data, prepare_data
from toolkit.engine.precision import DTYPES
from toolkit.engine.protocol import CountedBatch
from toolkit.models.build import build_model
from toolkit.models.loss_head import fuse_loss
from toolkit.models.trace import CannotTrace, explain_errors, trace_module
from toolkit.plan.hugging_face import parameters_on_meta
from toolkit.plan.trace import ModuleTrace, NotTraced
from toolkit.plan.types import Device, KernelChoice, RunPlan
from toolkit.progress import Progress
from toolkit.train.build import build_task
from toolkit.train.task import Task, TextTask, configure_text_task, text_task
from toolkit.train.user_task import build_user_task, checked_task

# Samples of text consist of token 0, so that no document ends in them.
END_OF_TEXT = 1


def trace_model(plan: RunPlan, *, read_data: bool = False) -> ModuleTrace | NotTraced:
    """Trace the model and the task of ``plan``; the reason if that is not possible.

    Kernels are those of the plan, except that nothing is compiled, that FlexAttention is replaced by fused
    attention without a mask, which stores the same, and that inputs of recomputed blocks stay on the device.

    Args:
        read_data: whether samples may be read if their shapes are not known otherwise: those of
            ``data=custom`` and ``data=arrays``.

    Raises:
        UserError: the model, the task or the data cannot be built as configured.
    """
    try:
        return _trace(_eager(plan), read_data)
    except CannotTrace as error:
        return NotTraced(str(error))


def _trace(plan: RunPlan, read_data: bool) -> ModuleTrace:
    dtype, is_target = DTYPES[plan.config.precision.name], plan.config.model.target is not None
    with explain_errors():
        task, batch = _task_and_batch(plan, read_data)
        units = task.units(batch)
        with parameters_on_meta():
            module = fuse_loss(build_model(plan, "meta"), plan)

    def loss(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return task.loss_sum(module, CountedBatch(tensors, units))

    return trace_module(
        module,
        loss,
        batch,
        samples=plan.batch.micro_batch,
        dtype=dtype,
        buffer_dtype=dtype if is_target else None,  # as engines convert modules of the user's own
    )


def _eager(plan: RunPlan) -> RunPlan:
    """``plan`` with the kernels that can be traced on a CPU."""
    config, kernels = plan.config, plan.kernels
    if kernels.attention.name == AttentionKernel.flex.value:
        kernels = replace(kernels, attention=KernelChoice(AttentionKernel.sdpa.value, "it is traced"))
        config = replace(config, data=replace(config.data, documents=DocumentMasking.joined))
    config = replace(
        config,
        compile=replace(config.compile, mode=CompileMode.none),
        offload=replace(config.offload, activations=OffloadDevice.none),
    )
    return replace(plan, config=config, kernels=kernels, world=replace(plan.world, device=Device.CPU))


def _task_and_batch(plan: RunPlan, read_data: bool) -> tuple[Task, dict[str, torch.Tensor]]:
    """Return the task, and a micro-batch as it collates it, on the CPU."""
    config = plan.config
    user_task = build_user_task(config)
    samples: Any
    if config.data.is_text:
        samples = np.zeros((plan.batch.micro_batch, config.train.sequence_length + 1), dtype=np.int64)
        separate = config.data.documents is DocumentMasking.separate
        task = user_task or text_task(plan)
        if isinstance(task, TextTask):
            configure_text_task(task, plan, END_OF_TEXT if separate else None)
        task = checked_task(task, config, None)
        task.sample_numbers = np.arange(plan.batch.micro_batch)
    elif read_data:
        data = open_data(config, plan.batch, 0, prepare_data(config, plan.vocab_size, Progress.silent()))
        try:
            samples = next(iter(data.stream.steps(0)))[0]
        finally:
            data.stream.close()
        task = build_task(plan, data, user_task, None)
    else:
        raise CannotTrace(
            f"the shapes of samples of data={config.data.name} are known once they are read: "
            "plan.py --trace reads a micro-batch"
        )
    return task, dict(task.collate(samples))
