"""Every key of a sweep: ``python launch/train.py -m ... sweep.KEY=VALUE``. The string under a field is its
documentation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from toolkit.config.checks import at_least


@dataclass(kw_only=True, slots=True)
class SweepSection:
    dir: str | None = None
    """Where the points' run directories and the sweep's table go. Null: sweeps/<name>-<8 hex digits of the
    sweep's words>.
    """
    at_once: int | None = None
    """Points under way at a time, at most. Null: as many as there is room for on this machine, or all of them
    on a cluster.
    """
    metric: str | None = None
    """What points are compared by: the last loss of an evaluation set (validation), or the median over the
    steps of a column of metrics.jsonl (tokens_per_second). Null: the last loss of the first evaluation set,
    or of training where there is none.
    """
    maximize: bool = False
    """The larger number is the better one."""
    dry_run: bool = False
    """Show the points, with what is refused and why, and start nothing."""

    def __post_init__(self) -> None:
        at_least("sweep", 1, at_once=self.at_once)


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    sweep: SweepSection = field(default_factory=SweepSection)
