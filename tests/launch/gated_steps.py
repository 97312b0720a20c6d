"""A hook that holds training after a step until a file exists, so that a test can act at a known step.

``+hooks.gate.target=tests.launch.gated_steps.GatedSteps``, with the step in ``GATE_STEP`` and the file in
``GATE``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from toolkit.hooks import CompletedStep, Hook


class GatedSteps(Hook):
    def on_step(self, completed: CompletedStep) -> None:
        while completed.step == int(os.environ["GATE_STEP"]) and not Path(os.environ["GATE"]).exists():
            time.sleep(0.02)
