"""Checkpoints that the vendors' own functions write and read, from and into this toolkit's engines. Called on every rank.

Files of the vendors are made here for our readers, and files of our writers are opened here, so that neither is judged by our own code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def vendor_save(engine: Any, folder: Path) -> None:
    """DeepSpeed's ``save_checkpoint``, of ``DeepSpeedEngine`` and ``DeepSpeedPipelineEngine``: ``folder/latest`` and
    ``folder/global_stepN``."""
    assert engine._ds.save_checkpoint(str(folder))


def vendor_load(engine: Any, folder: Path, *, universal: bool = False) -> None:
    """DeepSpeed's ``load_checkpoint``, into an engine that nothing was loaded into yet.

    Args:
        universal: as a run has it with ``checkpoint.load_universal``.
    """
    engine._ds._config.load_universal_checkpoint = universal
    path, _ = engine._ds.load_checkpoint(str(folder))
    assert path is not None, f"DeepSpeed finds nothing in {folder}"
