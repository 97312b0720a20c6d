"""The schema of a sweep, ``sweep.KEY=VALUE``. The string below a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass, field

from toolkit.config.checks import at_least


@dataclass(kw_only=True, slots=True)
class SweepSection:
    dir: str | None = None
    """Folder of the points' run directories and the sweep's table. Null: sweeps/<name>-<8 hex digits of the
    arguments>.
    """
    at_once: int | None = None
    """Maximum number of points that run at a time. Null: as many as fit on this machine, or all of them on a
    cluster.
    """
    metric: str | None = None
    """Metric that compares points: the last loss of an evaluation set (validation), or the median over the
    steps of a column of metrics.jsonl (tokens_per_second). Null: the last loss of the first evaluation set,
    or else of training.
    """
    maximize: bool = False
    """Whether a larger metric is better."""
    prune: float | None = None
    """Refuse points whose predicted time per token is more than this many times that of the fastest point of
    their batch: 1.5. Points whose time cannot be predicted run. Null: refuse none.
    """
    dry_run: bool = False
    """Show the points and the reasons for refused points, and start nothing."""

    def __post_init__(self) -> None:
        at_least("sweep", 1, at_once=self.at_once, prune=self.prune)


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    sweep: SweepSection = field(default_factory=SweepSection)
