"""Where the training's thread is within a step, every few milliseconds: at each linear layer forward and backward, around the optimizer
and around what happens after a step. The job writes the file, the benchmark reads it.

A mark costs a tenth of a microsecond, and one of the backward pass two; both sides of a comparison make the same.
"""

from __future__ import annotations

import time
from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[
    np.float64
]  # (steps, marks a step): seconds of the monotonic clock, which all processes share


class Marker:
    """``end_step`` hands the step's marks to the file, in one write."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("wb", buffering=0)
        self._marks = array("d")
        self._a_step = 0

    def mark(self, *_: object) -> None:
        self._marks.append(time.perf_counter())

    def watch_layers(self) -> None:
        """Of all models of this process, and its optimizers of torch."""
        from torch import Tensor, nn
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if isinstance(module, nn.Linear):
                self.mark()
                if inputs[0].requires_grad:
                    inputs[0].register_hook(self.mark)

        register_module_forward_pre_hook(before)
        register_optimizer_step_pre_hook(self.mark)
        register_optimizer_step_post_hook(self.mark)

    def end_step(self) -> None:
        """
        Raises:
            RuntimeError: this step has more or fewer marks than the one before: they cannot be compared.
        """
        self.mark()
        if self._a_step not in (0, len(self._marks)):
            raise RuntimeError(f"a step of {len(self._marks)} marks after one of {self._a_step}")
        self._a_step = len(self._marks)
        self._file.write(
            (b"" if self._file.tell() else array("d", [self._a_step]).tobytes()) + self._marks.tobytes()
        )
        del self._marks[:]


def read_marks(file: Path) -> Marks:
    """What is there of a file that may still be written."""
    numbers = np.fromfile(file)
    a_step = int(numbers[0])
    steps = (len(numbers) - 1) // a_step
    return numbers[1 : 1 + steps * a_step].reshape(steps, a_step)
