"""A hook that lengthens steps without computing.

``+hooks.pace.target=tests.launch.paced_steps.PacedSteps``
"""

from __future__ import annotations

import time

from toolkit.hooks import CompletedStep, Hook


class PacedSteps(Hook):
    """Wait 0.1 s after each step, and five times as long if the run has lost all ranks but one."""

    def on_step(self, completed: CompletedStep) -> None:
        time.sleep(0.5 if self.context.plan.world.ranks == 1 else 0.1)
