"""Damage files in tests."""

from __future__ import annotations

from pathlib import Path


def flip_byte(file: Path, at: int = -1) -> None:
    """Invert a bit of the byte ``at``, which may count from the end."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
