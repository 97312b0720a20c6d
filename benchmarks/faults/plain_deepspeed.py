"""Kill ranks of a plain DeepSpeed script that ``torchrun --max-restarts`` restarts, for comparison."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.faults.cases import BATCH, LAYOUTS, SAVE_EVERY, STEP_SECONDS, STEPS, Case
from benchmarks.faults.other_load import OtherLoad
from benchmarks.faults.processes import BIN, POLL_SECONDS, ROOT, kill_all, start
from benchmarks.faults.recovery import read_rank_records
from toolkit.testing.dist import find_free_port

SCRIPT = ROOT / "benchmarks" / "harness" / "restarting_baseline.py"
KILLS = {"rank-killed": 1, "two-ranks-killed": 2}
STEP_LIMIT_SECONDS, RECOVERY_LIMIT_SECONDS = 120.0, 60.0  # until the fault; from then to a new step
# Without it torchrun of torch 2.13 gives restarted ranks the store of the dead ones, and many do not connect.
# Only the c10d rendezvous reads it: with --master_port the store is always shared.
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


def can_run_without_toolkit(case: Case) -> bool:
    """Return whether the case can be repeated without the toolkit: kills of ranks in a DeepSpeed layout."""
    return case.fault in KILLS and "-zero" in case.layout and case.layout.startswith("deepspeed")


def run_without_toolkit(case: Case, folder: Path) -> dict[str, Any] | None:
    """Kill the same number of ranks at the same step.

    Returns:
        ``seconds`` to the next new step, None if the run did not recover, and ``other_cores`` as in the row
        of a case; or None if the run had ended before the fault.
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
        "first_pause": case.step,
        "folder": str(folder),
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    argv = [
        str(BIN / "torchrun"),
        f"--nproc_per_node={layout.ranks}",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{find_free_port()}",
        str(SCRIPT),
        str(folder / "spec.json"),
    ]
    mark = uuid4().hex
    others = OtherLoad(mark)
    started = start(argv, folder / "output.txt", mark, {**ENVIRON, "TMPDIR": str(folder)})

    def rows(after: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the steps of rank 0, or those that another process made after the steps of ``after``."""
        found = list(read_rank_records(folder, 0))
        if after is None:
            return found
        reached = max(row["ended"] for row in found if row["pid"] == after["pid"])
        return [row for row in found if row["pid"] != after["pid"] and row["ended"] > reached]

    def wait(holds: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not holds() and started.code() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return holds()

    try:
        with others:
            if not wait(lambda: len(rows()) >= case.step, STEP_LIMIT_SECONDS):
                return None
            time.sleep(STEP_SECONDS * (case.moment % 1))
            ranks = started.ranks()
            if len(ranks) < layout.ranks:
                return None
            moment, hit = time.time(), rows()[-1]
            for rank in random.Random(case.seed).sample(sorted(ranks), KILLS[case.fault]):
                ranks[rank].send_signal(signal.SIGKILL)
            recovered = wait(lambda: bool(rows(after=hit)), RECOVERY_LIMIT_SECONDS)
            seconds = rows(after=hit)[0]["time"] - moment if recovered else None
            return {"seconds": seconds, "other_cores": others.cores()}
    finally:
        kill_all(mark)
        for launcher in started.launchers:
            launcher.wait(timeout=20)
