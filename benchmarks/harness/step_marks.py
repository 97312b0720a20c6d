"""Record the position of the training thread within a step every few milliseconds.

There is a mark at each linear layer, forward and backward, around the optimizer and around what follows a
step. The job writes the file and the benchmark reads it. A mark costs 0.1 us, in the backward pass 2 us, on
both sides.
"""

from __future__ import annotations

import time
from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[
    np.float64
]  # [steps, marks per step]: seconds of the monotonic clock, which all processes share


class StepMarker:
    """Collect the marks of a step; ``end_step`` writes them to the file at once."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("wb", buffering=0)
        self._marks = array("d")
        self._a_step = 0

    def mark(self, *_: object) -> None:
        self._marks.append(time.perf_counter())

    def watch_layers(self) -> None:
        """Record marks in every model and torch optimizer of this process."""
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
        """Write the marks of this step.

        Raises:
            RuntimeError: this step has another number of marks than the one before.
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
    """Read the complete marks of a file that may still be written."""
    numbers = np.fromfile(file)
    a_step = int(numbers[0])
    steps = (len(numbers) - 1) // a_step
    return numbers[1 : 1 + steps * a_step].reshape(steps, a_step)
