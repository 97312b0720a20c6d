"""How much of each source a run has taken: for people, and in the rows of a run with several sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from toolkit.checkpoint_folder import step_of
from toolkit.hooks import Hook
from toolkit.monitor.sink import Row

SamplesConsumed = Mapping[str, tuple[int, float]]  # samples and epochs by source: ``SampleStream.consumed``


def format_consumed(consumed: SamplesConsumed) -> str:
    """``code 1,200 (0.31 epochs), web 3,600 (0.02 epochs)``."""
    return ", ".join(
        f"{name} {samples:,} ({epochs:.3g} epochs)" for name, (samples, epochs) in consumed.items()
    )


class DataProgress(Hook):
    """A line at each evaluation and each checkpoint. For rank 0 of a run with several sources."""

    def __init__(self, consumed: Callable[[int], SamplesConsumed], say: Callable[[str], None]) -> None:
        self._consumed, self._say = consumed, say
        self._told = -1

    def on_eval(self, row: Row) -> None:
        self._tell(row["step"])

    def on_checkpoint(self, path: Path) -> None:
        self._tell(step_of(path))

    def _tell(self, step: int | None) -> None:
        if step is not None and step > self._told:
            self._told = step
            self._say(f"step {step}: samples taken: {format_consumed(self._consumed(step))}")
