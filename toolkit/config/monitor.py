"""The section ``monitor`` of the schema. The string below a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from toolkit.config.checks import at_least


class WandbMode(Enum):
    offline = "offline"
    online = "online"
    disabled = "disabled"


class OnWrongComputation(Enum):
    """What follows if ranks compute different values from the same micro-batch."""

    alert = "alert"
    stop = "stop"
    leave = "leave"


@dataclass(kw_only=True, slots=True)
class MonitorConfig:
    every: int = 10
    """Steps between two rows on the console. metrics.jsonl has every step."""
    wandb: WandbMode = WandbMode.offline
    """offline, online or disabled."""
    project: str = "toolkit"
    """W&B project."""
    entity: str | None = None
    """W&B user or team. Null: your default."""
    group: str | None = None
    """W&B group, for example of a sweep. Null: the id of the run, which groups the W&B runs of its nodes."""
    tags: list[str] = field(default_factory=list)
    """W&B tags."""
    prompt: str | None = None
    """Text to continue with the model after the last step. Null: none."""
    ledger: bool = True
    """Write the time breakdown of each step on all ranks to ledger.jsonl."""
    probe: bool = True
    """Before the first step, measure latency and bandwidth of the collectives of each axis (about a second).
    """
    system_seconds: float = 10.0
    """Seconds between two samples of the GPUs and the host of each node; 0: none."""
    replicas_every: int = 100
    """Steps between two comparisons of the replicas of weights and states; 0: never."""
    computation_every: int = 0
    """Steps between two checks in which all data ranks compute the same micro-batch and compare the bits;
    0: never. A check costs about a forward pass of one micro-batch.
    """
    on_wrong_computation: OnWrongComputation = OnWrongComputation.alert
    """What follows a difference: alert, stop (end the run without saving and name the hosts to exclude), or
    leave (an elastic run continues without the faulty nodes, from a checkpoint before the fault).
    """
    hang_seconds: int = 600
    """Seconds without progress (a step, a batch of an evaluation, a save) after which a run is reported as
    hanging, with the stacks of all ranks, and ends; 0: never. It must be longer than a foreground save.
    Before the first step of an attempt it is at least ten minutes.
    """
    profile_step: int | None = None
    """First step of a trace by torch.profiler, in the attempt's folder. Null: none."""
    profile_steps: int = 3
    """Steps of the trace."""
    sinks: dict[str, Any] = field(default_factory=dict)
    """NAME: {target: my.package.Sink, arguments: {...}}, given as +monitor.sinks.NAME.target=...: further
    destinations of metrics, on rank 0.
    """
    price_per_gpu_hour: float | None = None
    """Price of one GPU per hour, in any currency, for the cost of the run. Null: no cost is reported."""

    def __post_init__(self) -> None:
        at_least(
            "monitor", 1, every=self.every, profile_step=self.profile_step, profile_steps=self.profile_steps
        )
        at_least(
            "monitor",
            0,
            system_seconds=self.system_seconds,
            replicas_every=self.replicas_every,
            computation_every=self.computation_every,
            hang_seconds=self.hang_seconds,
            price_per_gpu_hour=self.price_per_gpu_hour,
        )
