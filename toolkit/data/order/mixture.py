"""Mix several sources: position -> (source, index in it), with O(1) seek and O(sources) state.

Weights are valid from a phase's first sample on. A phase is cut into blocks of at least ``MIN_BLOCK_SAMPLES``
slots. Of the first ``x`` samples of a phase, ``floor(x * W_s)`` go to the sources up to and including ``s``,
where ``W_s`` is the exact share of these sources. So the number of samples that each source contributes
before a block is known without counting and never off by more than one. Within a block a keyed permutation
spreads the sources over the slots, so every batch has nearly its share of each. The slots of a source within
a block use its samples in order, so that the epochs of a source follow one another however small it is.

Worked example: weights 3 and 1, blocks of 4 slots. Source 0 contributes 3n and source 1 n samples before
block n. In block 0 the permutation may send slots 0, 1, 2, 3 to 2, 3, 1, 0: then slot 1 is sample 0 of source
1, and slots 0, 2 and 3 are samples 0, 1 and 2 of source 0.

A block is long enough for the rarest source to occur in it once; shorter blocks could ask a source for a
negative number. The last block of a phase also contains the remainder, up to twice the length: the phase then
ends with every source at a whole prefix of its samples, and the next phase continues from there. A source of
weight 0 is not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.config.mixture import RAREST
from toolkit.data.order.permutation import derive_key, permute, root_key

Ints = npt.NDArray[np.int64]

# Names of this mapping, constants included: a run continues under the name with which it began. In blocks-1
# the permutation also determined the index within the source, so within a block the epochs of a small source
# were mixed.
MIXTURE_VERSIONS = ("blocks-1", "blocks-2")
MIXTURE_VERSION = MIXTURE_VERSIONS[-1]

MIN_BLOCK_SAMPLES = 4096  # slots; more if a source is rarer than that, up to 2^20


@dataclass(frozen=True, slots=True)
class MixturePhase:
    """The mixture from ``first_sample`` on, in proportion to ``weights`` (at least one is above 0)."""

    first_sample: int
    weights: tuple[Fraction, ...]


class Mixture:
    """A mixture of sources in phases, the first from sample 0 on, the last without end.

    Construction and look-ups cost the same at every position of a run.
    """

    def __init__(self, phases: Sequence[MixturePhase], seed: int, version: str = MIXTURE_VERSION) -> None:
        assert phases, "a mixture has at least one phase"
        assert version in MIXTURE_VERSIONS, version
        assert phases[0].first_sample == 0, f"a first phase from sample {phases[0].first_sample} on"
        assert all(a.first_sample < b.first_sample for a, b in pairwise(phases)), (
            "phases in order, none empty"
        )
        self.sources = len(phases[0].weights)
        self.phases = tuple(phases)
        self.version, self._seed = version, seed
        self._firsts = np.array([phase.first_sample for phase in phases], dtype=np.int64)
        key = derive_key(root_key(seed), -3)
        self._tables = [
            _PhaseTable(
                phase.weights,
                following.first_sample - phase.first_sample if following else None,
                derive_key(key, phase_index),
                in_order=version != "blocks-1",
            )
            for phase_index, (phase, following) in enumerate(zip(phases, [*phases[1:], None], strict=True))
        ]
        lengths = [b.first_sample - a.first_sample for a, b in pairwise(phases)]
        ends = [
            table.samples_before(np.array([length]))[0]
            for table, length in zip(self._tables, lengths, strict=False)
        ]
        # Samples of each source before each phase.
        self._before_phase = list(accumulate(ends, initial=np.zeros(self.sources, dtype=np.int64)))

    def with_version(self, version: str) -> Mixture:
        """Return the same mixture in the order of another version."""
        return self if version == self.version else Mixture(self.phases, self._seed, version)

    def __call__(self, positions: Ints) -> tuple[Ints, Ints]:
        """Map positions since the start of training [n] to sources [n] and indices in them [n]."""
        numbers = np.searchsorted(self._firsts, positions, side="right") - 1
        sources, indices = np.empty_like(positions), np.empty_like(positions)
        for phase_index in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == phase_index)
            source_of, index = self._tables[phase_index](positions[rows] - self._firsts[phase_index])
            sources[rows], indices[rows] = source_of, index + self._before_phase[phase_index][source_of]
        return sources, indices

    def counts(self, position: int) -> list[int]:
        """Return the samples that each source contributes before ``position``, in O(block) time."""
        phase_index = int(np.searchsorted(self._firsts, position, side="right")) - 1
        first, in_block = self._tables[phase_index].counts(position - int(self._firsts[phase_index]))
        return [int(count) for count in self._before_phase[phase_index] + first + in_block]


def mixture_digest(mixture: Mixture) -> str:
    """Hash the phases: 16 hex digits."""
    text = repr(
        [
            (phase.first_sample, [str(weight / sum(phase.weights)) for weight in phase.weights])
            for phase in mixture.phases
        ]
    )
    return xxhash.xxh3_64_hexdigest(text.encode())


class _PhaseTable:
    """One phase: slot -> (source, index since the phase began)."""

    def __init__(
        self, weights: Sequence[Fraction], samples: int | None, key: npt.NDArray[np.uint64], *, in_order: bool
    ) -> None:
        total = sum(weights)
        assert total > 0, "some source has a weight"
        rarest = min(weight for weight in weights if weight > 0) / total
        assert rarest >= RAREST, f"a source of {rarest} of the samples"
        self._block = max(MIN_BLOCK_SAMPLES, 1 << math.ceil(1 / rarest - 1).bit_length())
        self._samples = samples
        self._blocks = None if samples is None else max(1, samples // self._block)
        # Exact for all weights: Python integers, stored as numpy objects. There are few per chunk of
        # positions.
        shares = [part / total for part in accumulate(weights)]
        self._denominator = math.lcm(*(share.denominator for share in shares))
        self._numerators = np.array([int(share * self._denominator) for share in shares], dtype=object)
        self._key = key
        self._in_order = in_order
        # Consecutive steps use the same block, for its slots and for its counts.
        self._block_sources = lru_cache(maxsize=2)(self._sources_of_block)

    def cumulative_counts(self, samples: Ints) -> Ints:
        """Count the phase's first ``samples`` [n] that go to each source or an earlier one: [n, sources]."""
        return (samples.astype(object)[:, None] * self._numerators // self._denominator).astype(np.int64)

    def samples_before(self, samples: Ints) -> Ints:
        """Count each source's samples in the first ``samples`` [n], which end with a block: [n, sources]."""
        return np.diff(self.cumulative_counts(samples), axis=1, prepend=0)

    def __call__(self, slots: Ints) -> tuple[Ints, Ints]:
        blocks = slots // self._block
        if self._blocks is not None:
            blocks = np.minimum(blocks, self._blocks - 1)
        if not self._in_order:
            return self._locate_by_permutation(slots, blocks)
        source_of, indices = np.empty_like(slots), np.empty_like(slots)
        present, inverse = np.unique(blocks, return_inverse=True)
        before_block = np.diff(self.cumulative_counts(present * self._block), axis=1, prepend=0)
        for number, block in enumerate(present.tolist()):
            rows = np.flatnonzero(inverse == number) if len(present) > 1 else slice(None)
            sources, ranks = self._block_sources(block)
            within = slots[rows] - block * self._block
            source_of[rows] = sources[within]
            indices[rows] = before_block[number][source_of[rows]] + ranks[within]
        return source_of, indices

    def _sources_of_block(self, block: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int32]]:
        """Return each slot's source in a block, and its rank among the block's slots of that source."""
        numbers = np.array([block], dtype=np.int64)
        end = int(self._end(numbers)[0])
        slots = np.arange(block * self._block, end, dtype=np.int64)
        source_of = self._locate_by_permutation(slots, np.full_like(slots, block))[0].astype(np.uint16)
        by_source = np.argsort(source_of, kind="stable")
        sizes = np.bincount(source_of, minlength=len(self._numerators))
        ranks = np.empty(len(source_of), dtype=np.int32)
        ranks[by_source] = np.arange(len(source_of)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return source_of, ranks

    def _locate_by_permutation(self, slots: Ints, blocks: Ints) -> tuple[Ints, Ints]:
        """Apply the permutation of each slot's block: (source, index since the phase began)."""
        present, inverse = np.unique(blocks, return_inverse=True)
        first = self.cumulative_counts(present * self._block)
        # Edges of the sources' ranges in the permuted block.
        edges = self.cumulative_counts(self._end(present)) - first
        parts = np.diff(edges, axis=1, prepend=0)
        before_block = np.diff(first, axis=1, prepend=0)
        permuted = self._permuted(slots - blocks * self._block, present, inverse)
        source_of = (permuted[:, None] >= edges[inverse]).sum(axis=1)
        start = (edges - parts)[inverse, source_of]
        return source_of, before_block[inverse, source_of] + permuted - start

    def counts(self, slots: int) -> tuple[Ints, Ints]:
        """Count samples before slot ``slots``, in earlier blocks and in its block: [sources] each."""
        block = slots // self._block if self._blocks is None else min(slots // self._block, self._blocks - 1)
        first = block * self._block
        inside = self._block_sources(block)[0][: slots - first]
        return self.samples_before(np.array([first]))[0], np.bincount(inside, minlength=len(self._numerators))

    def _end(self, blocks: Ints) -> Ints:
        """Return the slot after each block."""
        ends = (blocks + 1) * self._block
        if self._samples is not None and self._blocks is not None:
            ends[blocks == self._blocks - 1] = self._samples
        return ends

    def _permuted(self, within: Ints, present: Ints, inverse: Ints) -> Ints:
        sizes = self._end(present) - present * self._block
        keys = derive_key(self._key, present)
        permuted = np.empty_like(within)
        for size in np.unique(sizes).tolist():  # at most two: the last block of a phase may be longer
            rows = np.flatnonzero(sizes[inverse] == size)
            permuted[rows] = permute(within[rows], size, keys[inverse[rows]])
        return permuted
