"""Sort keys of documents, and their split, computed by hashing; nothing has to be stored or coordinated."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.data.prepare.plan import PreparationPlan
from toolkit.data.prepare.read import decode_document, read_documents
from toolkit.progress import Progress


def split_hash(content: bytes) -> int:
    """Return the hash in [0, 2^64) that determines a document's split.

    It depends on the content alone, so a document has the same split in every preparation, and a larger
    validation share contains the documents of a smaller one.
    """
    return int.from_bytes(xxhash.xxh3_128_digest(content)[:8])


def split_threshold(share: float) -> int:
    """Return the threshold below which the hashes of ``share`` of the documents are, on average."""
    return int(share * 2**64)


class DocumentKeys:
    """Computes sort keys and splits from 128-bit hashes, so that equal keys are equal documents."""

    def __init__(self, *, seed: int, validation_below: int, by_content: bool) -> None:
        """Args: validation_below: documents with a smaller ``split_hash`` are for validation. by_content:
        equal documents get equal keys; otherwise source and position are hashed too, which spreads them.
        """
        self._seed = seed
        self._threshold = validation_below
        self._by_content = by_content

    @classmethod
    def from_plan(cls, plan: PreparationPlan) -> DocumentKeys:
        recipe = plan.recipe
        return cls(
            seed=recipe["seed"], validation_below=plan.validation_below, by_content=recipe["deduplicate"]
        )

    def __call__(self, content: bytes, source: str, position: int) -> tuple[int, bool]:
        """Return (key of 128 bits, whether the document is for validation)."""
        digest = xxhash.xxh3_128_digest(content)
        location = b"" if self._by_content else f"{source}\0{position}".encode()
        return xxhash.xxh3_128_intdigest(digest + location, seed=self._seed), int.from_bytes(
            digest[:8]
        ) < self._threshold

    def is_validation(self, content: bytes) -> bool:
        return split_hash(content) < self._threshold


def first_of_equal_keys(high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Return which of the sorted keys differ from the key before."""
    first = np.ones(len(high), dtype=bool)
    first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    return first


def find_validation_threshold(plan: PreparationPlan, progress: Progress) -> int:
    """Return the threshold of ``split_hash`` that gives validation at least one of two documents.

    Reads documents until one is for validation; of a small input that may be all of them. If the configured
    share selects none, the document with the smallest hash is used, provided that another one is left for
    training.
    """
    threshold = split_threshold(plan.recipe["validation"])
    if not threshold:
        return 0
    smallest: list[int] = []  # hashes of two different documents
    with progress.task("searching a validation document", unit="documents") as task:
        for unit in plan.units:
            for document in read_documents(plan, unit):
                task.advance()
                if not document.content:
                    continue
                value = split_hash(decode_document(document.content)[0])
                if value < threshold:
                    return threshold
                smallest = sorted({*smallest, value})[:2]
    return smallest[0] + 1 if len(smallest) == 2 else threshold
