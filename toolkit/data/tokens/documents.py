"""Document boundaries in windows cut from one long row of tokens, and how often windows cut documents.

Every document ends with the tokenizer's end-of-text token, so a window's tokens alone determine the
boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.data.tokens.token_array import TokenSource

Ints = npt.NDArray[np.int64]

CHUNK_DOCUMENTS = 1 << 20
SAMPLED_TOKENS = 1 << 20


def position_ids(tokens: Ints, end_of_text: int) -> Ints:
    """Return each input token's position in its document, or in the window if that began earlier.

    Args:
        tokens: windows int64 [n, length + 1]; the last token of each is only a label.

    Returns:
        int64 [n, length]: 0 at the start of a window and after each end-of-text, which is the last token of
        its document.
    """
    rows, length = len(tokens), tokens.shape[1] - 1
    row, column = np.divmod(np.flatnonzero(tokens == end_of_text), length + 1)
    followed = column < length - 1
    first = np.sort(np.concatenate([np.arange(rows) * length, (row * length + column + 1)[followed]]))
    # A running sum of ones, reset to 0 at each first token: one pass, and documents are few compared with
    # tokens.
    steps = np.ones(rows * length, dtype=np.int64)
    steps[first[:1]] = 0
    steps[first[1:]] = 1 - np.diff(first)
    return np.cumsum(steps, out=steps).reshape(rows, length)


@dataclass(frozen=True, slots=True)
class WindowWaste:
    """Fractions, in [0, 1], of documents and tokens that windows of one length cut off.

    The fractions are means over all possible starts of the first window, since each epoch shifts its windows.

    Attributes:
        cut: share of documents in more than one window.
        longer: share of documents longer than a window, which no packing could keep whole.
        lost: share of tokens whose document began in an earlier window.
    """

    documents: int
    tokens: int
    cut: float
    longer: float
    lost: float

    def __str__(self) -> str:
        return (
            f"of {self.documents:,} documents {self.cut:.1%} are cut "
            f"({self.longer:.1%} are longer than a window), so that {self.lost:.1%} of tokens do not see "
            "where their document begins"
        )


def estimate_waste(source: TokenSource, end_of_text: int, sequence_length: int) -> WindowWaste:
    """Estimate the waste from the first SAMPLED_TOKENS tokens of a split, which is shuffled.

    ``compute_waste`` of the lengths in a split's index is exact (``launch/prepare.py inspect=FOLDER``).
    """
    tokens = np.empty((1, min(SAMPLED_TOKENS, source.tokens)), dtype=np.int64)
    source.read(np.zeros(1, dtype=np.int64), tokens)
    lengths = np.diff(np.flatnonzero(tokens[0] == end_of_text), prepend=-1)
    # Without a complete document, the incomplete one counts.
    return compute_waste(lengths if len(lengths) else np.array([tokens.size]), sequence_length)


def compute_waste(lengths: npt.NDArray[Any], sequence_length: int) -> WindowWaste:
    """Compute the waste for documents of the given lengths in windows of ``sequence_length`` inputs.

    Args:
        lengths: tokens of each document, end-of-text included, integers [documents].

    Takes O(documents) time and bounded additional memory. A window edge ``j`` tokens after a document's first
    token (``1 <= j < length``) separates ``length - j`` tokens from it; all ``sequence_length`` positions of
    the first edge are equally frequent.
    """
    size = sequence_length
    tokens = cut = longer = lost = 0
    for start in range(0, len(lengths), CHUNK_DOCUMENTS):
        part = lengths[start : start + CHUNK_DOCUMENTS].astype(np.int64)
        cuts = np.clip(part - 1, 0, size)  # positions of the first edge that cut the document
        tokens += int(part.sum())
        cut += int(cuts.sum())
        longer += int((part > size).sum())
        lost += int((cuts * part - cuts * (cuts + 1) // 2).sum())
    documents = len(lengths)
    return WindowWaste(
        documents,
        tokens,
        cut / (size * max(documents, 1)),
        longer / max(documents, 1),
        lost / (size * max(tokens, 1)),
    )
