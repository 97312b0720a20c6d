"""The record of a restart. Pure.

pytest tests/test_restart_phases.py
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from toolkit.restart_phases import RestartPhase, RestartPhases, read_restart, write_restart


def phases() -> RestartPhases:
    made = RestartPhases(100.0, ranks=2, standbys=1).ended(RestartPhase.DETECT, 100.1)
    made = made.ended(RestartPhase.STOP, 100.3).ended(RestartPhase.PREPARE, 100.4)
    return made.ended(RestartPhase.START, 102.3).ended(RestartPhase.FIRST_STEP, 104.0)


def test_each_phase_begins_where_the_one_before_ends() -> None:
    seconds = {name: round(took, 3) for name, took in phases().seconds().items()}
    assert seconds == {"detect": 0.1, "stop": 0.2, "prepare": 0.1, "start": 1.9, "first step": 1.7}
    assert phases().describe() == (
        "restarted in 4.0 s (1 of 2 ranks had a standby): "
        "detect 0.1, stop 0.2, prepare 0.1, start 1.9, first step 1.7"
    )


def test_clock_that_was_set_back_gives_no_negative_time() -> None:
    assert phases().ended(RestartPhase.LOAD, 50.0).seconds()["load"] == 0.0


def test_record_survives_json_and_files(tmp_path: Path) -> None:
    assert RestartPhases.from_json(json.loads(json.dumps(asdict(phases())))) == phases()
    assert read_restart(tmp_path) is None
    write_restart(tmp_path, phases())
    assert read_restart(tmp_path) == phases()
    (tmp_path / "restart.json").write_text("{")
    assert read_restart(tmp_path) is None
