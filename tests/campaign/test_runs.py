"""Faults in real runs, as benchmarks/campaign.py injects them.

pytest tests/campaign/test_runs.py                       a killed rank in a run of one rank
pytest tests/campaign/test_runs.py -m full -s            a sample of 40 cases; CAMPAIGN_SEED=7 for others
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.campaign import Campaign, describe_row
from benchmarks.faults.cases import LAYOUTS, Case
from benchmarks.faults.catalogue import FAULTS, LEFT_OUT, Expected
from benchmarks.faults.run import run_case, unbroken_losses
from tests.launch.tiny_runs import prepare_data

SAMPLE = 40
SEED = int(os.environ.get("CAMPAIGN_SEED", "23"))
KILLED = Case(number=0, fault="rank-killed", layout="local", launcher="python", moment=12.5, seed=1)
PAUSED = Case(number=1, fault="rank-paused", layout="local", launcher="python", moment=7.3, seed=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_data(tmp_path_factory.mktemp("data") / "toolkit")


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return unbroken_losses(LAYOUTS["local"], tmp_path_factory.mktemp("unbroken") / "local", data)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case", [KILLED, pytest.param(PAUSED, marks=pytest.mark.full)], ids=lambda case: case.fault
)
def test_fault_violates_no_invariant(
    case: Case, data: Path, unbroken: dict[int, float], tmp_path: Path
) -> None:
    row = run_case(case, tmp_path / "case", data, unbroken)
    assert row["violations"] == {}, row
    assert row["attempts"] == (1 if FAULTS[case.fault].expected is Expected.UNAFFECTED else 2)
    assert row["recovery"]["seconds"] > 0


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
def test_sample_of_the_campaign_violates_no_invariant(tmp_path: Path) -> None:
    """Classes that cannot be injected on this machine are printed with the reason."""
    campaign = Campaign(SEED, tmp_path, [], [])
    print(f"CAMPAIGN_SEED={SEED}; not injected: {LEFT_OUT | campaign.missing}")
    assert campaign.faults.keys() | campaign.missing.keys() == FAULTS.keys()
    rows = campaign.go_on(SAMPLE)
    assert len(rows) == SAMPLE
    assert {row["fault"] for row in rows} == campaign.faults.keys()
    wrong = [
        f"{describe_row(row)}\n{row['violations']}\n{row['output']}" for row in rows if row["violations"]
    ]
    assert not wrong, "\n\n".join(wrong)
    assert campaign.go_on(SAMPLE) == rows, "a finished campaign runs nothing again"
