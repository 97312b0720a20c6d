"""Where things of a run lie, how an attempt begins there, and its last word."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.checkpoint_folder import NewestCheckpoint, disagreement_error, find_newest, moved_steps, step_of
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, ExitCode, InputError, Problem, file_errors
from toolkit.files import write_whole
from toolkit.goodput import (
    SAVES,
    Attempt,
    AttemptTimes,
    compute_goodput,
    end_times,
    read_attempt,
    read_saves,
    read_times,
    write_times,
)
from toolkit.paths import MOST_NAME_BYTES
from toolkit.rows import last_row
from toolkit.rundir.lock import acquire_lock
from toolkit.rundir.rows import move_rows
from toolkit.rundir.source import (
    SourceKind,
    check_fork,
    check_identity,
    check_same_run,
    resolve_parent,
    resolve_source,
)
from toolkit.rundir.status import RunState, Status, read_status, write_status

LOST_END = "all its processes ended before one of them could record why (killed, or the machine failed)"
OTHER_FOLDER = "write run.dir=FOLDER, one that this user can make and write"
# What may lie in a folder before the first attempt: of this toolkit, of a killed start, of file systems.
BEFORE = {"lock", "jobs", "attempts", "checkpoints", "lost+found", ".gitkeep"}


def check_folder(path: Path) -> None:
    """A run writes into a folder of its own. Raises InputError for a file, and for a folder that holds other things than a run."""
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
                "run.dir", f"run.dir={path} is not a folder", "a run has a folder of its own", OTHER_FOLDER
            )
        )
    if (path / "attempts").is_dir() or (path / "status.json").is_file():
        return
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in BEFORE)
    if foreign:
        more = f" and {len(foreign) - 3} more" if foreign[3:] else ""
        raise InputError(
            Problem(
                "run.dir",
                f"run.dir={path} holds {', '.join(foreign[:3])}{more}, and no run",
                "a run begins in a folder that is new, empty or the run's own",
                f"write run.dir={path / 'NEW'}",
            )
        )


class RunDirectory:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def eval_file(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def ledger_file(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def alerts_file(self) -> Path:
        return self.path / "alerts.jsonl"

    def node_alerts_file(self, node: int) -> Path:
        """What was told on one node: on the first, of the whole run."""
        return self.alerts_file if node == 0 else self.path / "alerts" / f"node-{node}.jsonl"

    def system_file(self, node: int) -> Path:
        """Samples of one node. Each node's first rank writes its own, on whatever disk the node has for the run's directory."""
        return self.path / "system" / f"node-{node}.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def export(self) -> Path:
        return self.path / "export"

    def attempt_folder(self, attempt: int) -> Path:
        return self.path / "attempts" / f"{attempt:03d}"

    def log_file(self, attempt: int) -> Path:
        return self.attempt_folder(attempt) / "log.txt"

    def hang_folder(self, attempt: int) -> Path:
        """What each rank said of itself when the run made no progress, or failed."""
        return self.attempt_folder(attempt) / "hang"

    def hang_file(self, attempt: int) -> Path:
        """Why it made none, with the stacks of all ranks; there where the attempt ended so."""
        return self.attempt_folder(attempt) / "hang.txt"

    def environment_file(self, attempt: int) -> Path:
        return self.attempt_folder(attempt) / "environment.json"

    def attempts(self) -> list[int]:
        """Numbers of the attempts so far, in order."""
        folder = self.path / "attempts"
        return (
            sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())
            if folder.is_dir()
            else []
        )

    @property
    def fork_file(self) -> Path:
        """The parent of a run that began from another one's state."""
        return self.path / "fork.json"

    # ---- a start

    def check(self, config: RunConfig) -> None:
        """Refuse what can be refused without writing: a folder of another run or of no run, a wrong resume or fork. Raises UserError."""
        with file_errors("run.dir", OTHER_FOLDER):
            self._check(config)

    def _check(self, config: RunConfig) -> None:
        check_folder(self.path)
        check_identity(config, self.config_file)
        check_fork(config, self.path, self.fork_file, self.newest_checkpoint())
        found = self.newest_agreed()
        if config.resume == "auto" and found.disagreements:
            raise disagreement_error(self.checkpoints, found)
        # resume=never refuses to pass over a checkpoint that can be continued; among files that do not agree it is what a person chose.
        source = resolve_source(config, None if found.disagreements else found.checkpoint)
        if source.kind is SourceKind.RESUME and source.path is not None:
            check_same_run(config, source.path)

    def begin(self, config: RunConfig, plan: Mapping[str, Any], *, began: float | None = None) -> int:
        """Take the folder for this process, unless it has it, and open the next attempt, whose number is returned.

        Args:
            plan: what ``plan.json`` shall hold.
            began: when the process was started that does it, in seconds since 1970. None: now.

        Raises:
            UserError: see :meth:`check`; another live process runs here; or the folder cannot be made or written.
        """
        self.check(config)
        with file_errors("run.dir", OTHER_FOLDER):
            return self._begin(config, plan, began)

    def _begin(self, config: RunConfig, plan: Mapping[str, Any], began: float | None) -> int:
        from toolkit.config.compose import to_yaml

        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._take_lock()
        self._record_lost_end()
        attempt = max(self.attempts(), default=0) + 1
        yaml, plan_json = to_yaml(config), json.dumps(plan, indent=1) + "\n"
        folder = self.attempt_folder(attempt)
        folder.mkdir(parents=True)
        for place in (folder, self.path):
            write_whole(place / "config.yaml", yaml)
            write_whole(place / "plan.json", plan_json)
        if config.run.fork is not None and not self.fork_file.exists():
            parent = resolve_parent(config.run.fork)
            write_whole(self.fork_file, json.dumps({"parent": parent, "attempt": attempt}) + "\n")
        now = time.time()
        write_times(folder, AttemptTimes(began=min(began or now, now), seen=now))
        self.write_status(Status(state=RunState.STARTING, attempt=attempt))
        return attempt

    def continued(self, config: RunConfig, starts: int) -> RunConfig:
        """``config`` for a start that nobody typed: the last ``starts`` attempts were of the same command, and what they got to is
        continued. A ``resume`` that is a path, or never, was meant for the first of them, and has been followed once one of them got to
        train."""
        before = (
            read_attempt(self.attempt_folder(number)) for number in self.attempts()[-starts:] if starts > 0
        )
        went = any(attempt is not None and attempt.times.first is not None for attempt in before)
        return replace(config, resume="auto") if went else config

    def begun_since(self, moment: float) -> int:
        """How many attempts began at ``moment``, in seconds since 1970, or later."""
        found = (read_attempt(self.attempt_folder(number)) for number in self.attempts())
        return sum(attempt is not None and attempt.times.began >= moment for attempt in found)

    @property
    def lock_descriptor(self) -> int:
        """The open lock file. A child that inherits it keeps the folder taken when this process dies first."""
        assert self._lock is not None, "begin() comes first"
        return self._lock

    def release(self) -> None:
        """Let another process take the folder. The end of the process does the same."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- how it stands

    def write_status(self, status: Status) -> None:
        write_status(self.status_file, status)

    def status(self) -> Status | None:
        """None where no run has begun."""
        return read_status(self.status_file)

    def finish(
        self,
        state: RunState,
        exit_code: int,
        reason: str | None,
        *,
        attempt: int,
        anew: bool = False,
        at: float | None = None,
    ) -> None:
        """Record the end of an attempt. Keeps the step and checkpoint recorded so far and, unless ``anew``, an end already recorded.

        Args:
            at: when it ended, in seconds since 1970. None: now.
        """
        last = self.status()
        if last is not None and last.attempt == attempt and not last.state.live and not anew:
            return
        step, checkpoint = (
            (last.step, last.checkpoint) if last is not None and last.attempt == attempt else (None, None)
        )
        end_times(
            self.attempt_folder(attempt),
            time.time() if at is None else at,
            state=state.value,
            reason=reason,
            anew=anew,
        )
        total = compute_goodput(self.tried(), kept=None if state is RunState.DONE else self.saved_step() or 0)
        self.write_status(
            Status(
                state=state,
                attempt=attempt,
                exit_code=exit_code,
                step=step,
                checkpoint=checkpoint,
                reason=reason,
                goodput=total.to_json() if total is not None else None,
            )
        )

    def _record_lost_end(self) -> None:
        """Record that the last attempt failed if all its processes died before one of them could record it."""
        last = self.status()
        if last is not None and last.state.live:
            times = read_times(self.attempt_folder(last.attempt))
            self.finish(
                RunState.FAILED,
                int(ExitCode.FAILURE),
                LOST_END,
                attempt=last.attempt,
                at=times.seen if times is not None else None,
            )

    def tried(self, before: int | None = None) -> list[Attempt]:
        """What is known of the attempts' time, in their order; of those that left nothing to read, nothing.

        Args:
            before: only attempts before this one.
        """
        numbers = (number for number in self.attempts() if before is None or number < before)
        return [
            attempt
            for number in numbers
            if (attempt := read_attempt(self.attempt_folder(number))) is not None
        ]

    def saved_step(self) -> int | None:
        """Of the newest checkpoint of this run's own folder; None if there is none."""
        newest = self.newest_checkpoint()
        digits = newest.name.removeprefix("step-") if newest is not None else ""
        return int(digits) if digits.isdigit() else None

    def newest_checkpoint(self) -> Path | None:
        """Of this run's own, by its folder's name. Whether it is whole is found when it is read."""
        return max((file.parent for file in self.checkpoints.glob("[!.]*/manifest.json")), default=None)

    def newest_agreed(self) -> NewestCheckpoint:
        """The newest checkpoint, as far as the folder of checkpoints and the run's other files agree on one."""
        found = find_newest(self.checkpoints, self._claims())
        row = last_row(self.metrics_file)
        if found.checkpoint is None and row is not None and not self.status_file.exists():
            found = replace(
                found,
                disagreements=(
                    *found.disagreements,
                    f"{self.metrics_file.name} has rows up to step {row.get('step')}",
                ),
            )
        return found

    def _claims(self) -> dict[str, int]:
        """Steps that the run's other files say were saved, apart from those whose checkpoints a person has moved."""
        status, moved = self.status(), set(moved_steps(self.path / "attempts"))
        claims: dict[str, int | None] = {}
        if status is not None and status.checkpoint is not None:
            claims[self.status_file.name] = step_of(Path(status.checkpoint))
        trained = [
            number
            for number in self.attempts()
            if (times := read_times(self.attempt_folder(number))) and times.first is not None
        ]
        if trained:
            folder = self.attempt_folder(trained[-1])
            claims[f"attempts/{folder.name}/{SAVES}"] = max(
                (save.step for save in read_saves(folder)), default=None
            )
        return {who: step for who, step in claims.items() if step is not None and step not in moved}

    # ---- what is run again

    def folder_of_older(self, attempt: int) -> Path:
        """Of the attempt before ``attempt``: where what it left for steps that ``attempt`` runs again is kept."""
        return self.attempt_folder(
            max((number for number in self.attempts() if number < attempt), default=attempt)
        )

    def trim_after(self, step: int, attempt: int) -> None:
        """Move rows of steps after ``step`` to the attempt before ``attempt``: they will be run again, and a step stands once."""
        for file in (self.metrics_file, self.eval_file, self.ledger_file):
            if file.exists():
                move_rows(file, self.folder_of_older(attempt) / file.name, step)

    # ---- one process at a time

    def try_lock(self) -> bool:
        """Take the lock of the directory if no live process holds it."""
        if self._lock is None:
            self._lock = acquire_lock(self.path / "lock")[0]
        return self._lock is not None

    def _take_lock(self) -> None:
        descriptor, owner = acquire_lock(self.path / "lock")
        if descriptor is None:
            who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
            remedy = f"wait for it or stop it (kill {owner['pid']})" if owner else "wait for it or stop it"
            raise ConfigError(
                Problem(
                    "run.dir",
                    f"run.dir={self.path}, where {who} is running",
                    "one run at a time uses a directory",
                    f"{remedy}, or give this run its own run.name or run.dir",
                )
            )
        self._lock = descriptor
