"""A plan proves and counts what a conversion will do.

pytest tests/checkpoint/test_plan_reshard.py
pytest tests/checkpoint/test_plan_reshard.py -m full        405 B parameters from 1,024 ranks
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import synthetic_catalogs
from tests.checkpoint.tiny_run import tiny_checkpoint
from toolkit.checkpoint.catalog import Catalog, TensorPiece
from toolkit.checkpoint.formats import native
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.offline.plan import plan_reshard
from toolkit.checkpoint.offline.reshard import lay_out
from toolkit.checkpoint.shard import TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.target import CheckpointTarget
from toolkit.checkpoint.target_tensors import select_target_tensors
from toolkit.config.reshard import TargetConfig
from toolkit.config.schema import Precision
from toolkit.errors import CheckpointError


class Calls:
    """System calls of a conversion."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = self.bytes_read = self.bytes_written = 0
        self._lock = threading.Lock()
        preadv, pwrite = os.preadv, os.pwrite

        def read(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
            count = preadv(descriptor, buffers, offset, *flags)
            with self._lock:
                self.reads += 1
                self.bytes_read += count
            return count

        def write(descriptor: int, data: Any, offset: int) -> int:
            count = pwrite(descriptor, data, offset)
            with self._lock:
                self.bytes_written += count
            return count

        monkeypatch.setattr(os, "preadv", read)
        monkeypatch.setattr(os, "pwrite", write)


@pytest.mark.parametrize("precision", [None, Precision.fp32, Precision.bf16])
@pytest.mark.parametrize("mixed", [False, True])
def test_plan_matches_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed: bool, precision: Precision | None
) -> None:
    source = open_source(tiny_checkpoint(tmp_path / "a", mixed=mixed))
    target = lay_out(source, TargetConfig(precision=precision))
    plan = plan_reshard(source.catalog, target)
    calls = Calls(monkeypatch)
    conversion = Conversion(source, target, tmp_path / "b", workers=1)
    conversion.run()
    assert (plan.reads, plan.bytes_read) == (calls.reads, calls.bytes_read)
    assert plan.bytes_written + plan.fixed_bytes == calls.bytes_written
    assert plan.target_bytes == sum(path.stat().st_size for path in (tmp_path / "b").glob("*.safetensors"))
    assert plan.unused == conversion.unused
    assert len(plan.unused) == (21 if mixed and precision is Precision.fp32 else 0), (
        "bf16 weights that have masters"
    )
    assert plan.tensors == len(target.tensors)


def changed(source: Catalog, key: TensorKey, pieces: tuple[TensorPiece, ...]) -> Catalog:
    return replace(source, pieces={**source.pieces, key: pieces})


def test_plan_detects_coverage_errors(tmp_path: Path) -> None:
    source = open_source(tiny_checkpoint(tmp_path / "a"))
    target = lay_out(source, TargetConfig())
    plan_reshard(source.catalog, target)
    key = next(iter(source.catalog.tensors))
    (piece,) = source.catalog.pieces[key]
    wrong: list[tuple[tuple[TensorPiece, ...], str]] = [
        ((), "no piece contains it"),
        ((piece, piece), "both contain"),
        ((replace(piece, end=piece.end - 4),), "bytes of part-00000.safetensors for"),
    ]
    for pieces, found in wrong:
        with pytest.raises(CheckpointError, match=found):
            plan_reshard(changed(source.catalog, key, pieces), target)
    (made,) = target.pieces[key]
    other = replace(made, begin=made.begin + 4, end=made.end + 4)
    wrong = [
        ((other,), "belongs to two pieces"),
        ((replace(made, file="x"),), "x has pieces but is not a file"),
    ]
    for pieces, found in wrong:
        with pytest.raises(CheckpointError, match=found):
            plan_reshard(source.catalog, replace(target, pieces={**target.pieces, key: pieces}))


def native_target(source: CheckpointSource) -> CheckpointTarget:
    return native.lay_out(source, select_target_tensors(source, Precision.bf16, optimizer=True))


def test_plan_zero3_of_64_ranks_with_missing_rank() -> None:
    source = synthetic_catalogs.zero3("llama-3-8b", ranks=64)
    plan = plan_reshard(source.catalog, native_target(source))
    parameters = 8_030_261_248
    assert plan.bytes_read == 12 * parameters
    assert plan.bytes_written == 14 * parameters
    assert plan.source_pieces >= 64 * 3 * 291 * 0.9
    assert (plan.files_read, plan.unused) == (64, [])
    incomplete = synthetic_catalogs.zero3("llama-3-8b", ranks=64, missing=17)
    with pytest.raises(CheckpointError, match=r"elements are stored") as caught:
        plan_reshard(incomplete.catalog, native_target(incomplete))
    assert "master:model.embed_tokens.weight" in str(caught.value)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("missing", [None, 517])
def test_plan_405b_parameters_from_1024_ranks(missing: int | None) -> None:
    """In under a minute of one core and 2 GB. Measurements: docs/resharding.md."""
    found = planned("llama-3.1-405b", 1024, missing)
    print(found)
    if missing is not None:
        assert "elements are stored" in found["wrong"]
        return
    assert int(found["parameters"]) == 405_853_388_800
    assert int(found["read"]) == 12 * 405_853_388_800
    assert float(found["cpu_seconds"]) < 60
    assert int(found["peak_bytes"]) < 2e9


def planned(model: str, ranks: int, missing: int | None) -> Mapping[str, str]:
    """The output of a planning process."""
    arguments = [model, str(ranks), str(missing)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.synthetic_catalogs", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())
