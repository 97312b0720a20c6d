"""Documents to windows, lane by lane: exact on any number of ranks though no one knows how many tokens a document will have.

How many tokens a text has is known when it is tokenised, so in one row of all documents the place of a sample would be known only
to who has tokenised everything before it. Instead each place of the global batch is a *lane* with an endless row of documents of its
own: of ``lanes`` lanes, lane ``i`` has the documents at positions ``i, i + lanes, i + 2 lanes ...`` of the run's order, and sample
``n`` of the lane begins at its token ``n * sequence_length``. Which rank a place of the batch falls to depends on the layout; what
its lane holds does not. So ranks need not talk, none tokenises what another does, and every document is in one lane, once an epoch.

The state of a lane is two numbers: the document that its next sample begins in, and where in it. Continuing tokenises that document
again and nothing before it. While the batch grows (``train.batch_ramp``) the lanes of later places wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.data.order.stream import rank_places
from toolkit.plan.types import BatchPlan

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[Any]  # uint16 or uint32


def lanes_of(batch: BatchPlan, data_rank: int) -> Ints:
    """The lanes of a data rank, in the order of its places in a global batch after the ramp: int64 [lanes of the rank].

    A smaller batch of the ramp has the first places, so these are also the lanes of every batch before.
    """
    accumulation = batch.global_batch // (batch.micro_batch * batch.data_parallel)
    return rank_places(accumulation, batch.data_parallel, batch.micro_batch, data_rank).ravel()


def fork_places(documents: Sequence[int], offsets: Sequence[int], lanes: int) -> Ints:
    """Where ``lanes`` lanes begin so that they read on from the places of ``len(documents)`` other ones: [lanes, 2], document and offset.

    Nothing unread is left out. If ``lanes`` is a multiple of the other number, nothing is read twice either, since each lane's documents
    are then all of one former lane. Otherwise all begin with the first unread document, and documents that faster lanes had already
    read come again.
    """
    former, now = len(documents), np.arange(lanes)
    unread = np.asarray(documents, dtype=np.int64) * former + np.arange(
        former
    )  # each lane's first, in the run's order
    parents = now % former if lanes % former == 0 else np.full(lanes, unread.argmin())
    firsts = np.maximum(0, -((now - unread[parents]) // lanes))
    same = firsts * lanes + now == unread[parents]
    return np.stack([firsts, np.where(same, np.asarray(offsets, dtype=np.int64)[parents], 0)], axis=1)


@dataclass(slots=True)
class Lane:
    """One lane's tokens from its next sample on.

    Attributes:
        document: the lane's document that the next sample begins in; its first is 0.
        offset: the token of that document.
        asked: the next document to ask for.
        parts: the tokens of documents ``document`` and following, as far as they have come.
        tokens: in ``parts`` from ``offset`` on; negative while the first document has not come.
    """

    document: int
    offset: int
    asked: int = field(init=False)
    parts: deque[Tokens] = field(init=False, default_factory=deque)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.asked, self.tokens = self.document, -self.offset

    def add(self, tokens: Tokens) -> None:
        """The tokens of the next document, which may be none."""
        self.parts.append(tokens)
        self.tokens += len(tokens)

    def take(self, row: Ints) -> None:
        """Fill ``row`` [sequence_length + 1] and go on by ``sequence_length``: windows share a token, a label here and an input there."""
        assert self.tokens >= len(row), f"{self.tokens} tokens for a row of {len(row)}"
        filled, at = 0, self.offset
        for part in self.parts:
            piece = part[at : at + len(row) - filled]
            row[filled : filled + len(piece)] = piece
            filled, at = filled + len(piece), 0
            if filled == len(row):
                break
        self.offset += len(row) - 1
        self.tokens -= len(row) - 1
        while self.offset >= len(self.parts[0]):  # ends: the token that both windows share is there
            self.offset -= len(self.parts.popleft())
            self.document += 1


@dataclass(frozen=True, slots=True)
class Demand:
    """Documents to tokenise next: the ``numbers[i]``-th of lane ``lanes[i]``, both [documents]; lanes are counted within the rank."""

    lanes: Ints
    numbers: Ints


def demand(lanes: Sequence[Lane], mean_tokens: float, target: int) -> Demand:
    """What to ask for, so that each lane will have about ``target`` tokens: first the next document of every lane, then the second.

    Args:
        mean_tokens: of a document, as far as seen.
    """
    expected = np.array(
        [lane.tokens + (lane.asked - lane.document - len(lane.parts)) * mean_tokens for lane in lanes]
    )
    counts = np.ceil(np.maximum(target - expected, 0) / mean_tokens).astype(np.int64)
    rounds = np.arange(int(counts.max(initial=0)))
    turns, chosen = np.nonzero(rounds[:, None] < counts[None, :])
    firsts = np.array([lane.asked for lane in lanes], dtype=np.int64)
    return Demand(chosen.astype(np.int64), firsts[chosen] + turns)
