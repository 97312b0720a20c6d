"""Read the state of torch optimizers, and create it when a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from toolkit.errors import CheckpointError, Problem
from toolkit.optimizers.base import StateLayout

Number = int | float | bool


def state_tensors(states: StateLayout, state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of one parameter's tensors, which exist after the optimizer's first step."""
    for name in (*states.tensors, *states.whole):
        if state.get(name) is not None:
            yield name, state[name]


def read_numbers(
    parameters: Iterable[tuple[StateLayout, Mapping[str, Any]]], groups: Iterable[Mapping[str, Any]]
) -> dict[str, Number]:
    """Return the numbers that exist in the states of parameters and in parameter groups.

    Raises:
        CheckpointError: a number differs between parameters or groups, or a state is not in its layout.
    """
    found: dict[str, Number] = {}
    of_groups: set[str] = set()
    for states, state in parameters:
        of_groups |= {*states.group_numbers}
        _add_numbers(found, states.numbers, state)
        known = {*states.tensors, *states.whole, *(states.examples or ())}
        if states.examples is not None and (unknown := state.keys() - known):
            raise _problem(
                f"its state {unknown.pop()} appeared after the steps on small tensors that checked it",
                "an optimizer creates all its states in its first steps",
            )
    for group in groups:
        _add_numbers(found, sorted(of_groups), group)
    return found


def _add_numbers(found: dict[str, Number], names: Iterable[str], holder: Mapping[str, Any]) -> None:
    for name in names:
        if name in holder:
            value = _plain(holder[name])
            if found.setdefault(name, value) != value:
                raise _problem(
                    f"its {name} has several values, such as {found[name]} and {value}",
                    "a checkpoint stores one number for all parameters",
                )


def _problem(seen: str, rule: str) -> CheckpointError:
    remedy = "keep it as a tensor of the parameter's shape that exists from the first step on"
    return CheckpointError(Problem("optim.target", f"optim.target: {seen}", rule, remedy))


def _plain(value: Any) -> Number:
    number = value.item() if isinstance(value, torch.Tensor) else value
    assert isinstance(number, int | float), f"a state that is one number, not {value!r}"
    return number


def create_state(
    states: StateLayout,
    inner: torch.optim.Optimizer,
    group: Mapping[str, Any],
    tensor: torch.Tensor,
    numbers: Mapping[str, Number],
) -> dict[str, Any]:
    """Create the state of one parameter as after a step: zeroed tensors, and numbers from ``numbers``.

    States in ``states.whole`` are left out: their shapes are known only from a checkpoint.
    """
    examples = states.examples or {}
    found: dict[str, Any] = dict(examples)
    for name in states.tensors:
        example = examples.get(name)
        dtype = example.dtype if isinstance(example, torch.Tensor) else None
        found[name] = torch.zeros_like(tensor, requires_grad=False, dtype=dtype)
    for name in states.numbers:
        found[name] = restore_number(inner, group, tensor, numbers.get(name, 0), examples.get(name))
    return found


def restore_number(
    inner: torch.optim.Optimizer,
    group: Mapping[str, Any],
    tensor: torch.Tensor,
    value: Number,
    example: Any = None,
) -> Any:
    """Return ``value`` as the optimizer stores it: a new tensor for torch's, a Python number for others.

    Args:
        example: a value of the same state, whose type the result gets; None: a step count.
    """
    if isinstance(example, torch.Tensor):
        device = "cpu" if example.device.type == "cpu" else tensor.device
        return torch.full(example.shape, value, dtype=example.dtype, device=device)
    if example is not None:
        return type(example)(value)
    if not type(inner).__module__.startswith("torch."):
        return int(value)
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(float(value), device=tensor.device if on_device else "cpu")
