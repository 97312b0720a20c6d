"""What clouds say before they take a machine away, by servers on loopback that answer as theirs do.

pytest tests/cluster/test_notice.py
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from toolkit.cluster import notice
from toolkit.cluster.notice import Taken, server, watch
from toolkit.cluster.stop import StopRequest
from toolkit.config.cluster import PreemptionNotice

NOW = 1_505_722_800.0  # 2017-09-18T08:20:00Z


class Metadata:
    """A server of one answer a path: (text, the headers that have to come with the question). Others are 404."""

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
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    served = Metadata()
    yield served
    served.http.shutdown()
    served.http.server_close()


def test_google_says_true(metadata: Metadata) -> None:
    path = "/computeMetadata/v1/instance/preempted"
    metadata.answers[path] = ("FALSE", {"Metadata-Flavor": "Google"})
    assert notice.gce(server(metadata.url), NOW) is None
    metadata.answers[path] = ("TRUE", {"Metadata-Flavor": "Google"})
    assert notice.gce(server(metadata.url), NOW) == Taken("Google Cloud preempts this machine", 30)


def test_aws_says_when_and_wants_a_token(metadata: Metadata) -> None:
    path = "/latest/meta-data/spot/instance-action"
    metadata.answers["/latest/api/token"] = ("secret", {"X-aws-ec2-metadata-token-ttl-seconds": "21600"})
    assert notice.aws(server(metadata.url), NOW) is None
    metadata.answers[path] = (
        json.dumps({"action": "terminate", "time": "2017-09-18T08:22:00Z"}),
        {"X-aws-ec2-metadata-token": "secret"},
    )
    assert notice.aws(server(metadata.url), NOW) == Taken(
        "AWS will terminate this machine at 2017-09-18T08:22:00Z", 120
    )
    assert metadata.asked[:2] == ["PUT /latest/api/token", f"GET {path}"]


def test_azure_says_it_of_all_machines_and_one_is_this(metadata: Metadata) -> None:
    events = "/metadata/scheduledevents?api-version=2020-07-01"
    event = {
        "EventType": "Preempt",
        "Resources": ["other"],
        "NotBefore": "Mon, 18 Sep 2017 08:20:45 GMT",
        "EventStatus": "Scheduled",
    }
    own = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    metadata.answers[own] = ("mine", {"Metadata": "true"})
    metadata.answers[events] = (
        json.dumps({"DocumentIncarnation": 1, "Events": [event]}),
        {"Metadata": "true"},
    )
    assert notice.azure(server(metadata.url), NOW) is None
    event["Resources"] = ["other", "mine"]
    metadata.answers[events] = (json.dumps({"Events": [event]}), {"Metadata": "true"})
    assert notice.azure(server(metadata.url), NOW) == Taken("Azure announces Preempt for this machine", 45)
    event["EventType"] = "Freeze"  # it goes on by itself some seconds later
    metadata.answers[events] = (json.dumps({"Events": [event]}), {"Metadata": "true"})
    assert notice.azure(server(metadata.url), NOW) is None


def test_a_notice_is_a_request_to_stop_with_its_own_time(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_METADATA_URL", metadata.url)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there: metadata go past proxies
    stop = StopRequest()
    stop._grace_seconds = 3600
    watch(PreemptionNotice.gce, stop.request, poll_seconds=0.02)
    deadline = time.monotonic() + 10
    while len(metadata.asked) < 3 and time.monotonic() < deadline:  # 404 each time: no notice
        time.sleep(0.01)
    assert stop() is None
    assert stop.seconds_left() is None
    metadata.answers["/computeMetadata/v1/instance/preempted"] = ("TRUE", {"Metadata-Flavor": "Google"})
    while stop() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stop() == "Google Cloud preempts this machine"
    left = stop.seconds_left()
    assert left is not None
    assert 25 < left <= 30
    assert capfd.readouterr().err == "Google Cloud preempts this machine: 30 s are left, and the run stops\n"


def test_a_cloud_that_does_not_answer_is_told_once_and_asked_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_METADATA_URL", "http://127.0.0.1:9")
    requests: list[str] = []
    ended = watch(PreemptionNotice.aws, lambda words, seconds: requests.append(words), poll_seconds=0.01)
    time.sleep(0.5)
    ended.set()
    assert not requests
    told = capfd.readouterr().err
    assert told.count("no notice can be had of aws (cluster.notice)") == 1


def test_nobody_is_asked_without_being_told_to(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_METADATA_URL", metadata.url)
    before = threading.active_count()
    watch(PreemptionNotice.none, lambda words, seconds: None, poll_seconds=0.01)
    time.sleep(0.1)
    assert metadata.asked == []
    assert threading.active_count() == before
