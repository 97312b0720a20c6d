"""A local server that responds like the metadata service of a cloud."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Metadata:
    """A server with one response per path: (text, required request headers). Other paths return 404."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[str, Mapping[str, str]]] = {}
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                outer.asked.append(f"{self.command} {self.path}")
                text, headers = outer.answers.get(self.path, ("", {}))
                known = self.path in outer.answers
                allowed = all(self.headers.get(name) == value for name, value in headers.items())
                self.send_response(200 if known and allowed else 403 if known else 404)
                self.end_headers()
                self.wfile.write(text.encode() if known and allowed else b"")

            do_GET = do_PUT = answer

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        serve = {"poll_interval": 0.02}  # shutdown() waits for one interval
        threading.Thread(target=self.http.serve_forever, kwargs=serve, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"


@contextmanager
def serve_metadata() -> Iterator[Metadata]:
    server = Metadata()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()


def preemption_answers(cloud: str, seconds: float = 120) -> dict[str, tuple[str, Mapping[str, str]]]:
    """Return the responses of a cloud that takes this machine back in ``seconds``."""
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    if cloud == "gce":
        return {"/computeMetadata/v1/instance/preempted": ("TRUE", {"Metadata-Flavor": "Google"})}
    if cloud == "aws":
        notice = {"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        return {
            "/latest/api/token": ("secret", {}),
            "/latest/meta-data/spot/instance-action": (
                json.dumps(notice),
                {"X-aws-ec2-metadata-token": "secret"},
            ),
        }
    assert cloud == "azure"
    event = {"EventType": "Preempt", "Resources": ["this"], "NotBefore": format_datetime(at, usegmt=True)}
    return {
        "/metadata/instance/compute/name?api-version=2021-02-01&format=text": ("this", {"Metadata": "true"}),
        "/metadata/scheduledevents?api-version=2020-07-01": (
            json.dumps({"Events": [event]}),
            {"Metadata": "true"},
        ),
    }
