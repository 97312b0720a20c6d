"""Training directly on a dataset, with real files and tokenizer processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from tests.data.data_folders import batch_plan
from tests.data.dataset_files import Corpus, config_of, make_corpus
from toolkit.config.schema import RunConfig
from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.dataset import documents as documents_module
from toolkit.data.dataset import source as sources
from toolkit.data.dataset.data_folder import TrainingSource
from toolkit.data.dataset.documents import ArrowDocuments
from toolkit.data.dataset.stream import DatasetStream, merge_states
from toolkit.data.dataset.tokenizer_pool import TokenizerPool, WorkerDied
from toolkit.data.dataset.tokenizer_worker import is_held_out
from toolkit.data.manifest import read_manifest
from toolkit.data.registry import open_data, prepare_data
from toolkit.data.tokens import tokenizer as bpe
from toolkit.data.tokens.token_array import open_split
from toolkit.errors import CheckpointError, InputError
from toolkit.progress import Progress

Ints = npt.NDArray[np.int64]
State = dict[str, Any]
LENGTH, BATCH = 16, 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    with pytest.MonkeyPatch.context() as patch:
        yield make_corpus(tmp_path_factory.mktemp("corpus"), patch)


def ready(config: RunConfig) -> str:
    return prepare_data(config, None, Progress.silent())


class Ranks:
    """Open all data ranks of a layout in this process."""

    def __init__(
        self,
        config: RunConfig,
        folder: str,
        ranks: int = 1,
        micro: int = 1,
        step: int = 0,
        state: State | None = None,
    ) -> None:
        self.step = step
        self.streams: list[DatasetStream] = []
        for rank in range(ranks):
            stream = open_data(config, batch_plan(micro, BATCH, ranks), rank, folder).stream
            assert isinstance(stream, DatasetStream)
            self.streams.append(stream)
            if state is not None:
                stream.restore(json.loads(json.dumps(state)))
        self._steps = [stream.steps(step) for stream in self.streams]

    def take(self, count: int) -> list[Ints]:
        self.step += count
        taken = []
        for _ in range(count):
            ranks = [next(steps) for steps in self._steps]
            taken.append(np.concatenate([micro for of_all in zip(*ranks, strict=True) for micro in of_all]))
        return taken

    def state(self) -> State:
        return merge_states([stream.rank_state(self.step) for stream in self.streams], BATCH)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            stream.close()


def same(a: list[Ints], b: list[Ints]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def texts_of(rows: list[Ints], corpus: Corpus) -> list[list[str]]:
    """Return each lane's complete documents from its rows."""
    tokenizer = bpe.read_tokenizer(corpus.tokenizer)
    taken = np.stack(rows)
    lanes = []
    for lane in range(taken.shape[1]):
        row = np.concatenate([taken[:, lane, :-1].ravel(), taken[-1, lane, -1:]])
        parts = np.split(row, np.flatnonzero(row == corpus.end_of_text) + 1)[:-1]
        lanes.append([tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts])
    return lanes


def test_epoch_contains_every_text_once(corpus: Corpus) -> None:
    """Two columns of two parquet files are joined; nulls are skipped; strings of special tokens are text."""
    config = config_of(corpus, path=str(corpus.folder / "parquet"), text=["title", "text"])
    with Ranks(config, ready(config)) as ranks:
        lanes = texts_of(ranks.take(1200), corpus)
        documents = ranks.streams[0]._documents
    assert isinstance(documents, ArrowDocuments)
    numbers = [lane + BATCH * place for lane in range(BATCH) for place in range(len(lanes[lane]))]
    found = [text for lane in lanes for text in lane]
    first_epoch = sorted(text for number, text in zip(numbers, found, strict=True) if number < corpus.count)
    expected = sorted(
        "\n\n".join(part for part in (title, text) if part is not None) for title, text in corpus.rows
    )
    assert first_epoch == expected
    assert any("<|endoftext|>" in text for text in expected)


@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.full)])
def test_samples_do_not_depend_on_ranks_workers_or_resumes(
    corpus: Corpus, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream is also read past its end and from a state in its middle."""
    monkeypatch.setattr(documents_module, "STREAM_ROWS", 50)
    config = config_of(corpus, streaming=streaming)
    folder = ready(config)
    with Ranks(config, folder, micro=4) as ranks:
        first, state, then = ranks.take(700), ranks.state(), ranks.take(300)
        assert max(ranks.state()["documents"]) * BATCH > corpus.count
    other = config_of(corpus, streaming=streaming, workers=1)
    with Ranks(other, folder, ranks=2) as ranks:
        assert same(ranks.take(700), first)
        assert {**ranks.state(), "source": None} == {**state, "source": None}
        state = ranks.state()
    with Ranks(other, folder, ranks=2, step=700, state=state) as ranks:
        began = time.process_time()
        assert same(ranks.take(1), then[:1])
        assert time.process_time() - began < 3
        assert same(ranks.take(299), then[1:])
    if streaming:
        assert state["source"]["number"] > 0
    assert len(json.dumps(state)) < 1000


def test_documents_held_out_are_the_evaluation_set_and_never_trained_on(corpus: Corpus) -> None:
    config = config_of(corpus, validation=0.2)
    config.eval.every = 1
    folder = ready(config)
    with Ranks(config, folder) as ranks:
        trained = {text for lane in texts_of(ranks.take(1200), corpus) for text in lane}
        opened = open_data(config, batch_plan(1, BATCH, 1), 0, folder)
    assert opened.end_of_text == corpus.end_of_text
    texts = {text for _, text in corpus.rows}
    held_out = {text for text in texts if is_held_out(text.encode(), 0.2)}
    assert 0.1 < len(held_out) / len(texts) < 0.3
    assert trained == texts - held_out
    source = open_split(read_manifest(folder).folder, "validation")
    row = np.empty((1, source.tokens), dtype=np.int64)
    source.read(np.zeros(1, dtype=np.int64), row)
    (there,) = texts_of([row], corpus)
    assert set(there) <= held_out
    assert source.tokens > config.eval.batches * BATCH * LENGTH
    batches = list(opened.sets["validation"].batches())
    assert len(batches) == config.eval.batches
    windows = np.concatenate([micro for batch in batches for micro in batch])
    assert np.array_equal(windows[:, :-1].ravel(), row[0, : len(windows) * LENGTH])
    assert ready(config) == folder


def test_a_split_by_name_is_an_evaluation_set(corpus: Corpus) -> None:
    config = config_of(corpus, path=str(corpus.folder / "splits"))
    config.eval.every, config.eval.sets = 1, ["test"]
    for batches, documents in ((3, 10), (100, 20)):  # as many windows as an evaluation reads, or all
        config.eval.batches = batches
        manifest = read_manifest(ready(config))
        assert list(manifest.splits) == ["test"]
        assert manifest.splits["test"].documents == documents


def test_saved_dataset_is_read_in_place(corpus: Corpus) -> None:
    saved = config_of(corpus, path=str(corpus.folder / "saved"))
    with Ranks(saved, ready(saved)) as ranks, Ranks(config_of(corpus), ready(config_of(corpus))) as jsonl:
        assert same(ranks.take(50), jsonl.take(50))


def test_a_changed_file_is_refused_by_name(corpus: Corpus, tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes((corpus.folder / "corpus.jsonl").read_bytes())
    config = config_of(corpus, path=str(file))

    def stream(changed: RunConfig) -> Any:
        return open_data(changed, batch_plan(1, BATCH, 1), 0, ready(changed)).stream

    saved = json.loads(json.dumps(stream(config).fingerprint()))
    moved = tmp_path / "elsewhere" / "corpus.jsonl"
    moved.parent.mkdir()
    moved.write_bytes(file.read_bytes())
    stream(config_of(corpus, path=str(moved))).check_fingerprint(saved)
    file.write_bytes(file.read_bytes().replace(b"word1 ", b"word9 ", 1))
    with pytest.raises(CheckpointError, match=rf"data=.*\(corpus\.jsonl was {saved['file corpus.jsonl']}\)"):
        stream(config).check_fingerprint(saved)
    other = replace(config_of(corpus).train, sequence_length=LENGTH + 1)
    for changed, words in (
        (config_of(corpus, text=["title", "text"]), r"text=title,text, the checkpoint has text=text"),
        (config_of(corpus, tokenizer=str(corpus.other_tokenizer)), "tokenizer="),
        (replace(config_of(corpus), train=other), f"write train.sequence_length={LENGTH}"),
        (config_of(corpus, validation=0.1), r"write data\.dataset\.validation=0\.0"),
    ):
        with pytest.raises(CheckpointError, match=words):
            stream(changed).check_fingerprint(saved)


def test_large_files_are_hashed_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "HASHED_BYTES", 1000)
    monkeypatch.setattr(sources, "SAMPLE_BYTES", 8)
    a, b = tmp_path / "part" / "a", tmp_path / "b"
    a.parent.mkdir()
    a.write_bytes(bytes(5000))
    b.write_bytes(bytes(5000))
    before = sources.hash_files([a, b])
    assert list(before) == ["part/a", "b"]
    b.write_bytes(bytes(4999) + b"x")
    after = sources.hash_files([a, b])
    assert before["part/a"] == after["part/a"]
    assert before["b"] != after["b"]


def test_truncated_or_missing_arrow_files_are_named(corpus: Corpus, tmp_path: Path) -> None:
    (whole,) = TrainingSource.read(ready(config_of(corpus))).files
    file = tmp_path / "cut.arrow"
    file.write_bytes(Path(whole).read_bytes()[:-2000])
    for path in (file, tmp_path / "gone.arrow"):
        with pytest.raises(InputError, match=str(path)):
            ArrowDocuments([str(path)], ["text"], 0)


# -- processes


def test_killed_worker_raises_and_leaves_no_process(corpus: Corpus) -> None:
    config = config_of(corpus, workers=2)
    with Ranks(config, ready(config)) as ranks:
        (stream,) = ranks.streams
        assert stream._encoders is not None
        pids = stream._encoders.pids
        ranks.take(1)
        os.kill(pids[0], signal.SIGKILL)
        time.sleep(0.5)  # until it is dead
        began = time.monotonic()
        with pytest.raises(WorkerDied, match=f"tokenizer process {pids[0]} ended \\(signal 9"):
            ranks.take(10)  # long before the prefetched samples are used up
        assert time.monotonic() - began < 60
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_workers_end_with_their_parent_and_ignore_signals(corpus: Corpus) -> None:
    code = (
        "import sys, threading, time; from pathlib import Path; import numpy as np\n"
        "from toolkit.data.dataset.tokenizer_pool import TokenizerPool\n"
        "from toolkit.config.special_tokens import SpecialTokens\n"
        f"file = Path({str(corpus.tokenizer / 'tokenizer.json')!r})\n"
        "encoders = TokenizerPool(file, end_of_text=0, dtype=np.dtype('uint16'), held_out=0.0,\n"
        "    special_tokens=SpecialTokens.refuse, count=2)\n"
        # Both threads meet at the barrier, so each process serves one request: both ignore signals by then.
        "meet = threading.Barrier(2)\n"
        "fetch = lambda: (meet.wait(60), (b'ab', np.array([1, 2])))[1]\n"
        "encode_two = lambda: [len(f.result()) for f in [encoders.submit(fetch) for _ in range(2)]]\n"
        "encode_two(); print(*encoders.pids, flush=True); sys.stdin.readline()\n"
        "print(encode_two(), flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
            worker.send_signal(signal.SIGINT)
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "[2, 2]\n"
        parent.kill()
        gone, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive
        assert len(gone) == 2


def test_errors_of_workers_and_readers_are_raised(corpus: Corpus) -> None:
    encoders = TokenizerPool(
        corpus.tokenizer / "tokenizer.json",
        end_of_text=0,
        dtype=np.dtype(np.uint16),
        held_out=0.0,
        special_tokens=SpecialTokens.refuse,
        count=1,
    )
    with pytest.raises(RuntimeError, match=r"(?s)a tokenizer process failed:.*TypeError"):
        encoders.submit(lambda: (b"ab", np.array([1.5]))).result(timeout=60)

    def breaks() -> Any:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        encoders.submit(breaks).result(timeout=60)
    tokens, broken = encoders.submit(lambda: (b"a\xff", np.array([1, 2]))).result(timeout=60)
    assert tokens.dtype == np.uint16
    assert tokens[-1] == 0
    tokenizer = bpe.read_tokenizer(corpus.tokenizer)
    assert tokenizer.decode(broken.tolist()) == "\ufffd"  # bytes that are not UTF-8
    encoders.close()
    encoders.close()
    assert encoders.submit(breaks).exception() is not None
