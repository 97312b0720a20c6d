"""Handle parameters that a micro-batch does not use, which ZeRO assumes not to exist.

Measured on DeepSpeed 0.19.8 with a branch that only some micro-batches take. Under ZeRO 3 and with an
offloaded optimizer, a parameter without a gradient is updated with its gradient of an earlier step (the loss
is off by 0.1 after 20 steps), and a parameter that the last micro-batch does not use loses the gradients of
the earlier ones. If ranks use different parameters, ZeRO 1 and 2 sum gradients of different parameters, or
fail.

Models of ``families/`` always use all parameters. For other models these patches cost one addition per
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def connect_all_parameters(loss: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return the loss such that backward gives every trainable parameter a gradient, zero if unused.

    For ZeRO 1 and 2. Under ZeRO 3 a parameter has its shape only while its module runs, and all ranks must
    run the same modules, so a data-dependent branch cannot be trained.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    reached: torch.Tensor = _ConnectAllParameters.apply(loss, *parameters)
    return reached


def reduce_in_fixed_order(optimizer: Any) -> Callable[[], None]:
    """Let ZeRO 2 reduce gradients in a fixed order; call the returned function before each backward.

    By default it reduces gradients in the order in which they become ready, which depends on the branches
    taken: ranks would sum gradients of different parameters. With :func:`connect_all_parameters` every
    gradient becomes ready.
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
        # One element each, expanded: no memory is allocated if the parameter has another gradient.
        return (*gradients, *(zero.expand(shape) for zero, shape in ctx.like))


def zero_gradient_buffers(optimizer: Any) -> None:
    """Zero the buffers that hold gradients of an earlier step. Call it before a step's first micro-batch."""
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
    """Keep gradients of parameters that only earlier micro-batches used, around each backward.

    Under ZeRO 3 with an offloaded optimizer, the last backward of a step passes on only the gradients of the
    parameters that it used itself. Those of the other parameters are passed on here.
    """
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
