"""``launch/train.py`` with stub points: with ``-m`` it is the real sweep, with ``--frozen=FILE`` a run of 0.1
s.

    python tests/launch/stub_training.py -m +exp=quickstart zero=stage0,stage1

A point appends a line to ``starts.txt`` next to its run directory, takes ``STUB_SECONDS``, and leaves a loss
that depends on its configuration: 0.01 x stage + the distance of its learning rate from 1e-3 in powers of
ten. ``STUB_FAILS=2`` makes the points of stage 2 fail; SIGTERM stops it like a save. It imports next to
nothing, so dozens of points take seconds.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def point(file: Path) -> int:
    import yaml

    config = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
    run = Path(config["run"]["dir"])
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    with (run.parent / "starts.txt").open("a") as starts:
        seen = (
            f"{run.name} {','.join(map(str, sorted(os.sched_getaffinity(0))))} "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')}"
        )
        starts.write(f"{seen} {os.environ['OMP_NUM_THREADS']}\n")
    status(run, state="running")
    until = time.monotonic() + float(os.environ.get("STUB_SECONDS", "0.1"))
    while time.monotonic() < until:
        time.sleep(0.02)
        if stopped:
            status(run, state="stopped", exit_code=75, step=1, reason="SIGTERM")
            return 75
    stage = config["zero"]["stage"]
    if os.environ.get("STUB_FAILS") == str(stage):
        print("the stub fails")
        return 1
    steps, loss = config["train"]["steps"], 0.01 * stage + abs(math.log10(config["optim"]["lr"]) + 3)
    (run / "eval.jsonl").write_text(json.dumps({"step": steps, "set": "validation", "loss": loss}) + "\n")
    rows = [
        {"step": step, "loss": 9.0, "tokens_per_second": speed}
        for step, speed in enumerate((1.0, 100.0 + stage, 100.0 + stage), 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status(run, state="done", exit_code=0, step=steps)
    return 0


def status(run: Path, **fields: Any) -> None:
    temporary = run / f".status.{os.getpid()}"
    temporary.write_text(json.dumps({"attempt": 1, **fields}))
    temporary.replace(run / "status.json")


if __name__ == "__main__":
    if sys.argv[1].startswith("--frozen="):
        sys.exit(point(Path(sys.argv[1].removeprefix("--frozen="))))
    sys.path.insert(0, str(ROOT))
    from launch import train

    train.exit_now(train.main(sys.argv[1:]))
