"""``python launch/train.py -m ...``: the sweeper makes points, what is refused is left out, and the others are carried out.

Any number of processes may carry out one sweep, at once or one after another: a point belongs to the one that holds its claim, and one
that is done is not run again.
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

from toolkit.cluster.environment import Launch, Launcher
from toolkit.cluster.machine import this_machine
from toolkit.cluster.rendezvous import Left
from toolkit.cluster.stop import StopRequest
from toolkit.cluster.sweep import show
from toolkit.cluster.sweep.carriers import Carrier, Handle, carrier_of
from toolkit.cluster.sweep.points import Point, all_refused, make_points, name_of
from toolkit.cluster.sweep.record import PointState, Record, Row, is_done, result, row_of
from toolkit.config.cluster import ClusterBackend
from toolkit.config.multirun import BatchRunner, SweepArguments, read_sweep, run_sweeper
from toolkit.errors import ConfigError, ExitCode, InputError, Problem, UserError, file_errors
from toolkit.progress import Progress, ProgressTask
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import Status

BAD = (PointState.FAILED, PointState.DIVERGED, PointState.REFUSED)  # such a point has no number, and a reason
POLL_SECONDS = 0.1
ANSWER_SECONDS = 10.0  # in which rank 0 says what is wrong: a launcher that sees another rank end ends it, too, and the words with it


def sweep(arguments: Sequence[str], launch: Launch, stop: StopRequest, script: str) -> ExitCode:
    """Carry out the sweep that ``arguments`` describe.

    Args:
        script: what carries out one point when it is given ``--frozen=FILE``: launch/train.py.

    Raises:
        UserError: a mistake, or no point can run; then nothing was started.
        Left: this is a rank, and another one says that.
    """
    refuse_in_ranks(launch, arguments)
    words = read_sweep(arguments)
    with file_errors("sweep.dir", "write sweep.dir=FOLDER, one that can be written"):
        carried = _Sweep(words, stop, Path(script).absolute())
        carried.make_folder()
    try:
        run_sweeper(words, carried.folder, BatchRunner(carried.batch))
        return carried.tell()
    except _Enough as end:
        if end.reason is not None:
            carried.tell()
            print(
                f"stopped ({end.reason}). Go on with the same words: python {shlex.join([script, *arguments])}"
            )
        return end.code
    except UserError:
        carried.leave_nothing()
        raise


def refuse_in_ranks(launch: Launch, arguments: Sequence[str]) -> None:
    """Under a launcher every rank would be a sweep of its own. Raises ConfigError in rank 0, Left in the others, a little later."""
    if launch.launcher is Launcher.NONE:
        return
    if launch.rank != 0:
        time.sleep(ANSWER_SECONDS)
        raise Left(ExitCode.USER)
    words = shlex.join(arguments)
    raise ConfigError(
        Problem(
            "-m",
            f"{launch.launcher} started {launch.ranks} ranks of a sweep ({words})",
            "a sweep starts the ranks of each point itself, so it is started without a launcher",
            f"write python launch/train.py {words}; a point has cluster.gpus_per_node (or cluster.cpu_ranks) ranks",
        )
    )


class _Enough(Exception):
    """No more points are wanted."""

    def __init__(self, code: ExitCode, reason: str | None = None) -> None:
        self.code, self.reason = code, reason
        super().__init__(code, reason)


class PointFailed(Exception):
    """A point has no number. Hydra's grid never sees it; other sweepers count such points."""


@dataclass(frozen=True, slots=True)
class _Running:
    point: Point
    handle: Handle
    claim: int
    before: Status | None  # of the point, when it was started


class _Sweep:
    def __init__(self, words: SweepArguments, stop: StopRequest, script: Path) -> None:
        self.words, self._options, self._stop, self._script = words, words.sweep, stop, script
        self.folder = Path(words.sweep.dir or f"sweeps/{words.name}-{words.id}").expanduser().absolute()
        self._machine = this_machine()
        self._record = Record(self.folder)
        self._record.check(words.id, self._typed)
        self._began = time.time()
        self._elsewhere: set[str] = set()  # points that another process had when it was last asked
        self._mine: set[str] = (
            set()
        )  # points that can run, by their plans; an earlier search may have left others
        self._started = False
        self._told: set[str] = set()
        self._metric = words.sweep.metric or "loss"

    @property
    def _typed(self) -> list[str]:
        return [*self.words.options, *self.words.words, *self.words.hydra]

    def make_folder(self) -> None:
        """Raises InputError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise InputError(
                Problem(
                    "sweep.dir",
                    f"{self.folder}: {error.strerror}",
                    "the points of a sweep go into a folder of its own",
                    "write sweep.dir=FOLDER, one that can be written",
                )
            ) from error

    # ---- a batch of points

    def batch(self, combinations: Sequence[tuple[str, ...]]) -> list[float | Exception | None]:
        """One number a combination. Raises _Enough where no more are wanted."""
        points = make_points(combinations, self.words, self.folder, self._machine, self._script)
        refused = [
            row_of(point, self.folder, PointState.REFUSED, point.reason)
            for point in points
            if point.plan is None
        ]
        if self.words.grid and len(refused) == len(points) and not self._options.dry_run:
            raise all_refused(points)
        for line in show.grouped(refused):
            print(line, file=sys.stderr)
        if self._options.dry_run:
            self._show(
                [
                    *refused,
                    *(
                        row_of(point, self.folder, PointState.WAITING)
                        for point in points
                        if point.plan is not None
                    ),
                ]
            )
            self.leave_nothing()
            raise _Enough(ExitCode.DONE)
        self._record.begin(self.words.id, self._typed, self._options)
        feasible = [point for point in points if point.plan is not None]
        self._record.expect(
            [*refused, *(row_of(point, self.folder, PointState.WAITING) for point in feasible)]
        )
        self._mine |= {point.name for point in feasible}
        if feasible:
            self._carry_out(feasible)
        rows = {row.name: row for row in self._record.rows()}
        return [self._number(rows[name_of(self.words.swept(combination))]) for combination in combinations]

    def _number(self, row: Row) -> float | Exception | None:
        """What the sweeper gets: a refused or diverged point is as bad as can be, so that its neighbours are avoided too."""
        if row.number is not None or self.words.grid:
            return row.number
        if row.state in (PointState.REFUSED, PointState.DIVERGED):
            return float("-inf" if self._options.maximize else "inf")
        return PointFailed(f"{' '.join(row.swept)}: {row.state}, {row.reason}")

    # ---- carrying points out

    def _carry_out(self, points: Sequence[Point]) -> None:
        assert points[0].plan is not None
        wheres = {point.plan.config.cluster.where for point in points if point.plan is not None}
        at_once = min(len(points), self._options.at_once or len(points))
        carriers = {where: carrier_of(where, self._script, self._machine, at_once) for where in wheres}
        waiting, running = {point.name: point for point in points}, dict[str, _Running]()
        self._stop.arm(None)  # from now on there is something to save
        with (
            Progress() as progress,
            progress.task(f"sweep {self.folder.name}", total=len(points), unit="points") as task,
        ):
            while True:
                if self._stop() is not None:
                    self._stop_points(running)
                    raise _Enough(ExitCode.STOPPED, self._stop())
                self._collect(running, task)
                self._start(waiting, running, carriers, task)
                if not waiting and not running:
                    return
                if not running and self._elsewhere.issuperset(waiting) and waiting:
                    self._tell_once(
                        "what is left is under way in another process, or was left behind by a killed sweep: waiting for it"
                    )
                time.sleep(POLL_SECONDS)

    def _start(
        self,
        waiting: dict[str, Point],
        running: dict[str, _Running],
        carriers: Mapping[ClusterBackend, Carrier],
        task: ProgressTask,
    ) -> None:
        """In order, as long as there is room. A point that does not fit now is waited for, so that small ones do not starve it."""
        for name, point in list(waiting.items()):
            if self._options.at_once is not None and len(running) >= self._options.at_once:
                return
            claim = self._record.claim(name)
            if claim is None:
                self._elsewhere.add(name)
                continue
            row = self._settled(point)
            if row is None:
                assert point.plan is not None
                before = RunDirectory(self.folder / name).status()
                try:
                    handle = carriers[point.plan.config.cluster.where].start(point, claim)
                except UserError as error:
                    if (
                        not self._started
                    ):  # the cluster does not answer, say: the next point would fare no better
                        raise
                    row = row_of(point, self.folder, PointState.REFUSED, str(error), ended=time.time())
                else:
                    if handle is None:
                        os.close(claim)
                        if not running:
                            self._tell_once(
                                "the GPUs or cores of this machine are taken by points of other sweeps: waiting for room"
                            )
                        return
                    self._started = True
                    running[name] = _Running(point, handle, claim, before)
                    self._record.note(row_of(point, self.folder, PointState.RUNNING))
            if row is not None:
                self._finish(row, claim, task)
            del waiting[name]

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            print(text, file=sys.stderr)

    def _settled(self, point: Point) -> Row | None:
        """A point that is done; or that another process has tried while this one waited, and not done: it is not tried again."""
        if is_done(point):
            return result(point, self.folder, self._options.metric)
        if point.name in self._elsewhere:
            self._elsewhere.discard(point.name)
            row = next(row for row in self._record.rows() if row.name == point.name)
            if row.state in BAD and (row.ended or 0.0) >= self._began:
                return row
        return None

    def _collect(self, running: dict[str, _Running], task: ProgressTask) -> None:
        for name, run in list(running.items()):
            if run.handle.ended():
                self._finish(self._result(run), run.claim, task)
                del running[name]

    def _result(self, run: _Running, *, asked: bool = False) -> Row:
        return result(
            run.point,
            self.folder,
            self._options.metric,
            before=run.before,
            silent=run.handle.last_words(),
            asked=asked,
        )

    def _finish(self, row: Row, claim: int, task: ProgressTask | None = None) -> None:
        """The row is there before another process can take the claim."""
        self._record.note(row)
        os.close(claim)
        if row.state in BAD:
            print(f"{row.state}: {' '.join(row.swept) or row.name}: {row.reason}", file=sys.stderr)
        if task is not None:
            numbers = [other.number for other in self._record.rows() if other.number is not None]
            best = max(numbers, default=None) if self._options.maximize else min(numbers, default=None)
            task.advance(1, f"best {self._metric} {best:.6g}" if best is not None else "")

    def _stop_points(self, running: dict[str, _Running]) -> None:
        assert self._stop.signal is not None, "without a launcher, a stop is a signal"
        print(f"stopping {len(running)} point{'s' * (len(running) != 1)}, which save first", file=sys.stderr)
        left = [name for name, run in running.items() if not run.handle.stop(self._stop.signal)]
        for name in left:
            os.close(running.pop(name).claim)
        while running:
            for name, run in list(running.items()):
                if run.handle.ended():
                    self._finish(self._result(run, asked=True), run.claim)
                    del running[name]
            time.sleep(POLL_SECONDS)
        if left:
            print(f"{len(left)} jobs stay in the queue; this command finds them again", file=sys.stderr)

    # ---- in the end

    def tell(self) -> ExitCode:
        """Table, results.csv and picture; the exit code says whether every point that could run is done. Raises ConfigError."""
        rows = self._record.rows()
        if not rows:
            raise ConfigError(
                Problem(
                    "hydra.sweeper",
                    " ".join(self._typed),
                    "the sweeper makes points, and made none",
                    "correct hydra.sweeper.* (the number of trials, say)",
                )
            )
        maximize = self._options.maximize
        show.write_csv(self.folder / "results.csv", rows, self._metric, maximize)
        picture = show.plot(self.folder / "sweep.png", self.folder.name, rows, self._metric, maximize)
        self._show(rows)
        for text in show.grouped([row for row in rows if row.ended is not None and row.state in BAD]):
            print(text)
        best = show.ranked(rows, maximize)[0]
        if best.number is not None:
            print(
                f"best: {' '.join(best.swept) or best.name}: {self._metric} {best.number:.6g} in {best.run_dir}"
            )
        files = ", ".join(["sweep.json", "results.csv", *(["sweep.png"] if picture else [])])
        print(f"everything is in {self.folder}: {files}, and a run directory a point")
        states = {row.state for row in rows if row.name in self._mine}
        if PointState.FAILED in states:
            return ExitCode.FAILURE
        if PointState.DIVERGED in states:
            return ExitCode.DIVERGED
        if (
            PointState.REFUSED in states or not states
        ):  # when it started, by its data or the cluster; or all by their plans
            return ExitCode.USER
        return (
            ExitCode.STOPPED
            if states & {PointState.STOPPED, PointState.WAITING, PointState.RUNNING}
            else ExitCode.DONE
        )

    def _show(self, rows: Sequence[Row]) -> None:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 140).print(
            show.table(rows, self._metric, self._options.maximize)
        )

    def leave_nothing(self) -> None:
        """What a sweeper wrote before it was known that no point can run."""
        if self._record.file.exists():
            return
        (self.folder / "multirun.yaml").unlink(missing_ok=True)
        for folder in (self.folder, *([self.folder.parent] if self._options.dir is None else [])):
            with suppress(OSError):  # it holds something else, or is not there
                folder.rmdir()
