"""Compare the content of checkpoints of any formats and layouts.

pytest tests/checkpoint/test_diff.py
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.fabricate import write_rank_files
from tests.checkpoint.huggingface_folders import SCALARS, converted, with_optimizer
from tests.checkpoint.layouts import LAYOUTS, save, shards_of
from toolkit.checkpoint import manifest, tile_reader
from toolkit.checkpoint.offline.diff import CheckpointDiff, DiffOutcome, diff, diff_sources
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.errors import CheckpointError, InputError

KEY = TensorKey(WEIGHT, "w")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small tiles, so that a tensor has several."""
    monkeypatch.setattr(tile_reader, "TILE_BYTES", 256)


def values(seed: int = 0, shape: tuple[int, ...] = (12, 10)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adam(*, mixed: bool) -> dict[TensorKey, torch.Tensor]:
    exact = values()
    named = {TensorKey(EXP_AVG, "w"): values(1), TensorKey(EXP_AVG_SQ, "w"): values(1) ** 2}
    named |= {KEY: exact.bfloat16(), TensorKey(MASTER, "w"): exact} if mixed else {KEY: exact}
    return named


def made(folder: Path, named: dict[TensorKey, torch.Tensor], **settings: object) -> CheckpointSource:
    return write_rank_files(folder, named, **settings)  # type: ignore[arg-type]


def outcomes(found: CheckpointDiff) -> dict[str, DiffOutcome]:
    return {f"{one.pair.left or '-'} {one.pair.right or '-'}": one.outcome for one in found.tensors}


def test_other_layout_is_equal(tmp_path: Path) -> None:
    named = adam(mixed=True)
    native = open_source(save(tmp_path / "native", 1, shards_of(named, LAYOUTS["columns"], 3)))
    for number, settings in enumerate(({"ranks": 5}, {"replicated": ("w",)}, {"transposed": ("w",)})):
        other = made(tmp_path / f"{number}", named, **settings)
        progress: list[tuple[int, int]] = []
        found = diff_sources(
            native, other, advance=lambda done, total, progress=progress: progress.append((done, total))
        )
        assert found.equal
        assert [one.outcome for one in found.tensors] == [DiffOutcome.EQUAL] * 4
        assert found.lines() == [f"equal: 4 of 4 tensors are equal in {native.folder} and {other.folder}"]
        assert (
            {total for _, total in progress}
            == {sum(done for done, _ in progress)}
            == {2 * sum(t.nbytes for t in named.values())}
        )


def test_diff_run_and_export(tmp_path: Path) -> None:
    source = with_optimizer("mixtral", tmp_path / "same")
    folder = converted(tmp_path, "mixtral")
    assert diff(source.folder, folder).equal
    (folder / manifest.FOREIGN_NAME).unlink()
    of_hub = open_source(folder)
    assert diff_sources(replace(source, namespace=of_hub.namespace), of_hub).equal
    assert diff_sources(source, replace(of_hub, namespace=source.namespace)).scalars == ()
    assert set(SCALARS) >= {"step", "optimizer_step"}


def test_fp32_weight_matches_bf16_master(tmp_path: Path) -> None:
    wide, narrow = made(tmp_path / "fp32", adam(mixed=False)), made(tmp_path / "bf16", adam(mixed=True))
    found = diff_sources(wide, narrow)
    assert found.equal
    assert outcomes(found)["weight:w master:w"] is DiffOutcome.EQUAL
    assert outcomes(found)["weight:w weight:w"] is DiffOutcome.EQUAL
    assert "weight (float32) of the left is master (float32) of the right" in found.lines()
    assert "weight (float32) of the left is weight (bfloat16) of the right" in found.lines()
    assert diff_sources(narrow, wide).equal
    other = adam(mixed=True)
    other[TensorKey(MASTER, "w")][3, 3] += 1e-6  # the bf16 weight is the same
    assert outcomes(diff_sources(wide, made(tmp_path / "other", other))) == {
        "weight:w master:w": DiffOutcome.VALUES,
        "weight:w weight:w": DiffOutcome.EQUAL,
        "exp_avg:w exp_avg:w": DiffOutcome.EQUAL,
        "exp_avg_sq:w exp_avg_sq:w": DiffOutcome.EQUAL,
    }


def test_diff_export_lacks_optimizer(tmp_path: Path) -> None:
    run, rounded = (
        made(tmp_path / "run", adam(mixed=True)),
        made(tmp_path / "export", {KEY: values().bfloat16()}),
    )
    found = diff_sources(run, rounded)
    assert not found.equal
    assert outcomes(found) == {
        "weight:w weight:w": DiffOutcome.EQUAL,
        "master:w weight:w": DiffOutcome.DTYPE,
        "exp_avg:w -": DiffOutcome.ABSENT,
        "exp_avg_sq:w -": DiffOutcome.ABSENT,
    }
    assert "exp_avg:w: only on the left" in found.lines()
    assert (
        "master:w on the left, weight:w on the right: float32 and bfloat16; equal in the narrower"
        in found.lines()
    )
    only = diff_sources(rounded, made(tmp_path / "fp32", {KEY: values()}))
    assert outcomes(only) == {"weight:w weight:w": DiffOutcome.DTYPE}
    assert "exp_avg:w: only on the right" in diff_sources(rounded, run).lines()


def test_differing_values_are_counted_and_measured(tmp_path: Path) -> None:
    a = values()
    a[0, 0], a[5, 5], a[11, 9] = 2.0, 0.0, 8.0
    b = a.clone()
    b[0, 0], b[5, 5], b[11, 9] = 2.5, -0.0, 9.0
    for transposed in ((), ("w",)):
        left = made(tmp_path / f"a{len(transposed)}", {KEY: a})
        [one] = diff_sources(
            left, made(tmp_path / f"b{len(transposed)}", {KEY: b}, transposed=transposed)
        ).tensors
        assert (one.outcome, one.differing, one.max_abs, one.max_relative) == (
            DiffOutcome.VALUES,
            3,
            1.0,
            0.2,
        )
        assert str(one) == "weight:w: float32, 3 of 120 values differ, by 1 at most, relatively by 0.2"


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (float("nan"), float("nan"), (0, 0.0)),
        (float("nan"), 1.0, (1, math.inf)),
        (math.inf, 1.0, (1, math.inf)),
        (math.inf, -math.inf, (1, math.inf)),
        (0.0, 1e-45, (1, 1.0)),
        (3e38, -3e38, (1, 2.0)),
    ],
)
def test_nan_and_infinity_are_compared(
    tmp_path: Path, mine: float, theirs: float, expected: tuple[int, float]
) -> None:
    a, b = values(), values()
    a[4, 4], b[4, 4] = mine, theirs
    [one] = diff_sources(made(tmp_path / "a", {KEY: a}), made(tmp_path / "b", {KEY: b})).tensors
    assert (one.differing, one.max_relative) == expected


def test_shapes_dtypes_and_integers(tmp_path: Path) -> None:
    left = made(
        tmp_path / "a",
        {
            KEY: values(),
            TensorKey(WEIGHT, "half"): values().half(),
            TensorKey(WEIGHT, "n"): torch.arange(5),
            TensorKey(WEIGHT, "mask"): torch.ones(4).bool(),
        },
    )
    right = made(
        tmp_path / "b",
        {
            KEY: values(shape=(12, 11)),
            TensorKey(WEIGHT, "half"): values().bfloat16(),
            TensorKey(WEIGHT, "n"): torch.tensor([0, 1, 2, 3, 6]),
            TensorKey(WEIGHT, "mask"): torch.ones(4).bool(),
        },
    )
    found = {one.pair.left: one for one in diff_sources(left, right).tensors}
    assert str(found[KEY]) == "weight:w: (12, 10) on the left, (12, 11) on the right"
    assert found[TensorKey(WEIGHT, "half")].outcome is DiffOutcome.DTYPE
    assert 0 < found[TensorKey(WEIGHT, "half")].max_relative < 2**-8
    assert (found[TensorKey(WEIGHT, "n")].differing, found[TensorKey(WEIGHT, "n")].max_abs) == (1, 2.0)
    assert found[TensorKey(WEIGHT, "mask")].outcome is DiffOutcome.EQUAL


def test_scalars_are_compared(tmp_path: Path) -> None:
    sources = [
        made(tmp_path / f"{number}", {KEY: values()}, scalars=scalars)
        for number, scalars in enumerate(
            (
                {"step": 3, "optimizer_step": 3, "seed": 1},
                {"step": 3, "optimizer_step": 3, "seed": 2},
                {"step": 3},
            )
        )
    ]
    assert diff_sources(sources[0], sources[1]).equal, "a seed is the run's"
    found = diff_sources(sources[0], sources[2])
    assert found.scalars == (("optimizer_step", 3, None),)
    assert not found.equal
    assert found.lines()[0] == "optimizer_step: 3 on the left, None on the right"
    assert found.lines()[-1].startswith("not equal: 1 of 1 tensors are equal")
    assert found.lines()[-1].endswith("scalars that differ: 1")


def test_many_differences_are_summarized(tmp_path: Path) -> None:
    left = made(tmp_path / "a", {TensorKey(WEIGHT, f"t{number}"): values(number) for number in range(30)})
    right = made(
        tmp_path / "b", {TensorKey(WEIGHT, f"t{number}"): values(number + 1) for number in range(30)}
    )
    lines = diff_sources(left, right).lines(most=5)
    assert len(lines) == 7
    assert lines[5:] == [
        "and 25 more: values",
        f"not equal: 0 of 30 tensors are equal in {left.folder} and {right.folder}",
    ]


def test_other_families_cannot_be_compared(tmp_path: Path) -> None:
    left, right = made(tmp_path / "a", adam(mixed=True)), made(tmp_path / "b", adam(mixed=True))
    with pytest.raises(InputError, match=r"test/1[\s\S]*llama/1"):
        diff_sources(left, replace(right, namespace="llama/1"))
    (right.folder / "rank1.pt").write_bytes((right.folder / "rank1.pt").read_bytes()[:1500])
    with pytest.raises(CheckpointError, match=re.escape(str(right.folder / "rank1.pt"))):
        diff_sources(left, right)
