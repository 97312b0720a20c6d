"""Faults in real runs, as benchmarks/campaign.py injects them.

pytest tests/campaign/test_runs.py                                  a killed rank in a run of one rank
pytest tests/campaign/test_runs.py -m "full or not full"            40 more, of every class, on both engines
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks.faults.cases import LAYOUTS, MEMORY_EVERY, Case, choose_cases
from benchmarks.faults.catalogue import FAULTS
from benchmarks.faults.run import run_case, unbroken_losses
from tests.launch.tiny_runs import prepare_data

pytestmark = pytest.mark.timeout(1800)
Losses = Mapping[int, float]

QUICK = Case(0, "rank-killed", "local", "python", 12.5, seed=23)
# Few layouts need few unbroken runs.
SAMPLE_LAYOUTS = (
    "deepspeed-zero2-ranks2",
    "deepspeed-zero3-ranks2",
    "megatron-tp2",
    "megatron-dp2-zero1",
    "nodes2-deepspeed-zero1-ranks2",
)
CHOICES = {name: fault.choice for name, fault in FAULTS.items()}
SAMPLE = tuple(choose_cases(23, 40, CHOICES, {name: LAYOUTS[name] for name in SAMPLE_LAYOUTS}))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Losses]]:
    """The data, and the losses of a run of a layout without a fault."""
    folder = tmp_path_factory.mktemp("unbroken")
    data = prepare_data(folder / "data")
    return lambda layout: (data, unbroken_losses(LAYOUTS[layout], folder / layout, data))


@pytest.mark.parametrize(
    "case",
    [QUICK, *(pytest.param(each, marks=pytest.mark.full) for each in SAMPLE)],
    ids=lambda case: f"{case.number}-{case.fault}",
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
    if row["recovery"] is not None:
        assert row["recovery"]["seconds"] > 0
        assert sum(row["recovery"]["phases"].values()) == pytest.approx(row["recovery"]["seconds"], abs=0.5)
    if case.warm and case.fault == "rank-killed":
        assert row["recovery"]["repeated"] <= MEMORY_EVERY
