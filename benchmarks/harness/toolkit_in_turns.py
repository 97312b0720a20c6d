"""Run launch/train.py in turns with another job, for engine_step.py; hooks and sinks belong to the step.

torchrun --nproc_per_node 2 benchmarks/harness/toolkit_in_turns.py spec.json
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from turn_client import TurnClient

ROOT = Path(__file__).resolve().parents[2]
spec = json.loads(Path(sys.argv[-1]).read_text())


def run_in_turns() -> None:
    import toolkit.train.build as training
    from toolkit.hooks import CompletedStep, Hooks

    class TurnHooks(Hooks):
        def __init__(self, *hooks: Any, **named: Any) -> None:
            super().__init__(*hooks, **named)
            self._turns = TurnClient(spec["turns"] if os.environ["RANK"] == "0" else None)
            self._started = 0.0

        def on_start(self, step: int) -> None:
            super().on_start(step)
            self._turns.before_step(step)
            self._started = time.perf_counter()

        def on_step(self, completed: CompletedStep) -> None:
            super().on_step(completed)
            self._turns.after_step(completed.step - 1, time.perf_counter() - self._started)
            if not completed.last:
                self._turns.before_step(completed.step)
            self._started = time.perf_counter()

    training.Hooks = TurnHooks  # type: ignore[misc]


sys.argv = [str(ROOT / "launch" / "train.py"), *spec["overrides"]]
run_in_turns()
runpy.run_path(sys.argv[0], run_name="__main__")
