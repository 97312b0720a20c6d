"""Several sources as one: position -> (source, place in that source), a pure function with O(1) seek and O(sources) state.

Weights hold from a phase's first sample on. A phase is cut into blocks of ``BLOCK`` slots; the slots of its first ``x`` samples that
go to the sources up to and including ``s`` number ``floor(x * W_s)``, where ``W_s`` is the exact share of these sources. So what each
source has given before a block is known without counting, and never off by more than one sample. In a block a keyed permutation
spreads the sources over the slots, so every batch has nearly its share of each; the slots that a source has got in a block take its
samples in their order, so that a source's passes follow one another however small it is.

Worked example: weights 3 and 1, block of 4 slots; source 0 has given 3n and source 1 n samples before block n; in block 0 the
permutation may send slots 0, 1, 2, 3 to 2, 3, 1, 0: then slot 1 is sample 0 of source 1, and slots 0, 2 and 3 are samples 0, 1 and 2
of source 0.

A block is at least as long as the rarest source needs to stand in it once: shorter ones could ask a source for a negative number.
The last block of a phase takes what is left as well, up to twice the length: the phase then ends with every source at a whole
prefix of its own row, and the next phase goes on from there. A source of weight 0 rests.
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
from toolkit.data.order.permutation import keyed, permute, root_key

Ints = npt.NDArray[np.int64]

# Names of this mapping, constants included: a run goes on under the one with which it began. In blocks-1 the permutation decided the
# place in the source too, so within a block the passes of a source smaller than its share of the block were mixed.
VERSIONS = ("blocks-1", "blocks-2")
VERSION = VERSIONS[-1]

BLOCK = 4096  # slots; longer where a source is rarer than that, up to 2^20


@dataclass(frozen=True, slots=True)
class Phase:
    """``weights``: of each source, in the order of the sources; only their ratios matter. At least one is above 0."""

    first_sample: int
    weights: tuple[Fraction, ...]


class Mixture:
    """Phases in the order of their samples, the first from sample 0 on, the last without end.

    Construction and every look-up cost the same wherever they are in the run.
    """

    def __init__(self, phases: Sequence[Phase], seed: int, version: str = VERSION) -> None:
        assert phases, "a mixture has a phase"
        assert version in VERSIONS, version
        assert phases[0].first_sample == 0, f"a first phase from sample {phases[0].first_sample} on"
        assert all(a.first_sample < b.first_sample for a, b in pairwise(phases)), (
            "phases in order, none empty"
        )
        self.sources = len(phases[0].weights)
        self.phases = tuple(phases)
        self.version, self._seed = version, seed
        self._firsts = np.array([phase.first_sample for phase in phases], dtype=np.int64)
        key = keyed(root_key(seed), -3)
        self._tables = [
            _Table(
                phase.weights,
                following.first_sample - phase.first_sample if following else None,
                keyed(key, number),
                in_order=version != "blocks-1",
            )
            for number, (phase, following) in enumerate(zip(phases, [*phases[1:], None], strict=True))
        ]
        lengths = [b.first_sample - a.first_sample for a, b in pairwise(phases)]
        ends = [
            table.before(np.array([length]))[0] for table, length in zip(self._tables, lengths, strict=False)
        ]
        self._given = list(
            accumulate(ends, initial=np.zeros(self.sources, dtype=np.int64))
        )  # of each source before each phase

    def under(self, version: str) -> Mixture:
        """The same mixture in the order of another version."""
        return self if version == self.version else Mixture(self.phases, self._seed, version)

    def __call__(self, positions: Ints) -> tuple[Ints, Ints]:
        """Positions since the start of training [n], in any order -> sources [n], places in the row of that source [n]."""
        numbers = np.searchsorted(self._firsts, positions, side="right") - 1
        sources, places = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            at = np.flatnonzero(numbers == number)
            which, place = self._tables[number](positions[at] - self._firsts[number])
            sources[at], places[at] = which, place + self._given[number][which]
        return sources, places

    def counts(self, position: int) -> list[int]:
        """Samples that each source has given before ``position``, in O(block)."""
        number = int(np.searchsorted(self._firsts, position, side="right")) - 1
        first, before = self._tables[number].counts(position - int(self._firsts[number]))
        return [int(count) for count in self._given[number] + first + before]


def digest(mixture: Mixture) -> str:
    """Of the phases: 16 hex digits."""
    text = repr(
        [
            (phase.first_sample, [str(weight / sum(phase.weights)) for weight in phase.weights])
            for phase in mixture.phases
        ]
    )
    return xxhash.xxh3_64_hexdigest(text.encode())


class _Table:
    """One phase: slot -> (source, place since the phase began)."""

    def __init__(
        self, weights: Sequence[Fraction], samples: int | None, key: npt.NDArray[np.uint64], *, in_order: bool
    ) -> None:
        total = sum(weights)
        assert total > 0, "some source has a weight"
        rarest = min(weight for weight in weights if weight > 0) / total
        assert rarest >= RAREST, f"a source of {rarest} of the samples"
        self._block = max(BLOCK, 1 << math.ceil(1 / rarest - 1).bit_length())
        self._samples = samples
        self._blocks = None if samples is None else max(1, samples // self._block)
        # Exact whatever the weights: Python's integers, which numpy carries as objects. There are few per chunk of positions.
        shares = [part / total for part in accumulate(weights)]
        self._denominator = math.lcm(*(share.denominator for share in shares))
        self._numerators = np.array([int(share * self._denominator) for share in shares], dtype=object)
        self._key = key
        self._in_order = in_order
        # Steps go block by block, and each is asked for its slots and for its counts.
        self._block_sources = lru_cache(maxsize=2)(self._sources_of_block)

    def ends(self, samples: Ints) -> Ints:
        """Of the first ``samples`` [n] of the phase, those that go to each source or to one before it: [n, sources]."""
        return (samples.astype(object)[:, None] * self._numerators // self._denominator).astype(np.int64)

    def before(self, samples: Ints) -> Ints:
        """What each source gives in the first ``samples`` [n], where these end with a block: [n, sources]."""
        return np.diff(self.ends(samples), axis=1, prepend=0)

    def __call__(self, slots: Ints) -> tuple[Ints, Ints]:
        blocks = slots // self._block
        if self._blocks is not None:
            blocks = np.minimum(blocks, self._blocks - 1)
        if not self._in_order:
            return self._permuted_places(slots, blocks)
        which, places = np.empty_like(slots), np.empty_like(slots)
        present, where = np.unique(blocks, return_inverse=True)
        given = np.diff(self.ends(present * self._block), axis=1, prepend=0)
        for number, block in enumerate(present.tolist()):
            at = np.flatnonzero(where == number) if len(present) > 1 else slice(None)
            sources, ranks = self._block_sources(block)
            within = slots[at] - block * self._block
            which[at] = sources[within]
            places[at] = given[number][which[at]] + ranks[within]
        return which, places

    def _sources_of_block(self, block: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int32]]:
        """Of each slot of a block: its source, and how many slots before it in the block have the same one."""
        numbers = np.array([block], dtype=np.int64)
        end = int(self._end(numbers)[0])
        slots = np.arange(block * self._block, end, dtype=np.int64)
        which = self._permuted_places(slots, np.full_like(slots, block))[0].astype(np.uint16)
        by_source = np.argsort(which, kind="stable")
        sizes = np.bincount(which, minlength=len(self._numerators))
        ranks = np.empty(len(which), dtype=np.int32)
        ranks[by_source] = np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return which, ranks

    def _permuted_places(self, slots: Ints, blocks: Ints) -> tuple[Ints, Ints]:
        """Where the permutation of each slot's block sends it, as (source, place since the phase began)."""
        present, where = np.unique(blocks, return_inverse=True)
        first = self.ends(present * self._block)
        edges = self.ends(self._end(present)) - first  # of the sources' parts of the permuted block
        parts = np.diff(edges, axis=1, prepend=0)
        given = np.diff(first, axis=1, prepend=0)
        permuted = self._permuted(slots - blocks * self._block, present, where)
        which = (permuted[:, None] >= edges[where]).sum(axis=1)
        start = (edges - parts)[where, which]
        return which, given[where, which] + permuted - start

    def counts(self, slots: int) -> tuple[Ints, Ints]:
        """What each source gives in the blocks before slot ``slots``, and in its own block before it: [sources] each."""
        block = slots // self._block if self._blocks is None else min(slots // self._block, self._blocks - 1)
        first = block * self._block
        inside = self._block_sources(block)[0][: slots - first]
        return self.before(np.array([first]))[0], np.bincount(inside, minlength=len(self._numerators))

    def _end(self, blocks: Ints) -> Ints:
        """The slot after each block."""
        ends = (blocks + 1) * self._block
        if self._samples is not None and self._blocks is not None:
            ends[blocks == self._blocks - 1] = self._samples
        return ends

    def _permuted(self, within: Ints, present: Ints, where: Ints) -> Ints:
        sizes = self._end(present) - present * self._block
        keys = keyed(self._key, present)
        permuted = np.empty_like(within)
        for size in np.unique(sizes).tolist():  # two at most: the last block of a phase may be longer
            at = np.flatnonzero(sizes[where] == size)
            permuted[at] = permute(within[at], size, keys[where[at]])
        return permuted
