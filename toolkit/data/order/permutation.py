"""The order of samples as a pure function: position -> (epoch, window). It has no state and needs no memory.

    position -> epoch and index in it -> lane -> group of blocks -> keyed permutation within the group
             -> index in the row of shuffled blocks -> keyed permutation of blocks -> window

Windows are stored in blocks of 32 KiB. Each epoch permutes the blocks and cuts the row of shuffled blocks
into ``LANES`` lanes, and each lane into groups of at most ``GROUP_BLOCKS`` blocks. Position ``p`` of an epoch
belongs to lane ``p % LANES``, and samples are permuted one by one within its group. So at any moment samples
come from 4,096 blocks (128 MiB). That is enough to mix a corpus sorted by domain: a batch of 1,024 samples
comes from about as many blocks as it has samples (with 128 blocks of 1 MiB the variance of its domain counts
is 7 times as large). It is also local enough for object storage: a rank whose indices in the batch fall on
few lanes reads only their blocks. A data set of at most that size is one lane with one group: a full
permutation.

Lanes and groups are cut evenly and need not end at a block boundary, so every window occurs in an epoch
exactly once. Permutations are alternating Feistel networks on the next power of two; a result outside the
range is permuted again until it is inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

# The name of this mapping, constants included: a run resumes only under the name with which it started.
ORDER_VERSION = "feistel-1"

BLOCK_BYTES = 32 << 10
GROUP_BLOCKS = 64
LANES = 64
ROUNDS = 6  # half rounds, alternating
SMALL_ROUNDS = 24  # below 8 bits: narrow halves mix slowly, and 6 rounds leave a visible bias

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def mix(values: UInt64s) -> UInt64s:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014) element by element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def derive_key(key: UInt64s, value: npt.NDArray[np.int64] | int) -> UInt64s:
    """Derive a new key from a key and a number, element by element."""
    return mix((key + np.uint64(_GOLDEN)) ^ mix(np.atleast_1d(value).astype(np.uint64) + np.uint64(_GOLDEN)))


def root_key(seed: int) -> UInt64s:
    """Return the key of ``seed`` with shape [1]: arrays wrap around silently, numpy scalars warn."""
    return mix(np.array([seed & _MASK64], dtype=np.uint64) + np.uint64(_GOLDEN))


def _scramble(values: UInt64s, key: UInt64s) -> UInt64s:
    """Apply the round function: 32 bits from a half and a round key. Each multiplication keeps its high
    bits.
    """
    values = (values ^ key) * np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(32)
    values *= np.uint64(0x94D049BB133111EB)
    values >>= np.uint64(32)
    return values


def permute(values: Ints, size: int, key: UInt64s, *, inverse: bool = False) -> Ints:
    """Apply a keyed bijection of ``0 .. size`` element by element, with one key per value or one for all."""
    bits = max(size - 1, 0).bit_length()
    if bits == 0:
        return values.copy()
    low_bits = (bits + 1) // 2
    low_mask, high_mask, shift = (
        np.uint64((1 << low_bits) - 1),
        np.uint64((1 << (bits - low_bits)) - 1),
        np.uint64(low_bits),
    )
    count = ROUNDS if bits >= 8 else SMALL_ROUNDS
    rounds = range(count - 1, -1, -1) if inverse else range(count)

    def network(inputs: UInt64s, key: UInt64s) -> UInt64s:
        high, low = inputs >> shift, inputs & low_mask
        for number in rounds:
            round_constant = np.uint64((number + 1) * _GOLDEN & _MASK64)
            if number % 2:
                high = high ^ (_scramble(low, key + round_constant) & high_mask)
            else:
                low = low ^ (_scramble(high, key + round_constant) & low_mask)
        return (high << shift) | low

    end = np.uint64(size)
    key = np.broadcast_to(key, values.shape)
    permuted = network(values.astype(np.uint64), key)
    outside = np.flatnonzero(permuted >= end)
    while outside.size:
        result = network(permuted[outside], key[outside])
        permuted[outside] = result
        outside = outside[result >= end]
    return permuted.astype(np.int64)


def _split_evenly(indices: Ints, total: Ints, parts: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut ``total`` indices into ``parts`` contiguous parts; the first ones may be larger by one.

    Returns for each index: the number of its part, its index in the part, the size of the part.
    """
    size = total // parts
    larger = total % parts
    in_larger = indices < larger * (size + 1)
    rest = indices - larger * (size + 1)
    part = np.where(in_larger, indices // (size + 1), larger + rest // np.maximum(size, 1))
    within = np.where(in_larger, indices % (size + 1), rest % np.maximum(size, 1))
    return part, within, size + in_larger


def epoch_shifts(seed: int, epochs: Ints, tokens: int) -> Ints:
    """Return the token at which each epoch's first window starts, so that windows do not repeat."""
    return (derive_key(derive_key(root_key(seed), -2), epochs) % np.uint64(tokens)).astype(np.int64)


def block_samples(sequence_length: int, bytes_per_token: int) -> int:
    """Return the number of windows in a block."""
    return max(1, BLOCK_BYTES // (sequence_length * bytes_per_token))


class SampleOrder:
    """The order of ``samples`` windows, epoch after epoch, for any number of ranks.

    Construction and look-ups cost the same for 10 samples and for 10^12.
    """

    def __init__(self, samples: int, *, block_samples: int, seed: int) -> None:
        assert samples >= 1, f"{samples} samples"
        assert block_samples >= 1, f"{block_samples} samples in a block"
        self.samples = samples
        self._block = block_samples
        self._group = GROUP_BLOCKS * block_samples
        self._whole = samples <= LANES * self._group  # one lane, one group
        self._key = root_key(seed)

    def __call__(self, positions: Ints) -> tuple[Ints, Ints]:
        """Map positions since the start of training, [n] in any order, to epochs [n] and windows [n]."""
        positions = np.asarray(positions, dtype=np.int64)
        epochs, indices = np.divmod(positions, self.samples)
        present, inverse = np.unique(epochs, return_inverse=True)
        key = derive_key(self._key, present)
        if self._whole:
            return epochs, permute(indices, self.samples, key[inverse])
        lane_samples, longer_lanes = divmod(self.samples, LANES)
        lanes = indices % LANES
        length = lane_samples + (lanes < longer_lanes)
        groups, within, size = _split_evenly(indices // LANES, length, -(-length // self._group))
        group_key = derive_key(derive_key(key[inverse], lanes), groups)
        permuted = np.empty_like(within)
        # At most three sizes: lanes differ by one sample, groups by one more.
        for group_size in np.unique(size).tolist():
            at = size == group_size
            permuted[at] = permute(within[at], group_size, group_key[at])
        row = lanes * lane_samples + np.minimum(lanes, longer_lanes) + (indices // LANES - within) + permuted
        return epochs, self._window(row, key, inverse)

    def _window(self, row: Ints, key: UInt64s, inverse: npt.NDArray[np.intp]) -> Ints:
        """Map indices in the epoch's row of shuffled blocks to windows.

        The corpus's last block may be short.
        """
        blocks = -(-self.samples // self._block)
        shortfall = blocks * self._block - self.samples
        key = derive_key(key, -1)
        last = np.full(key.shape, blocks - 1, dtype=np.int64)
        short_end = (permute(last, blocks, key, inverse=True) + 1) * self._block - shortfall
        row = row + shortfall * (row >= short_end[inverse])
        slots, within = np.divmod(row, self._block)
        return permute(slots, blocks, key[inverse]) * self._block + within
