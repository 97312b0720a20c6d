"""Log one row of ``Kind.SYSTEM`` every ``monitor.system_seconds`` on each node, from threads that never block
training.

Each source (the GPUs, the host) is read in its own thread, so that a hanging driver or file system affects
only its own metrics. Late metrics are left out of the row, and a source is not read again before it has
returned.

    node 1                                of which node
    step 1200                             the newest finished step
    time 1781234567.8                     Unix time, seconds
    sample_seconds 0.04                   time to take the sample
    gpu/0/power_watts 612.0 ...           see gpu_metrics.py and host.py
    gpu/silent_seconds 73.0               how long a source has not answered
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from toolkit.monitor.alert import Alert
from toolkit.monitor.sink import Row
from toolkit.monitor.system.gpu import NodeGpus, XidEvents
from toolkit.monitor.system.gpu_metrics import VisibleGpu
from toolkit.monitor.system.metrics import SteadyMetricFilter, SystemMetrics

log = logging.getLogger(__name__)

PATIENCE_SECONDS = (1.0, 10.0)  # minimal and maximal wait of a row for its sources
CLOSE_SECONDS = 2.0  # maximal wait for these threads at the end of a run
XID_SECONDS = 0.5  # maximal wait for one event, so that the thread ends soon after the run


class MetricSource:
    """Metrics from a function that may block: it is called in its own thread, one call at a time.

    A failure is logged once, and the function is called again all the same.

    Args:
        close: called in that thread at the end.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], SystemMetrics],
        close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._read, self._close, self._clock = read, close, clock
        self._requests: SimpleQueue[bool] = SimpleQueue()  # False: stop
        self._changed = threading.Condition()
        self._requested_at: float | None = None  # None: the last request is finished
        self._metrics: SystemMetrics = {}
        self._failed = False
        self.thread = threading.Thread(target=self._run, name=f"system-{name}", daemon=True)
        self.thread.start()

    def request(self) -> None:
        """Request new metrics, unless the last request is still pending."""
        with self._changed:
            if self._requested_at is None:
                self._requested_at = self._clock()
                self._requests.put(True)

    def result(self, seconds: float) -> SystemMetrics:
        """Return the requested metrics, or ``<name>/silent_seconds`` if they have not arrived within
        ``seconds``.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._requested_at is None, seconds):
                return self._metrics
            assert self._requested_at is not None
            return {f"{self.name}/silent_seconds": round(self._clock() - self._requested_at, 1)}

    def stop(self) -> None:
        """Stop the thread after the current reading."""
        self._requests.put(False)

    def _run(self) -> None:
        while self._requests.get():
            try:
                metrics = self._read()
            except Exception as error:  # noqa: BLE001  whatever it is, training goes on, and so do the other metrics
                metrics = {}
                if not self._failed:
                    self._failed = True
                    log.warning(f"{self.name} metrics are missing: {type(error).__name__}: {error}")
            with self._changed:
                self._metrics, self._requested_at = metrics, None
                self._changed.notify_all()
        self._close()


class NodeSampler:
    """The thread that takes the samples.

    Args:
        seconds: between two rows. Late rows are not caught up.
        sources: read concurrently.
        log_row: receives each row.
        detect: returns alerts for a complete row (unchanged metrics are dropped only from logged rows). It is
            disabled after a failure.
    """

    def __init__(
        self,
        *,
        node: int,
        seconds: float,
        sources: Iterable[MetricSource],
        log_row: Callable[[Row], None],
        detect: Callable[[Row], Iterable[Alert]],
        alert: Callable[[Alert], None],
    ) -> None:
        self.step = 0  # written by the training thread
        self._node, self._seconds, self._sources = node, seconds, tuple(sources)
        self._log_row, self._detect, self._alert = log_row, detect, alert
        self._drop_unchanged = SteadyMetricFilter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop in bounded time, even if a source hangs."""
        self._stopping.set()
        for source in self._sources:
            source.stop()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in (self._thread, *(source.thread for source in self._sources)):
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            self._sample()
            due = max(due + self._seconds, time.monotonic())

    def _sample(self) -> None:
        began = time.monotonic()
        least, most = PATIENCE_SECONDS
        until = began + min(max(self._seconds, least), most)
        row: SystemMetrics = {"node": self._node, "step": self.step, "time": round(time.time(), 3)}
        for source in self._sources:
            source.request()
        for source in self._sources:
            row |= source.result(max(0.0, until - time.monotonic()))
        row["sample_seconds"] = round(time.monotonic() - began, 4)
        if self._stopping.is_set():  # the sinks may be closed
            return
        self._log_row(self._drop_unchanged(row))
        try:
            alerts = list(self._detect(row))
        except Exception as error:  # noqa: BLE001  rows go on
            alerts, self._detect = [], lambda row: ()
            log.warning(f"alerts of samples are disabled: {type(error).__name__}: {error}")
        for alert in alerts:
            self._alert(alert)


class GpuMetricSource:
    """Reads the GPUs for a :class:`MetricSource`, and waits for their XID events in another thread.

    Args:
        open_gpus: called for the first reading in the reading thread, because starting a driver takes seconds
            or hangs. Returns None if there is no GPU.
        open_events: opens the events of these GPUs.
        on_xid: receives the GPU and number of each event.
        node: for messages.
    """

    def __init__(
        self,
        open_gpus: Callable[[], NodeGpus | None],
        open_events: Callable[[NodeGpus], XidEvents],
        *,
        on_xid: Callable[[VisibleGpu | None, int], None],
        node: int = 0,
    ) -> None:
        self._open_gpus, self._open_events, self._on_xid, self._node = open_gpus, open_events, on_xid, node
        self._opened = False
        self._gpus: NodeGpus | None = None
        self._stopping = threading.Event()
        self._events: SystemMetrics = {}  # replaced by a new dictionary for each event

    def read(self) -> SystemMetrics:
        if not self._opened:
            self._opened, self._gpus = True, self._open_gpus()
            if self._gpus is None:
                log.info(f"node {self._node}: no GPU, only the host is sampled")
            else:
                threading.Thread(
                    target=self._wait_for_events, args=(self._gpus,), name="system-xid", daemon=True
                ).start()
        if self._gpus is None:
            return {}
        no_events = {f"gpu/{gpu.index}/xid_events": 0 for gpu in self._gpus.gpus}
        return {**self._gpus.read(), **no_events, **self._events}

    def stop(self) -> None:
        """Stop waiting for events; called from another thread."""
        self._stopping.set()

    def close(self) -> None:
        """Release the GPUs in the reading thread, after :meth:`stop`."""
        if self._gpus is not None:
            self._gpus.close()

    def _wait_for_events(self, gpus: NodeGpus) -> None:
        warned = False
        events: XidEvents | None = None
        while not self._stopping.is_set():
            try:
                events = events or self._open_events(gpus)
                event = events.wait(round(XID_SECONDS * 1000))
            except Exception as error:  # noqa: BLE001  training goes on; a lost GPU must not hide the others' events
                if not warned:
                    warned = True
                    log.warning(
                        f"node {self._node}: XID events may be missed: {type(error).__name__}: {error}"
                    )
                self._stopping.wait(XID_SECONDS)
                continue
            if event is not None and not self._stopping.is_set():  # the sinks may be closed
                self._handle(*event)
        if events is not None:
            events.close()

    def _handle(self, gpu: VisibleGpu | None, number: int) -> None:
        if gpu is not None:
            key = f"gpu/{gpu.index}/xid_events"
            self._events = {
                **self._events,
                key: int(self._events.get(key, 0)) + 1,
                f"gpu/{gpu.index}/xid": number,
            }
        self._on_xid(gpu, number)
