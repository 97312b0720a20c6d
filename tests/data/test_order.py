"""The order of samples: bijective, without remainder, seekable, mixed; with controls that must fail."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.data.order.permutation import (
    GROUP_BLOCKS,
    LANES,
    ORDER_VERSION,
    SampleOrder,
    block_samples,
    derive_key,
    epoch_shifts,
    permute,
    root_key,
)

Ints = npt.NDArray[np.int64]
IN_FLIGHT = LANES * GROUP_BLOCKS  # blocks


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=150, deadline=None)
def test_permute_is_a_bijection_with_an_inverse(size: int, seed: int) -> None:
    key, values = root_key(seed), np.arange(size)
    image = permute(values, size, key)
    assert np.array_equal(np.sort(image), values)
    assert np.array_equal(permute(image, size, key, inverse=True), values)


@given(size=st.integers(2**20, 2**62), seed=st.integers(0, 2**63 - 1), at=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_permute_has_an_inverse_at_any_size(size: int, seed: int, at: float) -> None:
    key = root_key(seed)
    values = np.minimum(int(at * size) + np.arange(64), size - 1)
    image = permute(values, size, key)
    assert image.min() >= 0
    assert image.max() < size
    assert np.array_equal(permute(image, size, key, inverse=True), values)


@pytest.mark.parametrize("size", [2, 3, 5, 10, 17, 129, 200])
def test_every_ordered_pair_is_equally_likely(size: int) -> None:
    """chi2/df of (image of 0, image of last) over 60,000 keys; the control is a keyed rotation."""
    keys = derive_key(root_key(7), np.arange(60_000))
    ends = [np.full(len(keys), value) for value in (0, size - 1)]

    def spread(of: Callable[[Ints], Ints]) -> float:
        first, last = of(ends[0]), of(ends[1])
        counts = np.bincount(first * size + last, minlength=size * size).reshape(size, size)
        off_diagonal = counts[~np.eye(size, dtype=bool)]
        expected = len(keys) / off_diagonal.size
        return float(((off_diagonal - expected) ** 2).sum() / expected / max(off_diagonal.size - 1, 1))

    bound = 1 + 6 * (2 / max(size * (size - 1) - 1, 1)) ** 0.5  # six standard deviations of chi2/df
    assert spread(lambda values: permute(values, size, keys)) < bound
    if size > 2:
        assert spread(lambda values: (values + (keys % np.uint64(size)).astype(np.int64)) % size) > 2 * bound


SEEDS = st.integers(0, 2**31)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[int, int]:
    """Samples, samples in a block.

    Up to IN_FLIGHT blocks an epoch is one permutation; beyond, lanes and groups come in.
    """
    block = draw(st.integers(1, 5))
    border = IN_FLIGHT * block
    few, about, many = (
        st.integers(1, 300),
        st.integers(border - 3, border + 3),
        st.integers(border + 1, 3 * border),
    )
    return draw(st.one_of(few, about, many, many)), block


@given(corpus=corpora(), seed=SEEDS, epoch=st.integers(0, 10**6))
@settings(max_examples=120, deadline=None)
def test_epoch_contains_every_sample_once(corpus: tuple[int, int], seed: int, epoch: int) -> None:
    samples, block = corpus
    order = SampleOrder(samples, block_samples=block, seed=seed)
    epochs, windows = order(np.arange(samples) + epoch * samples)
    assert (epochs == epoch).all()
    assert np.array_equal(np.sort(windows), np.arange(samples))


def test_control_dropped_remainder_is_detected() -> None:
    """Control of the test above: only whole groups, as in other loaders."""
    samples, block = 3 * IN_FLIGHT + 5, 1
    order = SampleOrder(samples, block_samples=block, seed=0)
    kept = samples // IN_FLIGHT * IN_FLIGHT
    assert not np.array_equal(np.sort(order(np.arange(kept))[1]), np.arange(samples))


@given(
    samples=st.integers(1, 10**15),
    block=st.integers(1, 300),
    seed=SEEDS,
    position=st.integers(0, 10**17),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_order_can_seek_to_any_position(
    samples: int, block: int, seed: int, position: int, data: st.DataObject
) -> None:
    """A sample does not depend on how its position is reached: alone, in a range, or in any order."""
    order = SampleOrder(samples, block_samples=block, seed=seed)
    run = position + np.arange(50)
    epochs, windows = order(run)
    picked = data.draw(st.permutations(range(50)))
    again = order(run[picked])
    assert np.array_equal(again[0], epochs[picked])
    assert np.array_equal(again[1], windows[picked])
    one = order(run[17:18])
    assert (one[0][0], one[1][0]) == (epochs[17], windows[17])
    assert ((windows >= 0) & (windows < samples)).all()


def test_epochs_and_seeds_differ() -> None:
    samples = 10_000
    first, second = (SampleOrder(samples, block_samples=1, seed=seed) for seed in (1, 2))
    mine = first(np.arange(samples))[1]
    for other in (first(np.arange(samples) + samples)[1], second(np.arange(samples))[1]):
        assert (mine == other).mean() < 0.002
    shifts = epoch_shifts(1, np.arange(1000), 10**9)
    assert len(np.unique(shifts)) == 1000
    assert ((shifts >= 0) & (shifts < 10**9)).all()


def domain_spread(windows: Ints, samples: int, batch: int = 1024, domains: int = 64) -> float:
    """chi2/df of domain counts per batch on a corpus sorted by domain; 1.0 is a perfect shuffle."""
    batches = (windows * domains // samples).reshape(-1, batch)
    counts = np.stack([np.bincount(one, minlength=domains) for one in batches])
    return float(((counts - batch / domains) ** 2 / (batch / domains)).sum(axis=1).mean() / (domains - 1))


def test_sorted_corpus_is_mixed() -> None:
    """Compare at most 128 MiB in flight (4,096 blocks of 32 KiB) of a corpus four times as large with a full
    permutation. The control is a shuffle buffer of 10,000 samples.
    """
    samples = 1_048_576
    block = 64
    assert samples == 4 * IN_FLIGHT * block
    windows = SampleOrder(samples, block_samples=block, seed=5)(np.arange(samples))[1]
    assert domain_spread(windows, samples) < 1.3
    random = np.random.default_rng(0)
    assert 0.9 < domain_spread(random.permutation(samples), samples) < 1.1
    assert domain_spread(buffered(samples, 10_000), samples) > 5


def buffered(samples: int, size: int) -> Ints:
    """Samples in order through a shuffle buffer as ``datasets`` has it: each new sample replaces a random
    one, which is returned.
    """
    slots = np.random.default_rng(1).integers(0, size, samples - size).tolist()
    held, gone = list(range(size)), []
    for sample, slot in enumerate(slots, start=size):
        gone.append(held[slot])
        held[slot] = sample
    return np.array(gone + held)


def test_samples_in_flight_fit_the_bound() -> None:
    """A stretch of positions within one group of each lane touches IN_FLIGHT blocks and, where groups end
    inside a block, a few more.
    """
    samples, block = 64 * IN_FLIGHT, 4
    order = SampleOrder(samples, block_samples=block, seed=3)
    group = IN_FLIGHT * block  # positions: the lanes' first groups
    for number in (0, 1, 15):
        windows = order(number * group + np.arange(group))[1]
        assert len(np.unique(windows // block)) <= IN_FLIGHT + LANES
        assert len(np.unique(windows[::LANES] // block)) <= GROUP_BLOCKS + 1  # one lane


def test_cost_does_not_grow_with_the_data() -> None:
    peaks = []
    for samples in (10**6, 10**9, 10**12):
        SampleOrder(samples, block_samples=256, seed=0)(np.arange(4096))
        tracemalloc.start()
        SampleOrder(samples, block_samples=256, seed=0)(samples // 3 + np.arange(4096))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 2 << 20


def test_order_version_fixes_the_mapping() -> None:
    """A change that moves samples needs a new version name, since runs resume only under their own."""
    assert ORDER_VERSION == "feistel-1"
    small = SampleOrder(10, block_samples=1, seed=0)(np.arange(10))[1].tolist()
    large = SampleOrder(10**12, block_samples=256, seed=1)(np.arange(4) + 10**11)[1].tolist()
    shifts = epoch_shifts(0, np.arange(2), 1000).tolist()
    assert small == [7, 5, 6, 8, 9, 2, 3, 1, 4, 0]
    assert large == [101523897205, 543308486146, 271207654167, 168365051582]
    assert shifts == [307, 504]


@pytest.mark.parametrize(
    ("sequence_length", "token_bytes", "samples"),
    [(2048, 2, 8), (8192, 4, 1), (100_000, 4, 1), (128, 2, 128)],
)
def test_blocks_have_about_32_kib(sequence_length: int, token_bytes: int, samples: int) -> None:
    assert block_samples(sequence_length, token_bytes) == samples
