"""Read the weights of ``model.pretrained``, a folder or hub id in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.shard import MASTER, WEIGHT, Reader, Shard
from toolkit.errors import InputError, Problem
from toolkit.families import get_family
from toolkit.plan.types import RunPlan


def open_pretrained(plan: RunPlan) -> Reader:
    """Open ``model.pretrained``; a hub id is downloaded to Hugging Face's cache first.

    Raises:
        InputError: it cannot be downloaded.
        CheckpointError: its weights are missing, damaged or of another family.
    """
    name = plan.config.model.pretrained
    assert name is not None, "the plan has pretrained weights"
    assert plan.shape is not None, "pretrained weights are of a family"
    folder = Path(name).expanduser()
    return _Weights(
        open_reader(
            folder if folder.is_dir() else _download(name),
            get_family(plan.shape.family).namespace,
            plan.shape,
        )
    )


class _Weights:
    """A ``Reader`` of the weights only: a new run starts with a new optimizer."""

    scalars: Mapping[str, object] = {}

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.tensors = {key: info for key, info in reader.tensors.items() if key.state in (WEIGHT, MASTER)}

    def read(self, shards: Sequence[Shard]) -> None:
        self._reader.read(shards)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=["config.json", "*.safetensors", "*.safetensors.index.json"],
                ignore_patterns=["*/*"],  # optimizer state, other formats
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).splitlines()[0]
        raise InputError(
            Problem(
                "model.pretrained",
                f"model.pretrained={name}: no such folder, and the hub reports: {why}",
                "model.pretrained is a folder in Hugging Face's format with safetensors, or a hub id",
                "write model.pretrained=./folder or model.pretrained=organisation/model",
            )
        ) from error
