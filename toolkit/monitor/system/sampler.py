"""One row of ``Kind.SYSTEM`` each ``monitor.system_seconds`` from each node, taken by threads that training never waits for.

Each source (the GPUs, the host) is read in a thread of its own: a driver or a file system that hangs costs its own figures and nothing
else. What is late is left out of the row, and a source is not asked again before it has answered: nothing piles up.

    node 1                                of which node
    step 1200                             the newest finished step
    time 1781234567.8                     Unix time, seconds
    sample_seconds 0.04                   that taking the row took
    gpu/0/power_watts 612.0 ...           see gpu_metrics.py, host.py, detect_system.py
    gpu/silent_seconds 73.0               a source that does not answer, for so long
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from toolkit.monitor.alert import Alert
from toolkit.monitor.sink import Row
from toolkit.monitor.system.gpu import NodeGpus, XidEvents
from toolkit.monitor.system.gpu_metrics import VisibleGpu
from toolkit.monitor.system.metrics import SteadyMetricFilter, SystemMetrics

PATIENCE_SECONDS = (1.0, 10.0)  # least and most that a row waits for its sources
CLOSE_SECONDS = 2.0  # that the end of a run waits for these threads
XID_SECONDS = 0.5  # that one wait for an event takes at most, so that its thread ends soon after the run


class MetricSource:
    """Figures from a function that may take long, or for ever: it is called in a thread of its own, one call at a time.

    Args:
        tell: takes a sentence, once, where the function fails; it is called again all the same.
        close: called in that thread at the end.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], SystemMetrics],
        tell: Callable[[str], None],
        close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._read, self._tell, self._close, self._clock = read, tell, close, clock
        self._questions: SimpleQueue[bool] = SimpleQueue()  # False: there are no more
        self._changed = threading.Condition()
        self._asked_at: float | None = None  # None: the last question is answered
        self._figures: SystemMetrics = {}
        self._told = False
        self.thread = threading.Thread(target=self._work, name=f"system-{name}", daemon=True)
        self.thread.start()

    def ask(self) -> None:
        """For figures of now, unless the last question is still open."""
        with self._changed:
            if self._asked_at is None:
                self._asked_at = self._clock()
                self._questions.put(True)

    def answer(self, seconds: float) -> SystemMetrics:
        """To the last question. What has not come within ``seconds`` is told as ``<name>/silent_seconds``."""
        with self._changed:
            if self._changed.wait_for(lambda: self._asked_at is None, seconds):
                return self._figures
            assert self._asked_at is not None
            return {f"{self.name}/silent_seconds": round(self._clock() - self._asked_at, 1)}

    def end(self) -> None:
        """The thread ends after the reading under way."""
        self._questions.put(False)

    def _work(self) -> None:
        while self._questions.get():
            try:
                figures = self._read()
            except Exception as error:  # noqa: BLE001  whatever it is, training goes on, and so do the other figures
                figures = {}
                if not self._told:
                    self._told = True
                    self._tell(f"figures of {self.name} are missing: {type(error).__name__}: {error}")
            with self._changed:
                self._figures, self._asked_at = figures, None
                self._changed.notify_all()
        self._close()


class NodeSampler:
    """The thread that makes the rows.

    Args:
        seconds: between two rows. A row that was late is not made up for.
        sources: read together.
        log: takes each row.
        detect: makes alerts of a whole row (in ``log``'s the steady figures may be missing). It is left out after it has failed once.
        tell: takes a sentence.
    """

    def __init__(
        self,
        *,
        node: int,
        seconds: float,
        sources: Iterable[MetricSource],
        log: Callable[[Row], None],
        detect: Callable[[Row], Iterable[Alert]],
        alert: Callable[[Alert], None],
        tell: Callable[[str], None],
    ) -> None:
        self.step = 0  # written by the training thread: one assignment a step
        self._node, self._seconds, self._sources = node, seconds, tuple(sources)
        self._log, self._detect, self._alert, self._tell = log, detect, alert, tell
        self._thrifty = SteadyMetricFilter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="system", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """In bounded time, whatever hangs."""
        self._over.set()
        for source in self._sources:
            source.end()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in (self._thread, *(source.thread for source in self._sources)):
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        due = time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            self._sample()
            due = max(due + self._seconds, time.monotonic())

    def _sample(self) -> None:
        began = time.monotonic()
        least, most = PATIENCE_SECONDS
        until = began + min(max(self._seconds, least), most)
        row: SystemMetrics = {"node": self._node, "step": self.step, "time": round(time.time(), 3)}
        for source in self._sources:
            source.ask()
        for source in self._sources:
            row |= source.answer(max(0.0, until - time.monotonic()))
        row["sample_seconds"] = round(time.monotonic() - began, 4)
        if self._over.is_set():  # the sinks may be closed
            return
        self._log(self._thrifty(row))
        try:
            found = list(self._detect(row))
        except Exception as error:  # noqa: BLE001  rows go on
            found, self._detect = [], lambda row: ()
            self._tell(f"no more alerts of samples: {type(error).__name__}: {error}")
        for alert in found:
            self._alert(alert)


class GpuMetricSource:
    """What a :class:`Source` reads of the GPUs, and a thread that waits for their XID events.

    Args:
        open_gpus: called at the first reading, in the reading thread: starting a driver takes seconds, or hangs. None: there is no GPU.
        open_events: the events of these GPUs.
        xid: takes GPU and number of each event as it comes.
        say: takes a sentence where there is no GPU.
    """

    def __init__(
        self,
        open_gpus: Callable[[], NodeGpus | None],
        open_events: Callable[[NodeGpus], XidEvents],
        *,
        xid: Callable[[VisibleGpu | None, int], None],
        say: Callable[[str], None],
    ) -> None:
        self._open_gpus, self._open_events, self._xid, self._say = open_gpus, open_events, xid, say
        self._opened = False
        self._gpus: NodeGpus | None = None
        self._over = threading.Event()
        self._events: SystemMetrics = {}  # of the rows; a new dictionary for each event

    def read(self) -> SystemMetrics:
        if not self._opened:
            self._opened, self._gpus = True, self._open_gpus()
            if self._gpus is None:
                self._say("no GPU on this node: host only")
            else:
                threading.Thread(
                    target=self._wait_for_events, args=(self._gpus,), name="system-xid", daemon=True
                ).start()
        if self._gpus is None:
            return {}
        none = {f"gpu/{card.place}/xid_events": 0 for card in self._gpus.cards}
        return {**self._gpus.read(), **none, **self._events}

    def stop(self) -> None:
        """From another thread: events are not waited for any longer."""
        self._over.set()

    def close(self) -> None:
        """In the reading thread, after :meth:`stop`."""
        if self._gpus is not None:
            self._gpus.close()

    def _wait_for_events(self, gpus: NodeGpus) -> None:
        told = False
        events: XidEvents | None = None
        while not self._over.is_set():
            try:
                events = events or self._open_events(gpus)
                event = events.wait(round(XID_SECONDS * 1000))
            except Exception as error:  # noqa: BLE001  training goes on; a lost GPU must not hide the others' events
                if not told:
                    told = True
                    self._say(f"XID events may be missed: {type(error).__name__}: {error}")
                self._over.wait(XID_SECONDS)
                continue
            if event is not None and not self._over.is_set():  # the sinks may be closed
                self._note(*event)
        if events is not None:
            events.close()

    def _note(self, card: VisibleGpu | None, number: int) -> None:
        if card is not None:
            key = f"gpu/{card.place}/xid_events"
            self._events = {
                **self._events,
                key: int(self._events.get(key, 0)) + 1,
                f"gpu/{card.place}/xid": number,
            }
        self._xid(card, number)
