"""Send requests to Slurm's controller from inside a job, also while it restarts or fails over."""

from __future__ import annotations

import subprocess
import time

ANSWER_SECONDS = 120.0
TRIES, RETRY_SECONDS = 3, 10.0


def call_controller(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm. One that does not answer within ``ANSWER_SECONDS`` fails like any other."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {ANSWER_SECONDS:g} s")


def ask_controller(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm until it succeeds, at most ``TRIES`` times, and return the last result."""
    for _ in range(TRIES - 1):
        result = call_controller(*command)
        if result.returncode == 0:
            return result
        time.sleep(RETRY_SECONDS)
    return call_controller(*command)
