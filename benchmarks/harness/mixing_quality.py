"""Measure how well an order mixes a corpus that is sorted by domain.

The figure is chi2/df of domain counts per batch of 1,024 samples; 1.0 is perfect. For a corpus of 4 million
windows of 4 KiB (16 GB) orders are computed, not read: this toolkit's, a full permutation and a shuffle
buffer of 10,000.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from harness.corpus import DOMAINS

Ints = npt.NDArray[np.int64]

BATCH = 1024


def chi2_per_df(domains: Ints, shares: npt.NDArray[np.float64]) -> float:
    """``domains`` [samples] are in order, in whole batches; ``shares`` [domains] are those of the corpus."""
    batches = domains[: len(domains) // BATCH * BATCH].reshape(-1, BATCH)
    counts = np.stack([np.bincount(batch, minlength=len(shares)) for batch in batches])
    expected = shares * BATCH
    return float(((counts - expected) ** 2 / expected).sum(axis=1).mean() / (len(shares) - 1))


def at_scale() -> dict[str, float]:
    """Return chi2/df of the first batches after a quarter of the epoch."""
    from toolkit.data.order.permutation import SampleOrder, block_samples

    samples, batches, seed = 4_000_000, 200, 0
    shares = np.full(DOMAINS, 1 / DOMAINS)
    first, taken = samples // 4, batches * BATCH
    _, ours = SampleOrder(samples, block_samples=block_samples(2048, 2), seed=seed)(
        np.arange(first, first + taken)
    )
    permuted = np.random.default_rng(seed).permutation(samples)[:taken]
    buffered = np.fromiter(buffer_order(first, taken, 10_000, seed), dtype=np.int64, count=taken)
    orders = {"this toolkit": ours, "full permutation": permuted, "buffer of 10,000": buffered}
    return {name: chi2_per_df(order * DOMAINS // samples, shares) for name, order in orders.items()}


def buffer_order(first: int, samples: int, size: int, seed: int) -> Iterator[int]:
    """Return the order of a shuffle buffer that begins full at ``first`` and draws at random."""
    kept = list(range(first, first + size))
    for drawn, position in enumerate(np.random.default_rng(seed).integers(0, size, samples).tolist()):
        yield kept[position]
        kept[position] = first + size + drawn
