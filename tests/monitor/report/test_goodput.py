"""The attempts' section of the report: how each start ended, how long it took to its first step, and where the rest of the time went.

pytest tests/monitor/report/test_goodput.py
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.monitor.report.runs import write_run
from toolkit.goodput import Attempt, Times, compute_goodput, write_times
from toolkit.monitor.report.attempts import attempts_section
from toolkit.monitor.report.run_data import ReportData, read_run
from toolkit.monitor.report.summary import summary_tiles
from toolkit.progress import Progress

FIRST = Times(
    began=1000.0,
    seen=1060.0,
    ended=1060.0,
    first=0,
    first_step=1012.5,
    starting=10.0,
    step=20,
    stepping=40.0,
    active=1055.0,
    state="failed",
    reason="rank 1 was ended by signal 9 (SIGKILL); see s3://user:secret@bucket/x",
)
SECOND = Times(
    began=1090.0,
    seen=1180.0,
    first=10,
    first_step=1100.0,
    starting=8.0,
    step=50,
    stepping=80.0,
    active=1180.0,
)


def written(folder: Path) -> ReportData:
    write_run(folder, steps=20, nodes=1, gpus=1)
    for number, times in enumerate((FIRST, SECOND), start=1):
        write_times(folder / "attempts" / f"{number:03d}", times)
    total = compute_goodput([Attempt(FIRST), Attempt(SECOND)])
    assert total is not None
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "goodput": total.to_json()}))
    return read_run(folder, Progress.silent())


def test_goodput_is_told_with_what_it_was_lost_to(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    found = attempts_section(run)
    assert found.intro == (
        "Goodput 55.6%: of 3:00 since the first start, between attempts too, 1:40 went into steps that stand.",
    )
    losses = {row[0]: row[1:] for row in found.tables[1].rows}
    assert losses["steps that were run again, or will have to be"] == ("0:20", "11.1%")
    assert losses["between two attempts"] == ("0:30", "16.7%")
    assert [tile.value for tile in summary_tiles(run) if tile.label == "goodput"] == ["55.6%"]


def test_each_start_says_how_it_ended_and_how_long_it_took_to_its_first_step(tmp_path: Path) -> None:
    first, second = attempts_section(written(tmp_path / "run")).tables[0].rows
    assert first[4:6] == ("12.5 s", "failed: rank 1 was ended by signal 9 (SIGKILL); see s3://***@bucket/x")
    assert first[1] == "1970-01-01 00:16:40"
    assert first[3] == "1:00"
    assert second[4] == "10 s"
    assert not any(name in first[7] for name in ("times.json", "saves.jsonl")), (
        "what every attempt leaves is not worth a word"
    )


def test_without_accounts_there_is_no_goodput_and_files_tell_the_times(tmp_path: Path) -> None:
    """As of runs of older versions."""
    write_run(tmp_path / "run", steps=20, nodes=1, gpus=1)
    run = read_run(tmp_path / "run", Progress.silent())
    found = attempts_section(run)
    assert found.intro == ()
    assert len(found.tables) == 1
    assert found.tables[0].rows[0][5].startswith("a later attempt followed")
    assert not [tile for tile in summary_tiles(run) if tile.label == "goodput"]
