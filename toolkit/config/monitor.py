"""Every key of what a run tells of itself: ``monitor.*``. The string under a field is its documentation."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from toolkit.config.checks import at_least


class WandbMode(Enum):
    offline = "offline"
    online = "online"
    disabled = "disabled"


@dataclass(kw_only=True, slots=True)
class MonitorConfig:
    every: int = 10
    """Steps between two rows on the console; metrics.jsonl has every step."""
    wandb: WandbMode = WandbMode.offline
    """offline, online or disabled."""
    project: str = "toolkit"
    """W&B project."""
    entity: str | None = None
    """W&B user or team. Null: your own default."""
    group: str | None = None
    """W&B group: runs of one sweep, say. Null: the run's id, under which the runs of its nodes are together.
    """
    tags: list[str] = field(default_factory=list)
    """W&B tags."""
    prompt: str | None = None
    """After the last step, continue this text and show the result; null: do not."""
    ledger: bool = True
    """Tell for each step where its time went, on all ranks: ledger.jsonl."""
    probe: bool = True
    """Before the first step, measure latency and bandwidth of the collectives of each axis (about a second).
    """
    system_seconds: float = 10.0
    """Time between two samples of the GPUs and the host of each node; 0: none."""
    replicas_every: int = 100
    """Steps between two comparisons of what ranks should hold equal copies of; 0: none."""
    hang_seconds: int = 600
    """Without progress for so long (a step, a batch of an evaluation, a save) the run is reported as hanging,
    with every rank's stack, and ends; 0: never. It has to be longer than a save in the foreground. Before the
    first step of a start it is ten minutes at least.
    """
    profile_step: int | None = None
    """First step of a trace by torch.profiler, in the attempt's folder. Null: none."""
    profile_steps: int = 3
    """Steps of the trace."""
    price_per_gpu_hour: float | None = None
    """What one GPU costs an hour, in whatever currency, for the cost of the run. Null: not told."""

    def __post_init__(self) -> None:
        at_least(
            "monitor", 1, every=self.every, profile_step=self.profile_step, profile_steps=self.profile_steps
        )
        at_least(
            "monitor",
            0,
            system_seconds=self.system_seconds,
            replicas_every=self.replicas_every,
            hang_seconds=self.hang_seconds,
            price_per_gpu_hour=self.price_per_gpu_hour,
        )
