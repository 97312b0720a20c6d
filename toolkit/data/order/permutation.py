"""The order of samples as a pure function: position -> (epoch, window). No state, no memory, no remainder.

    position -> epoch and place in it -> lane -> group of blocks -> keyed permutation within the group
             -> place in the row of shuffled blocks -> keyed permutation over blocks -> window

Windows lie on disk in blocks of 32 KiB. Each epoch permutes the blocks and cuts the row of shuffled blocks into
``LANES`` lanes, each lane into groups of at most ``GROUP_BLOCKS`` blocks. Position ``p`` of an epoch belongs to lane
``p % LANES``, and within its group samples are permuted one by one. So at any moment samples come from 4,096 blocks
(128 MiB): enough to mix a corpus that is sorted by domain (a batch of 1,024 samples then draws from about as many
places as it has samples; with 128 blocks of 1 MiB the variance of its domain counts is 7 times as large), local enough for object
storage, and a rank whose places in the batch fall on few lanes touches only their blocks. A data set that fits into
that much is one lane with one group: a full permutation.

Lanes and groups are cut evenly and need not end where a block ends, so every window stands in an epoch exactly once.
Permutations are alternating Feistel networks on the next power of two; a result outside the range is permuted again
until it falls inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# Names this mapping, constants included: a run resumes only under the name it started with.
VERSION = "feistel-1"

BLOCK_BYTES = 32 << 10
GROUP_BLOCKS = 64
LANES = 64
ROUNDS = 6  # half rounds, alternating
SMALL_ROUNDS = 24  # for fewer than 8 bits: narrow halves mix slowly, and 6 rounds leave a visible bias

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def mix(words: Words) -> Words:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), element by element."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def keyed(key: Words, value: npt.NDArray[np.int64] | int) -> Words:
    """A new key from a key and a number, element by element."""
    return mix((key + np.uint64(_GOLDEN)) ^ mix(np.atleast_1d(value).astype(np.uint64) + np.uint64(_GOLDEN)))


def root_key(seed: int) -> Words:
    """Shape [1]: arrays wrap around silently where numpy scalars warn."""
    return mix(np.array([seed & _WORD], dtype=np.uint64) + np.uint64(_GOLDEN))


def _scramble(words: Words, key: Words) -> Words:
    """The round function: 32 bits from a half and a round key. Two multiplications, each taking its high bits."""
    words = (words ^ key) * np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(32)
    words *= np.uint64(0x94D049BB133111EB)
    words >>= np.uint64(32)
    return words


def permute(values: Ints, size: int, key: Words, *, inverse: bool = False) -> Ints:
    """A keyed bijection of ``0 .. size``, element by element; ``key`` has one word per value, or one for all."""
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

    def network(words: Words, key: Words) -> Words:
        high, low = words >> shift, words & low_mask
        for number in rounds:
            word = np.uint64((number + 1) * _GOLDEN & _WORD)
            if number % 2:
                high = high ^ (_scramble(low, key + word) & high_mask)
            else:
                low = low ^ (_scramble(high, key + word) & low_mask)
        return (high << shift) | low

    end = np.uint64(size)
    key = np.broadcast_to(key, values.shape)
    words = network(values.astype(np.uint64), key)
    outside = np.flatnonzero(words >= end)
    while outside.size:
        again = network(words[outside], key[outside])
        words[outside] = again
        outside = outside[again >= end]
    return words.astype(np.int64)


def _cut(places: Ints, total: Ints, parts: Ints) -> tuple[Ints, Ints, Ints]:
    """``total`` places in ``parts`` contiguous parts whose sizes differ by one at most, the larger ones first.

    Returns for each place: the number of its part, its place in the part, the size of the part.
    """
    size = total // parts
    larger = total % parts
    in_larger = places < larger * (size + 1)
    rest = places - larger * (size + 1)
    part = np.where(in_larger, places // (size + 1), larger + rest // np.maximum(size, 1))
    within = np.where(in_larger, places % (size + 1), rest % np.maximum(size, 1))
    return part, within, size + in_larger


def epoch_shifts(seed: int, epochs: Ints, tokens: int) -> Ints:
    """How far the first window of each epoch lies from the corpus's first token: epochs do not repeat their windows."""
    return (keyed(keyed(root_key(seed), -2), epochs) % np.uint64(tokens)).astype(np.int64)


def block_samples(sequence_length: int, bytes_per_token: int) -> int:
    """Windows in a block."""
    return max(1, BLOCK_BYTES // (sequence_length * bytes_per_token))


class Order:
    """The order of ``samples`` windows, epoch after epoch, for any number of ranks.

    Construction and every look-up cost the same for 10 samples and 10^12.
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
        """Positions since the start of training, any shape [n], in any order -> epochs [n], windows [n]."""
        positions = np.asarray(positions, dtype=np.int64)
        epochs, places = np.divmod(positions, self.samples)
        present, where = np.unique(epochs, return_inverse=True)
        key = keyed(self._key, present)
        if self._whole:
            return epochs, permute(places, self.samples, key[where])
        lane_samples, longer_lanes = divmod(self.samples, LANES)
        lanes = places % LANES
        length = lane_samples + (lanes < longer_lanes)
        groups, within, size = _cut(places // LANES, length, -(-length // self._group))
        group_key = keyed(keyed(key[where], lanes), groups)
        chosen = np.empty_like(within)
        for one in np.unique(
            size
        ).tolist():  # three sizes at most: lanes differ by one sample, groups by one more
            at = size == one
            chosen[at] = permute(within[at], one, group_key[at])
        row = lanes * lane_samples + np.minimum(lanes, longer_lanes) + (places // LANES - within) + chosen
        return epochs, self._window(row, key, where)

    def _window(self, row: Ints, key: Words, where: npt.NDArray[np.intp]) -> Ints:
        """Place in the epoch's row of shuffled blocks -> window. One block, the corpus's last, may be short."""
        blocks = -(-self.samples // self._block)
        missing = blocks * self._block - self.samples
        key = keyed(key, -1)
        last = np.full(key.shape, blocks - 1, dtype=np.int64)
        short_end = (permute(last, blocks, key, inverse=True) + 1) * self._block - missing
        row = row + missing * (row >= short_end[where])
        slots, within = np.divmod(row, self._block)
        return permute(slots, blocks, key[where]) * self._block + within
