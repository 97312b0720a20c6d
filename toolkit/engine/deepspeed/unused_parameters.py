"""Gradients of parameters that a micro-batch does not use. ZeRO takes it that there are none.

Measured on DeepSpeed 0.19.8 with a branch that some micro-batches take: under ZeRO 3, and wherever the optimizer is offloaded, a
parameter without a gradient is stepped with the one it had in an earlier step (the loss is off by 0.1 after 20 steps), and one
that the last micro-batch does not use loses what the others gave it. Where ranks use different parameters, ZeRO 1 and 2 add up
gradients of different parameters, or fail.

Models of ``families/`` use all parameters always. Any other model gets all three mends, at the cost of one addition a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def connect_all_parameters(loss: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """The same loss, whose backward gives every trainable parameter of ``module`` a gradient, zero if no other.

    For ZeRO 1 and 2. Under ZeRO 3 a parameter has its shape only while its module runs, and all ranks must run the same
    modules: a branch that depends on the samples cannot train there.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    reached: torch.Tensor = _ConnectAllParameters.apply(loss, *parameters)
    return reached


def reduce_in_fixed_order(optimizer: Any) -> Callable[[], None]:
    """Let ZeRO 2 reduce gradients in one fixed order, last parameter first; the returned function is called before a backward.

    It reduces them as they come, side by side in buckets, and they come in another order where a branch is not taken: ranks
    would add up gradients of different parameters. With :func:`connect_all_parameters` each gradient comes, so none waits for ever.
    """
    order = [
        (parameter, number) for number, group in enumerate(optimizer.bit16_groups) for parameter in group
    ]
    order.sort(key=lambda entry: -optimizer.get_param_id(entry[0]))
    reduce, ready = optimizer.reduce_ready_partitions_and_remove_grads, set[int]()
    following = 0

    def take(parameter: torch.Tensor, number: int) -> None:
        nonlocal following
        ready.add(id(parameter))
        while following < len(order) and id(order[following][0]) in ready:
            following += 1
            reduce(*order[following - 1])

    def begin() -> None:
        nonlocal following
        following = 0
        ready.clear()

    optimizer.reduce_ready_partitions_and_remove_grads = take
    return begin


class _ConnectAllParameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(parameter.new_zeros(()), parameter.shape) for parameter in parameters]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # One element each, expanded: nothing is allocated where the parameter has another gradient to add this to.
        return (*gradients, *(zero.expand(shape) for zero, shape in ctx.like))


def zero_gradient_buffers(optimizer: Any) -> None:
    """Before the first micro-batch of a step: no buffer holds a gradient of an earlier step."""
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if flat is None:
        return
    flat.zero_()
    if optimizer.offload_optimizer:
        for master in optimizer.fp32_partitioned_groups_flat:
            if master.grad is not None:
                master.grad.zero_()


@contextmanager
def keep_earlier_gradients(optimizer: Any, last: bool) -> Iterator[None]:
    """Around a backward: under ZeRO 3 with the optimizer offloaded, the last one of a step hands over the gradients of the
    parameters that it used; those of parameters that only earlier micro-batches used follow here."""
    if not (last and getattr(optimizer, "offload_optimizer", False)):
        yield
        return
    used = optimizer._offload_boundary_param_ids
    earlier = set(used)
    used.clear()
    yield
    missed, everything = earlier - used, earlier | used
    if missed:
        optimizer._offload_boundary_param_ids = missed
        optimizer._finalize_offload_gradient_accumulation()
    optimizer._offload_boundary_param_ids = everything
