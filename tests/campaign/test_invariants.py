"""Each invariant of a fault campaign finds a violation that is planted in the files of a sound run.

pytest tests/campaign/test_invariants.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.faults.cases import BATCH, STEPS
from benchmarks.faults.invariants import End, Evidence, violations_of
from benchmarks.faults.processes import MARK, Started, kill_all, marked_processes, ranks_of
from benchmarks.faults.recovery import recovery_of
from tests.checkpoint.layouts import LAYOUTS, shards_of
from tests.damage import flip_byte
from tests.waiting import wait_until
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import WEIGHT, TensorKey
from toolkit.goodput import AttemptTimes, write_times
from toolkit.restart_phases import RestartPhase, RestartPhases, write_restart
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

KILLED_AFTER, SAVED = 12, 10  # step of the fault, and of the checkpoint from which the second attempt starts
LOSSES = {step: 5.0 - step / 10 for step in range(1, STEPS + 1)}
Plant = Callable[[Evidence], Evidence]


def samples(step: int, rank: int) -> list[int]:
    """The samples of one of two data ranks."""
    return [number for number in range((step - 1) * BATCH, step * BATCH) if number % 2 == rank]


def append_rows(file: Path, rows: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def write_attempt(evidence: Evidence, number: int, first: int, last: int, began: float) -> None:
    """Write what an attempt records: one step per second, after a start of ten seconds."""
    directory = RunDirectory(evidence.run)
    for rank in range(2):
        start = {"pid": 100 * number + rank, "rank": rank}
        rows: list[dict[str, object]] = [{**start, "time": began + 4, "connected": True}]
        rows += [{**start, "time": began + 9, "resumed": first}]
        for step in range(first + 1, last + 1):
            end = began + 10 + step - first
            who = {"pid": 100 * number + rank, "rank": rank, "time": end}
            rows += [{**who, "begun": step, "data_rank": rank, "samples": samples(step, rank)}]
            rows += [{**who, "ended": step}]
        append_rows(evidence.rank_records / f"rank-{rank}.jsonl", rows)
    folder = directory.attempt_folder(number)
    folder.mkdir(parents=True)
    times = AttemptTimes(
        began=began, seen=began, ended=began + 10 + last - first, first=first, first_step=began + 11
    )
    write_times(folder, times)


@pytest.fixture
def sound(tmp_path: Path) -> Evidence:
    """A run that was killed after step 12, and restarted from the checkpoint of step 10."""
    run, rank_records = tmp_path / "run", tmp_path / "rank-records"
    (tmp_path / "tmp").mkdir()
    rank_records.mkdir()
    directory = RunDirectory(run)
    for step in (STEPS - 5, STEPS):
        named = {TensorKey(WEIGHT, "w"): torch.full((8, 4), float(step))}
        (shards,) = shards_of(named, LAYOUTS["replicated"], 1)
        scalars = {"step": step, "consumed_samples": step * BATCH, "optimizer_step": step}
        store = CheckpointStore(directory.checkpoints, keep_last=2)
        saved = store.save(step, shards, scalars, namespace="test/1", rank=0, ranks=1, attempt=2).wait()
    status = Status(
        state=RunState.DONE, attempt=2, exit_code=0, step=STEPS, checkpoint=str(saved), reason=None
    )
    evidence = Evidence(
        run=run,
        rank_records=rank_records,
        reference=LOSSES,
        ends=(End(code=0, status=status),),
        temporary=tmp_path / "tmp",
    )
    write_attempt(evidence, 1, 0, KILLED_AFTER, began=1000.0)
    write_attempt(evidence, 2, SAVED, STEPS, began=1030.0)
    append_rows(directory.metrics_file, [{"step": step, "loss": loss} for step, loss in LOSSES.items()])
    repeated = [{"step": step, "loss": LOSSES[step]} for step in range(SAVED + 1, KILLED_AFTER + 1)]
    append_rows(directory.attempt_folder(1) / "metrics.jsonl", repeated)
    directory.write_status(status)
    return evidence


def with_status(evidence: Evidence, **changes: object) -> Evidence:
    (end,) = evidence.ends
    assert end.status is not None
    return replace(evidence, ends=(replace(end, status=replace(end.status, **changes)),))


@pytest.mark.parametrize(("code", "truthful"), [(-9, True), (1, False), (None, False)])
def test_ranks_of_a_killed_launcher_may_complete_the_run(
    sound: Evidence, code: int | None, truthful: bool
) -> None:
    (end,) = sound.ends
    found = violations_of(replace(sound, ends=(replace(end, code=code),)))
    assert ("status" not in found) is truthful


def edit_rows(file: Path, edit: Callable[[list[str]], list[str]]) -> None:
    file.write_text("".join(edit(file.read_text().splitlines(keepends=True))))


def lost_step(evidence: Evidence) -> Evidence:
    edit_rows(RunDirectory(evidence.run).metrics_file, lambda rows: rows[:7] + rows[8:])
    return evidence


def repeated_step(evidence: Evidence) -> Evidence:
    edit_rows(RunDirectory(evidence.run).metrics_file, lambda rows: [*rows[:8], rows[7], *rows[8:]])
    return evidence


def other_samples(evidence: Evidence) -> Evidence:
    """One data rank trains the samples of the step before."""
    text = (evidence.rank_records / "rank-1.jsonl").read_text()
    late = json.dumps(samples(20, 1))
    assert late in text
    (evidence.rank_records / "rank-1.jsonl").write_text(text.replace(late, json.dumps(samples(19, 1))))
    return evidence


def other_position(evidence: Evidence) -> Evidence:
    named = {TensorKey(WEIGHT, "w"): torch.zeros(8, 4)}
    (shards,) = shards_of(named, LAYOUTS["replicated"], 1)
    store = CheckpointStore(evidence.run / "checkpoints", keep_last=2)
    scalars = {"step": STEPS + 1, "consumed_samples": 7, "optimizer_step": STEPS + 1}
    store.save(STEPS + 1, shards, scalars, namespace="test/1", rank=0, ranks=1, attempt=2).wait()
    return evidence


def other_loss(evidence: Evidence) -> Evidence:
    text = RunDirectory(evidence.run).metrics_file.read_text()
    RunDirectory(evidence.run).metrics_file.write_text(text.replace("3.0}", "3.0000000000000004}"))
    return evidence


def other_loss_when_repeated(evidence: Evidence) -> Evidence:
    append_rows(RunDirectory(evidence.run).attempt_folder(1) / "metrics.jsonl", [{"step": 12, "loss": 1.0}])
    return evidence


def damaged_checkpoint(evidence: Evidence) -> Evidence:
    file = next((evidence.run / "checkpoints").rglob("*.safetensors"))
    flip_byte(file)
    return evidence


def loaded_damage(evidence: Evidence) -> Evidence:
    return replace(evidence, damaged_step=SAVED)


def late_end(evidence: Evidence) -> Evidence:
    return replace(evidence, ends=(replace(evidence.ends[0], late=True),))


def orphan(evidence: Evidence) -> Evidence:
    return replace(evidence, ends=(replace(evidence.ends[0], orphans=("123 python train.py",)),))


def live_status(evidence: Evidence) -> Evidence:
    return with_status(evidence, state=RunState.RUNNING, exit_code=None)


def early_done(evidence: Evidence) -> Evidence:
    return with_status(evidence, step=STEPS - 1)


def no_reason(evidence: Evidence) -> Evidence:
    changed = with_status(evidence, state=RunState.FAILED, exit_code=1)
    return replace(changed, ends=(replace(changed.ends[0], code=1),))


def absent_checkpoint(evidence: Evidence) -> Evidence:
    return with_status(evidence, checkpoint=str(evidence.run / "checkpoints" / "step-00000099"))


def temporary_file(evidence: Evidence) -> Evidence:
    (evidence.run / ".status.json.0a1b2c3d.writing").touch()
    return evidence


def temporary_checkpoint(evidence: Evidence) -> Evidence:
    (evidence.run / "checkpoints" / ".tmp-step-00000010-attempt-001-2").mkdir()
    return evidence


def snapshots_in_memory(evidence: Evidence) -> Evidence:
    folder = evidence.run.parent / "memory"
    folder.mkdir()
    return replace(evidence, memory=(folder, evidence.run.parent / "removed"))


def many_files(evidence: Evidence) -> Evidence:
    for number in range(60):
        (RunDirectory(evidence.run).attempt_folder(1) / f"core-{number}").touch()
    return evidence


def filled_temporary_folder(evidence: Evidence) -> Evidence:
    assert evidence.temporary is not None
    (evidence.temporary / "cache-1").touch()
    return evidence


PLANTED: dict[str, tuple[Plant, str, str]] = {
    plant.__name__: (plant, name, sentence)
    for plant, name, sentence in (
        (lost_step, "samples", r"lost steps \[8\]"),
        (repeated_step, "samples", r"repeated steps \[8\]"),
        (other_samples, "samples", "other samples than planned in steps 20"),
        (other_position, "samples", "records 7 consumed samples instead of 504"),
        (other_loss, "losses", "metrics.jsonl: other losses in steps 20"),
        (other_loss_when_repeated, "losses", "attempts/001/metrics.jsonl: other losses in steps 12"),
        (damaged_checkpoint, "loads", "step-000000"),
        (loaded_damage, "loads", "attempt 2 trained from step 10, which was damaged"),
        (late_end, "processes", "command 1 did not end in time"),
        (orphan, "processes", "left 1 processes: 123 python"),
        (live_status, "status", "status running, although no process is left"),
        (early_done, "status", "status done, step 19"),
        (no_reason, "status", "without a reason"),
        (absent_checkpoint, "status", "step-00000099, which does not exist"),
        (temporary_file, "leftovers", r"1 temporary files are left: \.status"),
        (temporary_checkpoint, "leftovers", r"checkpoints/\.tmp-step"),
        (snapshots_in_memory, "leftovers", "memory is left in memory"),
        (many_files, "growth", "attempt 1 has 62 files"),
        (filled_temporary_folder, "growth", "TMPDIR has 1 entries: cache-1"),
    )
}


def test_sound_run_violates_nothing(sound: Evidence) -> None:
    assert violations_of(sound) == {}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_violation_is_found(planted: str, sound: Evidence) -> None:
    plant, name, sentence = PLANTED[planted]
    found = violations_of(plant(sound))
    assert any(re.search(sentence, text) for text in found.get(name, [])), found


def test_standbys_are_no_ranks() -> None:
    mark = f"test-{time.time_ns()}"
    code = "import sys, time; open('/proc/self/comm', 'w').write(sys.argv[1]); time.sleep(60)"
    # the second rank was a standby, and the last standby has just started
    names = {"a-rank": "0", "standby-0": "0", "rank-1": "1", "warm-up-1": "1", "python": "0"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, name, *([] if name == "a-rank" else ["--standby=3"])],
            env={MARK: mark, "RANK": rank},
        )
        for name, rank in names.items()
    ]
    try:
        wait_until(lambda: {process.name() for process in marked_processes(mark)} == set(names), 60)
        found = Started(started, mark)
        ranks = {rank: process.pid for rank, process in found.ranks().items()}
        assert ranks == {0: started[0].pid, 1: started[2].pid}
        assert [process.pid for process in found.standbys()] == [started[1].pid]
    finally:
        kill_all(mark)
        for process in started:
            process.wait()


def test_orphans_are_found_by_their_environment(tmp_path: Path) -> None:
    """Also the child of a child in its own session, but no process without the mark."""
    mark = f"test-{time.time_ns()}"
    child = f"import subprocess, sys; subprocess.Popen({['sleep', '60']!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", child], env={MARK: mark, "RANK": "3"}, check=True)
    other = subprocess.Popen(["sleep", "60"])
    try:
        (found,) = marked_processes(mark)
        assert found.name() == "sleep"
        assert found.pid != other.pid
        assert ranks_of([found]) == {3: found}
        kill_all(mark)
        wait_until(lambda: marked_processes(mark) == [], 20)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_recovery_has_the_phases_of_the_restart(sound: Evidence) -> None:
    """The fault is 0.5 s after step 12; the second attempt begins at 1030 and repeats two steps."""
    found = recovery_of(sound.run, sound.rank_records, 1022.5)
    assert found is not None
    assert found["seconds"] == pytest.approx(1043 - 1022.5)
    assert found["repeated"] == 2
    assert found["phases"] == {
        "detect": 0.0,
        "prepare": 7.5,
        "start": 4.0,
        "build": 5.0,
        "first step": 2.0,
        "repeating": 2.0,
    }


def test_recovery_has_the_phases_that_the_restart_recorded(sound: Evidence) -> None:
    restart = RestartPhases(1022.4).ended(RestartPhase.DETECT, 1022.9).ended(RestartPhase.STOP, 1024.0)
    for phase, end in zip(list(RestartPhase)[2:], (1029, 1030, 1034, 1036, 1039, 1041), strict=True):
        restart = restart.ended(phase, end)
    write_restart(RunDirectory(sound.run).attempt_folder(2), restart)
    found = recovery_of(sound.run, sound.rank_records, 1022.5)
    assert found is not None
    assert list(found["phases"]) == [*RestartPhase, "repeating"]
    assert found["phases"]["detect"] == pytest.approx(0.4), "from the fault, not from the last look"
    assert sum(found["phases"].values()) == pytest.approx(found["seconds"])


def test_steps_that_the_stopping_process_completes_are_no_recovery(sound: Evidence) -> None:
    """The fault is after step 10; the process completes two more steps before it ends."""
    found = recovery_of(sound.run, sound.rank_records, 1020.5)
    assert found is not None
    assert found["seconds"] == pytest.approx(1043 - 1020.5)
    assert found["repeated"] == 2


def test_recovery_of_a_run_that_went_on(sound: Evidence) -> None:
    found = recovery_of(sound.run, sound.rank_records, 1035.0 + 8.25)
    assert found is not None
    assert (found["phases"], found["repeated"]) == ({"paused": pytest.approx(0.75)}, 0)


def test_run_without_a_new_step_has_no_recovery(sound: Evidence) -> None:
    assert recovery_of(sound.run, sound.rank_records, 2000.0) is None
