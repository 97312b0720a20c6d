"""Report whether the run in this container is healthy: HEALTHCHECK of the Dockerfile.

    python -m toolkit.cluster.jobs.health      exit code 0: healthy, or no run yet; 1: failed, or no progress

The run is found through its lock file, which its processes keep open, wherever ``run.dir`` is. Progress is
judged by the age of status.json, which a run updates at its steps: it is unhealthy if a hang should have been
reported (monitor.hang_seconds) and was not. Reads a few small files, imports neither torch nor the
configuration, and always ends within ten seconds.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import yaml

from toolkit.rundir.status import RunState

TIMEOUT_SECONDS = 10  # limit for everything: a file system that does not answer is unhealthy
MARGIN_SECONDS = 60.0  # for the watchdog to collect stacks and end the run


def main(proc: Path = Path("/proc")) -> int:
    signal.signal(signal.SIGALRM, _time_out)
    signal.alarm(TIMEOUT_SECONDS)
    problems = {folder: find_failure(folder, time.time()) for folder in sorted(set(find_run_folders(proc)))}
    print(
        "\n".join(f"{folder}: {problem or 'healthy'}" for folder, problem in problems.items())
        or "no run here"
    )
    return 1 if any(problems.values()) else 0


def find_run_folders(proc: Path) -> Iterator[Path]:
    """Yield the directories of runs whose lock file is open in a process that this one may inspect."""
    for process in proc.glob("[0-9]*"):
        for link in _entries(process / "fd"):
            with suppress(OSError):  # it has just been closed
                target = link.readlink()
                if target.name == "lock" and (target.parent / "attempts").is_dir():
                    yield target.parent


def _entries(folder: Path) -> list[Path]:
    """List a folder; empty if its process has just ended or belongs to another user."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def find_failure(folder: Path, now: float) -> str | None:
    """Return what is wrong with the run; None if it is healthy.

    Args:
        now: seconds since the epoch.
    """
    status_file = folder / "status.json"
    try:
        age = now - status_file.stat().st_mtime
        state = RunState(json.loads(status_file.read_text(encoding="utf-8"))["state"])
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # the run is just starting
        return None
    if state in (RunState.FAILED, RunState.REFUSED):
        return state.value
    limit = config["monitor"]["hang_seconds"]
    if state is RunState.RUNNING and limit > 0 and age > limit + MARGIN_SECONDS:
        return f"no step, evaluation or save for {age:.0f} s (monitor.hang_seconds={limit})"
    return None


def _time_out(*_: object) -> None:
    print(f"the run's files could not be read within {TIMEOUT_SECONDS} s")
    sys.stdout.flush()
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
