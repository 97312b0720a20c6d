"""Read the weights of ``model.pretrained``, a folder or hub id in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.formats.huggingface.source import open_state_dict
from toolkit.checkpoint.shard import MASTER, WEIGHT, Shard, StateReader
from toolkit.families import get_family
from toolkit.models.hugging_face import hub_folder, load_module
from toolkit.models.initial_weights import InitialWeights
from toolkit.plan.types import RunPlan


def open_pretrained(plan: RunPlan) -> StateReader:
    """Open ``model.pretrained``; a hub id is downloaded to Hugging Face's cache first.

    Ranks read only their shards. A model without a family whose tensors transformers has to rename or convert
    is loaded whole on every rank first.

    Raises:
        InputError: it cannot be downloaded, or transformers cannot load it.
        CheckpointError: its weights are missing, damaged or of another family.
    """
    name = plan.config.model.pretrained
    assert name is not None, "the plan has pretrained weights"
    folder = hub_folder(name)
    if plan.shape is not None:
        return _Weights(open_reader(folder, get_family(plan.shape.family).namespace, plan.shape))
    reader = _Weights(open_state_dict(folder).reader())
    shapes = {key.name: info.shape for key, info in reader.tensors.items()}
    if all(shapes.get(spec.name) == spec.shape for spec in plan.parameters):
        return reader
    return InitialWeights(plan, load_module)


class _Weights:
    """A ``Reader`` of the weights only: a new run starts with a new optimizer."""

    scalars: Mapping[str, object] = {}

    def __init__(self, reader: StateReader) -> None:
        self._reader = reader
        self.tensors = {key: info for key, info in reader.tensors.items() if key.state in (WEIGHT, MASTER)}

    def read(self, shards: Sequence[Shard]) -> None:
        self._reader.read(shards)
