"""Lanes of documents of unknown length: the same global batches for any ranks and resumes. All data are
synthetic.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.data.dataset import stream as stream_module
from toolkit.data.dataset.lanes import Lane, fork_positions, plan_requests, rank_lanes
from toolkit.data.dataset.stream import DatasetStream, merge_states
from toolkit.data.dataset.tokenizer_pool import Encoded, Texts
from toolkit.data.order.permutation import SampleOrder
from toolkit.errors import CheckpointError, InputError
from toolkit.plan.types import BatchPlan, RampStage

Ints = npt.NDArray[np.int64]
State = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def little_ahead() -> Iterator[None]:
    """Patch request sizes so that documents are requested in many requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "AHEAD_TOKENS", 500)
        patch.setattr(stream_module, "REQUEST_TOKENS", 60)
        patch.setattr(stream_module, "ASSUMED_DOCUMENT_TOKENS", 10.0)
        yield


def length_of(document: int, longest: int) -> int:
    """Return lengths from 0 (held out) to ``longest``, and occasionally ten times that."""
    number = document * 2654435761 % 1009
    return number % (longest + 1) if number % 7 else 10 * longest


def tokens_of(document: int, longest: int) -> Ints:
    return document * 100_000 + np.arange(length_of(document, longest))


class Numbered:
    """Documents whose text is their number."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count: int | None = count
        self.order = SampleOrder(count, block_samples=4, seed=seed)

    def read(self, numbers: Ints) -> Texts:
        texts = [str(document).encode() for document in self.order(numbers)[1].tolist()]
        return b"".join(texts), np.cumsum([len(text) for text in texts], dtype=np.int64)

    def release(self, first_needed: int) -> None: ...

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None: ...


class PositionTokens:
    """A replacement for the tokenizer processes."""

    def __init__(self, longest: int, count: int = 2) -> None:
        self.longest, self.count = longest, count

    def submit(self, fetch: Callable[[], Texts]) -> Future[Encoded]:
        text, ends = fetch()
        done: Future[Encoded] = Future()
        documents = [int(bytes(text[first:last])) for first, last in itertools.pairwise([0, *ends.tolist()])]
        done.set_result([tokens_of(document, self.longest) for document in documents])
        return done

    def check(self) -> None: ...

    def close(self) -> None: ...


def plan_of(micro_batch: int, ranks: int, stages: tuple[RampStage, ...]) -> BatchPlan:
    return BatchPlan(
        micro_batch=micro_batch, global_batch=stages[-1].size, data_parallel=ranks, stages=stages
    )


def flat(size: int) -> tuple[RampStage, ...]:
    return (RampStage(size, 0, 0, None),)


class Run:
    """Open all ranks of a layout in this process, from ``state`` on."""

    def __init__(
        self,
        batch: BatchPlan,
        *,
        documents: int = 40,
        longest: int = 9,
        length: int = 5,
        seed: int = 0,
        workers: int = 2,
        step: int = 0,
        state: State | None = None,
        parent: State | None = None,
        data: str = "made",
    ) -> None:
        """``parent``: the fingerprint and state of the run that this one forks."""
        self.step, self._lanes = step, batch.global_batch
        self._streams = [
            DatasetStream(
                Numbered(documents, seed),
                lambda: PositionTokens(longest, workers),
                fingerprint={"data": data},  # type: ignore[arg-type, return-value]
                sequence_length=length,
                seed=seed,
                batch=batch,
                data_rank=rank,
                gather=lambda part: [part],
            )
            for rank in range(batch.data_parallel)
        ]
        for stream in self._streams:
            if state is not None:
                stream.restore(json.loads(json.dumps(state)))
            if parent is not None:
                stream.fork(**json.loads(json.dumps(parent)))
        self._steps: list[Iterator[list[Ints]]] = [stream.steps(step) for stream in self._streams]

    def next(self) -> Ints:
        """The global batch: micro-batch by micro-batch, rank by rank."""
        self.step += 1
        ranks = [next(steps) for steps in self._steps]
        return np.concatenate([micro_batch for of_all in zip(*ranks, strict=True) for micro_batch in of_all])

    def take(self, count: int) -> list[Ints]:
        return [self.next() for _ in range(count)]

    def state(self) -> State:
        return merge_states([stream.rank_state(self.step) for stream in self._streams], self._lanes)

    def parent(self) -> State:
        return {"fingerprint": self._streams[0].fingerprint(), "state": self.state()}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.close()


def same(a: list[Ints], b: list[Ints]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def rows_of(lanes: int, documents: int, longest: int, seed: int, tokens: int) -> list[Ints]:
    """Compute directly what each lane must contain: its documents one after another."""
    order = SampleOrder(documents, block_samples=4, seed=seed)
    rows = []
    for lane in range(lanes):
        parts, have = [], 0
        for number in itertools.count():
            if have >= tokens:
                break
            parts.append(tokens_of(int(order(np.array([lane + number * lanes]))[1][0]), longest))
            have += len(parts[-1])
        rows.append(np.concatenate(parts))
    return rows


@given(
    lanes=st.integers(1, 12),
    documents=st.integers(1, 200),
    longest=st.integers(1, 30),
    length=st.integers(1, 40),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=15, deadline=None)
def test_lane_concatenates_its_documents(
    lanes: int, documents: int, longest: int, length: int, seed: int
) -> None:
    """Window ``n`` of a lane begins at its token ``n * length``; no token is skipped, repeated or moved."""
    if not any(length_of(document, longest) for document in range(documents)):
        documents += 10  # some have text
    with Run(
        plan_of(lanes, 1, flat(lanes)), documents=documents, longest=longest, length=length, seed=seed
    ) as run:
        taken = run.take(6)
        places = run.state()
    rows = rows_of(lanes, documents, longest, seed, 6 * length + 1)
    for step, batch in enumerate(taken):
        assert np.array_equal(batch, np.stack([row[step * length : (step + 1) * length + 1] for row in rows]))
    for lane in range(lanes):  # where the next window begins
        order = SampleOrder(documents, block_samples=4, seed=seed)
        document = int(order(np.array([lane + places["documents"][lane] * lanes]))[1][0])
        assert tokens_of(document, longest)[places["offsets"][lane]] == rows[lane][6 * length]


@given(
    data=st.data(),
    size=st.sampled_from([1, 4, 6, 12, 24]),
    seed=st.integers(0, 2**40),
    length=st.integers(1, 20),
    longest=st.integers(1, 40),
)
@settings(max_examples=8, deadline=None)
def test_lanes_do_not_depend_on_ranks_or_resumes(
    data: st.DataObject, size: int, seed: int, length: int, longest: int
) -> None:
    """Any ranks and micro-batch that divide the batch, changed at each of three resumes."""

    def layout() -> BatchPlan:
        ranks = data.draw(st.sampled_from([ranks for ranks in range(1, size + 1) if size % ranks == 0]))
        micro = data.draw(
            st.sampled_from([micro for micro in range(1, size + 1) if size % (micro * ranks) == 0])
        )
        return plan_of(micro, ranks, flat(size))

    settings_of: dict[str, Any] = {"seed": seed, "length": length, "longest": longest, "documents": 50}
    with Run(plan_of(size, 1, flat(size)), **settings_of) as run:
        whole = run.take(12)
    parts: list[Ints] = []
    state: State | None = None
    for _ in range(3):
        with Run(
            layout(), step=len(parts), state=state, workers=data.draw(st.integers(1, 4)), **settings_of
        ) as run:
            parts += run.take(data.draw(st.integers(1, 4)))
            state = run.state()
    assert same(parts, whole[: len(parts)])


def test_64_ranks_read_the_same_samples_as_one() -> None:
    """512 lanes on 1 rank and on 64; the state takes 10 bytes per lane."""
    with Run(plan_of(512, 1, flat(512)), documents=2500) as run:
        whole, state = run.take(2), run.state()
    with Run(plan_of(4, 64, flat(512)), documents=2500) as run:
        assert same(run.take(2), whole)
        assert run.state() == state
    assert len(json.dumps(state, separators=(",", ":"))) < 10 * 512


def test_lanes_counted_per_rank_are_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: lanes assigned to ranks instead of batch indices."""

    def per_rank(batch: BatchPlan, data_rank: int) -> Ints:
        share = batch.global_batch // batch.data_parallel
        return data_rank * share + np.arange(share)

    monkeypatch.setattr(stream_module, "rank_lanes", per_rank)
    with Run(plan_of(2, 1, flat(8))) as one, Run(plan_of(2, 2, flat(8))) as two:
        assert not same(one.take(3), two.take(3))


@pytest.mark.parametrize("lanes", [1, 4, 12])
def test_every_document_once_an_epoch(lanes: int) -> None:
    count, longest = 90, 9
    with Run(plan_of(1, lanes, flat(lanes)), documents=count, longest=longest, length=50) as run:
        taken = np.stack(run.take(60))  # [step, lane, token]
        state = run.state()
    order = SampleOrder(count, block_samples=4, seed=0)
    seen: list[int] = []
    for lane in range(lanes):
        row = np.concatenate([taken[:, lane, :-1].ravel(), taken[-1, lane, -1:]])
        documents = row[np.flatnonzero(row % 100_000 == 0)] // 100_000  # each shows its first token
        expected = [lane + number * lanes for number in range(state["documents"][lane] + 1)]
        there = [
            document for document in order(np.array(expected))[1].tolist() if length_of(document, longest)
        ]
        assert documents.tolist() == there
        seen += expected
    epochs = [set(range(epoch * count, (epoch + 1) * count)) for epoch in range(3)]
    assert len(seen) == len(set(seen))
    assert set(seen) >= epochs[0]
    assert sorted(order(np.array(sorted(epochs[0])))[1].tolist()) == list(range(count))


def test_batch_ramp_continues_the_lanes() -> None:
    stages = (RampStage(4, 0, 0, 3), RampStage(8, 3, 12, None))
    with Run(plan_of(4, 1, stages)) as run:
        whole = run.take(8)
    assert [len(batch) for batch in whole] == [4, 4, 4, 8, 8, 8, 8, 8]
    parts: list[Ints] = []
    state: State | None = None
    for ranks, count in ((2, 2), (4, 2), (1, 4)):
        with Run(plan_of(1, ranks, stages), step=len(parts), state=state) as run:
            parts += run.take(count)
            state = run.state()
    assert same(parts, whole)


def test_plan_requests_fills_lanes_evenly() -> None:
    lanes = [Lane(0, 0), Lane(3, 2), Lane(0, 0)]
    lanes[2].add(np.zeros(30))
    lanes[2].next_request = 1
    wanted = plan_requests(lanes, 10.0, 20)
    assert wanted.lanes.tolist() == [0, 1, 0, 1, 1]  # the next one of each first
    assert wanted.numbers.tolist() == [0, 3, 1, 4, 5]
    assert rank_lanes(plan_of(2, 2, flat(8)), 1).tolist() == [2, 3, 6, 7]


def test_documents_without_any_text_end_the_run() -> None:
    with (
        Run(plan_of(2, 1, flat(2)), documents=1, longest=0) as run,
        pytest.raises(InputError, match="without a document"),
    ):
        run.next()


def test_state_of_another_global_batch_is_refused() -> None:
    with Run(plan_of(2, 1, flat(4))) as run:
        run.next()
        state = run.state()
    with pytest.raises(CheckpointError, match="the checkpoint has 4 lanes, this run has 8"):
        Run(plan_of(2, 1, flat(8)), step=1, state=state)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_fork_with_other_lanes_skips_no_document(read: list[int], lanes: int) -> None:
    """``read``: documents that each old lane has finished; each is in the middle of the next one."""
    former = len(read)
    unread = {number for number in range(former * 12) if number // former >= read[number % former]}
    begun = {document * former + lane: 7 for lane, document in enumerate(read)}
    places = fork_positions(read, [7] * former, lanes)
    taken = {number for number in range(former * 12) if number // lanes >= places[number % lanes, 0]}
    assert taken >= unread
    for lane, (document, offset) in enumerate(places.tolist()):
        assert offset in (0, begun.get(document * lanes + lane, 0))
    if lanes % former == 0:
        assert taken == unread, "and reads none twice"
        assert sorted(places[:, 1].tolist()) == [0] * (lanes - former) + [7] * former, (
            "documents go on where they were left"
        )


def test_fork_continues_where_its_parent_stopped() -> None:
    """With the same global batch it has the parent's next samples.

    Controls: other documents, and no saved state.
    """
    with Run(plan_of(4, 1, flat(4))) as parent:
        begun = parent.take(3)
        left = parent.parent()
        following = parent.take(2)
    assert not same(begun[:2], following)
    with Run(plan_of(2, 2, flat(4)), step=3, parent=left) as fork:
        assert same(fork.take(2), following)
    with Run(plan_of(4, 1, flat(4)), step=3, parent=left, data="other") as fork:
        assert same(fork.take(2), begun[:2])
    with Run(plan_of(8, 1, flat(8)), step=3, parent=left) as doubled:
        first = doubled.next()
    assert all(any(np.array_equal(row[:1], next_row[:1]) for row in first) for next_row in following[0]), (
        "each former lane goes on"
    )
