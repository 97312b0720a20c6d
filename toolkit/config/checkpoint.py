"""The section ``checkpoint`` of the schema. The string below a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePosixPath

from toolkit.config.checks import at_least, check
from toolkit.config.urls import WRITABLE, is_url, shown, url_problem
from toolkit.errors import ConfigError, Problem

SHARED_MEMORY = "/dev/shm"


class MetricMode(Enum):
    """Whether a smaller or a larger value of a metric is better."""

    min = "min"
    max = "max"


@dataclass(kw_only=True, slots=True)
class KeepBestConfig:
    metric: str | None = None
    """Also save after each evaluation that is among the best by this metric, SET/NAME as validation/loss, and
    keep these checkpoints; checkpoints/best names the best. Null: keep none.
    """
    mode: MetricMode = MetricMode.min
    """min: smaller values are better; max: larger ones."""
    count: int = 1
    """Number of best checkpoints to keep, in addition to checkpoint.keep_last."""

    def __post_init__(self) -> None:
        at_least("checkpoint.keep_best", 1, count=self.count)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every: str = "500"
    """Interval in steps (500) or wall time (30min, 2h); 'auto': the wall time that costs least, from measured
    saves and the rate of failures; 'never' saves only at the end.
    """
    keep_last: int = 2
    """Number of newest checkpoints to keep."""
    keep_every: int = 0
    """Also keep every checkpoint at a multiple of this many steps; 0: none."""
    keep_best: KeepBestConfig = field(default_factory=KeepBestConfig)
    background: bool | None = None
    """Copy the state to host memory and write it while training continues. Null: on GPUs, if there is
    room."""
    staging_gib: float = 32.0
    """Host memory of a rank for the copy of saves in the background, in GiB (2^30 bytes). It is pinned on
    GPUs and used again by every save. A rank with more state writes in the foreground.
    """
    memory_every: int = 0
    """Interval in steps between snapshots of the state in the memory of the nodes (/dev/shm), from which a
    restart continues if they are newer than the newest checkpoint; 0: none. On several nodes each file is
    also copied to another node.
    """
    memory_folder: str = SHARED_MEMORY
    """Folder on each node for these snapshots. If host memory does not suffice, name one on a local disk; it
    must exist on every node.
    """
    url: str | None = None
    """Also keep checkpoints in an object store: s3://BUCKET/PREFIX, gs:// or az://, uploaded in the
    background. Null: only in <run.dir>/checkpoints. Credentials come from the environment.
    """
    at_end: bool = True
    """Save after the last step."""
    export: bool = False
    """After the last step, also export the weights in Hugging Face's format to <run.dir>/export."""

    def __post_init__(self) -> None:
        at_least("checkpoint", 1, keep_last=self.keep_last)
        at_least("checkpoint", 0, keep_every=self.keep_every, memory_every=self.memory_every)
        check(
            self.staging_gib > 0,
            "checkpoint.staging_gib",
            self.staging_gib,
            "the copy of a save in the background needs memory",
            "write checkpoint.staging_gib=32, or checkpoint.background=false",
        )
        check(
            PurePosixPath(self.memory_folder).is_absolute(),
            "checkpoint.memory_folder",
            self.memory_folder,
            "snapshots are kept in a folder with an absolute path",
            f"write checkpoint.memory_folder=/local/disk, or leave it out for {SHARED_MEMORY}",
        )
        parse_cadence(self.every)
        if self.url is not None:
            _check_url(self.url)

    @property
    def snapshots_in_memory(self) -> bool:
        """Whether snapshots take host memory, and not room on a local disk."""
        return PurePosixPath(self.memory_folder).is_relative_to(SHARED_MEMORY)


def _check_url(url: str) -> None:
    """Raises ConfigError for a URL with secrets, or of a store that cannot be written. No network."""
    problem = url_problem("checkpoint.url", url)
    if problem is None and url.partition("://")[0] not in WRITABLE:
        problem = Problem(
            "checkpoint.url",
            f"checkpoint.url={shown(url) if is_url(url) else url}",
            "checkpoints are uploaded to an object store",
            "write checkpoint.url=s3://BUCKET/FOLDER, or with gs:// or az://, or leave it out",
        )
    if problem is not None:
        raise ConfigError(problem)


@dataclass(frozen=True, slots=True)
class Cadence:
    """An interval between checkpoints: at most one is set, and none means never."""

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False  # chosen during the run: toolkit/train/auto_interval.py

    @property
    def never(self) -> bool:
        return self == Cadence()


def parse_cadence(text: str) -> Cadence:
    """Parse ``500`` (steps), ``90s``, ``30min``, ``2h`` (seconds), ``auto`` or ``never``. Raises
    ConfigError.
    """
    text = str(text).strip()
    if text in ("never", "auto"):
        return Cadence(auto=text == "auto")
    if text.isdigit() and int(text) > 0:
        return Cadence(steps=int(text))
    for unit, seconds in (("min", 60), ("h", 3600), ("s", 1)):
        number = text.removesuffix(unit)
        if number != text and number.isdigit() and int(number) > 0:
            return Cadence(seconds=int(number) * seconds)
    raise ConfigError(
        Problem(
            "checkpoint.every",
            f"checkpoint.every={text}",
            "a cadence is a number of steps, a time, auto or never",
            "write checkpoint.every=500, checkpoint.every=30min, checkpoint.every=auto or "
            "checkpoint.every=never",
        )
    )
