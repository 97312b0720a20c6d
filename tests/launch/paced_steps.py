"""A hook that lengthens steps without computing.

``+hooks.pace.target=tests.launch.paced_steps.PacedSteps``
"""

from __future__ import annotations

import time

from toolkit.hooks import CompletedStep, Hook

LONGEST_SECONDS = 10.0


class PacedSteps(Hook):
    """Wait 0.1 s after each step. If the run has lost all ranks but one, wait longer from step to step, so
    that another node can start before the run ends, however slow the machine is.
    """

    _alone = 0

    def on_step(self, completed: CompletedStep) -> None:
        self._alone += self.context.plan.world.ranks == 1
        time.sleep(min(0.1 + 0.2 * self._alone, LONGEST_SECONDS))
