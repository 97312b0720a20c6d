"""What the engines agree on about saved state: whether a source's optimizer state is this optimizer's."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.checkpoint.shard import MASTER, WEIGHT, StateReader, TensorKey
from toolkit.errors import CheckpointError, Problem


def resumes(reader: StateReader, kept: Iterable[str]) -> bool:
    """Whether ``reader`` has optimizer state, which then must be the states ``kept`` by this run's optimizer.

    Raises:
        CheckpointError: it is another optimizer's.
    """
    saved, kept = {key.state for key in reader.tensors} - {WEIGHT, MASTER}, set(kept)
    if saved and saved != kept:
        raise CheckpointError(
            Problem(
                key="optim.name",
                seen=f"the checkpoint has optimizer state {sorted(saved)}, this run's optimizer keeps {sorted(kept) or 'none'}",
                rule="a run resumes with the optimizer that it was saved with",
                remedy="resume with the same optim settings, or start from the weights alone: model.pretrained=EXPORTED_FOLDER",
            )
        )
    return bool(saved)


def weight_key(reader: StateReader, name: str) -> TensorKey:
    """Where the fp32 weight of ``name`` comes from: a saved weight may have been rounded from its master."""
    master = TensorKey(MASTER, name)
    return master if master in reader.tensors else TensorKey(WEIGHT, name)
