"""A preparation killed with ``kill -9`` and started again gives the same bytes without repeated work.

pytest tests/data/test_prepare_killed.py              # while shards are written
pytest -m full tests/data/test_prepare_killed.py      # and while documents are tokenised
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.data.sample_texts import (
    documents_of,
    files_of,
    make_texts,
    prepared,
    small_tokenizer,
    write_gz,
    write_jsonl,
)
from toolkit.config.compose import compose_prepare
from toolkit.data.prepare import merge, tokenise
from toolkit.data.prepare.parts import PartReceipt, read_receipts
from toolkit.data.prepare.run import prepare
from toolkit.progress import Progress

SMALL = Path(__file__).with_name("small_prepare.py")
TEXTS = make_texts(1500, seed=5)


class Corpus:
    """A corpus and its uninterrupted preparation, shared by the tests of this module."""

    def __init__(self, folder: Path) -> None:
        """One file that is read in ranges, and one that can only be read from its beginning: a unit of many
        parts.
        """
        self.input = folder / "in"
        write_jsonl(self.input / "a.jsonl", TEXTS[:1000])
        compressed = self.input / "b.jsonl.gz"
        write_gz(compressed, write_jsonl(folder / "scratch.jsonl", TEXTS[1000:] * 2).read_bytes())
        self.tokenizer = small_tokenizer(folder / "tokenizer")
        self.whole = folder / "whole"
        # Every preparation gets the same arguments, because the manifest contains the input's name.
        prepared(self.input, self.whole, self.tokenizer, deduplicate=True, workers=1)
        self.files = files_of(self.whole)


class Case:
    """A command that prepares the corpus, to be killed."""

    def __init__(self, corpus: Corpus, output: Path, workers: int) -> None:
        self.corpus, self.output = corpus, output
        self.words = [
            f"input={corpus.input}",
            f"output={self.output}",
            "validation=0.5",
            "deduplicate=true",
            f"tokenizer.path={corpus.tokenizer}",
            "tokenizer.end_of_text='<|endoftext|>'",
            "special_tokens=text",
        ]
        self.workers = workers

    @property
    def receipts(self) -> int:
        return len(list((self.output / ".work" / tokenise.PARTS).glob("*.json")))

    def killed_when(self, holds: Callable[[], bool]) -> bool:
        """Start it and kill the process that was started when ``holds``; its workers must end by themselves.

        False: it was done before.
        """
        command = [sys.executable, str(SMALL), *self.words, f"workers={self.workers}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        children: list[psutil.Process] = []
        try:
            while not holds():
                if process.poll() is not None:
                    assert process.returncode == 0, process.communicate()[0]
                    return False
                time.sleep(0.001)
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        finally:
            process.kill()
            process.wait(10)
        gone, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, f"{len(gone)} ended with their parent, {alive} did not"
        return not (self.output / "manifest.json").exists()

    def finished(self) -> bool:
        return not self.killed_when(lambda: False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def killed(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A preparation killed at a random part of about sixty."""
    case, seed = Case(corpus, tmp_path_factory.mktemp("killed") / "out", workers=2), random.randrange(10**6)
    print(f"seed {seed}")
    awaited = random.Random(seed).randint(3, 30)
    assert case.killed_when(lambda: case.receipts >= awaited), "killed in the work"
    assert awaited <= case.receipts < 50
    return case


def copy_of(case: Case, output: Path) -> Case:
    """Return the same interrupted preparation in another folder."""
    shutil.copytree(case.output, output)
    return Case(case.corpus, output, case.workers)


@pytest.mark.full
def test_resume_after_kill_during_tokenisation(killed: Case, tmp_path: Path) -> None:
    """The next process tokenises exactly the documents that are left."""
    case = copy_of(killed, tmp_path / "out")
    done = read_receipts(case.output / ".work" / tokenise.PARTS)
    read = sum(map(documents_in, done))
    assert 0 < read < 2000
    encoded = in_this_process(case)
    assert files_of(case.output) == case.corpus.files
    assert sum(encoded) == 2000 - read  # 2000 if receipts are ignored: see the control


@pytest.mark.full
def test_control_without_receipts_everything_is_repeated(killed: Case, tmp_path: Path) -> None:
    case = copy_of(killed, tmp_path / "out")
    for path in (case.output / ".work" / tokenise.PARTS).glob("*.json"):
        path.unlink()
    assert sum(in_this_process(case)) == 2000
    assert files_of(case.output) == case.corpus.files


def documents_in(receipt: PartReceipt) -> int:
    return sum(receipt.kept) + receipt.equal + receipt.empty


def in_this_process(case: Case) -> list[int]:
    """Finish a preparation and return the documents of each tokenised batch."""
    batches: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        add = tokenise._Part.add
        patch.setattr(
            tokenise._Part,
            "add",
            lambda part, batch, words: (batches.append(len(batch)), add(part, batch, words))[1],
        )
        prepare(compose_prepare([*case.words, "workers=1"]), Progress.silent())
    return batches


def test_resume_after_kill_while_writing_shards(corpus: Corpus, tmp_path: Path) -> None:
    case = Case(corpus, tmp_path / "out", workers=1)
    with pytest.MonkeyPatch.context() as patch:  # killed between two key ranges of the second shard
        patch.setattr(merge, "plan_shards", lambda *args, pieces=merge.plan_shards: pieces(*args[:2], 9000))
        write_range = merge._write_range

        def failing(*args: object) -> int:
            if (case.output / ".work" / merge.SHARDS / "train-00001.json").exists():
                raise KeyboardInterrupt
            return write_range(*args)  # type: ignore[arg-type]

        patch.setattr(merge, "_write_range", failing)
        with pytest.raises(KeyboardInterrupt):
            prepare(compose_prepare([*case.words, "workers=1"]), Progress.silent())
        written = {path.name: path.stat().st_mtime_ns for path in case.output.glob("*.bin")}
        assert set(written) == {"train-00000.bin", "train-00001.bin"}
        (case.output / f"train-00002.bin.partial-{os.getpid()}").write_bytes(b"of a killed process")
        patch.setattr(merge, "_write_range", write_range)
        prepare(compose_prepare([*case.words, "workers=1"]), Progress.silent())
        assert {name: (case.output / name).stat().st_mtime_ns for name in written} == written
        assert not list(case.output.glob("*.partial*"))
    assert (case.output / "report.json").read_bytes() == case.corpus.files["report.json"]
    assert documents_of(case.output, "train") == documents_of(corpus.whole, "train")


@pytest.mark.full
def test_resume_after_repeated_kills(corpus: Corpus, tmp_path: Path) -> None:
    """After a part or after a random time from its start on, with another number of processes each time,
    until it is done.
    """
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    random_, case, inside = random.Random(seed), Case(corpus, tmp_path / "out", workers=1), 0
    for attempt in range(40):
        case.workers = random_.randint(1, 3)
        before = case.receipts
        # The first kill always interrupts work: on a fast machine all random times may come too late for
        # it.
        began, wait = time.monotonic(), random_.uniform(0.2, 2.5) if attempt else float("inf")
        killed = case.killed_when(
            lambda began=began, wait=wait, first=not attempt: (
                time.monotonic() - began > wait or (first and case.receipts > 0)
            )
        )
        inside += killed and case.receipts > before
        if not killed:
            break
    assert inside >= 1, "killed in the work at least once"
    assert case.finished()
    assert files_of(case.output) == case.corpus.files
