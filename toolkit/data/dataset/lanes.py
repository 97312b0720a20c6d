"""Pack documents into windows lane by lane, reproducibly on any number of ranks without known token counts.

The number of tokens of a text is known only after tokenising it, so in one row of all documents a sample
could be located only by tokenising everything before it. Instead each index of the global batch is a *lane*
with its own endless row of documents: of ``lanes`` lanes, lane ``i`` has the documents at positions ``i, i +
lanes, i + 2 lanes ...`` of the run's order, and sample ``n`` of the lane begins at its token ``n *
sequence_length``. The rank of a lane depends on the layout, its content does not. So ranks need no
communication, no document is tokenised twice, and every document is in one lane, once per epoch.

The state of a lane is two numbers: the document in which its next sample begins, and the token within it.
Resuming tokenises that document again and nothing before it. While the batch grows (``train.batch_ramp``)
later lanes wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.data.order.stream import rank_batch_indices
from toolkit.plan.types import BatchPlan

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[Any]  # uint16 or uint32


def rank_lanes(batch: BatchPlan, data_rank: int) -> Ints:
    """Return a data rank's lanes in the order of its indices in the final global batch: int64 [lanes].

    A smaller batch of the ramp has the first indices, so the same lanes serve every earlier batch.
    """
    return rank_batch_indices(batch.accumulation, batch.data_parallel, batch.micro_batch, data_rank).ravel()


def fork_positions(documents: Sequence[int], offsets: Sequence[int], lanes: int) -> Ints:
    """Return where ``lanes`` new lanes continue from the positions of ``len(documents)`` old lanes.

    No unread document is skipped. If ``lanes`` is a multiple of the old number, none is read twice either,
    since each new lane's documents then belong to one old lane. Otherwise all lanes begin with the first
    unread document, and documents that faster lanes had already read are repeated.

    Returns:
        Document and offset of each lane, int64 [lanes, 2].
    """
    old_lanes, lane_numbers = len(documents), np.arange(lanes)
    # Each old lane's first unread document, in the run's order.
    unread = np.asarray(documents, dtype=np.int64) * old_lanes + np.arange(old_lanes)
    source_lanes = lane_numbers % old_lanes if lanes % old_lanes == 0 else np.full(lanes, unread.argmin())
    firsts = np.maximum(0, -((lane_numbers - unread[source_lanes]) // lanes))
    continues = firsts * lanes + lane_numbers == unread[source_lanes]
    return np.stack(
        [firsts, np.where(continues, np.asarray(offsets, dtype=np.int64)[source_lanes], 0)], axis=1
    )


@dataclass(slots=True)
class Lane:
    """The tokens of one lane from its next sample on.

    Attributes:
        document: the lane's document in which the next sample begins; the first is 0.
        offset: the token of that document at which the sample begins.
        next_request: the next document to request.
        parts: the tokens of the documents received so far, from ``document`` on.
        tokens: number of tokens in ``parts`` from ``offset`` on; negative before the first document is
            received.
    """

    document: int
    offset: int
    next_request: int = field(init=False)
    parts: deque[Tokens] = field(init=False, default_factory=deque)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.next_request, self.tokens = self.document, -self.offset

    def add(self, tokens: Tokens) -> None:
        """Append the tokens of the next document, which may be empty."""
        self.parts.append(tokens)
        self.tokens += len(tokens)

    def take(self, row: Ints) -> None:
        """Fill ``row`` [sequence_length + 1] and advance by ``sequence_length``: windows share one token."""
        assert self.tokens >= len(row), f"{self.tokens} tokens for a row of {len(row)}"
        filled, start = 0, self.offset
        for document_tokens in self.parts:
            chunk = document_tokens[start : start + len(row) - filled]
            row[filled : filled + len(chunk)] = chunk
            filled, start = filled + len(chunk), 0
            if filled == len(row):
                break
        self.offset += len(row) - 1
        self.tokens -= len(row) - 1
        while self.offset >= len(self.parts[0]):  # ends: the token that both windows share is still in parts
            self.offset -= len(self.parts.popleft())
            self.document += 1


@dataclass(frozen=True, slots=True)
class DocumentRequest:
    """Documents to tokenise: number ``numbers[i]`` of this rank's lane ``lanes[i]``, int64 [documents]."""

    lanes: Ints
    numbers: Ints


def plan_requests(lanes: Sequence[Lane], mean_tokens: float, target: int) -> DocumentRequest:
    """Choose requests that give each lane about ``target`` tokens: one document per lane, then the next.

    Args:
        mean_tokens: mean length of the documents seen so far.
    """
    expected = np.array(
        [lane.tokens + (lane.next_request - lane.document - len(lane.parts)) * mean_tokens for lane in lanes]
    )
    counts = np.ceil(np.maximum(target - expected, 0) / mean_tokens).astype(np.int64)
    rounds = np.arange(int(counts.max(initial=0)))
    round_numbers, chosen = np.nonzero(rounds[:, None] < counts[None, :])
    firsts = np.array([lane.next_request for lane in lanes], dtype=np.int64)
    return DocumentRequest(chosen.astype(np.int64), firsts[chosen] + round_numbers)
