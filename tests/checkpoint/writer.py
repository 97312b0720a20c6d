"""One writing rank of the crash tests, in a separate process. Its state depends on the step only."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.layouts import LAYOUTS, NAMESPACE, shards_of
from toolkit.checkpoint.online.commit import SavePhase
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import EXP_AVG, WEIGHT, TensorKey
from toolkit.checkpoint_folder import committed_checkpoints

RANKS = 2
NOT_SAVING = 0  # phases of a save count from 1


def state(step: int) -> dict[TensorKey, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        TensorKey(state, name): torch.randn(211, 97, generator=generator)
        for state in (WEIGHT, EXP_AVG)
        for name in "ab"
    }


def write(
    directory: Path, rank: int, attempt: int, current_phase: Any, kill_at: tuple[SavePhase, int] | None
) -> None:
    """Save the steps after the newest checkpoint's, until killed.

    Args:
        current_phase: Shared integer that is set to the rank's phase.
        kill_at: Die as by ``kill -9`` when this phase is entered for the n-th time (from 0).
    """
    torch.set_num_threads(1)
    entered: dict[SavePhase, int] = {}

    def on_phase(phase: SavePhase) -> None:
        current_phase.value = 1 + list(SavePhase).index(phase)
        if kill_at == (phase, entered.setdefault(phase, 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        entered[phase] += 1

    store = CheckpointStore(directory, keep_last=2, timeout_seconds=30, on_phase=on_phase)
    step = max(committed_checkpoints(directory), default=0)
    for number in itertools.count(step + 1):
        shards = shards_of(state(number), LAYOUTS["flat"], RANKS)[rank]
        pending = store.save(
            number,
            shards,
            {"step": number},
            namespace=NAMESPACE,
            rank=rank,
            ranks=RANKS,
            attempt=attempt,
            background=number % 2 == 0,
        )
        pending.wait()
        current_phase.value = NOT_SAVING
