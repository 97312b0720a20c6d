"""What one document may need of this machine's memory, found out before the tokenizer's library aborts the process."""

from __future__ import annotations

from pathlib import Path

from toolkit.data.prepare.read import Document
from toolkit.errors import InputError, Problem

LARGE_BYTES = 8 << 20  # of a document; smaller ones fit the memory of any machine
# Bytes of memory that the tokenizer needs per byte of a document: 105 for words, 145 for one long word.
TOKENISER_MEMORY = 150


def check_size(document: Document, path: Path) -> None:
    """Raise InputError if this machine lacks the memory to tokenise the document; the library would abort the process."""
    size = len(document.content)
    if size < LARGE_BYTES:
        return
    import psutil

    available = psutil.virtual_memory().available
    if size * TOKENISER_MEMORY > available:
        seen = f"{path}, {document.location}: a document of {size / 2**20:,.0f} MiB"
        rule = (
            f"the tokenizer takes a document as a whole, in {TOKENISER_MEMORY} times its size of memory "
            f"({size * TOKENISER_MEMORY / 2**30:,.1f} GiB; {available / 2**30:,.1f} GiB are available)"
        )
        remedy = (
            "split it into several documents or remove it, then start again to continue; "
            "or use a machine with more memory"
        )
        raise InputError(Problem("input", seen, rule, remedy))
