"""Sweeps as commands: each point is one job and runs once, even if sweeps are killed or run concurrently.

pytest tests/launch/test_sweep.py            small ones, with a fake training
pytest tests/launch/test_sweep.py -m full    a real Slurm, launchers of ranks, and real training
"""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.processes import ROOT, TRAIN, RunningCommand, command, send_signal
from tests.launch.slurm import loopback_slurm, missing
from toolkit.config.compose import compose, from_yaml

STUB = ROOT / "tests" / "launch" / "stub_training.py"
# 6 combinations, of which 2 cannot run: the rate would be below quickstart's schedule.min_lr=2e-4.
SMALL = ("+exp=quickstart", "zero=stage0,stage1", "optim.lr=5e-4,1e-3,1e-4")
LOW = "optim.lr=0.0001"


def typed(*words: str, script: Path = STUB) -> list[str]:
    return command("python", script, "-m", *words, ranks=None)


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    """Separate core locks, so that other sweeps on this machine do not interfere."""
    return {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), **more}


def starts(folder: Path) -> Counter[str]:
    file = folder / "starts.txt"
    return Counter(line.split()[0] for line in file.read_text().splitlines()) if file.exists() else Counter()


def content(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "sweep.json").read_text())


def done(folder: Path) -> list[str]:
    return [
        file.parent.name
        for file in folder.glob("*/status.json")
        if json.loads(file.read_text())["state"] == "done"
    ]


@pytest.mark.timeout(120)
def test_each_point_runs_once_despite_a_killed_sweep(tmp_path: Path) -> None:
    check_sweep_with_a_killed_process(SMALL, tmp_path, jobs=4, half=1)


def check_sweep_with_a_killed_process(grid: Sequence[str], tmp_path: Path, *, jobs: int, half: int) -> None:
    folder, other = tmp_path / "grid", tmp_path / "other"
    other.mkdir()
    argv = typed(*grid, f"sweep.dir={folder}")
    with (
        RunningCommand(argv, folder, cwd=tmp_path, environ=environ(tmp_path, STUB_SECONDS="0.2")) as first,
        RunningCommand(argv, folder, cwd=other, environ=environ(tmp_path, STUB_SECONDS="0.2")) as second,
    ):
        first.wait_until(lambda: len(done(folder)) >= half, 180, "half-way")
        before, began, lost = killed(first, folder)
        assert second.wait_for_exit(180) == 0, second.output
    check_grid(folder, before, began, lost, jobs, refused=2 if grid is SMALL else 8)
    assert "best: zero=stage0 optim.lr=0.001: loss 0 in" in second.output


@pytest.mark.full
@pytest.mark.timeout(300)
def test_killed_sweep_resumes_under_two_processes(tmp_path: Path) -> None:
    folder, other = tmp_path / "grid", tmp_path / "other"
    other.mkdir()
    argv = typed(*SMALL, f"sweep.dir={folder}")
    with RunningCommand(argv, folder, cwd=tmp_path, environ=environ(tmp_path, STUB_SECONDS="0.2")) as first:
        first.wait_until(lambda: len(done(folder)) >= 1, 180, "half-way")
        before, began, lost = killed(first, folder)
        with (
            RunningCommand(argv, folder, cwd=other, environ=environ(tmp_path)) as second,
            RunningCommand(argv, folder, cwd=tmp_path, environ=environ(tmp_path)) as third,
        ):
            assert (second.wait_for_exit(180), third.wait_for_exit(180)) == (0, 0), (
                second.output + third.output
            )
    check_grid(folder, before, began, lost, 4, refused=2)


def killed(sweep: RunningCommand, folder: Path) -> tuple[list[str], Counter[str], int]:
    """Kill the sweep and one of its running points, which must then run again.

    Returns:
        The points done so far, the starts by point, and how many points may have to run again.
    """
    points = psutil.Process(sweep.process.pid).children()
    send_signal(signal.SIGKILL, sweep.process.pid)
    sweep.process.wait(10)
    lost = 0
    for point in points:
        with suppress(psutil.NoSuchProcess, StopIteration):  # done by now
            frozen = next(word for word in point.cmdline() if word.startswith("--frozen="))
            if Path(frozen.removeprefix("--frozen=")).parts[-4] in starts(folder):
                point.kill()
                lost += 1
                break
    return done(folder), starts(folder), lost


def check_grid(
    folder: Path, before: list[str], began: Counter[str], lost: int, points: int, *, refused: int
) -> None:
    assert 0 < len(before) < points, "half-way"
    assert len(done(folder)) == points
    assert len(starts(folder)) == points
    again = {name: count for name, count in starts(folder).items() if count > 1}
    assert set(again) <= set(began) - set(before), "what was done is not run again"
    assert sum(again.values()) <= 2 * lost, "orphans of a killed sweep are waited for, and not started again"
    jobs = Counter(file.parts[-4] for file in folder.glob("*/jobs/*/config.yaml"))
    assert not starts(folder) - jobs
    assert sum((jobs - starts(folder)).values()) <= 1, (
        "every job was one start, but for one that the killed sweep was about to make"
    )

    rows = content(folder)["points"]
    assert Counter(row["state"] for row in rows) == {"done": points, "refused": refused}
    for row in rows:
        if row["state"] == "refused":
            assert row["swept"][1] == LOW
            assert "schedule.min_lr" in row["reason"]
            assert not Path(row["run_dir"]).exists(), "a refused point leaves no folder"
    configurations = set()
    for row in rows:
        if row["state"] == "done":
            frozen = from_yaml((Path(row["run_dir"]) / "jobs" / "001" / "config.yaml").read_text())
            assert frozen == compose(row["words"])
            assert (frozen.run.dir, frozen.monitor.group) == (row["run_dir"], "grid")
            configurations.add(repr(replace(frozen, run=replace(frozen.run, dir=None))))
    assert len(configurations) == points, "no two points are the same run"
    table = list(csv.DictReader((folder / "results.csv").open()))
    losses = [float(row["loss"]) for row in table if row["loss"]]
    assert (len(losses), losses[0]) == (points, 0.0)
    assert losses == sorted(losses)
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.timeout(120)
def test_ctrl_c_saves_points_and_sweep_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    argv = typed("+exp=quickstart", "zero=stage1,stage2", f"sweep.dir={folder}")
    with RunningCommand(argv, folder, cwd=tmp_path, environ=environ(tmp_path, STUB_SECONDS="60")) as started:
        started.wait_until(
            lambda: sum(starts(folder).values()) >= min(2, len(os.sched_getaffinity(0))), 60, "under way"
        )
        send_signal(signal.SIGINT, started.process.pid, group=True)
        assert started.wait_for_exit(30) == 75, started.output
        started.wait_until_gone(5)
        assert "To resume, run: python" in started.output
        assert {row["state"] for row in content(folder)["points"]} <= {"stopped", "waiting"}
    with RunningCommand(argv, folder, cwd=tmp_path, environ=environ(tmp_path)) as started:
        assert started.wait_for_exit(60) == 0, started.output
    assert [row["state"] for row in content(folder)["points"]] == ["done", "done"]


@pytest.mark.full
@pytest.mark.timeout(120)
def test_failed_point_is_retried_by_next_command(tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    argv = typed("+exp=quickstart", "zero=stage1,stage2", f"sweep.dir={folder}")
    with RunningCommand(argv, folder, cwd=tmp_path, environ=environ(tmp_path, STUB_FAILS="2")) as started:
        assert started.wait_for_exit(60) == 1, started.output
        assert "failed: zero=stage2" in started.output
        assert "the stub fails" in started.output, "its own output"
    assert {row["swept"][0]: row["state"] for row in content(folder)["points"]} == {
        "zero=stage1": "done",
        "zero=stage2": "failed",
    }
    argv += ["sweep.metric=tokens_per_second", "sweep.maximize=true"]
    with RunningCommand(argv, folder, cwd=tmp_path, environ=environ(tmp_path)) as started:
        assert started.wait_for_exit(60) == 0, started.output
        assert "best: zero=stage2: tokens_per_second 102" in started.output
    assert sorted(starts(folder).values()) == [1, 2], "what was done is not run again"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("word", "shows"), [("train.micro_batch=3,5", "train.micro_batch=5"), ("zero=stage1,stage9", "stage9")]
)
def test_sweep_without_feasible_points_leaves_nothing(word: str, shows: str, tmp_path: Path) -> None:
    with RunningCommand(
        typed("+exp=quickstart", word), tmp_path, cwd=tmp_path, environ=environ(tmp_path)
    ) as started:
        assert started.wait_for_exit(30) == 2, started.output
    assert "remedy:" in started.output
    assert shows in started.output
    assert "Traceback" not in started.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output.txt"]


@pytest.mark.full
@pytest.mark.timeout(180)
def test_sweep_under_a_launcher_is_rejected_once(tmp_path: Path) -> None:
    """hydra#2074, submitit#1764: Hydra's launchers conflict with rank launchers, and sweeps start inside
    every rank.
    """
    folder = tmp_path / "pair"
    argv = command("torchrun", TRAIN, "-m", "+exp=quickstart", "zero=stage1,stage2", f"sweep.dir={folder}")
    with RunningCommand(argv, folder, cwd=tmp_path, environ=environ(tmp_path)) as started:
        code = started.wait_for_exit(90)
        started.wait_until_gone(15)
    assert code == 1, started.output
    assert started.output.count("remedy:") == 2, "torchrun's own report repeats it at its end"
    assert f"run python {TRAIN} -m +exp=quickstart" in started.output
    assert not folder.exists()


QUEUE = """#!{python}
# A fake queue: sbatch starts the frozen configuration and prints its number, squeue reports its state,
# scancel stops it.
import os, pathlib, signal, subprocess, sys
here, words = pathlib.Path("{bin}"), sys.argv[1:]
name = pathlib.Path(sys.argv[0]).name
with (here / "calls").open("a") as calls: calls.write(name + " " + " ".join(words) + chr(10))
if name == "sbatch":
    folder = pathlib.Path(words[-1]).parent
    argv = [sys.executable, "{stub}", "--frozen=" + str(folder / "config.yaml")]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    job = subprocess.Popen(argv, start_new_session=True, **quiet)
    print(job.pid)
elif name == "squeue":
    number = next(word for word in words if word.startswith("--jobs=")).removeprefix("--jobs=")
    try: alive = pathlib.Path("/proc/" + number + "/stat").read_text().split()[2] not in "ZX"
    except FileNotFoundError: alive = False
    print("RUNNING" if alive else "")
elif name == "scancel" and "--batch" in words: os.kill(int(words[-1]), signal.SIGTERM)
"""


@pytest.mark.full
@pytest.mark.timeout(180)
def test_queued_points_survive_hangup_and_stop_on_ctrl_c(tmp_path: Path) -> None:
    folder, tools = tmp_path / "queued", tmp_path / "bin"
    tools.mkdir()
    for name in ("sbatch", "squeue", "scancel"):
        (tools / name).write_text(QUEUE.format(python=sys.executable, bin=tools, stub=STUB))
        (tools / name).chmod(0o755)
    where = ("cluster=slurm", "cluster.gpus_per_node=0", f"sweep.dir={folder}")
    argv = typed("+exp=quickstart", "zero=stage0,stage1", "optim.lr=1e-3,1e-2", *where)
    slow = environ(
        tmp_path, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}", STUB_SECONDS="60", OMP_NUM_THREADS="1"
    )
    with RunningCommand(argv, folder, cwd=tmp_path, environ=slow) as first:
        first.wait_until(lambda: len(starts(folder)) == 4, 60, "handed over")
        first.wait_until(
            lambda: {row["state"] for row in content(folder)["points"]} == {"running"}, 10, "noted"
        )
        send_signal(signal.SIGHUP, first.process.pid)
        assert first.wait_for_exit(20) == 75, first.output
        assert "4 jobs stay in the queue" in first.output
        asked = (tools / "calls").read_text().count("squeue")
        with RunningCommand(argv, folder, cwd=tmp_path, environ=slow) as second:
            second.wait_until(
                lambda: (tools / "calls").read_text().count("squeue") >= asked + 4, 60, "found again"
            )
            send_signal(signal.SIGINT, second.process.pid)
            assert second.wait_for_exit(30) == 75, second.output
            second.wait_until_gone(5)
    assert {row["state"] for row in content(folder)["points"]} == {"stopped"}
    calls = (tools / "calls").read_text()
    assert (calls.count("sbatch "), calls.count("scancel --batch")) == (4, 4)
    assert sorted(starts(folder).values()) == [1, 1, 1, 1]
    with RunningCommand(argv, folder, cwd=tmp_path, environ={**slow, "STUB_SECONDS": "0"}) as third:
        assert third.wait_for_exit(60) == 0, third.output
    assert {row["state"] for row in content(folder)["points"]} == {"done"}
    assert sorted(starts(folder).values()) == [2, 2, 2, 2], "stopped points resume as one more job each"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_sweep_on_real_slurm(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if (why := missing()) is not None:
        pytest.skip(f"no sweep ran in a real Slurm: {why}")
    folder = tmp_path / "queued"
    where = ("cluster=slurm", "cluster.nodes=1", "cluster.gpus_per_node=0", f"sweep.dir={folder}")
    argv = typed("+exp=quickstart", "zero=stage0,stage1", "optim.lr=1e-3,1e-2", *where)
    with (
        loopback_slurm(tmp_path_factory.mktemp("slurm")) as slurm,
        RunningCommand(
            argv, folder, cwd=tmp_path, environ={**slurm.environ, **environ(tmp_path, STUB_SECONDS="2")}
        ) as started,
    ):
        assert started.wait_for_exit(200) == 0, started.output
        records = [json.loads(file.read_text()) for file in folder.glob("*/jobs/*/job.json")]
        jobs = {record["id"]["id"] for record in records}
        assert len(jobs) == len(records) == 4
        deadline = time.monotonic() + 60
        while {slurm.job_state(job) for job in jobs} != {"COMPLETED"}:  # they end a little after their points
            text = [file.read_text() for file in folder.glob("*/jobs/*/output.txt")]
            assert time.monotonic() < deadline, ([slurm.job_state(job) for job in jobs], text)
            time.sleep(0.5)
    assert sorted(starts(folder).values()) == [1, 1, 1, 1]
    assert {row["state"] for row in content(folder)["points"]} == {"done"}


@pytest.mark.full
@pytest.mark.timeout(400)
def test_two_trained_points_are_compared_by_loss(tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    words = (
        "+exp=quickstart",
        "model.hidden_size=64",
        "train.steps=2",
        "optim.lr=1e-3,1e-2",
        f"data.path={tmp_path / 'data'}",
    )
    with RunningCommand(
        typed(*words, f"sweep.dir={folder}", script=TRAIN), folder, cwd=tmp_path, environ=environ(tmp_path)
    ) as started:
        assert started.wait_for_exit(300) == 0, started.output
        started.wait_until_gone(5)
    rows = content(folder)["points"]
    assert [(row["state"], row["step"]) for row in rows] == [("done", 2), ("done", 2)]
    for row in rows:
        last = json.loads((Path(row["run_dir"]) / "eval.jsonl").read_text().splitlines()[-1])
        assert row["number"] == last["loss"]
    assert rows[0]["number"] != rows[1]["number"]
    groups = [from_yaml((Path(row["run_dir"]) / "config.yaml").read_text()).monitor.group for row in rows]
    assert groups == ["pair", "pair"]
