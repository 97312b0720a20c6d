"""First pass: tokenise a work unit into parts, each committed when it is complete.

Memory of a process: the tokens of one part (PART_BYTES of text), tokenizer results for BATCH_TEXT_BYTES,
and one document.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.prepare.document_keys import DocumentKeys, first_of_equal_keys
from toolkit.data.prepare.parts import FIRST_BAD, PartReceipt, read_unit_receipts, write_part
from toolkit.data.prepare.plan import PreparationPlan, read_plan
from toolkit.data.prepare.read import InputDocument, check_memory, decode_document, read_documents
from toolkit.data.prepare.tokenizer import TokenizerSpec
from toolkit.data.tokens.special_tokens import SpecialTokenFinder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PART_BYTES = 16 << 20  # of text: what each process can lose in a kill
# Bytes of text encoded in one call: the library's results need a hundred times the memory of the text.
BATCH_TEXT_BYTES = 256 << 10
PARTS = "parts"
MAX_SHOWN_CHARACTERS = 240  # characters of an error about a row


def start_tokenising(work: Path, spec: TokenizerSpec) -> Callable[[int, Callable[[int], None]], None]:
    """Return a function that tokenises a unit by number and reports the input bytes processed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes run in parallel
    plan = read_plan(work)
    assert plan is not None
    tokenizer = spec.load()
    special = SpecialTokenFinder(tokenizer)

    def tokenise_unit(number: int, advance: Callable[[int], None]) -> None:
        assert plan is not None
        _tokenise_unit(work / PARTS, plan, number, tokenizer, special, spec, advance)

    return tokenise_unit


def _tokenise_unit(
    folder: Path,
    plan: PreparationPlan,
    number: int,
    tokenizer: Tokenizer,
    special: SpecialTokenFinder,
    spec: TokenizerSpec,
    advance: Callable[[int], None],
) -> None:
    finished = read_unit_receipts(folder, number)
    if finished and finished[-1].last:
        return
    documents_read = finished[-1].read if finished else 0
    part = _Part(plan, spec, special, number, len(finished), documents_read)
    bytes_done = 0
    for batch in _batches(islice(read_documents(plan, plan.units[number]), documents_read, None)):
        if part.text_bytes >= PART_BYTES:
            part.commit(folder, last=False)
            part = _Part(plan, spec, special, number, part.number + 1, part.documents_read)
        part.add(batch, tokenizer)
        advance(batch[-1].bytes_done - bytes_done)
        bytes_done = batch[-1].bytes_done
    part.commit(folder, last=True)


def _batches(documents: Iterator[InputDocument]) -> Iterator[list[InputDocument]]:
    batch: list[InputDocument] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.content)
        if size >= BATCH_TEXT_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Part:
    """A part that is being tokenised."""

    def __init__(
        self,
        plan: PreparationPlan,
        spec: TokenizerSpec,
        special: SpecialTokenFinder,
        unit: int,
        number: int,
        documents_read: int,
    ) -> None:
        self._plan = plan
        self._spec = spec
        self._special = special
        self._keys = DocumentKeys.from_plan(plan)
        self._unit = unit
        self.number = number
        self.documents_read = documents_read
        self.text_bytes = 0
        self._tokens: list[npt.NDArray[Any]] = []
        self._high, self._low, self._is_validation = array("Q"), array("Q"), array("B")
        self._sources: Counter[int] = Counter()
        self._special_counts: Counter[str] = Counter()
        self._empty = self._replaced = self._inner_end_tokens = 0
        self._bad: list[tuple[int, int, str]] = []

    def add(self, batch: list[InputDocument], tokenizer: Tokenizer) -> None:
        texts = []
        for document in batch:
            self.documents_read += 1
            if document.bad:
                self._bad.append(
                    (
                        document.source,
                        document.position,
                        f"{document.location}: {document.bad}"[:MAX_SHOWN_CHARACTERS],
                    )
                )
                continue
            if not document.content:
                self._empty += 1
                continue
            path = self._plan.path(document.source)
            check_memory(document, path)
            content, text = decode_document(document.content)
            if self._spec.special_tokens is SpecialTokens.refuse:
                self._special.check(text, location=f"{path}, {document.location}", key="special_tokens")
            else:
                self._special_counts += self._special.count(text)
            self._replaced += content is not document.content
            key, validation = self._keys(content, self._plan.sources[document.source].name, document.position)
            self._high.append(key >> 64)
            self._low.append(key & 0xFFFF_FFFF_FFFF_FFFF)
            self._is_validation.append(validation)
            self._sources[document.source] += 1
            self.text_bytes += len(content)
            texts.append(text)
        end_token = self._spec.end_of_text
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids = np.frombuffer(array("I", encoding.ids), dtype=np.uint32)
            self._inner_end_tokens += int(np.count_nonzero(ids == end_token))
            tokens = np.empty(len(ids) + 1, dtype=self._spec.dtype)
            tokens[:-1] = ids
            tokens[-1] = end_token
            self._tokens.append(tokens)

    def commit(self, folder: Path, *, last: bool) -> None:
        high, low = np.frombuffer(self._high, dtype="<u8"), np.frombuffer(self._low, dtype="<u8")
        is_validation = np.frombuffer(self._is_validation, dtype=np.uint8)
        lengths = np.fromiter(map(len, self._tokens), dtype=np.int64, count=len(self._tokens))
        order = np.lexsort((low, high, is_validation))
        if self._plan.recipe["deduplicate"]:
            order = order[first_of_equal_keys(high[order], low[order])]
        starts = np.zeros(len(order) + 1, dtype="<i8")
        np.cumsum(lengths[order], out=starts[1:])
        validation = int(is_validation[order].sum())
        receipt = PartReceipt(
            unit=self._unit,
            part=self.number,
            read=self.documents_read,
            last=last,
            kept=(len(order) - validation, validation),
            tokens=(int(lengths[is_validation == 0].sum()), int(lengths[is_validation == 1].sum())),
            text_bytes=self.text_bytes,
            empty=self._empty,
            equal=len(high) - len(order),
            replaced=self._replaced,
            inside=self._inner_end_tokens,
            special=tuple(sorted(self._special_counts.items())),
            bad=len(self._bad),
            first_bad=tuple(self._bad[:FIRST_BAD]),
            sources=tuple(sorted(self._sources.items())),
        )
        tokens = (
            np.concatenate([self._tokens[number] for number in order.tolist()]) if len(order) else np.empty(0)
        )
        write_part(folder, receipt, tokens, high[order], low[order], starts)


def find_unfinished_units(folder: Path, plan: PreparationPlan) -> tuple[list[int], int]:
    """Return the numbers of unfinished units, and the bytes of finished ones."""
    finished = {int(path.name[:6]) for path in folder.glob("*.json") if '"last": true' in path.read_text()}
    remaining = [number for number in range(len(plan.units)) if number not in finished]
    return remaining, sum(plan.units[number].bytes for number in finished)
