"""Keep the checkpoints of a run in an object store (``checkpoint.url``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.directory import is_sound
from toolkit.checkpoint.remote.claim import ClaimedStore, StoreState, claim_store
from toolkit.checkpoint.remote.pointer import SUBJECT, StoreClaim, Writer
from toolkit.checkpoint.remote.source import locate
from toolkit.checkpoint.remote.upload import Uploader, UploadSettings
from toolkit.checkpoint.remote.upload_folder import UploadFolder
from toolkit.checkpoint_folder import find_newest, step_of
from toolkit.config.urls import is_url
from toolkit.engine.rank_sync import broadcast_value
from toolkit.errors import UserError
from toolkit.hooks import CompletedStep, Hook
from toolkit.monitor.alert import Alert, Level
from toolkit.paths import Url
from toolkit.plan.types import RunPlan
from toolkit.progress import duration
from toolkit.remote.objects import WRITE_LIMITS, StoreObjects
from toolkit.remote.storage import StorageError, parse_location
from toolkit.rundir.directory import RunDirectory

log = logging.getLogger(__name__)

DELAY_SECONDS = 60.0  # without a success, before an alert


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """The store of a run, as every rank sees it.

    Attributes:
        newest: The URL of the checkpoint that the run continues from by itself, because it is later than the
            run directory's; None: it does not.
        steps: The steps of the checkpoints in the store.
        state: Of rank 0, which writes the pointer.
    """

    url: Url
    newest: Url | None = None
    steps: tuple[int, ...] = ()
    state: StoreState | None = None


def open_checkpoint_store(
    plan: RunPlan, directory: RunDirectory, rank: int, attempt: int
) -> OpenedStore | None:
    """Open ``checkpoint.url``; None without one. Collective.

    Rank 0 claims the store as its writer: ``checkpoint/remote/claim.py``.

    Raises:
        UserError: On every rank: the store refuses, or another run writes there. StorageError: It does not
            answer.
    """
    if plan.config.checkpoint.url is None:
        return None
    url = parse_location(plan.config.checkpoint.url, "checkpoint.url")
    assert isinstance(url, Url), "the configuration accepts URLs of object stores only"
    state: StoreState | None = None
    answer: tuple[Url | None, tuple[int, ...], Exception | None] = (None, (), None)
    if rank == 0:
        try:
            claimed = _claim_store(plan, directory, url, attempt)
            state, answer = claimed.state, (claimed.newest, claimed.steps, None)
        except (UserError, StorageError) as error:
            answer = (None, (), error)
    if plan.world.ranks > 1:
        answer = broadcast_value(answer, 0)
    found, steps, failure = answer
    if failure is not None:
        raise failure
    return OpenedStore(url, found, steps, state)


def _claim_store(plan: RunPlan, directory: RunDirectory, url: Url, attempt: int) -> ClaimedStore:
    config = plan.config
    explicit = None
    if is_url(config.resume):
        location = parse_location(config.resume, "resume")
        found = locate(location) if isinstance(location, Url) else None
        if found is not None and found.url == url / found.url.name:
            explicit = found.checkpoint
    local = find_newest(directory.checkpoints).checkpoint
    claim = StoreClaim(
        writer=Writer(
            run=UploadFolder(directory.uploads).run_name(), identity=plan.identity, attempt=attempt
        ),
        resume=config.resume,
        local_step=step_of(local) if local is not None else None,
        explicit=explicit,
        forks=config.run.fork is not None,
    )
    return claim_store(StoreObjects(url, SUBJECT, WRITE_LIMITS), claim)


class CheckpointUploads(Hook):
    """Upload each complete checkpoint in the background, and wait for the last one at the end.

    Args:
        alert: Takes an alert if uploads are delayed.
        seconds_left: As in :func:`toolkit.train.run.run`.
        only_sound: Leave out checkpoints that are not sound. A rollback goes back to a step before them, and
            the store must not name a state that the run has given up.
    """

    def __init__(
        self,
        store: OpenedStore,
        settings: UploadSettings,
        alert: Callable[[Alert], None],
        seconds_left: Callable[[], float | None],
        *,
        only_sound: bool = False,
    ) -> None:
        self._store, self._alert, self._seconds_left = store, alert, seconds_left
        self._only_sound = only_sound
        self._step = 0
        self.uploader = Uploader(
            StoreObjects(store.url, SUBJECT, WRITE_LIMITS), settings, store.state, self._on_delay
        )

    def on_start(self, step: int) -> None:
        self._step = step

    def on_checkpoint(self, path: Path) -> None:
        if not self._only_sound or is_sound(path):
            self.uploader.send(path)
        elif self._store.state is not None:  # once over all ranks
            log.warning(f"{path.name} is not uploaded to {self._store.url}, because it is not sound")

    def on_step(self, completed: CompletedStep) -> None:
        """Report uploads that failed. Raises ConfigError if another attempt writes to the store: then two of
        them are training.
        """
        self._step = completed.step
        if self.uploader.error is not None:
            raise self.uploader.error

    def on_end(self, step: int) -> None:
        complete = self.uploader.close(self._seconds_left)
        if self.uploader.error is not None:
            raise self.uploader.error
        if not complete and self._store.state is not None:  # once over all ranks
            log.warning(
                f"the newest checkpoint is not in {self._store.url} yet; it is in the run's folder, "
                "and the same command uploads it"
            )

    def _on_delay(self, failure: str, seconds: float) -> None:
        log.warning(f"the upload to {self._store.url} is delayed and will be repeated: {failure}")
        if seconds < DELAY_SECONDS:
            return
        self._alert(
            Alert(
                name="slow-checkpoint",
                fault="late-upload",
                level=Level.WARNING,
                step=self._step,
                cause="checkpoints are not reaching the store; they are complete in the run's folder",
                evidence=f"nothing was uploaded for {duration(seconds)}; the last failure: {failure}",
                next_step=f"check the store and the credentials of checkpoint.url={self._store.url}; "
                "training continues, and the upload too once the store answers",
            )
        )
