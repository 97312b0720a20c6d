"""The section of the attempts: their ends, start-up times, goodput and lost time.

pytest tests/monitor/report/test_goodput.py
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.monitor.report.runs import write_run
from toolkit.goodput import Attempt, AttemptTimes, compute_goodput, write_times
from toolkit.monitor.report.attempts import attempts_section
from toolkit.monitor.report.run_data import ReportData
from toolkit.monitor.report.run_reader import read_run
from toolkit.monitor.report.summary import summary_tiles
from toolkit.progress import Progress

FIRST = AttemptTimes(
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
SECOND = AttemptTimes(
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


def test_goodput_and_lost_time_are_shown(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    found = attempts_section(run)
    assert found.intro == (
        "Goodput 55.6%: of 3:00 since the first start, including the time between attempts, 1:40 went into "
        "steps that count.",
    )
    losses = {row[0]: row[1:] for row in found.tables[1].rows}
    assert losses["steps that were or must be repeated"] == ("0:20", "11.1%")
    assert losses["between attempts"] == ("0:30", "16.7%")
    assert [tile.value for tile in summary_tiles(run) if tile.label == "goodput"] == ["55.6%"]


def test_attempts_show_their_end_and_start_up_time(tmp_path: Path) -> None:
    first, second = attempts_section(written(tmp_path / "run")).tables[0].rows
    assert first[4:6] == ("12.5 s", "failed: rank 1 was ended by signal 9 (SIGKILL); see s3://***@bucket/x")
    assert first[1] == "1970-01-01 00:16:40"
    assert first[3] == "1:00"
    assert second[4] == "10 s"
    assert not any(name in first[7] for name in ("times.json", "saves.jsonl")), (
        "files of every attempt are not listed"
    )


def test_without_times_files_the_file_times_are_used(tmp_path: Path) -> None:
    """As for runs of older versions."""
    write_run(tmp_path / "run", steps=20, nodes=1, gpus=1)
    run = read_run(tmp_path / "run", Progress.silent())
    found = attempts_section(run)
    assert found.intro == ()
    assert len(found.tables) == 1
    assert found.tables[0].rows[0][5].startswith("a later attempt followed")
    assert not [tile for tile in summary_tiles(run) if tile.label == "goodput"]
