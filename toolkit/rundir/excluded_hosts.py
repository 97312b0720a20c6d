"""Hosts that the next start of a run on Slurm must not use: ``excluded_hosts.json`` in the run's folder.

A host that computes wrong values reports no error, so the check of computations writes its name to this file
(``train/computation_check.py``). The command submit and the requeueing of jobs read it. Delete an entry, or
the file, to use a repaired host again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from toolkit.errors import InputError, Problem
from toolkit.files import write_whole

FILE = "excluded_hosts.json"
SLURM_JOB = "SLURM_JOB_ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedHost:
    """A host that the next start must not use.

    Attributes:
        host: the name that Slurm gives it.
        step: the step after which the fault was found.
        reason: the fault.
    """

    host: str
    step: int
    reason: str


def exclude_hosts(run_dir: Path, hosts: Sequence[ExcludedHost]) -> tuple[str, ...]:
    """Exclude hosts from the next start, if this process belongs to a job of Slurm; return their names.

    Only one process of a run may call it at a time.
    """
    if SLURM_JOB not in os.environ or not hosts:
        return ()
    known = {entry.host: entry for entry in read_excluded_hosts(run_dir)}
    known |= {entry.host: entry for entry in hosts}
    write_whole(run_dir / FILE, json.dumps([asdict(entry) for entry in known.values()], indent=1) + "\n")
    return tuple(entry.host for entry in hosts)


def read_excluded_hosts(run_dir: Path) -> list[ExcludedHost]:
    """Return the excluded hosts; none if there is no file. Raises InputError if it is not valid."""
    file = run_dir / FILE
    if not file.exists():
        return []
    try:
        found = [ExcludedHost(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]
        valid = all(isinstance(entry.host, str) and entry.host.isprintable() for entry in found)
    except (ValueError, TypeError):
        valid = False
    if not valid:
        raise InputError(
            Problem(
                str(file),
                f"{file} is not valid",
                f"{FILE} is a list of entries with host, step and reason",
                "correct or delete it",
            )
        )
    return found
