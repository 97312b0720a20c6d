"""W&B online, at a server on this machine that refuses, hangs or answers errors: whoever logs does not notice, and it is told once.

    pytest tests/monitor/test_endpoint.py
"""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from toolkit.config.schema import WandbMode
from toolkit.monitor.apart import ProcessSink
from toolkit.monitor.queued import QueuedSink
from toolkit.monitor.sink import CompositeSink, Kind, NullSink, Sink
from toolkit.monitor.wandb import WandbSink, part

STEPS, STEP_SECONDS = 100, 0.02
START_SECONDS, CLOSE_SECONDS = 1.5, 4.0


class Failing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_error(500)

    do_GET = do_POST

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def endpoint(kind: str) -> Iterator[str]:
    if kind == "fails":
        with ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
        return
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if kind == "hangs":
            listening.listen(100)  # connections are made, and nobody reads them
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def calls(sink: Sink, told: list[str]) -> list[float]:
    """How long it takes to log a row, step for step."""
    composite, took = CompositeSink([sink], told.append), []
    for step in range(1, STEPS + 1):
        row = {"step": step, **{f"metric-{number}": number / step for number in range(50)}}
        began = time.perf_counter()
        composite.log(Kind.STEP, row)
        took.append(time.perf_counter() - began)
        time.sleep(STEP_SECONDS)
    composite.close(0)
    return took


@pytest.mark.parametrize("kind", ["refuses", "hangs", "fails"])
def test_a_server_that_is_of_no_use_takes_no_time(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    without = calls(NullSink(), told)
    assert told == []
    with endpoint(kind) as url:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "WANDB_SERVICE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in (("WANDB_BASE_URL", url), ("WANDB_API_KEY", "local-" + "0" * 40), ("WANDB_ERROR_REPORTING", "false"),
                            ("WANDB_CONFIG_DIR", str(tmp_path)), ("HOME", str(tmp_path))):
            monkeypatch.setenv(name, value)
        arguments = {"part": part(tmp_path / "run", "1a2b3c4d", WandbMode.online, 0, 2), "mode": WandbMode.online, "project": "p",
                     "entity": "us", "group": "g", "tags": [], "config": {}, "trainer": os.getpid(), "start_seconds": START_SECONDS}
        sink = QueuedSink(lambda: ProcessSink(WandbSink, arguments, "W&B", close_seconds=CLOSE_SECONDS), "W&B", close_seconds=CLOSE_SECONDS)
        began = time.monotonic()
        using = calls(sink, told)
        seconds = time.monotonic() - began
    print(f"{kind}: median {statistics.median(using) * 1e6:.0f} us, longest {max(using) * 1e3:.1f} ms (without: "
          f"{statistics.median(without) * 1e6:.0f} us, {max(without) * 1e3:.1f} ms); over after {seconds:.1f} s: {told}")
    assert statistics.median(using) < statistics.median(without) + 3e-4
    assert max(using) < max(without) + 0.05
    assert seconds < STEPS * (STEP_SECONDS + 0.005) + CLOSE_SECONDS + 2.0
    assert len(told) == 1
    assert told[0].startswith("W&B failed and gets nothing more: ")
