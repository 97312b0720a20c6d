"""Choose the state that a run starts from, and reject invalid combinations: another run's folder, a second
parent.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from toolkit.config.schema import RunConfig
from toolkit.config.urls import is_url
from toolkit.errors import CheckpointError, ConfigError, InputError, Problem, file_errors
from toolkit.paths import MOST_NAME_BYTES, Location, Url
from toolkit.remote.storage import parse_location
from toolkit.rundir.find import find_run

OTHER_FOLDER_REMEDY = "write run.dir=FOLDER, one that this user can make and write"
# Entries that a folder may contain before the first attempt: from this toolkit, a killed start, or a file
# system.
ALLOWED_ENTRIES = {"lock", "jobs", "attempts", "checkpoints", "lost+found", ".gitkeep"}


class StartKind(StrEnum):
    INITIAL = "initial"
    RESUME = "resume"
    FORK = "fork"


@dataclass(frozen=True, slots=True)
class StartState:
    """The state that a run starts from. ``path`` is None for initial weights."""

    kind: StartKind
    path: Location | None = None


def resolve_start_state(config: RunConfig, newest: Location | None) -> StartState:
    """Choose the state that this start continues from.

    Args:
        config: Configuration of this start.
        newest: The newest complete checkpoint of the run's own directory, if any; or in its store, if that is
            later.

    Raises:
        ConfigError: ``resume=never`` although there is a checkpoint, or ``resume=PATH`` with ``run.fork``.
        InputError: The path does not exist.
    """
    fork, resume = config.run.fork, config.resume
    if resume not in ("auto", "never"):
        if fork is not None:
            raise ConfigError(
                Problem(
                    "resume",
                    f"resume={resume} with run.fork={fork}",
                    "a run starts from one state",
                    "remove resume to fork, or run.fork to resume",
                )
            )
        return StartState(StartKind.RESUME, _existing_path("resume", resume))
    if newest is not None and resume == "never":
        raise ConfigError(
            Problem(
                "resume",
                f"resume=never, but {newest} exists",
                "resume=never does not continue a run",
                "write resume=auto to continue, or run.name=ANOTHER for a new run",
            )
        )
    if newest is not None:
        return StartState(StartKind.RESUME, newest)
    if fork is not None:
        return StartState(StartKind.FORK, _existing_path("run.fork", fork))
    return StartState(StartKind.INITIAL)


def _existing_path(key: str, value: str) -> Location:
    """Return the folder that ``value`` names. A URL is not accessed: planning uses no network."""
    if is_url(value):
        location = parse_location(value, key)
        if isinstance(location, Url):
            return location
        value = str(location)
    with file_errors(key, f"correct the path: {key}=PATH"):
        path = find_run(value, key)
        exists = path.is_dir()
    if not exists:
        raise InputError(
            Problem(
                key,
                f"{key}={value}",
                f"{key} must be an existing checkpoint or run directory",
                f"correct the path; {path.absolute()} is not a folder",
            )
        )
    return path


def check_folder(path: Path) -> None:
    """Check that a run can use ``path``. Raises InputError for a file, and for a folder that contains
    something other than a run.
    """
    for part in path.parts:
        if (size := len(os.fsencode(part))) > MOST_NAME_BYTES:
            raise InputError(
                Problem(
                    "run.dir",
                    f"run.dir={str(path)[:80]}... has a name of {size} bytes",
                    f"a folder's name has at most {MOST_NAME_BYTES} bytes",
                    "write a shorter run.name or run.dir=FOLDER",
                )
            )
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(
            Problem(
                "run.dir", f"run.dir={path} is not a folder", "a run has its own folder", OTHER_FOLDER_REMEDY
            )
        )
    if (path / "attempts").is_dir() or (path / "status.json").is_file():
        return
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in ALLOWED_ENTRIES)
    if foreign:
        more = f" and {len(foreign) - 3} more" if foreign[3:] else ""
        raise InputError(
            Problem(
                "run.dir",
                f"run.dir={path} contains {', '.join(foreign[:3])}{more}, and no run",
                "a run needs a folder that is new, empty or its own",
                f"write run.dir={path / 'NEW'}",
            )
        )


def check_identity(config: RunConfig, file: Path) -> None:
    """Raise ConfigError if the folder belongs to another run.

    Args:
        config: Configuration of this start.
        file: ``config.yaml`` of the folder's newest attempt. If it is missing, no run has begun there.
    """
    if not file.exists():
        return
    from toolkit.config.compose import from_yaml
    from toolkit.config.identity import identity, identity_differences

    recorded = from_yaml(file.read_text(encoding="utf-8"))
    if identity(recorded) == identity(config):
        return
    differences = "; ".join(identity_differences(recorded, config))
    raise ConfigError(
        Problem(
            "run.dir",
            f"run.dir={file.parent} contains another run ({differences})",
            "a run directory belongs to one model, data, optimizer, schedule and batch",
            "remove run.dir, choose another one, or start a new run from this one's state with run.fork="
            + str(file.parent),
        )
    )


def resolve_parent(fork: str) -> str:
    """Return the URL or the absolute path of the parent, as ``fork.json`` records it."""
    return fork if is_url(fork) else str(find_run(fork, "run.fork").absolute())


def check_fork(config: RunConfig, run_dir: Path, fork_file: Path, newest: Path | None) -> None:
    """Check that a fork is a new run with one parent. Raises ConfigError.

    Args:
        config: Configuration of this start.
        run_dir: The run's own directory.
        fork_file: Where the parent is recorded, if the run began as a fork.
        newest: A checkpoint of the run's own, if any.
    """
    if config.run.fork is None:
        return
    parent = resolve_parent(config.run.fork)
    seen = f"run.fork={config.run.fork}, and the run's own directory is {run_dir}"
    remedy = "give the new run its own run.name or run.dir"
    if run_dir.absolute() in (Path(parent), *Path(parent).parents):
        raise ConfigError(Problem("run.fork", seen, "a fork is a new run in its own directory", remedy))
    if fork_file.exists():
        recorded = json.loads(fork_file.read_text(encoding="utf-8"))["parent"]
        if recorded != parent:
            raise ConfigError(
                Problem("run.fork", f"{seen}, which began from {recorded}", "a run has one parent", remedy)
            )
    elif newest is not None:
        raise ConfigError(
            Problem("run.fork", f"{seen}, which has steps of its own", "run.fork starts a new run", remedy)
        )


def find_run_directory(path: Path) -> Path | None:
    """Return the run directory that ``path`` is or that contains the checkpoint ``path``; None for a
    separate checkpoint.
    """
    for folder in (path, path.parent.parent):
        if (folder / "config.yaml").exists() and (folder / "attempts").is_dir():
            return folder
    return None


def check_same_run(config: RunConfig, path: Location) -> None:
    """Check that ``resume=PATH`` continues the same run. Another model or other data requires a fork. A
    checkpoint in a store is checked when it is opened.

    Raises:
        CheckpointError: ``path`` belongs to a run with another identity.
    """
    folder = find_run_directory(path.absolute()) if isinstance(path, Path) else None
    if folder is None:
        return
    from toolkit.config.compose import from_yaml
    from toolkit.config.identity import identity_differences

    differences = identity_differences(
        from_yaml((folder / "config.yaml").read_text(encoding="utf-8")), config
    )
    if differences:
        raise CheckpointError(
            Problem(
                "resume",
                f"resume={path} belongs to another run ({'; '.join(differences)})",
                "resume continues the same model, data, optimizer, schedule and batch",
                f"write run.fork={path} to start a new run from its state",
            )
        )
