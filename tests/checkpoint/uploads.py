"""One run that saves and uploads, with the threads of both ranks in one process that can be killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.layouts import LAYOUTS, save, shards_of
from tests.waiting import wait_until
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.remote import upload
from toolkit.checkpoint.remote.claim import claim_store
from toolkit.checkpoint.remote.pointer import SUBJECT, StoreClaim, Writer
from toolkit.checkpoint.remote.upload import Uploader, UploadPhase, UploadSettings
from toolkit.checkpoint.remote.upload_folder import UploadFolder
from toolkit.checkpoint.shard import EXP_AVG, WEIGHT, Shard, TensorKey
from toolkit.checkpoint_folder import newest_checkpoint, step_of
from toolkit.paths import Url
from toolkit.remote.objects import WRITE_LIMITS, StoreObjects

RANKS = 2
SECONDS = 120.0  # for anything, on a busy machine
LIMITS = replace(
    WRITE_LIMITS, first_backoff_seconds=0.01, max_backoff_seconds=0.1, opening_seconds=1.0, store_retries=2
)
IDENTITY = "01234567"


def state(step: int) -> dict[TensorKey, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        TensorKey(state, name): torch.randn(40, 30, generator=generator)
        for state in (WEIGHT, EXP_AVG)
        for name in "ab"
    }


def poll_often(patch: pytest.MonkeyPatch) -> None:
    """Let the threads of ranks look for each other's files every 20 ms instead of every half second."""
    patch.setattr(upload, "POLL_SECONDS", 0.02)


class UploadingRun:
    """An attempt of a run in ``folder`` that uploads to ``url``. Construction claims the store."""

    def __init__(
        self,
        folder: Path,
        url: str,
        attempt: int = 1,
        *,
        resume: str = "auto",
        identity: str = IDENTITY,
        keep_last: int = 2,
        on_phase: Callable[[UploadPhase], None] = lambda phase: None,
        on_delay: Callable[[str, float], None] = lambda failure, seconds: None,
    ) -> None:
        self.checkpoints, self.attempt = folder / "checkpoints", attempt
        self.uploads = UploadFolder(folder / "uploads")
        objects = StoreObjects(Url(url), SUBJECT, LIMITS)
        local = newest_checkpoint(self.checkpoints)
        claim = StoreClaim(
            writer=Writer(run=self.uploads.run_name(), identity=identity, attempt=attempt),
            resume=resume,
            local_step=step_of(local) if local is not None else None,
        )
        self.claimed = claim_store(objects, claim)
        settings = UploadSettings(
            checkpoints=self.checkpoints,
            folder=self.uploads.path,
            rank=0,
            ranks=RANKS,
            attempt=attempt,
            keep_last=keep_last,
            keep_every=0,
            on_phase=on_phase,
            pause_seconds=0.05,
        )
        self.uploaders = [
            Uploader(objects, settings, self.claimed.state, on_delay),
            Uploader(objects, replace(settings, rank=1), None),
        ]
        self._stores = [
            CheckpointStore(self.checkpoints, keep_last=1, in_use=self.uploaders[0].steps_in_use)
            for _ in range(RANKS)
        ]
        if isinstance(local, Path):
            self.uploaders[0].send(local)

    def save(self, step: int, shards: Sequence[Sequence[Shard]] | None = None, **scalars: object) -> Path:
        """Save and send ``shards`` of each rank, by default those of ``state(step)``."""
        path = save(
            self.checkpoints,
            step,
            shards or shards_of(state(step), LAYOUTS["flat"], RANKS),
            stores=self._stores,
            attempt=self.attempt,
            scalars={"step": step, **scalars},
        )
        for uploader in self.uploaders:
            uploader.send(path)
        return path

    def wait_until_sent(self) -> None:
        wait_until(lambda: not self.uploads.pending, SECONDS, "sent")

    def close(self, seconds_left: Callable[[], float | None] = lambda: None) -> bool:
        """Close both ranks, as at the end of a run."""
        closed: list[bool] = []
        threads = [
            threading.Thread(target=lambda one=one: closed.append(one.close(seconds_left)))
            for one in self.uploaders
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert len(closed) == RANKS, "an uploader did not end"
        return all(closed)


def run_until_killed(
    folder: Path, url: str, environment: Mapping[str, str], kill_at: tuple[UploadPhase, int], steps: Any
) -> None:
    """Save and upload ``steps``, one after the other; die as by ``kill -9`` when a phase is entered for the
    n-th time (from 0).
    """
    torch.set_num_threads(1)
    poll_often(pytest.MonkeyPatch())
    os.environ.update(environment)
    entered: dict[UploadPhase, int] = {}

    def on_phase(phase: UploadPhase) -> None:
        if kill_at == (phase, entered.setdefault(phase, 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        entered[phase] += 1

    for attempt, step in enumerate(steps, 1):
        run = UploadingRun(folder, url, attempt, on_phase=on_phase, keep_last=1)
        run.save(step)
        assert run.close()


def upload_large_file(folder: Path, url: str, environment: Mapping[str, str], tensor: torch.Tensor) -> None:
    """Save and upload step 1, then step 2 with ``tensor`` in the file of rank 0."""
    torch.set_num_threads(1)
    poll_often(pytest.MonkeyPatch())
    os.environ.update(environment)
    run = UploadingRun(folder, url, keep_last=1)
    run.save(1)
    run.wait_until_sent()
    run.save(2, shards_of({TensorKey(WEIGHT, "a"): tensor}, LAYOUTS["first_only"], RANKS))
    assert run.close()
