"""benchmarks/reshard.py: every contender writes the requested target, and its figures are reported.

pytest tests/checkpoint/test_reshard_benchmark.py
pytest tests/checkpoint/test_reshard_benchmark.py -m full      with the vendors' tools
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "reshard.py"


def measured(folder: Path, *words: str) -> Any:
    command = [
        sys.executable,
        str(SCRIPT),
        "--folder",
        str(folder),
        "--out",
        str(folder / "x.json"),
        "--cold",
        "no",
        "--runs",
        "1",
    ]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in folder.iterdir()] == ["x.json"], "nothing is left"
    return json.loads((folder / "x.json").read_text())


def test_the_floor_and_ours(tmp_path: Path) -> None:
    found = measured(tmp_path, "--parameters", "1", "--only", "native")
    assert found["bytes"] == 12 * found["parameters"]
    assert found["parameters"] == pytest.approx(1e6, rel=0.5)
    assert found["times_cp"]["cp"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    assert found["median"]["native"]["peak_bytes"] < 1.28e8
    assert (
        found["times_cp"]["native"]["median"]
        == found["rows"]["native"][0]["seconds"] / found["rows"]["cp"][0]["seconds"]
    )
    assert len(found["peak_bytes_by_parameters"]["native"]) == 3


@pytest.mark.full
def test_all_contenders(tmp_path: Path) -> None:
    found = measured(tmp_path, "--parameters", "5")
    assert set(found["median"]) == {"cp", "native", "zero3-megatron", "universal", "dcp"}
    for name in ("native", "zero3-megatron", "dcp"):
        assert found["median"][name]["temporary_bytes"] < 0.1 * found["bytes"], name
