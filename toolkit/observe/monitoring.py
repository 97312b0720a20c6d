"""Set up everything that observes a run: the recorder, the sinks, and the hooks that measure and judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

from toolkit.config.checkpoint import parse_cadence
from toolkit.engine import collectives
from toolkit.engine.clock import make_clock
from toolkit.engine.protocol import Engine
from toolkit.errors import ExitCode
from toolkit.hooks import Hook
from toolkit.monitor.alert import Alert
from toolkit.monitor.health.checkpoints import LateCheckpoint
from toolkit.monitor.recorder import StepRecorder
from toolkit.monitor.sink import CompositeSink, Kind, Sink
from toolkit.observe.comm_benchmark import CommBenchmark
from toolkit.observe.context import RankContext
from toolkit.observe.gather import Gather, make_gather
from toolkit.observe.health import AlertDispatcher, CheckpointListener, open_health_sink
from toolkit.observe.ledger import LedgerHook, make_ledger
from toolkit.observe.process_stats import DelayTracker, ProcessStats
from toolkit.observe.profiler import StepProfiler
from toolkit.observe.replicas import ReplicaCheck
from toolkit.observe.system import sample_system
from toolkit.observe.watchdog import HangMonitor, watch_for_hangs
from toolkit.step_parts import NULL_RECORDER, Recorder


@dataclass(frozen=True, slots=True)
class RunMonitor:
    """The observers of one rank's run.

    Attributes:
        sink: takes the rows of the run; on rank 0 the health detectors see them too.
        recorder: the engine and the loop report to it where time goes.
        alert: takes alerts; on rank 0 they are about the run, on other ranks about their node.
        ledger: gathers the ranks' step times; None if it is disabled.
        hook_factories: build the hooks once the engine exists.
        hangs: ends the run if it makes no progress for ``monitor.hang_seconds``.
        late: warns if a checkpoint is overdue; None except on rank 0.
    """

    sink: Sink
    recorder: Recorder
    alert: Callable[[Alert], None]
    ledger: LedgerHook | None
    hook_factories: Sequence[Callable[[Engine], Hook]]
    process_stats: ProcessStats
    hangs: HangMonitor
    late: LateCheckpoint | None

    def build_hooks(self, engine: Engine) -> list[Hook]:
        """Return the hooks in call order; they come before evaluation and saving."""
        return [build(engine) for build in self.hook_factories]

    def ledger_steps_due(self) -> int:
        """Return this rank's value of ``StepConsensus.ledger``."""
        return 0 if self.ledger is None else self.ledger.due()


@contextmanager
def monitor_run(context: RankContext, sink: Sink) -> Iterator[RunMonitor]:
    """Observe the run from before the engine is built until it is over. Collective."""
    plan, rank, monitor = context.plan, context.rank, context.plan.config.monitor
    attempt_folder = context.directory.attempt_folder(context.attempt)
    recorder: Recorder = NULL_RECORDER
    step_recorder: StepRecorder | None = None
    factories: list[Callable[[Engine], Hook]] = []
    ledger: LedgerHook | None = None
    with ExitStack() as stack:
        alert = AlertDispatcher(sink, plan.run_dir)
        late: LateCheckpoint | None = None
        process_stats = stack.enter_context(closing(ProcessStats()))
        if rank == 0:
            late = LateCheckpoint(parse_cadence(plan.config.checkpoint.every), time.monotonic)
            health = open_health_sink(plan, alert, late)
            stack.callback(health.close, int(ExitCode.DONE))
            sink = CompositeSink([sink, health])
            saved = late.saved
            factories.append(lambda engine: CheckpointListener(saved))
        if monitor.ledger:
            delays = stack.enter_context(closing(DelayTracker()))
            delays.start()
            pipelined = plan.axes.pipeline > 1
            recorder = step_recorder = StepRecorder(
                make_clock(plan.world.device), pipelined=pipelined, delays=delays.read
            )
            new_ledger = make_ledger(context, step_recorder, partial(sink.log, Kind.LEDGER))
            ledger = stack.enter_context(closing(new_ledger))
            factories.append(lambda engine: new_ledger)
        if monitor.ledger or monitor.hang_seconds:
            stack.enter_context(collectives.record_collectives(plan.axes, step_recorder))
        if monitor.replicas_every and plan.axes.size > 1:
            gather = make_gather(rank, plan.axes.size, plan.world.ranks_per_node)
            factories.append(lambda engine: _build_replica_check(context, engine, gather, alert, stack))
        if monitor.probe:
            factories.append(
                lambda engine: CommBenchmark(
                    plan,
                    engine.device,
                    context.all_reduce_flags,
                    rank=rank,
                    file=attempt_folder / "probe.json",
                    sink=sink,
                    set_transfer_time=recorder.set_transfer_seconds,
                )
            )
        if (first := monitor.profile_step) is not None and context.first_on_node:
            trace = attempt_folder / f"trace-rank-{rank}.json.gz"
            factories.append(lambda engine: StepProfiler(first, monitor.profile_steps, trace, engine.device))
        sampling = stack.enter_context(sample_system(context, sink, alert))
        factories.append(lambda engine: sampling)

        # Entered last and left first: at the end it reports the collective calls, which are recorded until
        # then.
        hangs = stack.enter_context(watch_for_hangs(context, sink, alert, step_recorder))
        factories.insert(0, lambda engine: hangs)
        yield RunMonitor(sink, recorder, alert, ledger, factories, process_stats, hangs, late)


def _build_replica_check(
    context: RankContext, engine: Engine, gather: Gather, alert: Callable[[Alert], None], stack: ExitStack
) -> ReplicaCheck:
    every = context.plan.config.monitor.replicas_every
    return stack.enter_context(closing(ReplicaCheck(context, engine, gather, every=every, alert=alert)))
