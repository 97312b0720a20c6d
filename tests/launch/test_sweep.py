"""Sweeps as typed: each point one job, none twice, whoever is killed and however many processes carry the sweep out.

    pytest tests/launch/test_sweep.py            with points that only keep time
    pytest tests/launch/test_sweep.py -m full    and two points that train
"""

from __future__ import annotations

import csv
import json
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.processes import ROOT, TRAIN, Started, command, hit
from toolkit.config.compose import compose, from_yaml

STUB = ROOT / "tests" / "launch" / "stub_training.py"
RATES = ("1e-4", "3e-4", "1e-3", "3e-3")
# 48 combinations, of which 16 cannot run: a global batch of 4 is not cut into micro-batches of 3.
GRID = ("+exp=quickstart", "train.global_batch=4", "train.batch_ramp.start=null", "zero=stage0,stage1,stage2,stage3", f"optim.lr={','.join(RATES)}",
        "train.micro_batch=1,2,3")


def typed(*words: str, script: Path = STUB) -> list[str]:
    return command("python", script, "-m", *words, ranks=None)


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    """Locks of cores of its own: another sweep of this machine is none of this test's business."""
    return {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), **more}


def starts(folder: Path) -> Counter[str]:
    file = folder / "starts.txt"
    return Counter(line.split()[0] for line in file.read_text().splitlines()) if file.exists() else Counter()


def content(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "sweep.json").read_text())


def done(folder: Path) -> list[str]:
    return [file.parent.name for file in folder.glob("*/status.json") if json.loads(file.read_text())["state"] == "done"]


@pytest.mark.timeout(240)
def test_32_points_are_32_jobs_through_a_kill_and_under_two_processes(tmp_path: Path) -> None:
    folder = tmp_path / "grid"
    argv = typed(*GRID, f"sweep.dir={folder}")
    with Started(argv, folder, cwd=tmp_path, environ=environ(tmp_path, STUB_SECONDS="0.3")) as first:
        first.until(lambda: len(done(folder)) >= 12, 100, "half-way")
        hit(signal.SIGKILL, first.process.pid)
        orphans = [process for process in first.ours() if process.pid != first.process.pid]
        for orphan in orphans[:1]:  # a point that loses its own process, too, has to be run again
            orphan.kill()
        first.process.wait(10)
        before = done(folder)
        assert 12 <= len(before) < 32
        began = starts(folder)
        (tmp_path / "two").mkdir()
        with Started(argv, folder, cwd=tmp_path / "two", environ=environ(tmp_path)) as second, \
                Started(argv, folder, cwd=tmp_path, environ=environ(tmp_path)) as third:
            codes = second.ended(120), third.ended(120)
            assert codes == (0, 0), second.output + third.output
        answers = second.output + third.output
    assert len(done(folder)) == 32
    again = {name: count for name, count in starts(folder).items() if count > 1}
    assert set(again) <= set(began) - set(before)
    assert set(again.values()) <= {2}
    assert len(again) <= 1, "orphans of the killed sweep were waited for, and not started again"
    assert len(starts(folder)) == 32
    jobs = Counter(file.parts[-4] for file in folder.glob("*/jobs/*/config.yaml"))
    assert jobs == starts(folder), "every job was one start"

    found = content(folder)
    states = Counter(row["state"] for row in found["points"])
    assert states == {"done": 32, "refused": 16}
    refused = [row for row in found["points"] if row["state"] == "refused"]
    assert all("train.micro_batch=3" in row["swept"] and "micro_batch=3" in row["reason"] for row in refused)
    assert not any(Path(row["run_dir"]).exists() for row in refused), "a refused point leaves no folder"
    configurations = {}
    for row in found["points"]:
        if row["state"] == "done":
            frozen = from_yaml((Path(row["run_dir"]) / "jobs" / "001" / "config.yaml").read_text())
            assert frozen == compose(row["words"])
            assert frozen.run.dir == row["run_dir"]
            assert frozen.monitor.group == "grid"
            configurations[row["name"]] = replace(frozen, run=replace(frozen.run, dir=None))
    assert len({repr(config) for config in configurations.values()}) == 32, "no two points are the same run"
    assert f"best: zero=stage0 optim.lr=0.001 train.micro_batch={found_micro(folder)}" in answers
    table = list(csv.DictReader((folder / "results.csv").open()))
    losses = [float(row["loss"]) for row in table if row["loss"]]
    assert len(losses) == 32
    assert losses == sorted(losses)
    assert losses[0] == pytest.approx(0.0, abs=1e-9)
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


def found_micro(folder: Path) -> str:
    return next(iter(csv.DictReader((folder / "results.csv").open())))["train.micro_batch"]


@pytest.mark.timeout(120)
def test_ctrl_c_saves_the_points_and_the_same_words_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    argv = typed("+exp=quickstart", "zero=stage1,stage2", f"sweep.dir={folder}")
    with Started(argv, folder, cwd=tmp_path, environ=environ(tmp_path, STUB_SECONDS="60")) as started:
        started.until(lambda: sum(starts(folder).values()) >= min(2, len(os.sched_getaffinity(0))), 60, "under way")
        hit(signal.SIGINT, started.process.pid, group=True)
        assert started.ended(30) == 75, started.output
        started.gone(5)
        assert "Go on with the same words: python" in started.output
        assert {row["state"] for row in content(folder)["points"]} <= {"stopped", "waiting"}
    with Started(argv, folder, cwd=tmp_path, environ=environ(tmp_path)) as started:
        assert started.ended(60) == 0, started.output
    assert [row["state"] for row in content(folder)["points"]] == ["done", "done"]


@pytest.mark.timeout(120)
def test_a_point_that_fails_is_told_and_tried_again_by_the_next_command(tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    argv = typed("+exp=quickstart", "zero=stage1,stage2", f"sweep.dir={folder}")
    with Started(argv, folder, cwd=tmp_path, environ=environ(tmp_path, STUB_FAILS="2")) as started:
        assert started.ended(60) == 1, started.output
        assert "failed: zero=stage2" in started.output
        assert "the stub fails" in started.output, "its own words"
    assert {row["swept"][0]: row["state"] for row in content(folder)["points"]} == {"zero=stage1": "done", "zero=stage2": "failed"}
    with Started([*argv, "sweep.metric=tokens_per_second", "sweep.maximize=true"], folder, cwd=tmp_path, environ=environ(tmp_path)) as started:
        assert started.ended(60) == 0, started.output
        assert "best: zero=stage2: tokens_per_second 102" in started.output
    assert sorted(starts(folder).values()) == [1, 2], "what was done is not run again"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_under_a_launcher_the_answer_is_given_once_and_no_rank_sweeps(launcher: str, tmp_path: Path) -> None:
    """hydra#2074, submitit#1764: launchers of Hydra and of ranks clash, and sweeps start inside every rank."""
    folder = tmp_path / "pair"
    argv = command(launcher, TRAIN, "-m", "+exp=quickstart", "zero=stage1,stage2", f"sweep.dir={folder}")
    with Started(argv, folder, cwd=tmp_path, environ=environ(tmp_path)) as started:
        code = started.ended(90)
        started.gone(15)
    assert code == (2 if launcher == "deepspeed" else 1), started.output
    assert started.output.count("remedy:") == 1
    assert "write python launch/train.py -m +exp=quickstart" in started.output
    assert not folder.exists()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_two_points_train_and_the_table_has_their_losses(tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    words = ("+exp=quickstart", "model.hidden_size=64", "train.steps=2", "optim.lr=1e-3,1e-2", f"data.path={tmp_path / 'data'}")
    with Started(typed(*words, f"sweep.dir={folder}", script=TRAIN), folder, cwd=tmp_path, environ=environ(tmp_path)) as started:
        assert started.ended(300) == 0, started.output
        started.gone(5)
    rows = content(folder)["points"]
    assert [(row["state"], row["step"]) for row in rows] == [("done", 2), ("done", 2)]
    for row in rows:
        last = json.loads((Path(row["run_dir"]) / "eval.jsonl").read_text().splitlines()[-1])
        assert row["number"] == last["loss"]
    assert rows[0]["number"] != rows[1]["number"]
    groups = [from_yaml((Path(row["run_dir"]) / "config.yaml").read_text()).monitor.group for row in rows]
    assert groups == ["pair", "pair"]
