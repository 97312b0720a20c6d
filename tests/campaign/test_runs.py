"""Faults in real runs, as benchmarks/campaign.py injects them.

pytest tests/campaign/test_runs.py                                  a killed rank in a run of one rank
pytest tests/campaign/test_runs.py -m "full or not full"            a sample of the classes, both engines
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks.faults.cases import LAYOUTS, MEMORY_EVERY, Case
from benchmarks.faults.catalogue import FAULTS, Expected
from benchmarks.faults.run import run_case, unbroken_losses
from tests.launch.tiny_runs import prepare_data

pytestmark = pytest.mark.timeout(1800)
Losses = Mapping[int, float]


def case(fault: str, layout: str, launcher: str, moment: float, *, warm: bool = False) -> Case:
    return Case(0, fault, layout, launcher, moment, seed=23, warm=warm)


QUICK = case("rank-killed", "local", "python", 12.5)
# Those without an engine start quickly, and few layouts need few unbroken runs.
SAMPLE = (
    case("rank-paused", "local", "python", 7.3),
    case("supervisor-killed", "local", "python", 8.6, warm=True),
    case("preempted", "local", "torchrun", 5.2),
    case("nan", "local", "python", 9.9),
    case("disk-full", "local", "python", 6.4),
    case("store-failing", "local", "python", 0.0),
    case("rank-killed", "deepspeed-zero1-ranks2", "python", 10.4, warm=True),
    case("exception", "deepspeed-zero1-ranks2", "deepspeed", 3.1),
    case("snapshot-damaged", "megatron-dp2", "python", 7.5, warm=True),
    case("checkpoint-damaged", "megatron-dp2", "torchrun", 13.8),
    case("link-half-open", "nodes2-deepspeed-zero1-ranks2", "torchrun", 5.5),
)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Losses]]:
    """The data, and the losses of a run of a layout without a fault."""
    folder = tmp_path_factory.mktemp("unbroken")
    data = prepare_data(folder / "data")
    return lambda layout: (data, unbroken_losses(LAYOUTS[layout], folder / layout, data))


@pytest.mark.parametrize(
    "case",
    [QUICK, *(pytest.param(each, marks=pytest.mark.full) for each in SAMPLE)],
    ids=lambda case: f"{case.fault}-{case.launcher}",
)
def test_fault_violates_no_invariant(
    case: Case, unbroken: Callable[[str], tuple[Path, Losses]], tmp_path: Path
) -> None:
    fault = FAULTS[case.fault]
    if (why := fault.missing()) is not None:
        pytest.skip(f"{case.fault} {why}")
    data, losses = unbroken(case.layout)
    row = run_case(case, tmp_path / "case", data, losses)
    assert row["violations"] == {}, row
    assert not row["missed"]
    if fault.expected is Expected.UNAFFECTED:
        assert row["attempts"] == 1
    else:
        assert row["attempts"] >= 2
        assert row["recovery"]["seconds"] > 0
        assert sum(row["recovery"]["phases"].values()) == pytest.approx(row["recovery"]["seconds"], abs=0.5)
    if case.warm and case.fault == "rank-killed":
        assert row["recovery"]["repeated"] <= MEMORY_EVERY
