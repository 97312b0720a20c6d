"""W&B online with a local server: a shared run of two nodes, and servers that refuse, hang or return errors.

pytest tests/monitor/test_endpoint.py -m full
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.monitor import WandbMode
from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.sink import CompositeSink, Kind, Sink
from toolkit.monitor.sinks.queued import QueuedSink
from toolkit.monitor.sinks.subprocess_sink import SubprocessSink
from toolkit.monitor.sinks.wandb import WandbSink, wandb_run

pytestmark = pytest.mark.full
STEPS, STEP_SECONDS = 40, 0.02
START_SECONDS, CLOSE_SECONDS = 1.5, 4.0


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        code, answer = self.answer(body)
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST

    def answer(self, body: bytes) -> tuple[int, Any]:
        return 500, {}

    def log_message(self, *content: object) -> None:
        pass


class Accepting(Answering):
    """Answers the requests that W&B's client makes in these tests."""

    requests: list[tuple[str, str, Any]]  # writer, operation, content

    def answer(self, body: bytes) -> tuple[int, Any]:
        if self.path == "/upload":
            return 200, {}
        content = json.loads(body)
        if self.path.endswith("/file_stream"):
            self.requests.append((self.headers["X-WANDB-ASYNC-CLIENT-ID"], self.path, content))
            return 200, {}
        wanted, given = content["operationName"], content["variables"]
        self.requests.append((self.headers["X-WANDB-CLIENT-ID"], wanted, given))
        project = {
            "id": "p",
            "name": given.get("project"),
            "entity": {"id": "e", "name": given.get("entity")},
        }
        bucket = {
            "id": "b",
            "name": given.get("name"),
            "displayName": given.get("displayName"),
            "historyLineCount": 0,
            "project": project,
        }
        files = [
            {"name": name, "uploadUrl": f"{os.environ['WANDB_BASE_URL']}/upload"}
            for name in given.get("files", [])
        ]
        return 200, {
            "data": {
                "UpsertBucket": {"upsertBucket": {"bucket": bucket, "inserted": True}},
                "CreateRunFiles": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}},
                "NotifyScriptableRunAlert": {"notifyScriptableRunAlert": {"success": True}},
            }.get(wanted, {})
        }


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


@contextmanager
def serving(handler: type[Answering]) -> Iterator[str]:
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def endpoint(kind: str) -> Iterator[str]:
    if kind == "fails":
        with serving(Answering) as url:
            yield url
        return
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if kind == "hangs":
            listening.listen(100)  # accept connections but never read
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def online(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "WANDB_SERVICE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in (
        ("WANDB_BASE_URL", url),
        ("WANDB_API_KEY", "local-" + "0" * 40),
        ("WANDB_ERROR_REPORTING", "false"),
        ("WANDB_CONFIG_DIR", str(folder)),
        ("HOME", str(folder)),
    ):
        monkeypatch.setenv(name, value)


def wandb(folder: Path, node: int, start_seconds: float, close_seconds: float) -> QueuedSink:
    arguments = {
        "wandb_run": wandb_run(folder, "1a2b3c4d", WandbMode.online, node, 2),
        "mode": WandbMode.online,
        "project": "p",
        "entity": "us",
        "group": "g",
        "tags": ["t"],
        "config": {f"of-{node}": node},
        "trainer": os.getpid(),
        "command": ["train.py", "a=b"],
        "start_seconds": start_seconds,
    }
    return QueuedSink(
        lambda: SubprocessSink(WandbSink, arguments, "W&B", close_seconds=close_seconds),
        "W&B",
        close_seconds=close_seconds,
    )


def test_two_nodes_write_one_shared_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests: list[tuple[str, str, Any]] = []
    monkeypatch.setattr(Accepting, "requests", requests, raising=False)
    with serving(Accepting) as url:
        online(url, tmp_path, monkeypatch)
        nodes = [CompositeSink([wandb(tmp_path / "run", node, 60.0, 60.0)]) for node in (0, 1)]
        nodes[0].log(Kind.STEP, {"step": 1, "loss": 0.5})
        for node, sink in enumerate(nodes):
            sink.log(Kind.SYSTEM, {"step": 1, "load": 10.0 + node})
        nodes[1].log(
            Kind.ALERT,
            Alert(name="hot", level=Level.ERROR, step=1, cause="c", evidence="e", next_step="n").to_row(),
        )
        for sink in reversed(nodes):
            sink.close(0)
    assert caplog.messages == []
    upserts = [(writer, given) for writer, wanted, given in requests if wanted == "UpsertBucket"]
    assert {(given["name"], given["entity"], given["project"]) for _, given in upserts} == {
        ("run-1a2b3c4d-shared", "us", "p")
    }
    writers = {
        writer: next(node for node in (0, 1) if f"of-{node}" in json.loads(given["config"]))
        for writer, given in upserts
    }
    assert sorted(writers.values()) == [0, 1]
    assert {(given["groupName"], *given["tags"]) for _, given in upserts if given["groupName"]} == {
        ("g", "t")
    }

    streams = [
        (writers[writer], content)
        for writer, wanted, content in requests
        if wanted == "/files/us/p/run-1a2b3c4d-shared/file_stream"
    ]
    rows: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for node, content in streams:
        for line in content.get("files", {}).get("wandb-history.jsonl", {}).get("content", []):
            rows[node].append(
                {name: value for name, value in json.loads(line).items() if not name.startswith("_")}
            )
    assert rows == {
        0: [{"step": 1, "train/loss": 0.5}, {"step": 1, "system/node-0/load": 10.0}],
        1: [{"step": 1, "system/node-1/load": 11.0}, {"step": 1, "alerts/hot": 1}],
    }
    assert [given["title"] for _, wanted, given in requests if wanted == "NotifyScriptableRunAlert"] == [
        "hot"
    ]
    assert {node for node, content in streams if content.get("complete")} == {0}, (
        "node 0 decides how the run ended"
    )


def log_steps(sink: Sink) -> list[float]:
    """Log one row per step; return the seconds of each call."""
    composite, took = CompositeSink([sink]), []
    for step in range(1, STEPS + 1):
        row = {"step": step, **{f"metric-{number}": number / step for number in range(50)}}
        began = time.perf_counter()
        composite.log(Kind.STEP, row)
        took.append(time.perf_counter() - began)
        time.sleep(STEP_SECONDS)
    composite.close(0)
    return took


@pytest.mark.parametrize("kind", ["hangs", "refuses", "fails"])
def test_unusable_server_does_not_slow_down_logging(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without = log_steps(Sink())
    assert caplog.messages == []
    with endpoint(kind) as url:
        online(url, tmp_path, monkeypatch)
        began = time.monotonic()
        using = log_steps(wandb(tmp_path / "run", 0, START_SECONDS, CLOSE_SECONDS))
        seconds = time.monotonic() - began
    print(
        f"{kind}: median {statistics.median(using) * 1e6:.0f} us, longest {max(using) * 1e3:.1f} ms "
        "(without: "
        f"{statistics.median(without) * 1e6:.0f} us, {max(without) * 1e3:.1f} ms); closed after "
        f"{seconds:.1f} s"
    )
    assert statistics.median(using) < statistics.median(without) + 3e-4
    assert max(using) < max(without) + 0.05
    assert seconds < STEPS * (STEP_SECONDS + 0.005) + CLOSE_SECONDS + 2.0
    (message,) = caplog.messages
    assert message.startswith("W&B failed and receives no more rows: ")
