"""Whether the run in this container is well: HEALTHCHECK of Dockerfile.

    python -m toolkit.cluster.health            exit code 0 well, or none runs here yet; 1 it failed, or says nothing any more

The run is found by its lock, which its processes hold open, wherever ``run.dir`` is. That it goes on is seen by the age of
status.json, which a run writes at its steps: it is ill when it should have been reported as hanging (monitor.hang_seconds) and is not.
Reads some small files, imports neither torch nor the configuration, and ends after ten seconds in any case.
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

SECONDS = 10  # for all of it: a file system that does not answer is no health
MARGIN_SECONDS = 60.0  # for the watchdog to collect stacks and end the run


def main(proc: Path = Path("/proc")) -> int:
    signal.signal(signal.SIGALRM, _time_out)
    signal.alarm(SECONDS)
    found = {folder: find_failure(folder, time.time()) for folder in sorted(set(find_run_folders(proc)))}
    print("\n".join(f"{folder}: {ill or 'well'}" for folder, ill in found.items()) or "no run here")
    return 1 if any(found.values()) else 0


def find_run_folders(proc: Path) -> Iterator[Path]:
    """Of the runs whose lock a process that this one may look at holds open."""
    for process in proc.glob("[0-9]*"):
        for link in _entries(process / "fd"):
            with suppress(OSError):  # it has just been closed
                target = link.readlink()
                if target.name == "lock" and (target.parent / "attempts").is_dir():
                    yield target.parent


def _entries(folder: Path) -> list[Path]:
    """None of a process that has just ended, or is another user's."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def find_failure(folder: Path, now: float) -> str | None:
    """None: nothing.

    Args:
        now: seconds since the epoch.
    """
    status_file = folder / "status.json"
    try:
        age = now - status_file.stat().st_mtime
        state = RunState(json.loads(status_file.read_text(encoding="utf-8"))["state"])
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # it begins just now
        return None
    if state in (RunState.FAILED, RunState.REFUSED):
        return f"{state.value}"
    limit = config["monitor"]["hang_seconds"]
    if state is RunState.RUNNING and limit > 0 and age > limit + MARGIN_SECONDS:
        return f"no step, evaluation or save for {age:.0f} s (monitor.hang_seconds={limit})"
    return None


def _time_out(*_: object) -> None:
    print(f"its files could not be read in {SECONDS} s")
    sys.stdout.flush()
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
