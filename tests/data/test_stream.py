"""The stream: the same samples in the same order for any layout, resumable anywhere, prefetched by a
thread.
"""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.data_folders import PositionTokens, batch_plan, documents, make_folder
from toolkit.data.order import stream as stream_module
from toolkit.data.order.permutation import ORDER_VERSION
from toolkit.data.order.prefetch import Prefetch
from toolkit.data.order.samples import TokenWindows
from toolkit.data.order.stream import Stream, rank_positions
from toolkit.data.tokens.token_array import TokenSource, open_split
from toolkit.errors import CheckpointError, InputError
from toolkit.plan.types import BatchPlan, RampStage
from toolkit.testing.stream_cost import measure_stream_cost

Ints = npt.NDArray[np.int64]


def open_stream(
    tokens: int = 1000, length: int = 7, seed: int = 0, batch: BatchPlan | None = None, rank: int = 0
) -> Stream:
    return stream_of(PositionTokens(tokens), length, seed, batch, rank)


def stream_of(
    source: TokenSource, length: int, seed: int = 0, batch: BatchPlan | None = None, rank: int = 0
) -> Stream:
    windows = TokenWindows(source, length, seed)
    return Stream({"train": windows}, None, seed=seed, batch=batch or batch_plan(1, 1, 1), data_rank=rank)


def starts(stream: Stream, positions: Ints) -> Ints:
    """Return the first token of a window of ``PositionTokens``, which is its position."""
    return stream.samples(positions)[:, 0]


def global_batch(streams: list[Stream], step: int) -> Ints:
    """Return the samples of all ranks in a step, in the order of the global batch.

    Samples are ordered by micro-batch and then by rank.
    """
    ranks = [next(stream.steps(step)) for stream in streams]
    for stream in streams:
        stream.close()
    return np.concatenate(
        [micro_batch for of_all_ranks in zip(*ranks, strict=True) for micro_batch in of_all_ranks]
    )


def test_rank_positions_of_the_documented_example() -> None:
    plan = batch_plan(2, 8, 2)
    assert rank_positions(plan, 0, 0).tolist() == [[0, 1], [4, 5]]
    assert rank_positions(plan, 0, 1).tolist() == [[2, 3], [6, 7]]
    assert rank_positions(plan, 3, 1).tolist() == [[26, 27], [30, 31]]


@given(
    power=st.integers(0, 10),
    micro_power=st.integers(0, 10),
    odd=st.sampled_from([1, 3, 5]),
    step=st.integers(0, 10**9),
    tokens=st.integers(200, 10**9),
    length=st.integers(1, 64),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=40, deadline=None)
def test_global_batch_does_not_depend_on_layout(
    power: int, micro_power: int, odd: int, step: int, tokens: int, length: int, seed: int
) -> None:
    """Positions of up to 1,024 ranks are those of one; a control with counters per rank differs."""
    size = 1024 * odd
    ranks, micro = 2**power, min(2**micro_power, size // 2**power // odd * odd)
    plan = batch_plan(micro, size, ranks) if size % (micro * ranks) == 0 else batch_plan(1, size, ranks)
    alone = rank_positions(batch_plan(size, size, 1), step, 0).ravel()
    split = np.stack(
        [rank_positions(plan, step, rank) for rank in range(ranks)]
    )  # [rank, micro-batch, sample]
    assert np.array_equal(split.transpose(1, 0, 2).ravel(), alone)
    stream = open_stream(tokens, length, seed, plan)
    read_by_rank = starts(stream, split.ravel()).reshape(split.shape)
    assert np.array_equal(read_by_rank.transpose(1, 0, 2).ravel(), starts(stream, alone))
    counters = np.concatenate(
        [rank * 10**6 + step * size // ranks + np.arange(size // ranks) for rank in range(ranks)]
    )
    assert ranks == 1 or not np.array_equal(np.sort(counters), alone)


@pytest.mark.parametrize(("micro", "ranks"), [(12, 1), (1, 1), (3, 4), (1, 12), (2, 3), (6, 2)])
@pytest.mark.parametrize("step", [0, 5, 1000])
def test_every_layout_reads_the_same_windows(micro: int, ranks: int, step: int) -> None:
    whole = next(open_stream(batch=batch_plan(12, 12, 1)).steps(step))[0]
    plan = batch_plan(micro, 12, ranks)
    assert np.array_equal(
        global_batch([open_stream(batch=plan, rank=rank) for rank in range(ranks)], step), whole
    )


def test_old_fingerprint_continues_with_the_same_samples() -> None:
    """First and last token of a rank's samples, as the stream gave them before mixtures were added (commit
    28c2c24).
    """
    plan = batch_plan(2, 8, 2)
    for tokens, length, seed, expected in (
        (1000, 7, 0, [[[307, 314], [734, 741]], [[650, 657], [853, 860]]]),
        (
            10**12,
            128,
            11,
            [
                [[681618283083, 681618283211], [712526541899, 712526542027]],
                [[266180707275, 266180707403], [393498013899, 393498014027]],
            ],
        ),
    ):
        stream = open_stream(tokens, length, seed, plan, rank=1)
        assert [micro_batch[:, [0, -1]].tolist() for micro_batch in next(stream.steps(0))] == expected
        stream.close()
        assert stream.fingerprint() == {
            "order": ORDER_VERSION,
            "data": "data",
            "tokenizer": "tokenizer",
            "seed": seed,
            "sequence_length": length,
        }


def test_a_ramp_consumes_every_sample_once() -> None:
    stages = (RampStage(4, 0, 0, 3), RampStage(8, 3, 12, None))
    plan = BatchPlan(micro_batch=2, global_batch=8, data_parallel=2, stages=stages)
    streams = [open_stream(batch=plan, rank=rank) for rank in range(2)]
    seen = np.concatenate([global_batch(streams, step) for step in range(6)])
    assert np.array_equal(seen, open_stream().samples(np.arange(3 * 4 + 3 * 8)))
    assert [len(next(streams[0].steps(step))) for step in (0, 2, 3)] == [1, 1, 2]


@given(
    tokens=st.integers(8, 3000),
    length=st.integers(1, 7),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_an_epoch_predicts_its_tokens_once(tokens: int, length: int, seed: int, epoch: int) -> None:
    """Windows are consecutive tokens around the end; no token is predicted twice, fewer than a window's are
    left out.
    """
    stream = open_stream(tokens, length, seed)
    windows = stream.samples(epoch * (tokens // length) + np.arange(tokens // length))
    assert windows.shape == (tokens // length, length + 1)
    assert np.array_equal((windows[:, :1] + np.arange(length + 1)) % tokens, windows)
    targets = np.sort(windows[:, 1:].ravel())
    assert len(np.unique(targets)) == len(targets)
    assert tokens - len(targets) < length


def test_windows_differ_between_epochs() -> None:
    stream = open_stream(7000)
    first, second = (set(starts(stream, epoch * 1000 + np.arange(1000)).tolist()) for epoch in range(2))
    assert len(first) == len(second) == 1000
    assert len({start % 7 for start in first} & {start % 7 for start in second}) <= 6
    assert first != second


def test_resume_at_any_step_gives_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also across the boundaries of chunks that are ordered and read at once."""
    monkeypatch.setattr(stream_module, "ORDER_CHUNK_SAMPLES", 40)
    monkeypatch.setattr(stream_module, "READ_CHUNK_BYTES", 1 << 10)  # bytes: 16 samples
    source = PositionTokens(1000)
    plan = batch_plan(2, 4, 1)
    whole = list(itertools.islice(stream_of(source, 7, batch=plan).steps(0), 60))
    for step in (1, 9, 10, 11, 37):
        resumed = stream_of(source, 7, batch=plan).steps(step)
        for mine, theirs in zip(itertools.islice(resumed, 20), whole[step : step + 20], strict=True):
            assert np.array_equal(np.stack(mine), np.stack(theirs))
        resumed.close()


@pytest.mark.parametrize("mixed", [False, True], ids=["one source", "a mixture"])
def test_cost_is_flat(mixed: bool) -> None:
    """A million, 10^9 and 10^12 samples: alike in time to the first batch, resume, memory and state.

    Measured on two quiet cores: 1 to 2 ms and 0.9 MB for one source, 3 to 4 ms for three; the bounds leave
    room for a busy machine.
    """
    costs = [measure_stream_cost(samples, mixed=mixed) for samples in (10**6, 10**9, 10**12)]
    for cost in costs:
        assert cost.first_batch_seconds < 0.25
        assert cost.resume_seconds < 0.25
        assert cost.peak_bytes < 8 << 20
        assert cost.state_bytes < 512
    for seconds in ([cost.first_batch_seconds for cost in costs], [cost.resume_seconds for cost in costs]):
        assert (
            max(seconds) - min(seconds) < 0.01
        )  # a cost that grows with the data would be a million times larger for the last


def test_stream_reads_the_tokens_of_files(tmp_path: Path) -> None:
    texts = documents(60, 300)
    make_folder(tmp_path / "data", {"train": texts}, shard_bytes=500)
    row = np.concatenate(texts)
    stream = stream_of(open_split(tmp_path / "data", "train"), 9, 1, batch_plan(4, 8, 1))
    micro_batches = next(stream.steps(0))
    stream.close()
    assert [batch.shape for batch in micro_batches] == [(4, 10), (4, 10)]
    assert all(batch.dtype == np.int64 and batch.flags.c_contiguous for batch in micro_batches)
    _, epochs, numbers = stream.locate(np.arange(8))
    begins = TokenWindows(open_split(tmp_path / "data", "train"), 9, 1).starts(epochs, numbers)
    assert np.array_equal(np.concatenate(micro_batches), row[(begins[:, None] + np.arange(10)) % len(row)])


def test_max_samples_reads_the_beginning_of_the_data_only() -> None:
    def limited(max_samples: int | None) -> Stream:
        windows = TokenWindows(PositionTokens(1000), 7, 0, max_samples=max_samples)
        return Stream({"train": windows}, None, seed=0, batch=batch_plan(1, 1, 1), data_rank=0)

    rows = limited(5).samples(np.arange(50))  # ten epochs, each with another shift
    assert rows.min() == 0
    assert rows.max() == 5 * 7  # the last window's last token
    assert len(np.unique(rows[:, 0])) > 5
    assert limited(5).consumed(50)["train"] == (50, 10.0)
    assert limited(None).samples(np.arange(50)).max() > 5 * 7, "control"
    assert limited(142).fingerprint() == limited(None).fingerprint() != limited(5).fingerprint()


def test_too_short_a_split_is_refused() -> None:
    with pytest.raises(InputError, match=r"train\.sequence_length=7, split train has 7 tokens"):
        open_stream(7)
    (only,) = open_stream(8).samples(np.arange(1))
    assert len(only) == 8


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("order", "toolkit"),
        ("data", "data.path"),
        ("tokenizer", "data.path"),
        ("seed", "data.shuffle_seed=5"),
        ("sequence_length", "train.sequence_length=5"),
    ],
)
def test_a_stream_of_something_else_is_refused_by_name(key: str, words: str) -> None:
    stream = open_stream()
    saved = json.loads(json.dumps(stream.fingerprint()))
    stream.check_fingerprint(saved)
    for other in ({**saved, key: 5}, {name: value for name, value in saved.items() if name != key}):
        with pytest.raises(CheckpointError) as caught:
            stream.check_fingerprint(other)
        (problem,) = caught.value.problems
        assert problem.seen.startswith(f"{key}=")
        if key in other:
            assert words in problem.remedy


# -- reading ahead


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in ("data-stream", "prefetch")]


def wait_until_no_threads() -> None:
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


def test_prefetch_error_is_raised_by_next() -> None:
    class Breaking(PositionTokens):
        def read(self, starts: Ints, out: Ints) -> None:
            raise OSError("the disk is gone")

    stream = stream_of(Breaking(1000), 7)
    steps = stream.steps(0)
    with pytest.raises(OSError, match="the disk is gone"):
        next(steps)
    with pytest.raises(StopIteration):
        next(steps)
    wait_until_no_threads()


def test_items_before_an_error_are_delivered() -> None:
    def chunks() -> Iterator[list[int]]:
        yield [1, 2]
        yield []
        yield [3]
        raise KeyError("gone")

    items = Prefetch(chunks(), depth=1)
    assert [next(items) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(KeyError):
        next(items)


def test_prefetch_ends_with_its_iterator() -> None:
    assert list(Prefetch([[1], [2, 3]], depth=2)) == [1, 2, 3]


def test_prefetch_is_bounded() -> None:
    made = []

    def chunks() -> Iterator[list[int]]:
        for number in itertools.count():
            made.append(number)
            yield [number]

    items = Prefetch(chunks(), depth=3)
    assert next(items) == 0
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 5  # one used, three buffered, one read by the producer
    items.close()
    with pytest.raises(StopIteration):
        next(items)
    wait_until_no_threads()


def test_closing_or_freeing_ends_the_thread() -> None:
    stream = open_stream()
    first, second = stream.steps(0), stream.steps(5)
    next(first)
    next(second)
    assert len(threads()) == 2
    stream.close()
    stream.close()
    wait_until_no_threads()
    with pytest.raises(StopIteration):
        next(second)
    dropped = stream.steps(0)
    next(dropped)
    del dropped
    gc.collect()
    wait_until_no_threads()


@pytest.mark.full
def test_a_script_may_end_while_samples_are_read_ahead() -> None:
    """Without joining threads at exit, about every second process died of a signal."""
    code = (
        "from toolkit.testing.stream_cost import synthetic_stream\n"
        "left = [synthetic_stream(10**6, mixed=True).steps(0) for _ in range(8)]\n"
        "next(left[0]); next(synthetic_stream(10**6, mixed=False).steps(0))\n"
    )
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
