"""Everything that watches a run, put together: what is measured, what is told, and the hooks that do it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

from toolkit.config.schema import parse_cadence
from toolkit.engine import collectives
from toolkit.engine.clock import clock_of
from toolkit.engine.protocol import Engine
from toolkit.engine.rank_sync import FlagReduce
from toolkit.errors import ExitCode
from toolkit.hooks import Hook
from toolkit.monitor.alert import Alert
from toolkit.monitor.health.build import build_detectors
from toolkit.monitor.health.checkpoints import LateCheckpoint
from toolkit.monitor.recorder import StepRecorder
from toolkit.monitor.sink import CompositeSink, FilteredSink, Kind, Sink
from toolkit.monitor.sinks.queued import QueuedSink
from toolkit.monitor.step_parts import UNRECORDED, Recorder
from toolkit.observe.gather import gather_of
from toolkit.observe.health import Alerts, HealthSink, Saves
from toolkit.observe.ledger import Ledger, ledger_of
from toolkit.observe.probe import Probe
from toolkit.observe.process_stats import ProcessStats
from toolkit.observe.processor import Processor
from toolkit.observe.profile import Profile
from toolkit.observe.replicas import Replicas
from toolkit.observe.system import sampling
from toolkit.observe.watchdog import Progress, watchdog
from toolkit.plan.types import RunPlan
from toolkit.rundir.directory import RunDirectory

log = logging.getLogger(__name__)

JUDGING_LAG_SECONDS = 0.5  # steps are judged a few at a time: a thread that is woken for each costs more by that than by the work
JUDGED_SECONDS = 5.0  # how long the end waits for the last rows to be looked at


@dataclass(frozen=True, slots=True)
class Watch:
    """What a rank's run is watched by.

    Attributes:
        sink: takes the rows of the run: the run's sinks, and on rank 0 what judges the rows.
        recorder: where its time goes; the engine and the loop tell it.
        alert: takes what deserves attention. On rank 0 it reaches people; other ranks' alerts are of their own node.
        ledger: gathers where the ranks' time goes; None: nobody asked for it.
        makers: of the hooks, which may want to know the engine.
        vitals: of this rank's process.
        progress: is told that the run goes on; without such a word for ``monitor.hang_seconds`` the run is ended.
    """

    sink: Sink
    recorder: Recorder
    alert: Callable[[Alert], None]
    ledger: Ledger | None
    makers: Sequence[Callable[[Engine], Hook]]
    process_stats: ProcessStats
    progress: Progress

    def hooks(self, engine: Engine) -> list[Hook]:
        """In the order in which they listen, before evaluation and saving."""
        return [make(engine) for make in self.makers]

    def ledger_due(self) -> int:
        """What this rank says of the ledger in each step's exchange: ``StepConsensus.ledger``."""
        return 0 if self.ledger is None else self.ledger.due()


@contextmanager
def watching(
    plan: RunPlan,
    directory: RunDirectory,
    sink: Sink,
    all_reduce_flags: FlagReduce,
    *,
    rank: int,
    attempt: int,
) -> Iterator[Watch]:
    """From before the engine is built until the run is over, whatever ends it."""
    monitor, attempt_folder = plan.config.monitor, directory.attempt_folder(attempt)
    recorder: Recorder = UNRECORDED
    taking: StepRecorder | None = None
    makers: list[Callable[[Engine], Hook]] = []
    ledger: Ledger | None = None
    with ExitStack() as stack:
        alert = Alerts(sink, plan.run_dir)
        process_stats = stack.enter_context(closing(ProcessStats()))
        if rank == 0:
            sink = CompositeSink([sink, judge(plan, alert, stack, makers)])
        if monitor.ledger:
            processor = stack.enter_context(closing(Processor()))
            processor.start()
            recorder = taking = StepRecorder(
                clock_of(plan.world.device), pipelined=plan.axes.pipeline > 1, delays=processor.read
            )
            log_row = partial(sink.log, Kind.LEDGER)
            ledger = made = stack.enter_context(
                closing(ledger_of(plan, taking, log_row, rank=rank, say=log.info, tell=log.warning))
            )
            makers.append(lambda engine: made)
        if monitor.ledger or monitor.hang_seconds:
            stack.enter_context(collectives.watched(plan.axes, taking))
        if monitor.replicas_every and plan.axes.size > 1:
            compare = gather_of(rank, plan.axes.size, plan.world.ranks_per_node)
            makers.append(
                lambda engine: stack.enter_context(
                    closing(
                        Replicas(
                            plan,
                            engine,
                            all_reduce_flags,
                            compare,
                            rank=rank,
                            every=monitor.replicas_every,
                            alert=alert,
                            tell=log.warning,
                        )
                    )
                )
            )
        if monitor.probe:
            makers.append(
                lambda engine: Probe(
                    plan,
                    engine.device,
                    all_reduce_flags,
                    rank=rank,
                    file=attempt_folder / "probe.json",
                    sink=sink,
                    take=recorder.set_transfer_seconds,
                    say=log.info,
                )
            )
        if monitor.profile_step is not None and rank % plan.world.ranks_per_node == 0:
            first, file = monitor.profile_step, attempt_folder / f"trace-rank-{rank}.json.gz"
            makers.append(
                lambda engine: Profile(
                    first, monitor.profile_steps, file, engine.device, say=log.info, tell=log.warning
                )
            )

        stepping = stack.enter_context(sampling(plan, directory, sink, all_reduce_flags, alert, rank=rank))
        makers.append(lambda engine: stepping)

        # The last to be entered is the first to be left: it asks the others while calls are still remembered.
        progress = stack.enter_context(
            watchdog(plan, directory, sink, alert, taking, rank=rank, attempt=attempt)
        )
        makers.insert(0, lambda engine: progress)
        yield Watch(sink, recorder, alert, ledger, makers, process_stats, progress)


def judge(
    plan: RunPlan, alert: Callable[[Alert], None], stack: ExitStack, makers: list[Callable[[Engine], Hook]]
) -> Sink:
    """On rank 0: looks at the rows of the run, in a thread of its own."""
    late = LateCheckpoint(parse_cadence(plan.config.checkpoint.every), time.monotonic)
    makers.append(lambda engine: Saves(late.saved))
    judges = [*build_detectors(plan), late]
    queued = QueuedSink(
        lambda: HealthSink(judges, alert, log.warning),
        "health",
        lag_seconds=JUDGING_LAG_SECONDS,
        close_seconds=JUDGED_SECONDS,
    )
    wanted = {kind for one in judges for kind in one.kinds}
    health = CompositeSink(
        [FilteredSink(queued, lambda kind, row: kind in wanted)]
    )  # trouble of its own is told, and ends nothing
    stack.callback(health.close, int(ExitCode.DONE))
    return health
