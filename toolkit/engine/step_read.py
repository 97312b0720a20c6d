"""Read what the host needs to know about a step from the device, once.

An operation on a GPU returns before it is computed. Reading a value waits until the device has computed
everything before it, and meanwhile the host launches nothing. Engines cannot avoid one read per step: the
host decides by the gradient norm whether the optimizer updates. The loss and the counts of the step are
copied together with the norm. The update then runs on the device while the host logs the step and launches
the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Values = Callable[[], Sequence[torch.Tensor]]


def read_numbers(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of scalars, with one copy from the device. Values in host memory cost nothing.

    Args:
        tensors: each has one element; there may be none.
    """
    if not tensors:
        return []
    flat = [tensor.detach().double().reshape(()) for tensor in tensors]
    on_device = [value for value in flat if value.device.type != "cpu"] or flat
    numbers = iter(torch.stack(on_device).tolist())
    return [
        next(numbers) if on_device is flat or value.device.type != "cpu" else float(value) for value in flat
    ]


def loss_weight(numerator: float, units: torch.Tensor) -> torch.Tensor:
    """Return ``numerator / max(units, 1)`` as an fp32 scalar on the device of ``units``, rounded once.

    Args:
        units: fp64 scalar.
    """
    return (units.new_full((), numerator) / units.clamp(min=1)).float()


class StepRead:
    """The values of one step, which are read together with its gradient norm.

    An engine uses it in every step:

        read.begin(lambda: [loss_sum, units])
        optimizer.step()                       # calls read.norms(norm), for which the host has to wait
        loss_sum, units = read.values()
    """

    def __init__(self) -> None:
        self._values: Values = list
        self._numbers: list[float] | None = []

    def begin(self, values: Values) -> None:
        """Begin a step.

        Args:
            values: returns the scalars to read. Called once, after the backward pass of all micro-batches;
                it may reduce over ranks, because all ranks read at the same point.
        """
        self._values, self._numbers = values, None

    def norms(self, *norms: torch.Tensor) -> list[float]:
        """Read these norms, and with the first ones of a step its values."""
        if self._numbers is not None:
            return read_numbers(norms)
        numbers = read_numbers([*norms, *self._values()])
        self._values, self._numbers = list, numbers[len(norms) :]  # releases the step's tensors
        return numbers[: len(norms)]

    def values(self) -> list[float]:
        """Return the step's values; they are read now if the engine needed no norm."""
        if self._numbers is None:
            self.norms()
        assert self._numbers is not None
        return self._numbers
