"""Where a document comes to stand, and in which split: hashes, in place of an order that somebody would have to keep."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.data.prepare.plan import Plan


def side(content: bytes) -> int:
    """Decides a document's split: in [0, 2^64). By content alone, neither seed nor place: a document is on the same side in whatever is
    prepared, and with a larger share the documents of a smaller one stay on their side."""
    return int.from_bytes(xxhash.xxh3_128_digest(content)[:8])


def below(share: float) -> int:
    """``side`` is smaller than this for ``share`` of the documents, on average."""
    return int(share * 2**64)


class Keys:
    """Where a document comes to stand, and in which split. Worked from 128-bit hashes, so that equal keys are equal documents."""

    def __init__(self, *, seed: int, validation_below: int, by_content: bool) -> None:
        """
        Args:
            validation_below: documents whose ``side`` is smaller go to validation.
            by_content: equal documents get equal keys; otherwise their places separate them, so that they do not lie together.
        """
        self._seed = seed
        self._threshold = validation_below
        self._by_content = by_content

    @classmethod
    def of(cls, plan: Plan) -> Keys:
        recipe = plan.recipe
        return cls(
            seed=recipe["seed"], validation_below=plan.validation_below, by_content=recipe["deduplicate"]
        )

    def __call__(self, content: bytes, source: str, place: int) -> tuple[int, bool]:
        """(key of 128 bits, whether it is for validation)."""
        digest = xxhash.xxh3_128_digest(content)
        where = b"" if self._by_content else f"{source}\0{place}".encode()
        return xxhash.xxh3_128_intdigest(digest + where, seed=self._seed), int.from_bytes(
            digest[:8]
        ) < self._threshold

    def is_validation(self, content: bytes) -> bool:
        return side(content) < self._threshold


def first_of_equal(high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Of sorted keys: which are not equal to the one before."""
    first = np.ones(len(high), dtype=bool)
    first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    return first
