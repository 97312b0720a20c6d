"""Which state a start begins with: a checkpoint of this run, of its parent, published weights, or random ones. All are readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.directory import checkpoint_at, newest
from toolkit.checkpoint.shard import Reader
from toolkit.engine.build import first_weights
from toolkit.plan.types import RunPlan
from toolkit.rundir import RunDirectory, SourceKind, resolve_source
from toolkit.train import state
from toolkit.train.state import TrainState


@dataclass(frozen=True, slots=True)
class Beginning:
    """``checkpoint`` is None where training begins at its first step."""

    reader: Reader
    state: TrainState
    checkpoint: Path | None
    words: str  # for people


def find_beginning(plan: RunPlan, directory: RunDirectory, check_data: Callable[[Mapping[str, object]], None]) -> Beginning:
    """Without collectives: every rank comes to the same answer from the same files.

    Args:
        check_data: see ``state.restore``.

    Raises:
        UserError: there is nothing to continue from, or it must not be continued from.
    """
    source = resolve_source(plan.config, newest(directory.checkpoints))
    if source.path is None:
        pretrained = plan.config.model.pretrained
        words = f"random weights of train.seed={plan.config.train.seed}" if pretrained is None else f"the weights of {pretrained}"
        return Beginning(first_weights(plan), TrainState(), None, words)
    checkpoint = checkpoint_at(source.path) or source.path
    reader = open_reader(checkpoint, state.namespace(plan))
    begins = state.restore(plan, reader, source.kind, checkpoint, check_data)
    kind = "fork of" if source.kind is SourceKind.FORK else "continues from"
    return Beginning(reader, begins, checkpoint, f"{kind} {checkpoint}: {begins.step} steps are done")

