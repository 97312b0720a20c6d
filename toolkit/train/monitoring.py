"""Everything that watches a run, put together: what is measured, what is told, and the hooks that do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

from toolkit.engine import collectives
from toolkit.engine.clock import clock_of
from toolkit.engine.protocol import Engine
from toolkit.monitor.alert import Alert
from toolkit.monitor.console import say
from toolkit.monitor.parts import UNRECORDED, Recorder
from toolkit.monitor.recorder import StepRecorder
from toolkit.monitor.sink import Kind, Sink, tell
from toolkit.plan.types import RunPlan
from toolkit.rundir import RunDirectory
from toolkit.train.agree import Exchange
from toolkit.train.hooks import Hook
from toolkit.train.ledger import Ledger, ledger_of
from toolkit.train.probe import Probe
from toolkit.train.profile import Profile


@dataclass(frozen=True, slots=True)
class Watch:
    """What a rank's run is watched by.

    Attributes:
        recorder: where its time goes; the engine and the loop tell it.
        alert: takes what deserves attention. On rank 0 it reaches people; other ranks' alerts are of their own node.
        ledger: gathers where the ranks' time goes; None: nobody asked for it.
        makers: of the hooks, which may want to know the engine.
    """

    recorder: Recorder
    alert: Callable[[Alert], None]
    ledger: Ledger | None
    makers: Sequence[Callable[[Engine], Hook]]

    def hooks(self, engine: Engine) -> list[Hook]:
        """In the order in which they listen, before evaluation and saving."""
        return [make(engine) for make in self.makers]

    def ledger_due(self) -> int:
        """What this rank says of the ledger in each step's exchange: ``Agreed.ledger``."""
        return 0 if self.ledger is None else self.ledger.due()


@contextmanager
def watching(plan: RunPlan, directory: RunDirectory, sink: Sink, ask: Exchange, *, rank: int, local_rank: int,
             attempt: int) -> Iterator[Watch]:
    """From before the engine is built until the run is over, whatever ends it."""
    monitor, attempt_folder = plan.config.monitor, directory.attempt_folder(attempt)
    recorder: Recorder = UNRECORDED
    taking: StepRecorder | None = None
    makers: list[Callable[[Engine], Hook]] = []
    ledger: Ledger | None = None
    with ExitStack() as stack:
        if monitor.ledger:
            recorder = taking = StepRecorder(clock_of(plan.world.device), pipelined=plan.axes.pipeline > 1)
            log_row = partial(sink.log, Kind.LEDGER)
            ledger = made = stack.enter_context(closing(ledger_of(plan, taking, log_row, rank=rank, say=say, tell=tell)))
            makers.append(lambda engine: made)
        if monitor.ledger or monitor.hang_seconds:
            stack.enter_context(collectives.watched(plan.axes, taking))
        if monitor.probe:
            makers.append(lambda engine: Probe(plan, engine.device, ask, rank=rank, file=attempt_folder / "probe.json", sink=sink,
                                               take=recorder.transfers_take, say=say))
        if monitor.profile_step is not None and rank % plan.world.ranks_per_node == 0:
            first, file = monitor.profile_step, attempt_folder / f"trace-rank-{rank}.json.gz"
            makers.append(lambda engine: Profile(first, monitor.profile_steps, file, engine.device, say=say, tell=tell))
        yield Watch(recorder, lambda alert: sink.log(Kind.ALERT, alert.row()), ledger, makers)
