"""Hooks of the benchmarks that kill ranks: the moment of each step, written at once.

``+hooks.marks.target=restart_marks.StepMoments``, with the file in ``RESTART_MARKS``
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from toolkit.hooks import CompletedStep, Hook


class StepMoments(Hook):
    """Append ``seconds since 1970, step, seconds of the step`` after each step, on rank 0."""

    def on_step(self, completed: CompletedStep) -> None:
        if self.context.rank == 0:
            with Path(os.environ["RESTART_MARKS"]).open("a") as file:
                file.write(f"{time.time()} {completed.step} {completed.seconds}\n")
