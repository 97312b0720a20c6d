"""Run a sweep: ``python launch/train.py -m ...``.

Any number of processes may work on one sweep, concurrently or in succession. A point belongs to the process
that holds its claim, and a point that is done never runs again.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolkit.cluster.stop.stop_request import StopRequest
from toolkit.cluster.sweep import report
from toolkit.cluster.sweep.points import SweepPoint, all_refused_error, make_points, point_name
from toolkit.cluster.sweep.runners import PointHandle, PointRunner, make_runner
from toolkit.cluster.sweep.store import PointRow, PointState, SweepStore, is_done, make_row, read_result
from toolkit.cluster.world.environment import Launch, Launcher
from toolkit.cluster.world.machine_info import detect_machine
from toolkit.cluster.world.rendezvous import PeerExited
from toolkit.commands import command_line
from toolkit.config.cluster import ClusterBackend
from toolkit.config.multirun import BatchRunner, SweepArguments, read_sweep, run_sweeper
from toolkit.errors import ConfigError, ExitCode, InputError, Problem, UserError, file_errors
from toolkit.progress import Progress, ProgressTask
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import Status

FAILED_STATES = (
    PointState.FAILED,
    PointState.DIVERGED,
    PointState.REFUSED,
)  # such a point has a reason instead of a result
POLL_SECONDS = 0.1
# delay in which rank 0 reports the problem, since a launcher stops all ranks as soon as one exits
PEER_EXIT_SECONDS = 10.0


def sweep(arguments: Sequence[str], launch: Launch, stop: StopRequest, script: str) -> ExitCode:
    """Run the sweep that ``arguments`` describe.

    Args:
        script: launch/train.py or its module, which runs one point with ``--frozen=FILE``.

    Raises:
        UserError: a mistake, or no point can run; nothing was started.
        PeerExited: this is a rank, and rank 0 reports the mistake.
    """
    refuse_launcher(launch, arguments)
    words = read_sweep(arguments)
    with file_errors("sweep.dir", "set sweep.dir=FOLDER to a writable folder"):
        sweep_run = _Sweep(words, stop, str(Path(script).absolute()) if script.endswith(".py") else script)
        sweep_run.make_folder()
    try:
        run_sweeper(words, sweep_run.folder, BatchRunner(sweep_run.run_batch))
        return sweep_run.finish()
    except _SweepEnd as end:
        if end.reason is not None:
            sweep_run.finish()
            print(f"stopped ({end.reason}). To resume, run: {command_line('train', shlex.join(arguments))}")
        return end.code
    except UserError:
        sweep_run.remove_empty_folder()
        raise


def refuse_launcher(launch: Launch, arguments: Sequence[str]) -> None:
    """Reject a launcher, whose ranks would each run the whole sweep. Raises ConfigError on rank 0, later
    PeerExited on the others.
    """
    if launch.launcher is Launcher.NONE:
        return
    if launch.rank != 0:
        time.sleep(PEER_EXIT_SECONDS)
        raise PeerExited(ExitCode.USER)
    words = shlex.join(arguments)
    raise ConfigError(
        Problem(
            "-m",
            f"{launch.launcher} started {launch.ranks} ranks of a sweep ({words})",
            "a sweep starts the ranks of each point itself, so it needs no launcher",
            f"run {command_line('train', words)}; each point uses cluster.gpus_per_node (or "
            "cluster.cpu_ranks) ranks",
        )
    )


class _SweepEnd(Exception):
    """End the sweep early."""

    def __init__(self, code: ExitCode, reason: str | None = None) -> None:
        self.code, self.reason = code, reason
        super().__init__(code, reason)


class PointFailed(Exception):
    """A point failed. Grid sweeps never see this; other sweepers count such points."""


@dataclass(frozen=True, slots=True)
class _Running:
    point: SweepPoint
    handle: PointHandle
    claim: int
    before: Status | None  # status of the point when it was started


class _Sweep:
    def __init__(self, words: SweepArguments, stop: StopRequest, script: str) -> None:
        self.words, self._options, self._stop, self._script = words, words.sweep, stop, script
        self.folder = Path(words.sweep.dir or f"sweeps/{words.name}-{words.id}").expanduser().absolute()
        self._machine = detect_machine()
        self._store = SweepStore(self.folder)
        self._store.check_owner(words.id, self._arguments)
        self._began = time.time()
        self._claimed_elsewhere: set[str] = set()  # claimed by another process when last checked
        # points whose plans are valid; the folder may contain other points of an earlier search
        self._feasible: set[str] = set()
        self._started = False
        self._warned: set[str] = set()
        self._metric = words.sweep.metric or "loss"

    @property
    def _arguments(self) -> list[str]:
        return [*self.words.options, *self.words.overrides, *self.words.hydra]

    def make_folder(self) -> None:
        """Create the sweep's folder. Raises InputError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise InputError(
                Problem(
                    "sweep.dir",
                    f"{self.folder}: {error.strerror}",
                    "the points of a sweep are stored in its folder",
                    "set sweep.dir=FOLDER to a writable folder",
                )
            ) from error

    # ---- a batch of points

    def run_batch(self, combinations: Sequence[tuple[str, ...]]) -> list[float | Exception | None]:
        """Run a batch and return one result per combination. Raises _SweepEnd to end the sweep."""
        points = make_points(combinations, self.words, self.folder, self._machine, self._script)
        refused = [
            make_row(point, self.folder, PointState.REFUSED, point.reason)
            for point in points
            if point.plan is None
        ]
        if self.words.grid and len(refused) == len(points) and not self._options.dry_run:
            raise all_refused_error(points)
        for line in report.group_reasons(refused):
            print(line, file=sys.stderr)
        if self._options.dry_run:
            self._print_table(
                [
                    *refused,
                    *(
                        make_row(point, self.folder, PointState.WAITING)
                        for point in points
                        if point.plan is not None
                    ),
                ]
            )
            self.remove_empty_folder()
            raise _SweepEnd(ExitCode.DONE)
        self._store.initialize(self.words.id, self._arguments, self._options)
        feasible = [point for point in points if point.plan is not None]
        self._store.add_points(
            [*refused, *(make_row(point, self.folder, PointState.WAITING) for point in feasible)]
        )
        self._feasible |= {point.name for point in feasible}
        if feasible:
            self._run_points(feasible)
        rows = {row.name: row for row in self._store.rows()}
        return [self._number(rows[point_name(self.words.swept(combination))]) for combination in combinations]

    def _number(self, row: PointRow) -> float | Exception | None:
        """Return the sweeper's objective value; refused and diverged points get the worst value, so that
        searches avoid them.
        """
        if row.number is not None or self.words.grid:
            return row.number
        if row.state in (PointState.REFUSED, PointState.DIVERGED):
            return float("-inf" if self._options.maximize else "inf")
        return PointFailed(f"{' '.join(row.swept)}: {row.state}, {row.reason}")

    # ---- running points

    def _run_points(self, points: Sequence[SweepPoint]) -> None:
        assert points[0].plan is not None
        wheres = {point.plan.config.cluster.where for point in points if point.plan is not None}
        at_once = min(len(points), self._options.at_once or len(points))
        runners_by_backend = {
            where: make_runner(where, self._script, self._machine, at_once) for where in wheres
        }
        waiting, running = {point.name: point for point in points}, dict[str, _Running]()
        self._stop.arm(None)  # from now on there is something to save
        with (
            Progress() as progress,
            progress.task(f"sweep {self.folder.name}", total=len(points), unit="points") as task,
        ):
            while True:
                if self._stop() is not None:
                    self._stop_points(running)
                    raise _SweepEnd(ExitCode.STOPPED, self._stop())
                self._collect_ended(running, task)
                self._start(waiting, running, runners_by_backend, task)
                if not waiting and not running:
                    return
                if not running and self._claimed_elsewhere.issuperset(waiting) and waiting:
                    self._warn_once(
                        "the remaining points are running in another process, or were left by a killed "
                        "sweep: waiting for them"
                    )
                time.sleep(POLL_SECONDS)

    def _start(
        self,
        waiting: dict[str, SweepPoint],
        running: dict[str, _Running],
        runners_by_backend: Mapping[ClusterBackend, PointRunner],
        task: ProgressTask,
    ) -> None:
        """Start waiting points in order. If a point does not fit, wait for it, so that small points do not
        starve it.
        """
        for name, point in list(waiting.items()):
            if self._options.at_once is not None and len(running) >= self._options.at_once:
                return
            claim = self._store.claim(name)
            if claim is None:
                self._claimed_elsewhere.add(name)
                continue
            row = self._reuse_result(point)
            if row is None:
                assert point.plan is not None
                before = RunDirectory(self.folder / name).status()
                try:
                    handle = runners_by_backend[point.plan.config.cluster.where].start(point, claim)
                except UserError as error:
                    # for example if the cluster does not respond, later points would fail too
                    if not self._started:
                        raise
                    row = make_row(point, self.folder, PointState.REFUSED, str(error), ended=time.time())
                else:
                    if handle is None:
                        os.close(claim)
                        if not running:
                            self._warn_once(
                                "the GPUs or cores of this machine are used by points of other sweeps: "
                                "waiting"
                            )
                        return
                    self._started = True
                    running[name] = _Running(point, handle, claim, before)
                    self._store.update(make_row(point, self.folder, PointState.RUNNING))
            if row is not None:
                self._finish(row, claim, task)
            del waiting[name]

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            print(text, file=sys.stderr)

    def _reuse_result(self, point: SweepPoint) -> PointRow | None:
        """Return the result of a point that is done, or that another process has just tried without
        success.
        """
        if is_done(point):
            return read_result(point, self.folder, self._options.metric)
        if point.name in self._claimed_elsewhere:
            self._claimed_elsewhere.discard(point.name)
            row = next(row for row in self._store.rows() if row.name == point.name)
            if row.state in FAILED_STATES and (row.ended or 0.0) >= self._began:
                return row
        return None

    def _collect_ended(self, running: dict[str, _Running], task: ProgressTask) -> None:
        for name, run in list(running.items()):
            if run.handle.ended():
                self._finish(self._result(run), run.claim, task)
                del running[name]

    def _result(self, run: _Running, *, asked: bool = False) -> PointRow:
        return read_result(
            run.point,
            self.folder,
            self._options.metric,
            before=run.before,
            silent=run.handle.end_message(),
            asked=asked,
        )

    def _finish(self, row: PointRow, claim: int, task: ProgressTask | None = None) -> None:
        """Store the row before another process can claim the point."""
        self._store.update(row)
        os.close(claim)
        if row.state in FAILED_STATES:
            print(f"{row.state}: {' '.join(row.swept) or row.name}: {row.reason}", file=sys.stderr)
        if task is not None:
            numbers = [other.number for other in self._store.rows() if other.number is not None]
            best = max(numbers, default=None) if self._options.maximize else min(numbers, default=None)
            task.advance(1, f"best {self._metric} {best:.6g}" if best is not None else "")

    def _stop_points(self, running: dict[str, _Running]) -> None:
        assert self._stop.signal is not None, "without a launcher, a stop request has a signal"
        print(f"stopping {len(running)} point{'s' * (len(running) != 1)} after saving", file=sys.stderr)
        kept = [name for name, run in running.items() if not run.handle.stop(self._stop.signal)]
        for name in kept:
            os.close(running.pop(name).claim)
        while running:
            for name, run in list(running.items()):
                if run.handle.ended():
                    self._finish(self._result(run, asked=True), run.claim)
                    del running[name]
            time.sleep(POLL_SECONDS)
        if kept:
            print(f"{len(kept)} jobs stay in the queue; the same command finds them again", file=sys.stderr)

    # ---- summary

    def finish(self) -> ExitCode:
        """Print the table and write results.csv and the plot; return the sweep's exit code. Raises
        ConfigError without points.
        """
        rows = self._store.rows()
        if not rows:
            raise ConfigError(
                Problem(
                    "hydra.sweeper",
                    " ".join(self._arguments),
                    "the sweeper must generate at least one point",
                    "correct hydra.sweeper.* (for example the number of trials)",
                )
            )
        maximize = self._options.maximize
        report.write_csv(self.folder / "results.csv", rows, self._metric, maximize)
        picture = report.plot(self.folder / "sweep.png", self.folder.name, rows, self._metric, maximize)
        self._print_table(rows)
        for text in report.group_reasons(
            [row for row in rows if row.ended is not None and row.state in FAILED_STATES]
        ):
            print(text)
        best = report.rank_rows(rows, maximize)[0]
        if best.number is not None:
            label = " ".join(best.swept) or best.name
            print(f"best: {label}: {self._metric} {best.number:.6g} in {best.run_dir}")
        files = ", ".join(["sweep.json", "results.csv", *(["sweep.png"] if picture else [])])
        print(f"results are in {self.folder}: {files}, and one run directory per point")
        states = {row.state for row in rows if row.name in self._feasible}
        if PointState.FAILED in states:
            return ExitCode.FAILURE
        if PointState.DIVERGED in states:
            return ExitCode.DIVERGED
        # refused at its start, by its data or the cluster; or all by their plans
        if PointState.REFUSED in states or not states:
            return ExitCode.USER
        return (
            ExitCode.STOPPED
            if states & {PointState.STOPPED, PointState.WAITING, PointState.RUNNING}
            else ExitCode.DONE
        )

    def _print_table(self, rows: Sequence[PointRow]) -> None:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 140).print(
            report.format_table(rows, self._metric, self._options.maximize)
        )

    def remove_empty_folder(self) -> None:
        """Remove what a sweeper wrote before all points were refused."""
        if self._store.file.exists():
            return
        (self.folder / "multirun.yaml").unlink(missing_ok=True)
        for folder in (self.folder, *([self.folder.parent] if self._options.dir is None else [])):
            with suppress(OSError):  # it is not empty, or does not exist
                folder.rmdir()
