"""One data rank's samples of a ``datasets`` source: documents of its lanes, tokenised by processes, packed, read ahead by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.data.dataset.documents import Documents, no_documents
from toolkit.data.dataset.encode import Encoded, Encoders
from toolkit.data.dataset.lanes import Demand, Lane, demand, fork_places, lanes_of
from toolkit.data.order.fingerprint import FORK, check_same
from toolkit.data.order.prefetch import Prefetch
from toolkit.data.order.stream import rank_places
from toolkit.errors import CheckpointError, Problem
from toolkit.plan.types import BatchPlan

Ints = npt.NDArray[np.int64]
State = dict[str, Any]
Gather = Callable[[State], list[State]]  # what each rank gave, on every rank

VERSION = "lanes-1"  # names what lane has which document, and in what order
AHEAD_TOKENS = 1 << 18  # of a rank, made or under way; a lane has two windows at least
REQUEST_TOKENS = 1 << 15  # about as many a request: 30 ms of tokenising, beside which sending it is little
STEPS_AHEAD = 3
GUESSED_TOKENS = 500.0  # of a document, until some are known
PASSED_EVERY = 64  # steps

# What a fingerprint holds -> its key, and what to do where it differs.
_REMEDIES = {
    "order": ("data.name", f"use data.name and the version of the toolkit that wrote the checkpoint, {FORK}"),
    "data": ("data.dataset.path", f"bring back the files or the revision that the run began with, {FORK}"),
    "split": ("data.dataset.split", f"write data.dataset.split={{saved}}, {FORK}"),
    "text": ("data.dataset.text", f"write data.dataset.text=[{{saved}}], {FORK}"),
    "validation": ("data.dataset.validation", f"write data.dataset.validation={{saved}}, {FORK}"),
    "tokenizer": ("data.dataset.tokenizer", f"name the tokenizer that the run began with, {FORK}"),
    "end_of_text": ("data.dataset.end_of_text", f"name the token that the run began with, {FORK}"),
    "special_tokens": (
        "data.special_tokens",
        f"write data.special_tokens=parse if the checkpoint has it, else text, {FORK}",
    ),
    "seed": ("data.shuffle_seed", f"write data.shuffle_seed={{saved}}, {FORK}"),
    "sequence_length": ("train.sequence_length", f"write train.sequence_length={{saved}}, {FORK}"),
    "lanes": ("train.global_batch", f"write train.global_batch={{saved}}, {FORK}"),
}
FILE = "file "  # before the name of a file of the dataset, where they are few


class _Steps(Iterator[list[Ints]]):
    """The steps of a stream, each of which knows where its lanes are after it."""

    def __init__(
        self, stream: DatasetStream, first_step: int, made: Prefetch[tuple[list[Ints], Ints]]
    ) -> None:
        self._stream, self._step, self._made = stream, first_step, made

    def __next__(self) -> list[Ints]:
        micro_batches, places = next(self._made)
        self._step += 1
        self._stream._delivered(self._step, places)
        return micro_batches


class DatasetStream:
    """Endless. ``state`` is of the step that was taken last from the last ``steps``.

    Args:
        fingerprint: of what is read: dataset, columns, tokenizer.
        encoders: makes the tokenizer processes; called with the first ``steps``.
        gather: exchanges the ranks' states; called on all of them at the same step.
    """

    def __init__(
        self,
        documents: Documents,
        encoders: Callable[[], Encoders],
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
            "order": VERSION,
            **fingerprint,
            "seed": seed,
            "sequence_length": sequence_length,
            "lanes": batch.global_batch,
        }
        self._length, self._batch, self._rank = sequence_length, batch, data_rank
        self._lanes = lanes_of(batch, data_rank)
        self._places = np.zeros(
            (len(self._lanes), 2), dtype=np.int64
        )  # of each lane: its document, the token in it
        self._at = 0
        self._encoders: Encoders | None = None
        self._made_ahead: Prefetch[tuple[list[Ints], Ints]] | None = None

    def steps(self, first_step: int) -> Iterator[list[Ints]]:
        """This rank's micro-batches, one list a step: each int64 [micro_batch, sequence_length + 1]. An error is raised by ``next``.

        Without ``restore`` or ``fork`` the first step has the first documents, whichever step it is.
        """
        assert self._encoders is None, "documents are read once: another reader opens the data again"
        self._encoders = self._open_encoders()
        self._at = first_step
        chunks = ([step] for step in self._made(first_step, self._encoders))
        self._made_ahead = Prefetch(chunks, STEPS_AHEAD, name="dataset-stream")
        return _Steps(self, first_step, self._made_ahead)

    def consumed(self, step: int) -> dict[str, tuple[int, float]]:
        """Epochs are those of this rank's lanes on the average; not known (nan) of a stream."""
        count = self._documents.count
        epochs = (
            float(self._places[:, 0].mean()) * self._batch.global_batch / count
            if count and step == self._at
            else float("nan")
        )
        return {"train": (self._batch.at(step).first_sample, epochs)}

    def fingerprint(self) -> dict[str, str | int]:
        return dict(self._fingerprint)

    def check_fingerprint(self, saved: Mapping[str, object]) -> None:
        """Raises CheckpointError naming everything in which the stream that was saved differs from this one."""
        mine = self._fingerprint
        changed = [
            f"{name.removeprefix(FILE)} was {saved.get(name, 'absent')}"
            for name in sorted(mine.keys() | saved.keys())
            if name.startswith(FILE) and mine.get(name) != saved.get(name)
        ]
        check_same(mine, saved, _REMEDIES, details={"data": f" ({', '.join(changed)})"} if changed else None)

    def state(self, step: int) -> State:
        """Of all lanes, so that any number of ranks can go on: ten bytes a lane, and what the source itself needs."""
        return merge_states(self._gather(self.part(step)), self._batch.global_batch)

    def part(self, step: int) -> State:
        """What this rank knows of the state."""
        assert step == self._at, f"the state after {step} steps was asked for, {self._at} are taken"
        self._documents.passed(self._least())
        return {
            "lanes": self._lanes.tolist(),
            "places": self._places.tolist(),
            "source": self._documents.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError where it is not of this stream's lanes."""
        documents, offsets = state.get("documents", []), state.get("offsets", [])
        if not len(documents) == len(offsets) == self._batch.global_batch:
            raise CheckpointError(
                Problem(
                    "train.global_batch",
                    f"the checkpoint has the places of {len(documents)} lanes, here are {self._batch.global_batch}",
                    "data=dataset continues where each place of the global batch was",
                    f"continue from another checkpoint, {FORK}",
                )
            )
        self._places = np.array([documents, offsets], dtype=np.int64).T[self._lanes]
        self._documents.restore(state.get("source", {}))

    def fork(self, fingerprint: Mapping[str, object], state: Mapping[str, Any]) -> None:
        """Continue where the lanes of another run stood, if it read the same documents; else begin with the first documents."""
        if any(
            self._fingerprint.get(name) != fingerprint.get(name)
            for name in (self._fingerprint.keys() | fingerprint.keys()) - {"lanes", "sequence_length"}
        ):
            return
        self._places = fork_places(state["documents"], state["offsets"], self._batch.global_batch)[
            self._lanes
        ]
        self._documents.restore(state["source"])

    def close(self) -> None:
        if self._encoders is not None:
            self._encoders.close()  # first: a thread may wait for an answer
        if self._made_ahead is not None:
            self._made_ahead.close()

    def _delivered(self, step: int, places: Ints) -> None:
        self._at, self._places = step, places
        if step % PASSED_EVERY == 0:
            self._documents.passed(self._least())

    def _least(self) -> int:
        """The first document that some lane of this rank still needs."""
        return int((self._places[:, 0] * self._batch.global_batch + self._lanes).min())

    def _made(self, first_step: int, encoders: Encoders) -> Iterator[tuple[list[Ints], Ints]]:
        """Each step's micro-batches, and the places of the lanes after it."""
        packer = _Packer(
            self._lanes, self._places, self._batch.global_batch, self._documents, encoders, self._length
        )
        step = first_step
        while True:
            now = self._batch.at(step)
            shape = rank_places(
                now.accumulation, self._batch.data_parallel, self._batch.micro_batch, self._rank
            ).shape
            rows = packer.rows(shape[0] * shape[1])  # its first places: the lanes are in their order
            yield list(rows.reshape(*shape, self._length + 1)), packer.places()
            step += 1


def merge_states(parts: Sequence[State], lanes: int) -> State:
    """The state of a stream from the ``part`` of each rank, which may repeat each other."""
    places = {
        lane: place for part in parts for lane, place in zip(part["lanes"], part["places"], strict=True)
    }
    assert sorted(places) == list(range(lanes)), "every lane is some rank's"
    in_order = [places[lane] for lane in range(lanes)]
    source = min((part["source"] for part in parts), key=lambda source: source.get("number", 0))
    return {
        "documents": [document for document, _ in in_order],
        "offsets": [offset for _, offset in in_order],
        "source": source,
    }


class _Packer:
    """Keeps requests under way so that every lane has tokens. Belongs to one thread."""

    def __init__(
        self, lanes: Ints, places: Ints, all_lanes: int, documents: Documents, encoders: Encoders, length: int
    ) -> None:
        self._numbers, self._all_lanes, self._documents, self._encoders, self._length = (
            lanes,
            all_lanes,
            documents,
            encoders,
            length,
        )
        self._lanes = [Lane(document, offset) for document, offset in places.tolist()]
        self._target = max(2 * length + 1, AHEAD_TOKENS // len(lanes))
        self._asked: deque[tuple[Demand, Future[Encoded]]] = deque()
        self._seen_documents, self._seen_tokens, self._empty = 1.0, GUESSED_TOKENS, 0

    def rows(self, count: int) -> Ints:
        """The next sample of each of the first ``count`` lanes: int64 [count, length + 1]."""
        self._encoders.check()
        self._ask()
        short = [lane for lane in self._lanes[:count] if lane.tokens <= self._length]
        while short:
            self._receive()
            self._ask()
            short = [lane for lane in short if lane.tokens <= self._length]
        rows = np.empty((count, self._length + 1), dtype=np.int64)
        for lane, row in zip(self._lanes, rows, strict=False):
            lane.take(row)
        return rows

    def places(self) -> Ints:
        return np.array([(lane.document, lane.offset) for lane in self._lanes], dtype=np.int64)

    def _ask(self) -> None:
        """For what the lanes lack, in requests that are worth a process's while: a small one only where nothing is under way."""
        mean = self._seen_tokens / self._seen_documents
        wanted = demand(self._lanes, mean, self._target)
        at_once = max(1, round(REQUEST_TOKENS / mean))
        spread = -(-len(wanted.lanes) // self._encoders.count)
        size = min(at_once, max(1, spread)) if not self._asked else at_once
        for first in range(0, len(wanted.lanes), size):
            part = Demand(wanted.lanes[first : first + size], wanted.numbers[first : first + size])
            if self._asked and len(part.lanes) < size:
                return
            numbers = part.numbers * self._all_lanes + self._numbers[part.lanes]
            self._asked.append((part, self._encoders.submit(partial(self._documents.texts, numbers))))
            for lane in part.lanes.tolist():
                self._lanes[lane].asked += 1

    def _receive(self) -> None:
        asked, future = self._asked.popleft()
        for lane, tokens in zip(asked.lanes.tolist(), future.result(), strict=True):
            self._lanes[lane].add(tokens)
            self._seen_tokens += len(tokens)
            self._empty = 0 if len(tokens) else self._empty + 1
        self._seen_documents += len(asked.lanes)
        if self._documents.count is not None and self._empty > 4 * self._documents.count + 1000:
            raise no_documents()
