"""Documents in windows that are cut from one long row of tokens: where each begins, and what the cutting costs.

Every document ends with the tokenizer's end-of-text token, so where documents begin is a function of a window's tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.data.tokens.token_array import TokenSource

Ints = npt.NDArray[np.int64]

LENGTHS_AT_ONCE = 1 << 20
LOOKED_AT = 1 << 20


def position_ids(tokens: Ints, end_of_text: int) -> Ints:
    """The place of each input token in its document, counted from the window's start for a document that began before it.

    Args:
        tokens: windows int64 [n, length + 1]; the last token of each is a label only.

    Returns:
        int64 [n, length]: 0 at the start of a window and after each end-of-text, which is the last token of its document.
    """
    rows, length = len(tokens), tokens.shape[1] - 1
    row, place = np.divmod(np.flatnonzero(tokens == end_of_text), length + 1)
    followed = place < length - 1
    first = np.sort(np.concatenate([np.arange(rows) * length, (row * length + place + 1)[followed]]))
    # A running sum of ones that falls back to 0 at each first token: one pass, and documents are few beside tokens.
    steps = np.ones(rows * length, dtype=np.int64)
    steps[first[:1]] = 0
    steps[first[1:]] = 1 - np.diff(first)
    return np.cumsum(steps, out=steps).reshape(rows, length)


@dataclass(frozen=True, slots=True)
class Waste:
    """What windows of one length do to documents: shares in [0, 1].

    They are means over all places where the first window may begin: each epoch shifts its windows.
    """

    documents: int
    tokens: int
    cut: float  # of documents: in more than one window
    longer: float  # of documents: longer than a window, which no packing would keep whole
    lost: float  # of tokens: they see no beginning of their document, which an earlier window has

    def __str__(self) -> str:
        return (
            f"of {self.documents:,} documents {self.cut:.1%} are cut ({self.longer:.1%} are longer than a window), so that "
            f"{self.lost:.1%} of tokens do not see where their document begins"
        )


def waste_of(source: TokenSource, end_of_text: int, sequence_length: int) -> Waste:
    """As the first LOOKED_AT tokens of a split show it: documents are shuffled when they are written. Of the whole split, ``waste`` of
    the lengths in its index says it (``launch/prepare.py inspect=FOLDER``)."""
    tokens = np.empty((1, min(LOOKED_AT, source.tokens)), dtype=np.int64)
    source.read(np.zeros(1, dtype=np.int64), tokens)
    lengths = np.diff(np.flatnonzero(tokens[0] == end_of_text), prepend=-1)
    return waste(
        lengths if len(lengths) else np.array([tokens.size]), sequence_length
    )  # the last one, which is not whole, counts alone


def waste(lengths: npt.NDArray[Any], sequence_length: int) -> Waste:
    """Of documents of ``lengths`` tokens (integers [documents], end-of-text included), one after another, in windows of
    ``sequence_length`` inputs. O(documents), in bounded memory beside ``lengths``.

    A window's edge that comes ``j`` tokens after a document's first one (``1 <= j < length``) leaves ``length - j`` tokens without
    it; of the ``sequence_length`` places that the first edge after it can have, all are equally frequent.
    """
    size = sequence_length
    tokens = cut = longer = lost = 0
    for start in range(0, len(lengths), LENGTHS_AT_ONCE):
        some = lengths[start : start + LENGTHS_AT_ONCE].astype(np.int64)
        edges = np.clip(some - 1, 0, size)  # places of the first edge that cut the document
        tokens += int(some.sum())
        cut += int(edges.sum())
        longer += int((some > size).sum())
        lost += int((edges * some - edges * (edges + 1) // 2).sum())
    documents = len(lengths)
    return Waste(
        documents,
        tokens,
        cut / (size * max(documents, 1)),
        longer / max(documents, 1),
        lost / (size * max(tokens, 1)),
    )
