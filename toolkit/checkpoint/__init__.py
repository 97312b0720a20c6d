"""Checkpoints without a layout: named boxes of tensors in safetensors files and a manifest. Imports no engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.checkpoint.reader import CatalogReader


def open_reader(path: str | Path, namespace: str | None = None) -> CatalogReader:
    """A Reader of whatever state lies at ``path``.

    Args:
        path: a checkpoint (``.../checkpoints/step-00000123``), a run directory or its ``checkpoints`` folder (the newest
            checkpoint is taken), or a folder in Hugging Face's format (``config.json`` and safetensors).
        namespace: of canonical names that the source must have; None accepts any.

    Raises:
        CheckpointError: nothing of these is there, or what is there is damaged or of another namespace.
    """
    from toolkit.checkpoint import directory
    from toolkit.checkpoint.formats import huggingface
    from toolkit.checkpoint.reader import open_checkpoint
    from toolkit.errors import CheckpointError, Problem

    folder = Path(path).expanduser()
    checkpoint = directory.checkpoint_at(folder)
    if checkpoint is not None:
        return open_checkpoint(checkpoint, namespace)
    if (folder / huggingface.CONFIG).exists():
        return huggingface.open_folder(folder, namespace)
    raise CheckpointError(Problem(
        str(folder), f"{folder} {'holds no checkpoint' if folder.is_dir() else 'is not there'}",
        "state comes from a checkpoint folder, a run directory with a complete checkpoint, or a Hugging Face folder",
        "correct the path, or leave it out to start from the beginning"))
