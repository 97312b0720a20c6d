"""benchmarks/streaming.py measures what it says: its own contenders deliver the corpus, and its verdicts tell right from wrong.

python -m pytest tests/data/test_streaming_benchmark.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def benchmarks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


@pytest.fixture(scope="module")
def corpus(benchmarks: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from sides.corpus import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus") / "made", 400_000, seed=3)


def epoch(corpus: Any, name: str) -> np.ndarray:
    """[samples, 2048]."""
    from sides.streams import SIDES
    from sides.streams.common import GLOBAL_BATCH, LENGTH, StreamRank

    batches = SIDES[name].open(corpus, corpus.folder / "formats", StreamRank(), None).batches
    return np.concatenate([next(batches).numpy() for _ in range(corpus.tokens // LENGTH // GLOBAL_BATCH)])


def test_floor_and_toolkit_deliver_the_same_tokens(corpus: Any) -> None:
    """The toolkit's windows are shifted, so tokens are compared by how often each stands there; the rest fills no global batch."""
    slices, floor, scattered, ours = (
        epoch(corpus, name) for name in ("slice", "floor", "floor-random", "toolkit")
    )
    assert floor.shape == scattered.shape == ours.shape
    assert all(part.dtype == np.int64 for part in (slices, floor, scattered, ours))
    np.testing.assert_array_equal(slices, floor)
    rows = set(map(tuple, corpus.windows(2048).tolist()))
    assert len({*map(tuple, floor.tolist())}) == len({*map(tuple, scattered.tolist())}) == len(floor)
    assert rows >= {*map(tuple, floor.tolist())} | {*map(tuple, scattered.tolist())}
    whole = np.bincount(corpus.mapped(), minlength=64_000)
    for found in (floor, scattered, ours):
        missing = whole - np.bincount(found.ravel(), minlength=64_000)
        assert missing.min() >= 0
        assert missing.sum() == corpus.tokens - floor.size
    twice = np.concatenate([ours[8:], ours[8:16]])  # the control: a batch left out, another one given twice
    assert (whole - np.bincount(twice.ravel(), minlength=64_000)).min() < 0


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("floor", 1), ("toolkit", 1), ("toolkit", 4), ("toolkit-mixture", 1), ("toolkit-mixture", 2)],
)
def test_a_state_continues_on_any_ranks(corpus: Any, name: str, ranks: int) -> None:
    from sides.streams import SIDES
    from sides.streams.common import StreamRank

    whole = SIDES[name].open(corpus, corpus.folder, StreamRank(), None)
    for _ in range(5):
        next(whole.batches)
    state = whole.state()
    following = [next(whole.batches).numpy() for _ in range(3)]
    parts = [
        SIDES[name].open(corpus, corpus.folder, StreamRank(rank, ranks), state).batches
        for rank in range(ranks)
    ]
    for expected in following:
        np.testing.assert_array_equal(np.concatenate([next(part).numpy() for part in parts]), expected)


def test_verdicts_tell_right_from_wrong(benchmarks: None) -> None:
    from streaming import compare_batches

    numbers = np.arange(8 * 200, dtype=np.uint64).reshape(200, 8)
    assert compare_batches(numbers, numbers[100:164][:, ::-1], 100) == {"exact": True, "taken_before": 0.0}
    assert compare_batches(numbers, numbers[99:163], 100) == {"exact": False, "taken_before": 1 / 64}
    assert compare_batches(numbers, numbers[:64], 100) == {"exact": False, "taken_before": 1.0}


def test_mixing_is_one_for_a_permutation_and_large_for_none(benchmarks: None) -> None:
    from sides.mixing import buffer_order, chi2_per_df

    samples, shares = 1 << 16, np.full(64, 1 / 64)
    domains = np.arange(samples) * 64 // samples
    shuffled = np.random.default_rng(0).permutation(samples)
    assert chi2_per_df(domains[shuffled], shares) == pytest.approx(1.0, abs=0.06)
    assert chi2_per_df(domains, shares) == pytest.approx(1024)
    buffered = np.fromiter(buffer_order(0, 40_000, 10_000, 0), dtype=np.int64)
    assert len(np.unique(buffered)) == 40_000
    assert 5 < chi2_per_df(domains[buffered], shares) < 200


class StandInForLitdata(ModuleType):
    """``optimize`` clears its two scratch folders before it starts, as litdata 0.2.76 does, and keeps their paths in ``cleared``."""

    def __init__(self) -> None:
        super().__init__("litdata")
        self.cleared: list[Path] = []

    def optimize(self, *arguments: object, **settings: object) -> None:
        for variable, name in (
            ("DATA_OPTIMIZER_CACHE_FOLDER", "chunks"),
            ("DATA_OPTIMIZER_DATA_CACHE_FOLDER", "data"),
        ):
            folder = Path(os.getenv(variable, f"{tempfile.gettempdir()}/{name}"))
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            self.cleared.append(folder)

    def TokensLoader(self) -> None:
        pass


def test_making_litdata_files_deletes_nothing_in_the_temporary_directory(
    corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sides.streams import SIDES

    stand_in = StandInForLitdata()
    monkeypatch.setitem(sys.modules, "litdata", stand_in)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    planted = [tmp_path / "temporary" / name / "precious.txt" for name in ("chunks", "data")]
    for file in planted:
        file.parent.mkdir(parents=True)
        file.write_text("of somebody else")
    files = tmp_path / "formats" / "litdata"
    files.mkdir(parents=True)
    make = SIDES["litdata"].make
    assert make is not None
    make(corpus, files)
    assert all(file.read_text() == "of somebody else" for file in planted)
    assert len(stand_in.cleared) == 2
    assert all(folder.is_relative_to(files.parent) and not folder.exists() for folder in stand_in.cleared)
    stand_in.optimize()  # the control: without the benchmark's settings, both planted files are deleted
    assert not any(file.exists() for file in planted)


def test_the_ratio_is_of_turns_in_one_process(corpus: Any) -> None:
    """As the benchmark runs it; how large the ratio is, a quick test cannot say."""
    argv = [
        sys.executable,
        str(BENCHMARKS / "sides" / "read_stream.py"),
        "toolkit",
        "speed",
        "--corpus",
        str(corpus.folder),
        "--files",
        str(corpus.folder / "none"),
        "--seconds",
        "0.2",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["turns"]
    assert all(turn["cpu_ns"] > 0 and turn["slice_cpu_ns"] > 0 for turn in found["turns"])
    assert found["first_seconds"] > 0
    assert found["peak_bytes"] > 1 << 20

    from streaming import turn_medians

    turns = [
        {"cpu_ns": 3.0, "slice_cpu_ns": 2.0},
        {"cpu_ns": 8.0, "slice_cpu_ns": 4.0},
        {"cpu_ns": 4.0, "slice_cpu_ns": 1.0},
    ]
    assert turn_medians(turns) == {"turns": 3, "cpu_ns": 4.0, "slice_cpu_ns": 2.0, "ratio": 2.0}


def test_measuring_layouts_replaces_only_them(
    benchmarks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import streaming
    import streaming_report

    out = tmp_path / "streaming.json"
    before = json.loads((BENCHMARKS / "results" / "streaming.json").read_text())
    out.write_text(json.dumps({**before, "layouts": "of another day"}))
    monkeypatch.setattr(
        sys,
        "argv",
        ["streaming.py", "--layouts", "--layout-tokens", "2500000", "--seconds", "0", "--out", str(out)],
    )
    monkeypatch.setattr(streaming_report, "print_table", lambda found: None)
    streaming.main()
    found = json.loads(out.read_text())
    assert {name: part for name, part in found.items() if name != "layouts"} == {
        name: before[name] for name in found if name != "layouts"
    }
    cases = found["layouts"]["cases"]
    assert {"one shard", "six shards", "mixture of eight", "six shards, int32"} <= {
        case["name"] for case in cases
    }
    page = streaming_report.format_page(found)
    for case in cases:
        assert f"| {case['name']} | {case['cpu_ns']:.2f} |" in page
    slow = {**cases[0], "ratio": 9.0}
    assert any(
        "9.00" in line and "missed" in line
        for line in streaming_report.format_layouts({**found["layouts"], "cases": [slow]})
    )
    assert streaming_report.format_layouts(None) == []
