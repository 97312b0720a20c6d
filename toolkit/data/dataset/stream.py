"""Samples of one data rank from a ``datasets`` source, tokenised by processes and packed into windows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.data.dataset.documents import DocumentSource, empty_dataset_error
from toolkit.data.dataset.lanes import DocumentRequest, Lane, fork_positions, plan_requests, rank_lanes
from toolkit.data.dataset.tokenizer_pool import Encoded, TokenizerPool
from toolkit.data.order.prefetch import Prefetch
from toolkit.data.order.skipped import SkippedSamples
from toolkit.data.order.stream import FORK, compare_fingerprints, rank_batch_indices
from toolkit.errors import CheckpointError, Problem
from toolkit.plan.types import BatchPlan

Ints = npt.NDArray[np.int64]
State = dict[str, Any]
Gather = Callable[[State], list[State]]  # returns the states of all ranks on every rank

LANES_VERSION = "lanes-1"  # names the assignment of documents to lanes and their order
AHEAD_TOKENS = 1 << 18  # per rank, tokenised or requested in advance; at least two windows per lane
REQUEST_TOKENS = 1 << 15  # approximate size of a request: 30 ms of tokenising, much longer than sending it
STEPS_AHEAD = 3
ASSUMED_DOCUMENT_TOKENS = 500.0  # assumed document length until some are known
RELEASE_INTERVAL_STEPS = 64  # steps

# Entry of a fingerprint -> its key, and what to do if it differs.
_REMEDIES = {
    "order": ("data.name", f"use data.name and the version of the toolkit that wrote the checkpoint, {FORK}"),
    "data": ("data.dataset.path", f"restore the files or the revision with which the run began, {FORK}"),
    "split": ("data.dataset.split", f"write data.dataset.split={{saved}}, {FORK}"),
    "text": ("data.dataset.text", f"write data.dataset.text=[{{saved}}], {FORK}"),
    "validation": ("data.dataset.validation", f"write data.dataset.validation={{saved}}, {FORK}"),
    "tokenizer": ("data.dataset.tokenizer", f"name the tokenizer with which the run began, {FORK}"),
    "end_of_text": ("data.dataset.end_of_text", f"name the token with which the run began, {FORK}"),
    "special_tokens": (
        "data.special_tokens",
        f"write data.special_tokens=parse if the checkpoint has it, else text, {FORK}",
    ),
    "seed": ("data.shuffle_seed", f"write data.shuffle_seed={{saved}}, {FORK}"),
    "sequence_length": ("train.sequence_length", f"write train.sequence_length={{saved}}, {FORK}"),
    "lanes": ("train.global_batch", f"write train.global_batch={{saved}}, {FORK}"),
}
FILE_PREFIX = "file "  # prefix of the entries of a dataset's files, if they are few


class _Steps(Iterator[list[Ints]]):
    """The steps of a stream. Each step comes with the positions of the lanes after it."""

    def __init__(
        self, stream: DatasetStream, first_step: int, produced: Prefetch[tuple[list[Ints], Ints]]
    ) -> None:
        self._stream, self._step, self._produced = stream, first_step, produced

    def __next__(self) -> list[Ints]:
        micro_batches, positions = next(self._produced)
        self._step += 1
        self._stream._advance(self._step, positions)
        return micro_batches


class DatasetStream:
    """An endless stream. ``state`` is valid for the last step taken from the last call of ``steps``.

    Args:
        fingerprint: of the dataset, its columns and the tokenizer.
        encoders: starts the tokenizer processes; called by the first ``steps``.
        gather: exchanges the ranks' states; called on all ranks at the same step.
    """

    prefetchable = False
    skipped = SkippedSamples()  # it cannot skip

    def __init__(
        self,
        documents: DocumentSource,
        encoders: Callable[[], TokenizerPool],
        *,
        fingerprint: Mapping[str, str | int],
        sequence_length: int,
        seed: int,
        batch: BatchPlan,
        data_rank: int,
        gather: Gather,
    ) -> None:
        self._documents, self._open_encoders, self._gather = documents, encoders, gather
        self._fingerprint = {
            "order": LANES_VERSION,
            **fingerprint,
            "seed": seed,
            "sequence_length": sequence_length,
            "lanes": batch.global_batch,
        }
        self._length, self._batch, self._rank = sequence_length, batch, data_rank
        self._lanes = rank_lanes(batch, data_rank)
        self._positions = np.zeros((len(self._lanes), 2), dtype=np.int64)  # document and offset of each lane
        self._step_done = 0
        self._encoders: TokenizerPool | None = None
        self._prefetch: Prefetch[tuple[list[Ints], Ints]] | None = None

    def steps(self, first_step: int) -> Iterator[list[Ints]]:
        """Iterate over steps: lists of this rank's micro-batches int64 [micro_batch, sequence_length + 1].

        ``next`` raises errors. Without ``restore`` or ``fork`` the first step has the first documents,
        whatever its number.
        """
        assert self._encoders is None, "a stream is read once: open the data again"
        self._encoders = self._open_encoders()
        self._step_done = first_step
        chunks = ([step] for step in self._produce(first_step, self._encoders))
        self._prefetch = Prefetch(chunks, STEPS_AHEAD, name="dataset-stream")
        return _Steps(self, first_step, self._prefetch)

    def consumed(self, step: int) -> dict[str, tuple[int, float]]:
        """Return samples and epochs (the mean of this rank's lanes; nan for a stream or another step)."""
        count = self._documents.count
        epochs = (
            float(self._positions[:, 0].mean()) * self._batch.global_batch / count
            if count and step == self._step_done
            else float("nan")
        )
        return {"train": (self._batch.at(step).first_sample, epochs)}

    def fingerprint(self) -> dict[str, str | int]:
        return dict(self._fingerprint)

    def check_fingerprint(self, saved: Mapping[str, object]) -> None:
        """Raise CheckpointError naming every difference between the saved stream and this one."""
        current = self._fingerprint
        changed = [
            f"{name.removeprefix(FILE_PREFIX)} was {saved.get(name, 'absent')}"
            for name in sorted(current.keys() | saved.keys())
            if name.startswith(FILE_PREFIX) and current.get(name) != saved.get(name)
        ]
        compare_fingerprints(
            current, saved, _REMEDIES, details={"data": f" ({', '.join(changed)})"} if changed else None
        )

    def state(self, step: int) -> State:
        """Return the state of all lanes, valid on any number of ranks, and of the source."""
        return merge_states(self._gather(self.rank_state(step)), self._batch.global_batch)

    def rank_state(self, step: int) -> State:
        """Return this rank's part of the state."""
        assert step == self._step_done, (
            f"the state after {step} steps was requested, but {self._step_done} steps were taken"
        )
        self._documents.release(self._first_needed_document())
        return {
            "lanes": self._lanes.tolist(),
            "places": self._positions.tolist(),
            "source": self._documents.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Raises CheckpointError if it is of another number of lanes."""
        documents, offsets = state.get("documents", []), state.get("offsets", [])
        if not len(documents) == len(offsets) == self._batch.global_batch:
            raise CheckpointError(
                Problem(
                    "train.global_batch",
                    f"the checkpoint has {len(documents)} lanes, this run has {self._batch.global_batch}",
                    "data=dataset continues each lane, that is each index of the global batch, where it was",
                    f"continue from another checkpoint, {FORK}",
                )
            )
        self._positions = np.array([documents, offsets], dtype=np.int64).T[self._lanes]
        self._documents.restore(state.get("source", {}))

    def fork(self, fingerprint: Mapping[str, object], state: Mapping[str, Any]) -> None:
        """Continue at the positions of a run that read the same documents; otherwise begin at the first."""
        if any(
            self._fingerprint.get(name) != fingerprint.get(name)
            for name in (self._fingerprint.keys() | fingerprint.keys()) - {"lanes", "sequence_length"}
        ):
            return
        self._positions = fork_positions(state["documents"], state["offsets"], self._batch.global_batch)[
            self._lanes
        ]
        self._documents.restore(state["source"])

    def close(self) -> None:
        if self._encoders is not None:
            self._encoders.close()  # first, since a thread may wait for an answer
        if self._prefetch is not None:
            self._prefetch.close()

    def _advance(self, step: int, positions: Ints) -> None:
        self._step_done, self._positions = step, positions
        if step % RELEASE_INTERVAL_STEPS == 0:
            self._documents.release(self._first_needed_document())

    def _first_needed_document(self) -> int:
        """Return the first document that a lane of this rank still needs."""
        return int((self._positions[:, 0] * self._batch.global_batch + self._lanes).min())

    def _produce(self, first_step: int, encoders: TokenizerPool) -> Iterator[tuple[list[Ints], Ints]]:
        """Yield each step's micro-batches and the positions of the lanes after it."""
        packer = _Packer(
            self._lanes, self._positions, self._batch.global_batch, self._documents, encoders, self._length
        )
        step = first_step
        while True:
            stage = self._batch.at(step)
            shape = rank_batch_indices(
                stage.accumulation, self._batch.data_parallel, self._batch.micro_batch, self._rank
            ).shape
            rows = packer.rows(shape[0] * shape[1])  # lanes are in the order of their batch indices
            yield list(rows.reshape(*shape, self._length + 1)), packer.positions()
            step += 1


def merge_states(parts: Sequence[State], lanes: int) -> State:
    """Merge the states of all ranks; ranks of one data rank repeat each other."""
    positions = {
        lane: position
        for rank_state in parts
        for lane, position in zip(rank_state["lanes"], rank_state["places"], strict=True)
    }
    assert sorted(positions) == list(range(lanes)), "every lane belongs to a rank"
    in_order = [positions[lane] for lane in range(lanes)]
    source = min((rank_state["source"] for rank_state in parts), key=lambda source: source.get("number", 0))
    return {
        "documents": [document for document, _ in in_order],
        "offsets": [offset for _, offset in in_order],
        "source": source,
    }


class _Packer:
    """Keeps enough requests pending that every lane has tokens. Used by one thread."""

    def __init__(
        self,
        lanes: Ints,
        positions: Ints,
        all_lanes: int,
        documents: DocumentSource,
        encoders: TokenizerPool,
        length: int,
    ) -> None:
        self._numbers, self._all_lanes, self._documents, self._encoders, self._length = (
            lanes,
            all_lanes,
            documents,
            encoders,
            length,
        )
        self._lanes = [Lane(document, offset) for document, offset in positions.tolist()]
        self._target = max(2 * length + 1, AHEAD_TOKENS // len(lanes))
        self._pending_requests: deque[tuple[DocumentRequest, Future[Encoded]]] = deque()
        self._seen_documents, self._seen_tokens, self._empty = 1.0, ASSUMED_DOCUMENT_TOKENS, 0

    def rows(self, count: int) -> Ints:
        """Return the next sample of each of the first ``count`` lanes: int64 [count, length + 1]."""
        self._encoders.check()
        self._submit_requests()
        short = [lane for lane in self._lanes[:count] if lane.tokens <= self._length]
        while short:
            self._receive()
            self._submit_requests()
            short = [lane for lane in short if lane.tokens <= self._length]
        rows = np.empty((count, self._length + 1), dtype=np.int64)
        for lane, row in zip(self._lanes, rows, strict=False):
            lane.take(row)
        return rows

    def positions(self) -> Ints:
        return np.array([(lane.document, lane.offset) for lane in self._lanes], dtype=np.int64)

    def _submit_requests(self) -> None:
        """Request what the lanes lack in requests of full size, or a smaller one if none is pending."""
        mean = self._seen_tokens / self._seen_documents
        request = plan_requests(self._lanes, mean, self._target)
        max_documents = max(1, round(REQUEST_TOKENS / mean))
        spread = -(-len(request.lanes) // self._encoders.count)
        request_documents = (
            min(max_documents, max(1, spread)) if not self._pending_requests else max_documents
        )
        for first in range(0, len(request.lanes), request_documents):
            chunk = DocumentRequest(
                request.lanes[first : first + request_documents],
                request.numbers[first : first + request_documents],
            )
            if self._pending_requests and len(chunk.lanes) < request_documents:
                return
            numbers = chunk.numbers * self._all_lanes + self._numbers[chunk.lanes]
            self._pending_requests.append(
                (chunk, self._encoders.submit(partial(self._documents.read, numbers)))
            )
            for lane in chunk.lanes.tolist():
                self._lanes[lane].next_request += 1

    def _receive(self) -> None:
        requested, future = self._pending_requests.popleft()
        for lane, tokens in zip(requested.lanes.tolist(), future.result(), strict=True):
            self._lanes[lane].add(tokens)
            self._seen_tokens += len(tokens)
            self._empty = 0 if len(tokens) else self._empty + 1
        self._seen_documents += len(requested.lanes)
        if self._documents.count is not None and self._empty > 4 * self._documents.count + 1000:
            raise empty_dataset_error()
