"""Positions that a run leaves out.

pytest tests/data/test_skipped.py
"""

from __future__ import annotations

import json
import random
from itertools import islice

import numpy as np
import pytest

from tests.data.data_folders import batch_plan
from tests.data.test_mixture import mixed
from tests.data.test_stream import open_stream
from toolkit.data.custom.map_style import MapStream
from toolkit.data.custom.reader import SampleReader
from toolkit.data.order.skipped import SkippedSamples
from toolkit.data.order.stream import Stream
from toolkit.user_code import UserObject

SKIPPED = SkippedSamples(((4, 8), (9, 10), (20, 32)))


def test_positions_are_all_but_the_skipped_ones() -> None:
    every = [position for position in range(60) if not any(a <= position < b for a, b in SKIPPED.ranges)]
    assert SKIPPED.positions(np.arange(40)).tolist() == every[:40]
    assert [SKIPPED.position(number) for number in range(40)] == every[:40]
    assert SkippedSamples().positions(np.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_ranges_that_touch_or_overlap_are_joined() -> None:
    added = SKIPPED.add([(8, 9), (30, 40), (50, 60)])
    assert added.ranges == ((4, 10), (20, 40), (50, 60))
    assert SKIPPED.add([(5, 6)]) == SKIPPED


def test_state_survives_json() -> None:
    assert SkippedSamples.from_state(json.loads(json.dumps(SKIPPED.to_state()))) == SKIPPED
    assert SkippedSamples().to_state() == {}
    assert SkippedSamples.from_state({}) == SkippedSamples()


def open_any(ranks: int, rank: int, several: bool) -> Stream:
    batch = batch_plan(1, 4, ranks)
    return mixed(batch=batch, rank=rank) if several else open_stream(batch=batch, rank=rank)


def taken(skipped: SkippedSamples, ranks: int, first: int, last: int, several: bool = False) -> list[int]:
    """The first tokens, which identify them, of the samples of the steps ``first`` to ``last - 1``, in the
    order of the global batch."""
    by_rank = []
    for rank in range(ranks):
        stream = open_any(ranks, rank, several)
        stream.skipped = skipped
        steps = stream.steps(first)
        by_rank.append([[int(rows[0, 0]) for rows in next(steps)] for _ in range(last - first)])
        stream.close()
    return [
        by_rank[rank][step][micro_batch]
        for step in range(last - first)
        for micro_batch in range(4 // ranks)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_stream_takes_every_sample_but_the_skipped_ones_once(ranks: int, several: bool) -> None:
    order = open_any(1, 0, several).samples(np.arange(60))[:, 0].tolist()
    expected = [sample for at, sample in enumerate(order) if not any(a <= at < b for a, b in SKIPPED.ranges)]
    assert taken(SKIPPED, ranks, 0, 10, several) == expected[:40]
    assert taken(SKIPPED, ranks, 3, 7, several) == expected[12:28], "a run that resumes skips the same"
    assert taken(SkippedSamples(), ranks, 0, 10, several) == order[:40] != expected[:40], "control"


def test_consumed_counts_leave_out_skipped_samples() -> None:
    stream = open_any(1, 0, several=True)
    stream.skipped = SKIPPED
    for steps in (1, 2, 5, 8, 10):
        sources = [token >> 32 for token in taken(SKIPPED, 1, 0, steps, several=True)]
        counts = [count for count, _ in stream.consumed(steps).values()]
        assert counts == [sources.count(number) for number in range(3)]


class Rows:
    """A map-style dataset whose samples are their own numbers and a random number."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> tuple[int, float]:
        return number, random.random()


def test_map_style_dataset_skips_the_same_positions() -> None:
    def read(skipped: SkippedSamples, first: int, steps: int) -> list[tuple[int, float]]:
        reader = SampleReader(Rows(), UserObject("data", "mine.Rows", {}), 50, seed=5, workers=0)
        stream = MapStream(reader, 50, {}, seed=5, batch=batch_plan(2, 4, 1), data_rank=0)
        stream.restore(skipped.to_state())
        assert stream.state(first) == skipped.to_state()
        taken = list(islice(stream.steps(first), steps))
        stream.close()
        assert list(islice(stream.steps(first), steps)) == taken, "it may be read again"
        return [sample for step in taken for micro_batch in step for sample in micro_batch]

    order = read(SkippedSamples(), 0, 15)
    expected = [sample for at, sample in enumerate(order) if not any(a <= at < b for a, b in SKIPPED.ranges)]
    assert read(SKIPPED, 0, 10) == expected[:40]
    assert read(SKIPPED, 4, 6) == expected[16:40]


def test_stream_restores_what_it_skips_and_a_fork_of_the_same_data_inherits_it() -> None:
    stream = open_any(1, 0, several=False)
    assert stream.state(3) == {}
    stream.skipped = SKIPPED
    state = json.loads(json.dumps(stream.state(3)))
    again, fork, other = (open_any(1, 0, several=False) for _ in range(3))
    again.restore(state)
    fork.fork(stream.fingerprint(), state)
    other.fork({**stream.fingerprint(), "seed": 2}, state)
    assert again.skipped == fork.skipped == SKIPPED
    assert other.skipped == SkippedSamples()
