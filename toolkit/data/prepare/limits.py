"""What one document may need of this machine's memory, found out before the tokenizer's library aborts the process."""

from __future__ import annotations

from pathlib import Path

from toolkit.data.prepare.read import Document
from toolkit.errors import InputError, Problem

LARGE_BYTES = 8 << 20  # of a document: smaller ones fit the memory of any machine
TOKENISER_MEMORY = (
    150  # bytes that the tokenizer needs for a byte of a document: 105 for words, 145 for one long word
)


def check_size(document: Document, path: Path) -> None:
    """Raises InputError if this machine has not the memory to tokenise the document."""
    size = len(document.content)
    if size < LARGE_BYTES:
        return
    import psutil

    available = psutil.virtual_memory().available
    if size * TOKENISER_MEMORY > available:
        seen = f"{path}, {document.where}: a document of {size / 2**20:,.0f} MiB"
        rule = (
            f"the tokenizer takes a document as a whole, in {TOKENISER_MEMORY} times its size of memory "
            f"({size * TOKENISER_MEMORY / 2**30:,.1f} GiB; {available / 2**30:,.1f} GiB are available)"
        )
        remedy = "cut it into several documents or remove it, then start again to continue; or use a machine with more memory"
        raise InputError(Problem("input", seen, rule, remedy))
