"""A tokenizer process: receives texts and sends tokens until its parent ends.

    python -m toolkit.data.dataset.tokenizer_worker SOCKET TOKENIZER END_OF_TEXT DTYPE HELD_OUT SPECIAL_TOKENS

It is a separate program rather than a child of multiprocessing: it imports neither the parent's main module
nor torch, so it starts in a quarter of a second and needs 60 MB. It ends when its socket closes, which the
kernel does for a dead parent.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.tokens.special_tokens import SpecialTokenFinder, configure_tokenizer
from toolkit.errors import InputError

MAX_SHOWN_CHARACTERS = 60  # characters of a document shown in an error
WATCH_SECONDS = (
    5.0  # how often to check the parent: a process forked from it may keep the other end of the socket open
)


def is_held_out(text: bytes, share: float) -> bool:
    """Decide by the document's hash, so that equal documents are in the same split in all data."""
    return xxhash.xxh3_64_intdigest(text) < share * 2**64


def serve(
    pipe: Connection,
    tokenizer_file: str,
    end_of_text: int,
    dtype: np.dtype[np.unsignedinteger],
    held_out: float,
    special_tokens: SpecialTokens,
) -> None:
    """Answer each (text, ends) with (tokens, lengths), the InputError of a refused text, or a traceback.

    ``text`` is the UTF-8 of all documents, concatenated, and ``ends`` int64 [documents]. ``tokens`` are those
    of all documents and ``lengths`` int64 [documents]. A document that is held out of training has no tokens;
    every other ends with ``end_of_text``.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    configure_tokenizer(tokenizer, special_tokens)
    special = SpecialTokenFinder(tokenizer)
    parent = os.getppid()
    while True:
        while not pipe.poll(WATCH_SECONDS):
            if os.getppid() != parent:
                return
        try:
            text, ends = pipe.recv()
        except EOFError:
            return
        try:
            documents = [
                bytes(text[first:last])
                for first, last in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)
            ]
            is_training = [not held_out or not is_held_out(document, held_out) for document in documents]
            texts = [
                document.decode(errors="replace")
                for document, is_included in zip(documents, is_training, strict=True)
                if is_included
            ]
            if special_tokens is SpecialTokens.refuse:
                for document in texts:
                    special.check(
                        document,
                        location=f"a document that begins {document[:MAX_SHOWN_CHARACTERS]!r}",
                        key="data.special_tokens",
                    )
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            parts: list[npt.NDArray[np.unsignedinteger]] = [
                np.array([*encoding.ids, end_of_text], dtype) for encoding in encodings
            ]
            lengths = np.zeros(len(is_training), dtype=np.int64)
            lengths[np.flatnonzero(is_training)] = [len(part) for part in parts]
            answer: object = (np.concatenate(parts) if parts else np.empty(0, dtype), lengths)
        except InputError as error:
            answer = error
        except Exception:  # noqa: BLE001  the parent raises it
            answer = traceback.format_exc()
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    # Signals to the process group are meant for the parent, which saves first and needs tokens for that step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    serve(
        Connection(int(sys.argv[1])),
        sys.argv[2],
        int(sys.argv[3]),
        np.dtype(sys.argv[4]),
        float(sys.argv[5]),
        SpecialTokens[sys.argv[6]],
    )
