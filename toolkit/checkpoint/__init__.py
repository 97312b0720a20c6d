"""Checkpoints without a layout: named boxes of tensors in safetensors files and a manifest. Imports no engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.checkpoint.reader import CatalogReader
    from toolkit.families.base import ModelShape


def open_reader(
    path: str | Path, namespace: str | None = None, model: ModelShape | None = None
) -> CatalogReader:
    """A Reader of whatever state lies at ``path``, whoever wrote it.

    Args:
        path: a checkpoint in any format that ``source.py`` knows, or what points to one: a run directory or its ``checkpoints``
            folder (the newest checkpoint is taken), a folder with a vendor's tracker file, a Hugging Face folder.
        namespace: of canonical names that the source must have; None accepts any.
        model: what the model is, for formats that do not say it.

    Raises:
        CheckpointError: nothing of these is there, or what is there is damaged or of another namespace.
    """
    from toolkit.checkpoint.source import open_source
    from toolkit.errors import CheckpointError, Problem

    found = open_source(path, model)
    if namespace is not None and found.namespace != namespace:
        raise CheckpointError(
            Problem(
                str(found.folder),
                f"{found.folder} has namespace={found.namespace}",
                f"this run's tensors have the names of {namespace}",
                "describe the model that the checkpoint was made of, or name another checkpoint: resume=PATH",
            )
        )
    return found.reader()
