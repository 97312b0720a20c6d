"""First pass: a unit of the input becomes parts, each committed when it is whole.

Memory of a process: the tokens of one part (PART_BYTES of text), and what the tokenizer makes of TEXT_AT_ONCE. One document is held whole.
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
from toolkit.data.prepare.keys import Keys, first_of_equal
from toolkit.data.prepare.limits import check_size
from toolkit.data.prepare.parts import FIRST_BAD, Receipt, parts_of, write_part
from toolkit.data.prepare.plan import Plan, read_plan
from toolkit.data.prepare.read import Document, decoded, documents
from toolkit.data.prepare.vocabulary import Vocabulary
from toolkit.data.tokens.special_tokens import SpecialStrings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PART_BYTES = 16 << 20  # of text: what a kill can cost each process
TEXT_AT_ONCE = 256 << 10  # encoded in one call: the library's own results take a hundred times the text
PARTS = "parts"
SHOWN = 240  # characters of what is wrong with a row


def tokenising(work: Path, vocabulary: Vocabulary) -> Callable[[int, Callable[[int], None]], None]:
    """What a process does with the number of a unit; it tells the bytes of input that it has done."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    plan = read_plan(work)
    assert plan is not None
    tokenizer = vocabulary.load()
    special = SpecialStrings(tokenizer)

    def one(number: int, advance: Callable[[int], None]) -> None:
        assert plan is not None
        _tokenise(work / PARTS, plan, number, tokenizer, special, vocabulary, advance)

    return one


def _tokenise(
    folder: Path, plan: Plan, number: int, tokenizer: Tokenizer, special: SpecialStrings, vocabulary: Vocabulary,
    advance: Callable[[int], None],
) -> None:  # fmt: skip
    before = parts_of(folder, number)
    if before and before[-1].last:
        return
    read = before[-1].read if before else 0
    part = _Part(plan, vocabulary, special, number, len(before), read)
    done = 0
    for batch in _batches(islice(documents(plan, plan.units[number]), read, None)):
        if part.text_bytes >= PART_BYTES:
            part.commit(folder, last=False)
            part = _Part(plan, vocabulary, special, number, part.number + 1, part.read)
        part.add(batch, tokenizer)
        advance(batch[-1].done - done)
        done = batch[-1].done
    part.commit(folder, last=True)


def _batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in found:
        batch.append(document)
        size += len(document.content)
        if size >= TEXT_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Part:
    """A part under way."""

    def __init__(
        self, plan: Plan, vocabulary: Vocabulary, special: SpecialStrings, unit: int, number: int, read: int
    ) -> None:
        self._plan = plan
        self._vocabulary = vocabulary
        self._special = special
        self._keys = Keys.of(plan)
        self._unit = unit
        self.number = number
        self.read = read
        self.text_bytes = 0
        self._tokens: list[npt.NDArray[Any]] = []
        self._high, self._low, self._side = array("Q"), array("Q"), array("B")
        self._sources: Counter[int] = Counter()
        self._found: Counter[str] = Counter()  # strings of special tokens
        self._empty = self._replaced = self._inside = 0
        self._bad: list[tuple[int, int, str]] = []

    def add(self, batch: list[Document], tokenizer: Tokenizer) -> None:
        texts = []
        for document in batch:
            self.read += 1
            if document.bad:
                self._bad.append(
                    (document.source, document.place, f"{document.where}: {document.bad}"[:SHOWN])
                )
                continue
            if not document.content:
                self._empty += 1
                continue
            path = self._plan.path(document.source)
            check_size(document, path)
            content, text = decoded(document.content)
            if self._vocabulary.special_tokens is SpecialTokens.refuse:
                self._special.check(text, where=f"{path}, {document.where}", key="special_tokens")
            else:
                self._found += self._special.count(text)
            self._replaced += content is not document.content
            key, validation = self._keys(content, self._plan.sources[document.source].name, document.place)
            self._high.append(key >> 64)
            self._low.append(key & 0xFFFF_FFFF_FFFF_FFFF)
            self._side.append(validation)
            self._sources[document.source] += 1
            self.text_bytes += len(content)
            texts.append(text)
        end = self._vocabulary.end_of_text
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids = np.frombuffer(array("I", encoding.ids), dtype=np.uint32)
            self._inside += int(np.count_nonzero(ids == end))
            tokens = np.empty(len(ids) + 1, dtype=self._vocabulary.dtype)
            tokens[:-1] = ids
            tokens[-1] = end
            self._tokens.append(tokens)

    def commit(self, folder: Path, *, last: bool) -> None:
        high, low = np.frombuffer(self._high, dtype="<u8"), np.frombuffer(self._low, dtype="<u8")
        side = np.frombuffer(self._side, dtype=np.uint8)
        lengths = np.fromiter(map(len, self._tokens), dtype=np.int64, count=len(self._tokens))
        order = np.lexsort((low, high, side))
        if self._plan.recipe["deduplicate"]:
            order = order[first_of_equal(high[order], low[order])]
        starts = np.zeros(len(order) + 1, dtype="<i8")
        np.cumsum(lengths[order], out=starts[1:])
        validation = int(side[order].sum())
        receipt = Receipt(
            unit=self._unit, part=self.number, read=self.read, last=last, kept=(len(order) - validation, validation),
            tokens=(int(lengths[side == 0].sum()), int(lengths[side == 1].sum())), text_bytes=self.text_bytes, empty=self._empty,
            equal=len(high) - len(order), replaced=self._replaced, inside=self._inside, special=tuple(sorted(self._found.items())),
            bad=len(self._bad), first_bad=tuple(self._bad[:FIRST_BAD]), sources=tuple(sorted(self._sources.items())),
        )  # fmt: skip
        tokens = (
            np.concatenate([self._tokens[number] for number in order.tolist()]) if len(order) else np.empty(0)
        )
        write_part(folder, receipt, tokens, high[order], low[order], starts)


def units_left(folder: Path, plan: Plan) -> tuple[list[int], int]:
    """Numbers of the units that are not done, and the bytes of those that are."""
    done = {int(path.name[:6]) for path in folder.glob("*.json") if '"last": true' in path.read_text()}
    left = [number for number in range(len(plan.units)) if number not in done]
    return left, sum(plan.units[number].bytes for number in done)
