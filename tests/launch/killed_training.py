"""``launch/train.py`` with one rank that dies, as by ``kill -9``, during one of its saves.

    KILL=pointer:1:0:2 python tests/launch/killed_training.py ...

``KILL`` is PHASE:ENTRY:RANK:SAVE: rank RANK dies when its save number SAVE of this start enters PHASE for the
ENTRY-th time, both counted from 1. Without it no rank dies.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def deadly(phase: str, entry: int, rank: int, save: int) -> None:
    import toolkit.train.build as training
    from toolkit.checkpoint.online.commit import SavePhase
    from toolkit.checkpoint.online.store import CheckpointStore

    class Deadly(CheckpointStore):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named, on_phase=self._enter)
            self._number = self._entered = 0

        def save(self, *arguments: Any, **named: Any) -> Any:
            self._number += 1  # the loop requests a save when the previous one has ended
            return super().save(*arguments, **named)

        def _enter(self, entered: SavePhase) -> None:
            if self._number == save and entered == phase:
                self._entered += 1
                if self._entered == entry:
                    os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("RANK", "0") == str(rank):
        training.CheckpointStore = Deadly  # type: ignore[misc]


if __name__ == "__main__":
    if kill := os.environ.get("KILL"):
        words = kill.split(":")
        deadly(words[0], *map(int, words[1:]))
    sys.argv[0] = str(Path(__file__).resolve())  # the supervisor starts the ranks with it
    sys.path.insert(0, str(ROOT))
    from launch.train import exit_now, main

    exit_now(main(sys.argv[1:]))
