"""A campaign continues after the rows of its folder and after recorded ones, but never after those of other
cases.

pytest tests/campaign/test_records.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.campaign import RECORDS, Campaign
from benchmarks.faults.cases import PLANNED_CASES, Case
from benchmarks.faults.report import BEGIN, END
from tests.campaign.test_report import row_of
from toolkit.errors import InputError
from toolkit.rows import read_rows


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the cases that run, without their commands."""
    numbers: list[int] = []

    def run(self: Campaign, case: Case) -> dict[str, Any]:
        numbers.append(case.number)
        return {**row_of(case), "campaign_seed": self.seed, "output": "not recorded"}

    monkeypatch.setattr(Campaign, "run", run)
    return numbers


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "results.md"
    file.write_text(f"{BEGIN}\n\nold\n\n{END}\n")
    return file


def campaign(tmp_path: Path, name: str, page: Path, seed: int = 7, classes: str = "") -> Campaign:
    """A campaign in a folder of its own that is recorded."""
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    return Campaign(seed, folder, classes.split(), [], tmp_path / "campaign.jsonl", page)


def test_campaign_continues_after_the_rows_of_its_folder(tmp_path: Path, ran: list[int]) -> None:
    first = Campaign(7, tmp_path, [], []).run_remaining(3)
    assert [each["number"] for each in first] == ran == [0, 1, 2]
    assert Campaign(7, tmp_path, [], []).run_remaining(3) == first
    assert (
        [each["number"] for each in Campaign(7, tmp_path, [], []).run_remaining(5)] == ran == [0, 1, 2, 3, 4]
    )


def test_rows_of_other_cases_in_the_folder_do_not_count(
    tmp_path: Path, ran: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    Campaign(8, tmp_path, [], []).run_remaining(2)
    Campaign(7, tmp_path, [], []).run_remaining(3)
    assert ran == [0, 1, 0, 1, 2]
    Campaign(7, tmp_path, [], []).run_remaining(3)
    assert ran == [0, 1, 0, 1, 2]
    assert "2 rows are of other cases and do not count" in capsys.readouterr().out


def test_campaign_continues_after_recorded_rows_in_a_new_folder(
    tmp_path: Path, page: Path, ran: list[int]
) -> None:
    campaign(tmp_path, "one", page).run_remaining(3)
    rows = campaign(tmp_path, "two", page).run_remaining(5)
    assert [row["number"] for row in rows] == ran == [0, 1, 2, 3, 4]
    recorded = list(read_rows(tmp_path / "campaign.jsonl"))
    assert [row["number"] for row in recorded] == [0, 1, 2, 3, 4]
    assert "output" not in recorded[0]
    assert "5 of the 500 cases of seed 7" in page.read_text()
    Campaign(7, tmp_path / "two", [], []).run_remaining(3)
    assert ran[5:] == [0, 1, 2], "a campaign that is not recorded runs the cases itself"


def test_each_case_is_recorded_before_the_next_begins(
    tmp_path: Path, page: Path, ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Campaign.run

    def interrupted(self: Campaign, case: Case) -> dict[str, Any]:
        if case.number == 2:
            raise KeyboardInterrupt
        return run(self, case)

    monkeypatch.setattr(Campaign, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        campaign(tmp_path, "one", page).run_remaining(5)
    assert [row["number"] for row in read_rows(tmp_path / "campaign.jsonl")] == [0, 1]
    assert "2 of the 500 cases" in page.read_text()


def test_recorded_rows_of_other_cases_are_refused(tmp_path: Path, page: Path, ran: list[int]) -> None:
    campaign(tmp_path, "one", page).run_remaining(2)
    before = (tmp_path / "campaign.jsonl").read_text()
    with pytest.raises(InputError, match=r"rows of seed 7\n.*have its seed, 8"):
        campaign(tmp_path, "two", page, seed=8).run_remaining(2)
    with pytest.raises(InputError, match=r"2 rows of other cases, the first of them number 0"):
        campaign(tmp_path, "two", page, classes="rank-killed").run_remaining(2)
    changed = before.replace("torchrun", "deepspeed", 1)
    assert changed != before
    (tmp_path / "campaign.jsonl").write_text(changed)
    with pytest.raises(InputError, match="1 rows of other cases"):
        campaign(tmp_path, "two", page).run_remaining(3)
    assert (ran, (tmp_path / "campaign.jsonl").read_text()) == ([0, 1], changed)


def test_repeated_case_replaces_its_row(tmp_path: Path, page: Path, ran: list[int]) -> None:
    campaign(tmp_path, "one", page).run_remaining(3)
    campaign(tmp_path, "two", page).repeat(1)
    rows = campaign(tmp_path, "one", page).run_remaining(3)
    assert [row["number"] for row in rows] == [0, 1, 2]
    assert ran == [0, 1, 2, 1]


def test_no_case_begins_after_the_limit(
    tmp_path: Path, ran: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert Campaign(7, tmp_path, [], []).run_remaining(3, minutes=0.0) == []
    assert ran == []
    assert "3 cases are left after 0 minutes" in capsys.readouterr().out


def test_recorded_campaign_of_the_repository_has_one_seed_and_each_case_once() -> None:
    rows = list(read_rows(RECORDS))
    assert len({row["campaign_seed"] for row in rows}) <= 1
    assert [row["number"] for row in rows] == sorted({row["number"] for row in rows})
    assert len(rows) <= PLANNED_CASES
