"""The same kills with a plain DeepSpeed script that ``torchrun --max-restarts`` restarts."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from benchmarks.faults.cases import BATCH, LAYOUTS, SAVE_EVERY, STEP_SECONDS, STEPS, Case
from benchmarks.faults.processes import POLL_SECONDS, ROOT, kill_all, launch_command, start
from benchmarks.faults.recovery import read_witness
from toolkit.cluster.rank_processes import find_free_port

SCRIPT = ROOT / "benchmarks" / "harness" / "restarting_baseline.py"
KILLS = {"rank-killed": 1, "two-ranks-killed": 2}
COMMAND_SECONDS = 120.0
# Without it torchrun of torch 2.13 gives restarted ranks the store of the dead ones, and they never connect.
ENVIRON = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "tie_word_embeddings": True,
}


def has_stock_side(case: Case) -> bool:
    """Return whether the case can be repeated without the toolkit: kills of ranks in a DeepSpeed layout."""
    return case.fault in KILLS and "-zero" in case.layout and case.layout.startswith("deepspeed")


def run_stock(case: Case, folder: Path) -> dict[str, Any]:
    """Kill the same number of ranks at the same step, and return the seconds to the next new step, or None
    if the run did not recover.
    """
    folder.mkdir(parents=True)
    layout = LAYOUTS[case.layout]
    spec = {
        "model": MODEL,
        "batch": BATCH,
        "sequence_length": 32,
        "stage": int(layout.overrides[0].removeprefix("zero=stage")),
        "steps": STEPS,
        "save_every": SAVE_EVERY,
        "step_seconds": STEP_SECONDS,
        "folder": str(folder),
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    argv = launch_command("torchrun", SCRIPT, [str(folder / "spec.json")], layout.ranks, find_free_port())
    mark, seconds = uuid4().hex, None
    started = start(argv, folder / "output.txt", mark, ENVIRON)
    deadline = time.monotonic() + COMMAND_SECONDS

    def step() -> int:
        return max((row["ended"] for row in read_witness(folder, 0)), default=0)

    try:
        while step() < 1 + int(case.moment) and started.code() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        time.sleep(STEP_SECONDS * (case.moment % 1))
        moment, before = time.time(), step()
        ranks = started.ranks()
        for rank in random.Random(case.seed).sample(sorted(ranks), KILLS[case.fault]):
            ranks[rank].send_signal(signal.SIGKILL)
        while started.code() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        after = [
            row["time"] for row in read_witness(folder, 0) if row["time"] > moment and row["ended"] > before
        ]
        seconds = after[0] - moment if after else None
    except (psutil.Error, ValueError):
        pass  # the run ended before the fault: nothing was measured
    finally:
        kill_all(mark)
        for launcher in started.launchers:
            launcher.wait(timeout=20)
    return {"seconds": seconds, "code": started.code()}
