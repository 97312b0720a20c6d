"""Paths in a run's directory, the start of an attempt, and its recorded end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.checkpoint_folder import (
    BEST_POINTER,
    POINTER,
    NewestCheckpoint,
    committed_checkpoints,
    disagreement_error,
    find_newest,
    moved_steps,
    step_of,
)
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, ExitCode, InputError, Problem, file_errors
from toolkit.files import remove_unfinished, write_whole
from toolkit.goodput import (
    SAVES,
    TIMES,
    Attempt,
    AttemptTimes,
    compute_goodput,
    end_times,
    read_attempt,
    read_saves,
    read_times,
    write_times,
)
from toolkit.rows import last_row
from toolkit.rundir.lock import acquire_lock
from toolkit.rundir.repeated_steps import cut_rows, move_rows
from toolkit.rundir.start_state import (
    OTHER_FOLDER_REMEDY,
    StartKind,
    check_folder,
    check_fork,
    check_identity,
    check_same_run,
    resolve_parent,
    resolve_start_state,
)
from toolkit.rundir.status import RunState, Status, read_status, write_status

LOST_END = "all its processes ended before one of them could record why (killed, or the machine failed)"


class RunDirectory:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.plan_file = self.path / "plan.json"
        self.status_file = self.path / "status.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.eval_file = self.path / "eval.jsonl"
        self.ledger_file = self.path / "ledger.jsonl"
        self.rollbacks_file = self.path / "rollbacks.jsonl"  # of train/rollback.py
        self.departures_file = self.path / "departures.jsonl"  # of train/departure.py
        self.hooks_file = self.path / "hooks.jsonl"  # metrics that the user's hooks log
        self.alerts_file = self.path / "alerts.jsonl"
        self.fork_file = self.path / "fork.json"  # the parent of a forked run
        self.checkpoints = self.path / "checkpoints"
        self.uploads = self.path / "uploads"  # what has been uploaded to checkpoint.url
        self.plots = self.path / "plots"
        self.export = self.path / "export"
        self._lock: int | None = None

    def node_alerts_file(self, node: int) -> Path:
        """Alerts of one node; the first node's file also has those of the whole run."""
        return self.alerts_file if node == 0 else self.path / "alerts" / f"node-{node}.jsonl"

    def system_file(self, node: int) -> Path:
        """Samples of one node, written by its first rank to the node's disk for the run's directory."""
        return self.path / "system" / f"node-{node}.jsonl"

    def attempt_folder(self, attempt: int) -> Path:
        return self.path / "attempts" / f"{attempt:03d}"

    def log_file(self, attempt: int) -> Path:
        return self.attempt_folder(attempt) / "log.txt"

    def hang_folder(self, attempt: int) -> Path:
        """Each rank's report when the run made no progress or failed."""
        return self.attempt_folder(attempt) / "hang"

    def hang_file(self, attempt: int) -> Path:
        """The diagnosis of a hang with the stacks of all ranks; only if the attempt ended with one."""
        return self.attempt_folder(attempt) / "hang.txt"

    def environment_file(self, attempt: int) -> Path:
        return self.attempt_folder(attempt) / "environment.json"

    def attempts(self) -> list[int]:
        """Return the numbers of all attempts, in order."""
        folder = self.path / "attempts"
        return (
            sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())
            if folder.is_dir()
            else []
        )

    # ---- start

    def check(self, config: RunConfig) -> None:
        """Reject without writing what can be rejected: a folder of another run, an invalid resume or fork.
        Raises UserError.
        """
        with file_errors("run.dir", OTHER_FOLDER_REMEDY):
            self._check(config)

    def _check(self, config: RunConfig) -> None:
        check_folder(self.path)
        check_identity(config, self.config_file)
        check_fork(config, self.path, self.fork_file, self.newest_checkpoint())
        found = self.newest_with_disagreements()
        if config.resume == "auto" and found.disagreements:
            raise disagreement_error(self.checkpoints, found)
        # resume=never rejects a usable checkpoint; if the files disagree, it is the user's decision.
        start = resolve_start_state(config, None if found.disagreements else found.checkpoint)
        if start.kind is StartKind.RESUME and start.path is not None:
            check_same_run(config, start.path)

    def begin(self, config: RunConfig, plan: Mapping[str, Any], *, began: float | None = None) -> int:
        """Lock the folder for this process, unless it is locked already, and open the next attempt. Returns
        the attempt's number.

        Args:
            config: Configuration of this start.
            plan: Content of ``plan.json``.
            began: Start time of the process in seconds since 1970; None means now.

        Raises:
            UserError: As :meth:`check`; or another process runs here, or the folder cannot be written.
        """
        self.check(config)
        with file_errors("run.dir", OTHER_FOLDER_REMEDY):
            return self._begin(config, plan, began)

    def _begin(self, config: RunConfig, plan: Mapping[str, Any], began: float | None) -> int:
        from toolkit.config.compose import to_yaml

        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._take_lock()
        remove_unfinished(self._files_of_lock_owner())
        self._record_lost_end()
        attempt = max(self.attempts(), default=0) + 1
        yaml, plan_json = to_yaml(config), json.dumps(plan, indent=1) + "\n"
        folder = self.attempt_folder(attempt)
        folder.mkdir(parents=True)
        for directory in (folder, self.path):
            write_whole(directory / "config.yaml", yaml)
            write_whole(directory / "plan.json", plan_json)
        if config.run.fork is not None and not self.fork_file.exists():
            parent = resolve_parent(config.run.fork)
            write_whole(self.fork_file, json.dumps({"parent": parent, "attempt": attempt}) + "\n")
        now = time.time()
        write_times(folder, AttemptTimes(began=min(began or now, now), seen=now))
        self.write_status(Status(state=RunState.STARTING, attempt=attempt))
        return attempt

    def _files_of_lock_owner(self) -> list[Path]:
        """Files that only the process with the lock replaces."""
        rows = [self.metrics_file, self.eval_file, self.ledger_file, self.hooks_file, self.rollbacks_file]
        rows.append(self.departures_file)
        pointers = [self.checkpoints / name for name in (POINTER, BEST_POINTER)]
        times = [self.attempt_folder(number) / TIMES for number in self.attempts()]
        whole = [self.status_file, self.config_file, self.plan_file, self.plots / "loss.png"]
        return [*whole, *rows, *pointers, *times]

    def config_for_restart(self, config: RunConfig, starts: int) -> RunConfig:
        """Return ``config`` for an automatic restart, after ``starts`` attempts of the same command.

        ``resume=PATH`` and ``resume=never`` apply to the first of them only, and become ``auto`` once one of
        them has trained.
        """
        previous = (
            read_attempt(self.attempt_folder(number)) for number in self.attempts()[-starts:] if starts > 0
        )
        has_trained = any(attempt is not None and attempt.times.first is not None for attempt in previous)
        return replace(config, resume="auto") if has_trained else config

    def count_attempts_since(self, moment: float) -> int:
        """Return the number of attempts that began at or after ``moment``, in seconds since 1970."""
        found = (read_attempt(self.attempt_folder(number)) for number in self.attempts())
        return sum(attempt is not None and attempt.times.began >= moment for attempt in found)

    @property
    def lock_descriptor(self) -> int:
        """The open lock file. A child that inherits it keeps the folder locked if this process dies first."""
        assert self._lock is not None, "call begin() first"
        return self._lock

    def release(self) -> None:
        """Unlock the folder. The end of the process does the same."""
        if self._lock is not None:
            os.ftruncate(self._lock, 0)  # on file systems without locks the recorded owner counts
            os.close(self._lock)
            self._lock = None

    # ---- status

    def write_status(self, status: Status) -> None:
        write_status(self.status_file, status)

    def has_stepped(self, attempt: int) -> bool:
        """Return whether ``attempt`` is the newest and has completed a step; False while the status cannot
        be read.
        """
        try:
            status = self.status()
        except (OSError, InputError):
            return False
        return status is not None and status.attempt == attempt and status.step is not None

    def status(self) -> Status | None:
        """Return the status, or None if no run has begun."""
        return read_status(self.status_file)

    def finish(
        self,
        state: RunState,
        exit_code: int,
        reason: str | None,
        *,
        attempt: int,
        overwrite: bool = False,
        at: float | None = None,
    ) -> None:
        """Record the end of an attempt, with the step and checkpoint recorded so far.

        Args:
            state: Final state.
            exit_code: Exit code.
            reason: Why it ended, for the user.
            attempt: Number of the attempt.
            overwrite: Replace an end that is already recorded.
            at: End time in seconds since 1970; None means now.
        """
        last = self.status()
        if last is not None and last.attempt == attempt and not last.state.live and not overwrite:
            return
        step, checkpoint = (
            (last.step, last.checkpoint) if last is not None and last.attempt == attempt else (None, None)
        )
        end_times(
            self.attempt_folder(attempt),
            time.time() if at is None else at,
            state=state.value,
            reason=reason,
            overwrite=overwrite,
        )
        total = compute_goodput(
            self.attempt_times(), kept=None if state is RunState.DONE else self.saved_step() or 0
        )
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
        """Record that the last attempt failed if all its processes died before one of them could record
        it."""
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

    def attempt_times(self, before: int | None = None) -> list[Attempt]:
        """Return the times of the attempts in order, without those that left no file.

        Args:
            before: Only attempts before this one.
        """
        numbers = (number for number in self.attempts() if before is None or number < before)
        return [
            attempt
            for number in numbers
            if (attempt := read_attempt(self.attempt_folder(number))) is not None
        ]

    def saved_step(self) -> int | None:
        """Return the step of the newest checkpoint in this run's folder, or None."""
        return max(committed_checkpoints(self.checkpoints), default=None)

    def newest_checkpoint(self) -> Path | None:
        """Return the checkpoint of that step. Its content is checked when it is read."""
        return next(reversed(committed_checkpoints(self.checkpoints).values()), None)

    def newest_with_disagreements(self) -> NewestCheckpoint:
        """Return the newest checkpoint, and whether the checkpoints folder and the run's other files agree
        on it.
        """
        found = find_newest(self.checkpoints, self._recorded_saves())
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

    def _recorded_saves(self) -> dict[str, int]:
        """Return the saved steps that the run's other files record, except those whose checkpoints were
        moved.
        """
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
        return {file: step for file, step in claims.items() if step is not None and step not in moved}

    # ---- repeated steps

    def previous_attempt_folder(self, attempt: int) -> Path:
        """Return the folder of the attempt before ``attempt``, for rows and checkpoints of steps that
        ``attempt`` repeats.
        """
        return self.attempt_folder(self.previous_attempt(attempt))

    def previous_attempt(self, attempt: int) -> int:
        """Return the number of the attempt before ``attempt``, or ``attempt`` if it is the first."""
        return max((number for number in self.attempts() if number < attempt), default=attempt)

    def move_rows_after(self, step: int, attempt: int) -> None:
        """Move rows after ``step`` to the attempt before ``attempt``, so that each repeated step is
        recorded once.
        """
        for file in self._step_files():
            move_rows(file, self.previous_attempt_folder(attempt) / file.name, step)

    def cut_rows_after(self, step: int, attempt: int) -> None:
        """Move rows after ``step`` to ``attempt``, which goes back to that step and has the files open."""
        for file in self._step_files():
            cut_rows(file, self.attempt_folder(attempt) / file.name, step)

    def move_rollbacks(self, attempt: int) -> None:
        """Move the rows of rollbacks to the attempt before ``attempt``, which begins the run again."""
        if self.rollbacks_file.exists():
            move_rows(
                self.rollbacks_file, self.previous_attempt_folder(attempt) / self.rollbacks_file.name, -1
            )

    def set_aside_folder(self, attempt: int) -> Path:
        """Return a folder of ``attempt`` that does not exist, for checkpoints that it sets aside."""
        folder, number = self.attempt_folder(attempt) / "checkpoints", 1
        while folder.exists():
            number += 1
            folder = folder.with_name(f"checkpoints-{number}")
        return folder

    def _step_files(self) -> list[Path]:
        """Return the existing files with rows by step."""
        files = (self.metrics_file, self.eval_file, self.ledger_file, self.hooks_file)
        return [file for file in files if file.exists()]

    # ---- lock

    def try_lock(self) -> bool:
        """Lock the directory if no other process has locked it."""
        if self._lock is None:
            self._lock = acquire_lock(self.path / "lock")[0]
        return self._lock is not None

    def _take_lock(self) -> None:
        descriptor, owner = acquire_lock(self.path / "lock")
        if descriptor is None:
            who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
            # A killed owner's ranks keep its lock while they save. Whether it lives is not known here: it may
            # be in another container.
            remedy = f"wait for it or stop it (kill {owner['pid']})" if owner else "wait for it or stop it"
            remedy += "; if it has ended, wait until its ranks have saved"
            raise ConfigError(
                Problem(
                    "run.dir",
                    f"run.dir={self.path}, in which {who} is running",
                    "a directory is used by one run at a time",
                    f"{remedy}, or give this run its own run.name or run.dir",
                )
            )
        self._lock = descriptor
