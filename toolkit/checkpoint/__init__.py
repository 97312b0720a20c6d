"""Layout-independent checkpoints: boxes of named tensors in safetensors files, and a manifest. Imports no
engine.

    box      a rectangular part of a tensor: offset and shape (``shard.py``)
    shard    a box in the memory of a rank (``shard.py``)
    piece    a box in a file: which bytes, and their hashes (``catalog.py``)
    tile     a box that is small enough to be read, converted and written at once (``tile_reader.py``)
    catalog  the pieces of all tensors of a checkpoint, in any format (``catalog.py``)

Saving: ``online/store.py`` writes shards as pieces, and ``online/commit.py`` makes the save atomic. Loading:
``planner.py`` decides which pieces a rank reads, and ``piece_reader.py`` reads them. Formats are listed in
``source.py`` (to read) and ``offline/reshard.py`` (to write).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.checkpoint.catalog_reader import CatalogReader
    from toolkit.families.base import ModelShape


def open_reader(
    path: str | Path, namespace: str | None = None, model: ModelShape | None = None
) -> CatalogReader:
    """Open a reader for the checkpoint at ``path``, in any supported format.

    Args:
        path: A checkpoint, or a path that leads to one: a run directory or its ``checkpoints`` folder (the
            newest checkpoint is used), a folder with a vendor's tracker file, a Hugging Face folder, or the
            URL of a checkpoint in a store or of the prefix with its pointer.
        namespace: Namespace that the checkpoint's canonical names must have. None accepts any.
        model: Shape of the model, for formats that do not record it.

    Raises:
        CheckpointError: ``path`` leads to no checkpoint, or the checkpoint is damaged or has another
            namespace.
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
                "set the model options to those of the checkpoint, or choose another checkpoint: resume=PATH",
            )
        )
    return found.reader()
