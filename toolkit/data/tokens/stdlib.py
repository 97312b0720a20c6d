"""The embedded data set: the source files of the running Python's standard library.

    ensure_stdlib("data/stdlib", vocab_size=4096, progress=progress)

    data/stdlib/manifest.json          points to the newest generation
    data/stdlib/<fingerprint>/         one generation: manifest.json, shards, tokenizer/

The fingerprint covers the files' names and bytes and the recipe. A generation appears by one rename and never
changes, so runs can continue to use an older one (another vocabulary, another Python).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import xxhash

from toolkit.data.manifest import DataManifest, DataOrigin, read_manifest, write_manifest
from toolkit.data.manifest_file import MANIFEST_NAME
from toolkit.data.tokens.index import token_dtype
from toolkit.data.tokens.tokenizer import encode_texts, save_tokenizer, train_bpe
from toolkit.data.tokens.writer import SplitWriter
from toolkit.errors import InputError, Problem
from toolkit.files import sync_folder
from toolkit.progress import Progress

RECIPE = 1  # increase it if the same files would give other tokens
LICENCE = "PSF-2.0"
# Tests are a third of the library and are repetitive; the other folders are not part of it.
SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
VALIDATION_PERMILLE = 75
BATCH_TEXTS = 64
WAIT_SECONDS = 600.0

Texts = Sequence[tuple[str, bytes]]  # relative path, content


def ensure_stdlib(
    path: str | Path, vocab_size: int, progress: Progress | None = None, *, root: Path | None = None
) -> DataManifest:
    """Make the data folder ``path``, unless it already has the current generation.

    Any number of processes may call this function at once: one makes the data, the others wait. A killed
    process leaves nothing that could be mistaken for data. The same files give the same bytes on every
    machine.

    Args:
        vocab_size: the requested size of the vocabulary; a small text may give fewer tokens.
        root: the folder whose ``.py`` files are the text; the standard library by default.

    Raises:
        InputError: there are no such files, ``path`` cannot be written, or another process does not finish in
            time.
    """
    path, progress = Path(path), progress or Progress.silent()
    texts = read_source_texts(root or Path(sysconfig.get_path("stdlib")))
    fingerprint = hash_texts(texts, vocab_size)
    generation = path / fingerprint[:12]
    if not _is_current(path, generation):
        try:
            path.mkdir(parents=True, exist_ok=True)
            with _lock(path / ".lock"):
                if not (generation / MANIFEST_NAME).is_file():
                    _write_generation(generation, texts, fingerprint, vocab_size, progress)
                write_manifest(read_manifest(generation), path)
        except OSError as error:
            remedy = "name a folder that can be written and has room: data.path=FOLDER"
            raise InputError(
                Problem("data.path", f"data.path={path}: {error}", "the data folder can be made", remedy)
            ) from error
    return read_manifest(generation)


def read_source_texts(root: Path) -> Texts:
    """Read every ``.py`` file under ``root`` except SKIPPED folders, sorted by path.

    Raises InputError if there is none.
    """
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        remedy = (
            "install a Python that has its library as files, "
            "or train on your own text: data=prepared data.path=FOLDER"
        )
        raise InputError(
            Problem(
                "data.name",
                f"no .py files in {root}",
                "data=stdlib reads the sources of the standard library",
                remedy,
            )
        )
    return sorted((file.relative_to(root).as_posix(), file.read_bytes()) for file in files)


def hash_texts(texts: Texts, vocab_size: int) -> str:
    """Hash everything that determines the tokens: 32 hex digits."""
    hasher = xxhash.xxh3_128(f"{RECIPE} {vocab_size} {VALIDATION_PERMILLE}".encode())
    for name, content in texts:
        hasher.update(f"\0{name}\0{len(content)}\0".encode())
        hasher.update(content)
    return hasher.hexdigest()


def is_validation(content: bytes) -> bool:
    """Decide by the document's hash, so that equal documents are in the same split in all data."""
    return xxhash.xxh3_64_intdigest(content) % 1000 < VALIDATION_PERMILLE


def _write_generation(
    generation: Path, texts: Texts, fingerprint: str, vocab_size: int, progress: Progress
) -> None:
    """Write the generation to a temporary folder and rename it. The caller holds the lock."""
    # Temporary folders are left by killed processes: only the holder of the lock writes here.
    for abandoned_folder in generation.parent.glob("*.partial"):
        shutil.rmtree(abandoned_folder)
    if generation.exists():  # incomplete: its manifest was deleted
        shutil.rmtree(generation)
    partial = generation.with_name(f"{generation.name}.partial")
    partial.mkdir()
    size = sum(len(content) for _, content in texts)
    # Shuffled once, by hash, so that the order does not depend on names or on the number of files.
    shuffled = sorted(texts, key=lambda text: (xxhash.xxh3_64_intdigest(text[1], seed=RECIPE), text[0]))
    train = [content for _, content in shuffled if not is_validation(content)]
    validation = [content for _, content in shuffled if is_validation(content)]
    tokenizer = train_bpe(_iterate_texts(train, "training the tokenizer", progress), vocab_size)
    info = save_tokenizer(tokenizer, partial)
    dtype = token_dtype(info.size)
    splits = {}
    with progress.task("tokenising", total=size, unit="B") as task, ExitStack() as open_writers:
        for name, documents in (("train", train), ("validation", validation)):
            writer = open_writers.enter_context(SplitWriter(partial, name, dtype))
            for first in range(0, len(documents), BATCH_TEXTS):
                batch = documents[first : first + BATCH_TEXTS]
                for tokens in encode_texts(
                    tokenizer, [_decode(document) for document in batch], info.end_of_text
                ):
                    writer.add(tokens)
                task.advance(sum(map(len, batch)))
            splits[name] = writer.close()
    python = ".".join(map(str, sys.version_info[:3]))
    origin = DataOrigin(f"standard library of Python {python}", LICENCE, len(texts), size, fingerprint)
    write_manifest(
        DataManifest(folder=partial, dtype=dtype.name, origin=origin, tokenizer=info, splits=splits), partial
    )
    partial.replace(generation)
    sync_folder(generation.parent)


def _decode(content: bytes) -> str:
    return content.decode("utf-8", errors="replace")


def _iterate_texts(documents: Sequence[bytes], description: str, progress: Progress) -> Iterator[str]:
    with progress.task(description, total=sum(map(len, documents)), unit="B") as task:
        for document in documents:
            yield _decode(document)
            task.advance(len(document))


def _is_current(path: Path, generation: Path) -> bool:
    """Return whether the generation is complete and the folder's manifest points to it."""
    if not (generation / MANIFEST_NAME).is_file():
        return False
    try:
        return read_manifest(path).folder == generation
    except InputError:  # absent, or of an older format: it is written again
        return False


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Exclude other processes. The kernel releases the lock when its holder exits for any reason."""
    deadline = time.monotonic() + WAIT_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    rule = f"a process that makes the data ends within {WAIT_SECONDS:.0f} s"
                    raise InputError(
                        Problem("data.path", f"{path} is held by another process", rule, "end that process")
                    ) from None
                time.sleep(0.1)
        yield
