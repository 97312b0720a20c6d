"""Memory does not grow with tensors: it is the same for 1, 4 and 16 times the size.

pytest tests/checkpoint/test_memory.py
pytest tests/checkpoint/test_memory.py -m full      resident memory of processes, at real sizes
"""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoint.layouts import LAYOUTS, save, shards_of
from tests.checkpoint.memory_programs import PROGRAMS
from toolkit.checkpoint import catalog, file_reader, piece_reader, planner, tile_reader, verify
from toolkit.checkpoint.offline import output, unit_writer
from toolkit.checkpoint.online import writing
from toolkit.checkpoint.shard import MASTER, WEIGHT, TensorKey

ROOM = 64 * 2**10
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (catalog, file_reader, piece_reader, output, verify, writing):
        monkeypatch.setattr(module, "BLOCK_BYTES", ROOM)
    monkeypatch.setattr(planner, "SPLIT_BYTES", ROOM)
    monkeypatch.setattr(unit_writer, "TILE_BYTES", ROOM)
    monkeypatch.setattr(tile_reader, "TILE_BYTES", ROOM)


def checkpoints(folder: Path, rows: int) -> Path:
    """A bf16 weight and its master, [rows, 256], in two layouts."""
    values = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
    named = {TensorKey(WEIGHT, "w"): values.bfloat16(), TensorKey(MASTER, "w"): values}
    save(folder / "run", 1, shards_of(named, LAYOUTS["flat"], 3))
    save(folder / "other", 1, shards_of(named, LAYOUTS["columns"], 2))
    return folder


def peak(work: Callable[[Path], None], folder: Path) -> int:
    tracemalloc.start()
    try:
        work(folder)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("convert", "verify_run") else pytest.param(name, marks=pytest.mark.full)
        for name in PROGRAMS
    ],
)
def test_traced_memory_is_bounded(tmp_path: Path, small_rooms: None, name: str) -> None:
    """Masters of 0.5, 2 and 8 MB, with buffers of 64 KiB. The overlap of two threads is random; the bound
    is not.
    """
    folders = [checkpoints(tmp_path / f"{rows}", rows) for rows in (512, 2048, 8192)]
    PROGRAMS[name](checkpoints(tmp_path / "imports", 512))
    peaks = [peak(PROGRAMS[name], folder) for folder in folders]
    print(name, peaks)
    assert max(peaks) < 16 * ROOM, "the largest master is 128 rooms"


def test_control_reading_whole_file_grows_memory(tmp_path: Path) -> None:
    """Control: the measurement detects memory that grows with the tensor."""

    def read(folder: Path) -> None:
        np.fromfile(next((folder / "run" / "step-00000001").glob("*.safetensors")), np.uint8)

    assert peak(read, checkpoints(tmp_path / "b", 8192)) > 10 * peak(read, checkpoints(tmp_path / "a", 512))


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
def test_resident_memory_is_bounded(tmp_path: Path, name: str) -> None:
    """Masters of 32, 128 and 512 MiB and their weights, with two workers of 128 MB each. The smallest
    finishes before both workers fill their buffers, so it only has an upper bound.
    """
    found = []
    for rows in (2**15, 2**17, 2**19):
        folder = checkpoints(tmp_path / f"{rows}", rows)
        command = [sys.executable, "-m", "tests.checkpoint.memory_programs", name, str(folder)]
        found.append(
            int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
        )
    print(name, [f"{numbytes / 2**20:.0f} MiB" for numbytes in found])
    assert max(found) < 1.1 * found[1] + 8 * 2**20, found
    assert max(found) < 2 * 128e6, found
