"""The values of ``train.activation_checkpointing``: which activations the backward pass recomputes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from toolkit.errors import ConfigError, Problem

KEY = "train.activation_checkpointing"
# Earlier versions had a boolean, which is in the saved configurations of older runs.
BOOLEANS = {"true": "full", "false": "none"}


class RecomputationMode(Enum):
    none = "none"
    selective = "selective"
    full = "full"


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The activations that the backward pass recomputes.

    Attributes:
        mode: ``full``: blocks whole, from their input; ``selective``: the cheap operators of all blocks.
        every: ``full`` recomputes the blocks 0, ``every``, 2 ``every``, ...; 1: all blocks.
    """

    mode: RecomputationMode
    every: int = 1

    @property
    def full(self) -> bool:
        return self.mode is RecomputationMode.full

    @property
    def selective(self) -> bool:
        return self.mode is RecomputationMode.selective

    def count(self, blocks: Iterable[int]) -> int:
        """Return how many of ``blocks``, numbered through the whole model, are recomputed whole."""
        return sum(block % self.every == 0 for block in blocks) if self.full else 0


def normalize(value: object) -> str:
    """``value`` as text; the booleans of older configurations become ``full`` and ``none``."""
    text = str(value).strip().lower()
    return BOOLEANS.get(text, text)


def parse_recomputation(value: object) -> Recomputation:
    """Parse ``none``, ``selective``, ``full`` or a number N.

    Raises:
        ConfigError: it is none of these.
    """
    text = normalize(value)
    if text in RecomputationMode.__members__:
        return Recomputation(RecomputationMode[text])
    if text.isdigit() and int(text) > 0:
        return Recomputation(RecomputationMode.full, int(text))
    raise ConfigError(
        Problem(
            KEY,
            f"{KEY}={value}",
            "no block is recomputed, only cheap operators, every block, or every N-th block",
            f"write {KEY}=none, selective, full or a number such as 2",
        )
    )
