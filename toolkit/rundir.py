"""The folder of one run: who may write there, what each start leaves behind, and where its state comes from.

    config.yaml plan.json status.json          of the newest attempt
    metrics.jsonl eval.jsonl ledger.jsonl      each step once, over all attempts
    alerts.jsonl alerts/node-N.jsonl           as they came; of other nodes than the first
    system/node-N.jsonl                        as they came, of each node
    checkpoints/ plots/
    attempts/001/{config.yaml,plan.json,environment.json,log.txt,times.json,saves.jsonl}, and metric rows and checkpoints of steps that a
                                               later attempt ran again
    attempts/001/{hang.txt,hang/}              of one that ended for want of progress
    fork.json                                  the parent, in a run that began from another one's state
    lock                                       held while a process runs here

Only rank 0, or the parent that starts the ranks, writes; and each node's first rank what is of its node; and whichever rank reports a hang.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from toolkit.attempts import Attempt, Times, end_times, goodput, read_attempt, write_times
from toolkit.config.schema import RunConfig
from toolkit.errors import CheckpointError, ConfigError, InputError, Problem
from toolkit.files import write_whole


class RunState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"  # by a signal or a notice, after saving; where time was too short for that, the reason says what is lost
    FAILED = "failed"
    REFUSED = "refused"  # a mistake in configuration or input, found after the folder was opened

    @property
    def live(self) -> bool:
        return self in (RunState.STARTING, RunState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The truth of a run: launchers change exit codes, this file does not. ``exit_code`` is None while it runs. ``goodput`` is of the
    whole run until now, as ``toolkit/attempts.py`` describes it, and says nothing of how the run stands."""

    state: RunState
    attempt: int
    exit_code: int | None = None
    step: int | None = None  # optimizer steps done
    checkpoint: str | None = None  # the newest complete one
    reason: str | None = None
    goodput: Mapping[str, Any] | None = field(default=None, compare=False)


class SourceKind(StrEnum):
    INITIAL = "initial"  # random or pretrained weights
    RESUME = "resume"
    FORK = "fork"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a run's state comes from. ``path`` is None for initial weights."""

    kind: SourceKind
    path: Path | None = None


def resolve_source(config: RunConfig, newest: Path | None) -> Source:
    """Which state this start continues from.

    Args:
        newest: the newest complete checkpoint of the run's own directory, if any.

    Raises:
        ConfigError: ``resume=never`` where there is something to continue, or ``resume=PATH`` together with ``run.fork``.
        InputError: a path that is not there.
    """
    fork, resume = config.run.fork, config.resume
    if resume not in ("auto", "never"):
        if fork is not None:
            raise ConfigError(Problem("resume", f"resume={resume} with run.fork={fork}", "a run continues from one state",
                                      "leave out resume to fork, or run.fork to resume"))
        return Source(SourceKind.RESUME, _existing("resume", resume))
    if newest is not None and resume == "never":
        raise ConfigError(Problem("resume", f"resume=never, and {newest} is there", "resume=never refuses to continue a run",
                                  "write resume=auto to continue, or run.name=ANOTHER for a new run"))
    if newest is not None:
        return Source(SourceKind.RESUME, newest)
    if fork is not None:
        return Source(SourceKind.FORK, _existing("run.fork", fork))
    return Source(SourceKind.INITIAL)


def _existing(key: str, value: str) -> Path:
    path = Path(value).expanduser()
    if not path.is_dir():
        raise InputError(Problem(key, f"{key}={value}", f"{key} names a checkpoint or a run directory that exists",
                                 f"correct the path; {path.absolute()} is not a folder"))
    return path


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
        return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()) if folder.is_dir() else []

    # ---- a start

    def check(self, config: RunConfig) -> None:
        """Refuse what can be refused without writing: another run's folder, a wrong resume or fork. Raises UserError."""
        self._check_identity(config)
        self._check_fork(config)
        source = resolve_source(config, self._any_checkpoint())
        if source.kind is SourceKind.RESUME and source.path is not None:
            check_same_run(config, source.path)

    def begin(self, config: RunConfig, plan: Mapping[str, Any], *, began: float | None = None) -> int:
        """Take the folder for this process, unless it has it, and open the next attempt, whose number is returned.

        Args:
            plan: what ``plan.json`` shall hold.
            began: when the process was started that does it, in seconds since 1970. None: now.

        Raises:
            UserError: see :meth:`check`; or another live process runs here.
        """
        from toolkit.config.compose import to_yaml

        self.check(config)
        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._take_lock()
        attempt = max(self.attempts(), default=0) + 1
        yaml, plan_json = to_yaml(config), json.dumps(plan, indent=1) + "\n"
        folder = self.attempt_folder(attempt)
        folder.mkdir(parents=True)
        for place in (folder, self.path):
            write_whole(place / "config.yaml", yaml)
            write_whole(place / "plan.json", plan_json)
        if config.run.fork is not None and not self._fork_file.exists():
            parent = str(Path(config.run.fork).expanduser().absolute())
            write_whole(self._fork_file, json.dumps({"parent": parent, "attempt": attempt}) + "\n")
        now = time.time()
        write_times(folder, Times(began=min(began or now, now), seen=now))
        self.write_status(Status(state=RunState.STARTING, attempt=attempt))
        return attempt

    def continued(self, config: RunConfig, starts: int) -> RunConfig:
        """``config`` for a start that nobody typed: the last ``starts`` attempts were of the same command, and what they got to is
        continued. A ``resume`` that is a path, or never, was meant for the first of them, and has been followed once one of them got to
        train."""
        before = (read_attempt(self.attempt_folder(number)) for number in self.attempts()[-starts:] if starts > 0)
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

    # ---- status

    def write_status(self, status: Status) -> None:
        """How a run ended is durable. A run under way writes every second and syncs nothing: who loses power has no run under way."""
        write_whole(self.status_file, json.dumps(asdict(status)) + "\n", durable=not status.state.live)

    def status(self) -> Status | None:
        """None where no run has begun, or where a power failure emptied the status of a run under way."""
        text = self.status_file.read_text(encoding="utf-8") if self.status_file.exists() else ""
        if not text:
            return None
        fields = json.loads(text)
        return Status(**{**fields, "state": RunState(fields["state"])})

    def finish(self, state: RunState, exit_code: int, reason: str | None, *, attempt: int, anew: bool = False) -> None:
        """The last word of an attempt. Keeps the step and checkpoint recorded so far, and, unless ``anew``, an end already recorded."""
        last = self.status()
        if last is not None and last.attempt == attempt and not last.state.live and not anew:
            return
        step, checkpoint = (last.step, last.checkpoint) if last is not None and last.attempt == attempt else (None, None)
        end_times(self.attempt_folder(attempt), time.time(), state=state.value, reason=reason, anew=anew)
        total = goodput(self.tried(), kept=None if state is RunState.DONE else self.saved_step() or 0)
        self.write_status(Status(state=state, attempt=attempt, exit_code=exit_code, step=step, checkpoint=checkpoint, reason=reason,
                                 goodput=total.to_json() if total is not None else None))

    def tried(self, before: int | None = None) -> list[Attempt]:
        """What is known of the attempts' time, in their order; of those that left nothing to read, nothing.

        Args:
            before: only attempts before this one.
        """
        numbers = (number for number in self.attempts() if before is None or number < before)
        return [attempt for number in numbers if (attempt := read_attempt(self.attempt_folder(number))) is not None]

    def saved_step(self) -> int | None:
        """Of the newest checkpoint of this run's own folder; None if there is none."""
        newest = self._any_checkpoint()
        digits = newest.name.removeprefix("step-") if newest is not None else ""
        return int(digits) if digits.isdigit() else None

    # ---- what is run again

    def folder_of_older(self, attempt: int) -> Path:
        """Of the attempt before ``attempt``: where what it left for steps that ``attempt`` runs again is kept."""
        return self.attempt_folder(max((number for number in self.attempts() if number < attempt), default=attempt))

    def trim_after(self, step: int, attempt: int) -> None:
        """Move rows of steps after ``step`` to the attempt before ``attempt``: they will be run again, and a step stands once."""
        for file in (self.metrics_file, self.eval_file, self.ledger_file):
            if file.exists():
                _move_rows(file, self.folder_of_older(attempt) / file.name, step)

    # ---- checks

    @property
    def _fork_file(self) -> Path:
        return self.path / "fork.json"

    def _check_identity(self, config: RunConfig) -> None:
        if not self.config_file.exists():
            return
        from toolkit.config.compose import from_yaml
        from toolkit.config.identity import identity, identity_differences

        before = from_yaml(self.config_file.read_text(encoding="utf-8"))
        if identity(before) == identity(config):
            return
        differences = "; ".join(identity_differences(before, config))
        raise ConfigError(Problem(
            "run.dir", f"run.dir={self.path} holds another run ({differences})",
            "a run directory belongs to one model, data, optimizer, schedule and batch",
            "leave out run.dir, write another one, or start a new run from this one's state with run.fork=" + str(self.path)))

    def _check_fork(self, config: RunConfig) -> None:
        if config.run.fork is None:
            return
        parent = Path(config.run.fork).expanduser().absolute()
        seen = f"run.fork={config.run.fork}, and the run's own directory is {self.path}"
        remedy = "give the new run its own run.name or run.dir"
        if self.path.absolute() in (parent, *parent.parents):
            raise ConfigError(Problem("run.fork", seen, "a fork is a new run, apart from its parent", remedy))
        if self._fork_file.exists():
            recorded = json.loads(self._fork_file.read_text(encoding="utf-8"))["parent"]
            if recorded != str(parent):
                raise ConfigError(Problem("run.fork", f"{seen}, which began from {recorded}", "a run has one parent", remedy))
        elif self._any_checkpoint() is not None:
            raise ConfigError(Problem("run.fork", f"{seen}, which has steps of its own", "run.fork starts a new run", remedy))

    def _any_checkpoint(self) -> Path | None:
        """A checkpoint folder of this run, complete or not: enough to know that there is something to continue."""
        if not self.checkpoints.is_dir():
            return None
        folders = (entry for entry in self.checkpoints.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        return max((entry for entry in folders if (entry / "manifest.json").exists()), default=None)

    # ---- one process at a time

    def _take_lock(self) -> None:
        descriptor, owner = lock_file(self.path / "lock")
        if descriptor is None:
            who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
            remedy = f"wait for it or stop it (kill {owner['pid']})" if owner else "wait for it or stop it"
            raise ConfigError(Problem("run.dir", f"run.dir={self.path}, where {who} is running", "one run at a time uses a directory",
                                      f"{remedy}, or give this run its own run.name or run.dir"))
        self._lock = descriptor


def lock_file(path: Path) -> tuple[int | None, dict[str, Any] | None]:
    """Take the lock ``path`` for this process: the open file, which holds it; or None and its owner {pid, host, since}, if known.

    The kernel frees the lock with its last holder, however that one dies; a child that inherits the open file is one. pid and host are
    for people, and for file systems without locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    owner = _read_owner(path)
    if not _locked(descriptor, owner):
        os.close(descriptor)
        return None, owner
    record = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, record.encode(), 0)
    return descriptor, None


def _read_owner(path: Path) -> dict[str, Any] | None:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # empty: its owner is between opening and writing, or died there
        return None
    return owner if isinstance(owner, dict) else None


def _locked(descriptor: int, owner: Mapping[str, Any] | None) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
            raise
        # A file system without locks: believe the recorded owner if it is of this machine.
        return owner is None or owner["host"] != socket.gethostname() or not _alive(owner["pid"])
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _move_rows(file: Path, target: Path, step: int) -> None:
    """Rows of ``file`` with a step beyond ``step`` are added to ``target``. A torn row (the machine stopped while it was
    written) is dropped: its step will be run again, or its checkpoint would not be complete."""
    kept: list[str] = []
    moved: list[str] = []
    torn = False
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            row_step = _step_of(line)
            torn = torn or row_step is None
            if row_step is not None:
                (kept if row_step <= step else moved).append(line)
    if moved:
        target.parent.mkdir(parents=True, exist_ok=True)
        present = target.read_text(encoding="utf-8").splitlines(keepends=True) if target.exists() else []
        known = set(present)  # where an earlier trim stopped between the two files
        write_whole(target, "".join(present + [line for line in moved if line not in known]))
    if moved or torn:
        write_whole(file, "".join(kept))


def _step_of(line: str) -> int | None:
    """The step of a whole row; None for a torn one."""
    if not line.endswith("\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) else None


def run_directory_of(path: Path) -> Path | None:
    """The run directory that ``path`` is, or that a checkpoint at ``path`` lies in; None for a lone checkpoint."""
    for folder in (path, path.parent.parent):
        if (folder / "config.yaml").exists() and (folder / "attempts").is_dir():
            return folder
    return None


def check_same_run(config: RunConfig, path: Path) -> None:
    """``resume=PATH`` continues the same run; another model or other data is a fork.

    Raises:
        CheckpointError: ``path`` belongs to a run of another identity.
    """
    folder = run_directory_of(path.absolute())
    if folder is None:
        return
    from toolkit.config.compose import from_yaml
    from toolkit.config.identity import identity_differences

    differences = identity_differences(from_yaml((folder / "config.yaml").read_text(encoding="utf-8")), config)
    if differences:
        raise CheckpointError(Problem("resume", f"resume={path} is of another run ({'; '.join(differences)})",
                                      "resume continues the same model, data, optimizer, schedule and batch",
                                      f"write run.fork={path} to start a new run from its state"))
