"""Mixtures: exact shares, every sample once per epoch, independent of layout, resumable anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import islice
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.data_folders import PositionTokens, batch_plan
from toolkit.data.order import stream as stream_module
from toolkit.data.order.mixture import (
    MIN_BLOCK_SAMPLES,
    MIXTURE_VERSION,
    Mixture,
    MixturePhase,
    mixture_digest,
)
from toolkit.data.order.permutation import SampleOrder
from toolkit.data.order.samples import TokenWindows
from toolkit.data.order.stream import Stream, rank_positions, source_seed
from toolkit.errors import CheckpointError
from toolkit.plan.types import BatchPlan, RampStage

Ints = npt.NDArray[np.int64]
LENGTH = 7


def phases(*table: tuple[int, Sequence[float]]) -> list[MixturePhase]:
    return [
        MixturePhase(first, tuple(Fraction(str(weight)) for weight in weights)) for first, weights in table
    ]


HALF_AND_MORE = phases((0, (5, 3, 0)), (60, (1, 1, 1)), (100, (0, 0.25, 0.75)))


class Named(PositionTokens):
    """A source whose tokens identify the source."""

    def __init__(self, tokens: int, number: int) -> None:
        super().__init__(tokens)
        self.data_hash = f"{tokens} tokens of source {number}"
        self._first = number << 32

    def read(self, starts: Ints, out: Ints) -> None:
        super().read(starts, out)
        out += self._first


def mixed(
    sizes: Sequence[int] = (200, 90, 50),
    table: Sequence[MixturePhase] = HALF_AND_MORE,
    seed: int = 3,
    batch: BatchPlan | None = None,
    rank: int = 0,
) -> Stream:
    names = ["code", "maths", "web", "x", "y"][: len(sizes)]
    sources = {
        name: TokenWindows(Named(size, number), LENGTH, source_seed(seed, name))
        for number, (name, size) in enumerate(zip(names, sizes, strict=True))
    }
    return Stream(
        sources, Mixture(table, seed), seed=seed, batch=batch or batch_plan(1, 1, 1), data_rank=rank
    )


@st.composite
def tables(draw: st.DrawFn, longest: int = 3 * MIN_BLOCK_SAMPLES) -> list[MixturePhase]:
    sources = draw(st.integers(1, 5))
    weight = st.sampled_from([0, 0, 1, 2, 0.1, 0.7, 1 / 3, 1e-3, 100])
    weights = st.lists(weight, min_size=sources, max_size=sources).filter(lambda some: sum(some) > 0)
    lengths = draw(st.lists(st.integers(1, longest), max_size=3))
    firsts = np.cumsum([0, *lengths]).tolist()
    return phases(*((first, draw(weights)) for first in firsts))


SEEDS = st.integers(0, 2**40)


def test_shares_of_whole_blocks_are_exact() -> None:
    """Each source's indices have no gap, and the shares of whole blocks are exact."""
    mixture = Mixture(phases((0, (3, 1))), 0)
    for blocks in (1, 2, 7):
        assert mixture.counts(blocks * MIN_BLOCK_SAMPLES) == [
            3 * blocks * MIN_BLOCK_SAMPLES // 4,
            blocks * MIN_BLOCK_SAMPLES // 4,
        ]
    sources, places = mixture(np.arange(2 * MIN_BLOCK_SAMPLES))
    for source in range(2):
        mine = places[sources == source]
        assert np.array_equal(np.sort(mine), np.arange(len(mine)))


@given(table=tables(), seed=SEEDS, more=st.integers(1, 2 * MIN_BLOCK_SAMPLES), data=st.data())
@settings(max_examples=30, deadline=None)
def test_phases_continue_each_source(
    table: list[MixturePhase], seed: int, more: int, data: st.DataObject
) -> None:
    mixture = Mixture(table, seed)
    end = table[-1].first_sample + more
    sources, places = mixture(np.arange(end))
    firsts = [phase.first_sample for phase in table]
    for number, (first, last) in enumerate(zip(firsts, [*firsts[1:], end], strict=True)):
        before, after = mixture.counts(first), mixture.counts(last)
        assert after == np.bincount(sources[:last], minlength=mixture.sources).tolist()
        weights = table[number].weights
        for source, weight in enumerate(weights):
            mine = places[first:last][sources[first:last] == source]
            assert len(np.unique(mine)) == len(mine)
            assert not len(mine) or mine.min() >= before[source]
            assert weight > 0 or not len(mine)
            if (
                number < len(table) - 1
            ):  # a phase ends with whole prefixes, and its shares are exact but for less than a sample
                assert np.array_equal(np.sort(mine), np.arange(before[source], after[source]))
                assert abs(len(mine) - weight / sum(weights) * (last - first)) < 1
    stop = data.draw(st.integers(0, end))
    assert mixture.counts(stop) == np.bincount(sources[:stop], minlength=mixture.sources).tolist()
    picked = np.array(data.draw(st.lists(st.integers(0, end - 1), max_size=20)), dtype=np.int64)
    again = mixture(picked)
    assert np.array_equal(again[0], sources[picked])
    assert np.array_equal(again[1], places[picked])


@given(
    weights=st.lists(st.sampled_from([1, 0.1, 0.37, 1 / 3, 5e-5, 0]), min_size=2, max_size=6).filter(
        lambda some: sum(some) > 0
    ),
    seed=SEEDS,
    position=st.integers(0, 10**15),
)
@settings(max_examples=30, deadline=None)
def test_source_counts_follow_weights_at_any_position(weights: list[float], seed: int, position: int) -> None:
    """At a position no run reaches step by step: counts are the exact shares but for one block, and places
    are near them.
    """
    table = phases((0, weights))
    mixture = Mixture(table, seed)
    shares = [weight / sum(table[0].weights) for weight in table[0].weights]
    block = max([Fraction(MIN_BLOCK_SAMPLES), *(2 / share for share in shares if share)])
    for count, share in zip(mixture.counts(position), shares, strict=True):
        assert abs(count - share * position) <= block * share + 1
    sources, places = mixture(position + np.arange(100))
    for source in np.unique(sources).tolist():
        assert (
            np.abs(places[sources == source] - float(shares[source]) * position)
            <= float(block * shares[source]) + 101
        ).all()


def test_batches_have_nearly_their_shares() -> None:
    """The variance of a source's count in a batch of 256 is below that of independent draws. The control,
    sources one after another in each block, is far above.
    """
    mixture = Mixture(phases((0, (0.7, 0.2, 0.1))), 11)
    sources, _ = mixture(np.arange(64 * MIN_BLOCK_SAMPLES))

    def spread(sources: Ints) -> float:
        counts = np.stack([np.bincount(batch, minlength=3) for batch in sources.reshape(-1, 256)])
        expected = 256 * np.array([0.7, 0.2, 0.1])
        return float(((counts - expected) ** 2 / expected).sum(axis=1).mean() / 2)

    assert 0.8 < spread(sources) < 1.0  # without replacement: 1 - 256 / 4096 of independent draws'
    assert spread(np.sort(sources.reshape(-1, MIN_BLOCK_SAMPLES), axis=1).ravel()) > 20


def test_sorted_sources_are_mixed() -> None:
    """chi2/df of the domains of both sources a batch; one source alone: tests/data/test_order.py."""
    samples = 1_048_576
    sources, places = Mixture(phases((0, (7, 3))), 2)(np.arange(samples // 2))
    windows = np.empty_like(places)
    for source in range(2):
        at = sources == source
        windows[at] = SampleOrder(samples, block_samples=64, seed=source)(places[at])[1]
    counts = np.stack(
        [
            np.bincount(batch, minlength=128)
            for batch in (windows * 64 // samples + 64 * sources).reshape(-1, 1024)
        ]
    )
    expected = 1024 * np.repeat([0.7, 0.3], 64) / 64
    assert ((counts - expected) ** 2 / expected).sum(axis=1).mean() / 127 < 1.3


def test_a_rare_source_keeps_its_share() -> None:
    """A source rarer than once per block makes blocks longer. With 4,096 slots its count could be -1."""
    mixture = Mixture(phases((0, (1, 0.0001, 0.0001))), 0)
    counts = [mixture.counts(10**9), mixture.counts(10**9 + 10**6)]
    for source in (1, 2):
        assert counts[1][source] - counts[0][source] == pytest.approx(100, abs=2)
    sources, places = mixture(np.arange(10**5))
    mine = places[sources == 2]
    assert len(mine) == pytest.approx(10, abs=3)
    assert len(np.unique(mine)) == len(mine)


# -- the stream over a mixture

LAYOUTS = [(12, 1), (1, 12), (3, 4), (2, 3), (1, 1), (6, 2)]


def global_batches(streams: Sequence[Stream], first_step: int, steps: int) -> list[Ints]:
    """Return a global batch as all ranks see it: by micro-batch, then by rank."""
    ranks = [list(islice(stream.steps(first_step), steps)) for stream in streams]
    for stream in streams:
        stream.close()
    return [
        np.concatenate(
            [micro_batch for of_all_ranks in zip(*step, strict=True) for micro_batch in of_all_ranks]
        )
        for step in zip(*ranks, strict=True)
    ]


@given(
    sizes=st.lists(st.integers(LENGTH + 1, 2000), min_size=3, max_size=3),
    seed=SEEDS,
    stops=st.lists(st.tuples(st.sampled_from(LAYOUTS), st.integers(1, 4)), min_size=1, max_size=4),
)
@settings(max_examples=15, deadline=None)
def test_resume_at_any_step_with_other_ranks(
    sizes: list[int], seed: int, stops: list[tuple[tuple[int, int], int]]
) -> None:
    """A run that changes its ranks at every resume has the samples of one rank that never stopped."""
    with patch.object(
        stream_module, "ORDER_CHUNK_SAMPLES", 40
    ):  # chunks have borders in the test, and little is prefetched
        whole = global_batches(
            [mixed(sizes, seed=seed, batch=batch_plan(12, 12, 1))], 0, sum(steps for _, steps in stops)
        )
        found: list[Ints] = []
        for (micro, ranks), steps in stops:
            streams = [
                mixed(sizes, seed=seed, batch=batch_plan(micro, 12, ranks), rank=rank)
                for rank in range(ranks)
            ]
            found += global_batches(streams, len(found), steps)
    assert np.array_equal(np.stack(found), np.stack(whole))


def divisors(size: int, most: int = 1024) -> list[int]:
    return [number for number in range(1, min(size, most) + 1) if size % number == 0]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[BatchPlan, int]]]:
    """Draw a global batch and a run: the layout and the number of steps of each start."""
    size = draw(st.sampled_from([1, 6, 60, 1000, 1024, 3072]))
    starts = []
    for _ in range(draw(st.integers(1, 4))):
        ranks = draw(st.sampled_from(divisors(size)))
        starts.append(
            (batch_plan(draw(st.sampled_from(divisors(size // ranks))), size, ranks), draw(st.integers(1, 3)))
        )
    return size, starts


@given(history=histories(), first_step=st.integers(0, 10**6), table=tables(), seed=SEEDS)
@settings(max_examples=15, deadline=None)
def test_mixture_is_the_same_on_up_to_1024_changing_ranks(
    history: tuple[int, list[tuple[BatchPlan, int]]], first_step: int, table: list[MixturePhase], seed: int
) -> None:
    """Sources, epochs and numbers of each step on all ranks are those on one that never stopped. The control,
    a counter and a draw of each rank's own as loaders with per-rank mixing have them, gives other samples as
    soon as there are several ranks.
    """
    size, starts = history
    sizes = [1000 * (number + 1) for number in range(len(table[0].weights))]
    stream = mixed(sizes, table, seed)
    step = first_step
    for plan, steps in starts:
        for _ in range(steps):
            split = np.stack(
                [rank_positions(plan, step, rank) for rank in range(plan.data_parallel)]
            )  # [rank, micro-batch, sample]
            by_rank = [
                part.reshape(split.shape).transpose(1, 0, 2).ravel() for part in stream.locate(split.ravel())
            ]
            alone = stream.locate(step * size + np.arange(size))
            assert all(np.array_equal(a, b) for a, b in zip(by_rank, alone, strict=True))
            step += 1
        drawn = [
            np.sort(drawn_by_rank(seed, 64 * size, ranks)) for ranks in (1, plan.data_parallel)
        ]  # equal positions are unlikely by chance
        assert np.array_equal(*drawn) == (plan.data_parallel == 1)


def drawn_by_rank(seed: int, size: int, ranks: int) -> Ints:
    """The control's first steps: each rank draws sources with a separate generator and takes every
    ``ranks``-th sample of them.
    """
    parts = []
    for rank in range(ranks):
        sources = np.random.default_rng([seed, rank]).integers(0, 3, size // ranks)
        counts = (np.cumsum(np.eye(3, dtype=np.int64)[sources], axis=0) - 1)[np.arange(len(sources)), sources]
        parts.append(sources << 32 | counts * ranks + rank)
    return np.concatenate(parts)


@given(
    sizes=st.lists(st.integers(LENGTH + 1, 300), min_size=2, max_size=4),
    seed=SEEDS,
    weights=st.lists(st.sampled_from([1, 2, 0.3]), min_size=4, max_size=4),
)
@settings(max_examples=20, deadline=None)
def test_each_epoch_of_a_source_contains_every_sample_once(
    sizes: list[int], seed: int, weights: list[float]
) -> None:
    stream = mixed(sizes, phases((0, weights[: len(sizes)]), (1000, weights[-len(sizes) :])), seed)
    sources, epochs, numbers = stream.locate(np.arange(1000 + 2 * MIN_BLOCK_SAMPLES))
    for number, (samples, (count, taken)) in enumerate(
        zip(sizes, stream.consumed(1000 + 2 * MIN_BLOCK_SAMPLES).values(), strict=True)
    ):
        mine = sources == number
        a_epoch = samples // LENGTH
        assert count == mine.sum()
        assert taken == count / a_epoch
        for epoch in range(count // a_epoch - 1):  # the last is in the middle of a block
            assert np.array_equal(np.sort(numbers[mine & (epochs == epoch)]), np.arange(a_epoch))


def test_phase_may_begin_during_a_batch_ramp() -> None:
    stages = (RampStage(4, 0, 0, 3), RampStage(8, 3, 12, None))
    plan = BatchPlan(micro_batch=2, global_batch=8, data_parallel=2, stages=stages)
    table = phases((0, (1, 0, 0)), (plan.at(4).first_sample, (0, 0, 1)))
    streams = [mixed(table=table, batch=plan, rank=rank) for rank in range(2)]
    seen = np.concatenate(global_batches(streams, 0, 6))
    assert (seen[:, 0] >> 32).tolist() == [0] * 20 + [2] * 16
    assert {name: count for name, (count, _) in streams[0].consumed(5).items()} == {
        "code": 20,
        "maths": 0,
        "web": 8,
    }


def test_one_source_is_a_mixture_of_one_at_no_cost() -> None:
    source = TokenWindows(PositionTokens(10**6), LENGTH, 5)
    alone = Stream({"train": source}, None, seed=5, batch=batch_plan(1, 1, 1), data_rank=0)
    ids, epochs, numbers = alone.locate(np.arange(500))
    assert not ids.any()
    assert len({(e, n) for e, n in zip(epochs.tolist(), numbers.tolist(), strict=True)}) == 500
    assert "mixture" not in alone.fingerprint()
    assert alone.consumed(7) == {"train": (7, 7 / source.count)}


def test_source_seed_depends_on_its_name_alone() -> None:
    """The seed depends on the source's name and not on the other sources."""
    assert source_seed(7, None) == 7
    assert len({source_seed(seed, name) for seed in range(3) for name in ("a", "b", "c")}) == 9


def test_fingerprint_errors_name_differences() -> None:
    mine = mixed()
    assert len(str(mine.fingerprint())) < 500
    changes = {
        "data of maths": (mixed((200, 91, 50)), "data.path"),
        "mixture": (mixed(table=phases((0, (5, 3, 1)))), "data.sources"),
        "seed": (mixed(seed=4), "data.shuffle_seed"),
    }
    for name, (other, key) in changes.items():
        with pytest.raises(CheckpointError) as caught:
            mine.check_fingerprint(other.fingerprint())
        (problem,) = caught.value.problems
        assert (problem.key, problem.seen.partition("=")[0]) == (key, name)
    mine.check_fingerprint(mixed().fingerprint())
    assert mixture_digest(Mixture(phases((0, (1, 2))), 0)) == mixture_digest(
        Mixture(phases((0, (2, 4))), 1)
    ), "only ratios matter; the seed is a separate entry"


@pytest.mark.parametrize(
    ("version", "expected"),
    [("blocks-1", [2, 2, 3, 1, 248, 811, 499999999597]), ("blocks-2", [0, 0, 1, 6, 3, 4, 499999999998])],
)
def test_each_version_keeps_its_mapping(version: str, expected: list[int]) -> None:
    """A change that moves samples needs a new name, and the mapping of an old name stays: runs continue
    with the version they began with.
    """
    sources, places = Mixture(phases((0, (3, 1)), (10, (1, 1))), 0, version)(
        np.array([0, 1, 2, 9, 10, 11, 10**12])
    )
    assert sources.tolist() == [0, 1, 0, 0, 1, 1, 1]
    assert places.tolist() == expected
    assert MIXTURE_VERSION == "blocks-2"


def test_epochs_of_a_small_source_are_consecutive() -> None:
    """Each sample of a source of 10 is taken once before any is taken again; under blocks-1, the control,
    they are not.
    """

    def epochs(version: str) -> list[int]:
        stream = mixed(sizes=(10 * LENGTH + 1, 2001), table=phases((0, (1, 3))))
        stream.check_fingerprint(
            {
                **stream.fingerprint(),
                "mixture": str(stream.fingerprint()["mixture"]).replace(MIXTURE_VERSION, version),
            }
        )
        which, passes, numbers = stream.locate(np.arange(1000))
        small, taken = passes[which == 0], numbers[which == 0]
        for number in np.unique(small).tolist()[:-1]:
            assert sorted(taken[small == number].tolist()) == sorted(set(taken[small == number].tolist()))
        return small.tolist()

    found = epochs(MIXTURE_VERSION)
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] == (len(found) - 1) // 10
    old = epochs("blocks-1")
    assert old != sorted(old)


def test_resume_keeps_the_older_mixture_version() -> None:
    began = mixed()
    saved = {
        **began.fingerprint(),
        "mixture": str(began.fingerprint()["mixture"]).replace(MIXTURE_VERSION, "blocks-1"),
    }
    resumed = mixed()
    resumed.check_fingerprint(saved)
    assert resumed.fingerprint() == saved
    old = Mixture(HALF_AND_MORE, 3, "blocks-1")
    positions = np.arange(200)
    assert np.array_equal(resumed.locate(positions)[0], old(positions)[0])
    assert not np.array_equal(old(positions)[1], Mixture(HALF_AND_MORE, 3)(positions)[1]), (
        "the versions differ"
    )
    with pytest.raises(CheckpointError, match="mixture"):
        mixed().check_fingerprint({**saved, "mixture": "blocks-9 0"})
