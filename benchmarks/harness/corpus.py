"""Write the synthetic corpus of benchmarks/streaming.py: documents in 64 domains, one domain after another.

    python benchmarks/harness/corpus.py FOLDER --tokens 200000000

Document lengths are log-normal with median 545 and mean 900 (about those of web text), from 16 to 65,536;
each document ends with token 0. The tokens of domain d are uniform in ``1000 d + 1 .. 1000 d + 999``, so a
window identifies its domain. Equal seeds give equal bytes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.data.digest import hash_file
from toolkit.data.manifest import DataManifest, DataOrigin, TokenizerInfo, TokenSplit, write_manifest
from toolkit.data.tokens.writer import SplitWriter

DOMAINS = 64
DOMAIN_TOKENS = 1000  # token ids per domain
VOCABULARY = DOMAINS * DOMAIN_TOKENS
END_OF_TEXT = 0
PARTS = ("part-0", "part-1", "part-2")  # the sources of a mixture: thirds of the corpus
_NAME = "corpus.json"


@dataclass(frozen=True, slots=True)
class Corpus:
    """All tokens as one Megatron shard (``train-00000.bin``, uint16), and its thirds as data folders
    (``part-N``)."""

    folder: Path
    tokens: int
    documents: int
    seed: int

    @property
    def bin(self) -> Path:
        return self.folder / "train-00000.bin"

    def mapped(self) -> npt.NDArray[np.uint16]:
        """Return [tokens] as a plain array, because slicing a memmap object is slow."""
        return np.asarray(np.memmap(self.bin, dtype="<u2", mode="r"))

    def windows(self, length: int) -> npt.NDArray[np.uint16]:
        """Return windows [windows, length] without overlap, as other formats store them."""
        tokens = self.mapped()
        return tokens[: len(tokens) // length * length].reshape(-1, length)


def open_corpus(folder: Path) -> Corpus:
    return Corpus(**{**json.loads((folder / _NAME).read_text()), "folder": folder})


def make_corpus(folder: Path, tokens: int, seed: int = 0) -> Corpus:
    """Create a corpus of at least ``tokens`` tokens unless ``folder`` has it."""
    wanted = {"asked": tokens, "seed": seed}
    note = folder / "asked.json"
    if note.is_file() and json.loads(note.read_text()) == wanted:
        return open_corpus(folder)
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(
            f"{folder} holds something else than the corpus of {wanted}: empty it, or name another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    documents = [domain_documents(rng, domain, -(-tokens // DOMAINS)) for domain in range(DOMAINS)]
    whole = _write(folder, [document for domain in documents for document in domain], seed)
    for number, part in enumerate(PARTS):
        bounds = DOMAINS * number // len(PARTS), DOMAINS * (number + 1) // len(PARTS)
        _write(folder / part, [document for domain in documents[slice(*bounds)] for document in domain], seed)
    corpus = Corpus(folder, whole.tokens, whole.documents, seed)
    (folder / _NAME).write_text(json.dumps({**asdict(corpus), "folder": None}))
    note.write_text(json.dumps(wanted))  # written last, so that an interrupted corpus is not used
    return corpus


def domain_documents(rng: np.random.Generator, domain: int, tokens: int) -> list[npt.NDArray[np.uint16]]:
    """Return the documents of one domain, with at least ``tokens`` tokens in total."""
    enough = tokens // 16 + 1  # an upper bound: all documents have the minimum length
    lengths = np.clip(rng.lognormal(6.3, 1.0, enough), 16, 65536).astype(np.int64)
    ends = np.cumsum(lengths)
    ends = ends[: int(np.searchsorted(ends, tokens)) + 1]
    row = rng.integers(
        domain * DOMAIN_TOKENS + 1, (domain + 1) * DOMAIN_TOKENS, int(ends[-1]), dtype=np.uint16
    )
    row[ends - 1] = END_OF_TEXT
    return np.split(row, ends[:-1])


def domain_of(windows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the domain in which each window [windows, length] begins.

    The first token may be an end of text, but not both of the first two.
    """
    return windows[:, :2].max(axis=1).astype(np.int64) // DOMAIN_TOKENS


def _write(folder: Path, documents: list[npt.NDArray[np.uint16]], seed: int) -> TokenSplit:
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    tokenizer.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.write_text('{"fabricated": "these tokens stand for no text"}')
    with SplitWriter(folder, "train", np.dtype("<u2")) as writer:
        for document in documents:
            writer.add(document)
        split = writer.close()
    origin = DataOrigin(
        f"fabricated by benchmarks/harness/corpus.py, seed {seed}",
        "CC0-1.0",
        split.documents,
        split.tokens * 2,
        "",
    )
    info = TokenizerInfo("tokenizer", hash_file(tokenizer).xxh3_128, VOCABULARY, END_OF_TEXT)
    write_manifest(
        DataManifest(folder=folder, dtype="uint16", origin=origin, tokenizer=info, splits={"train": split}),
        folder,
    )
    return split


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(make_corpus(given.folder, given.tokens, given.seed))
