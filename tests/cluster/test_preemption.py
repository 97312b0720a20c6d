"""Preemption notices, with local servers that respond like the clouds' metadata services."""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.cluster.metadata_server import Metadata
from toolkit.cluster.stop import preemption
from toolkit.cluster.stop.preemption import PendingPreemption, metadata_client, watch_preemption
from toolkit.cluster.stop.stop_request import StopRequest
from toolkit.config.cluster import PreemptionNotice

NOW = 1_505_722_800.0  # 2017-09-18T08:20:00Z


def test_gce_notice(metadata: Metadata) -> None:
    path = "/computeMetadata/v1/instance/preempted"
    metadata.answers[path] = ("FALSE", {"Metadata-Flavor": "Google"})
    assert preemption.poll_gce(metadata_client(metadata.url), NOW) is None
    metadata.answers[path] = ("TRUE", {"Metadata-Flavor": "Google"})
    assert preemption.poll_gce(metadata_client(metadata.url), NOW) == PendingPreemption(
        "Google Cloud preempts this machine", 30
    )


def test_aws_notice_uses_a_token_and_a_time(metadata: Metadata) -> None:
    path = "/latest/meta-data/spot/instance-action"
    metadata.answers["/latest/api/token"] = ("secret", {"X-aws-ec2-metadata-token-ttl-seconds": "21600"})
    assert preemption.poll_aws(metadata_client(metadata.url), NOW) is None
    metadata.answers[path] = (
        json.dumps({"action": "terminate", "time": "2017-09-18T08:22:00Z"}),
        {"X-aws-ec2-metadata-token": "secret"},
    )
    assert preemption.poll_aws(metadata_client(metadata.url), NOW) == PendingPreemption(
        "AWS will terminate this machine at 2017-09-18T08:22:00Z", 120
    )
    assert metadata.asked[:2] == ["PUT /latest/api/token", f"GET {path}"]


def test_azure_notice_is_filtered_by_machine(metadata: Metadata) -> None:
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
    assert preemption.poll_azure(metadata_client(metadata.url), NOW) is None
    event["Resources"] = ["other", "mine"]
    metadata.answers[events] = (json.dumps({"Events": [event]}), {"Metadata": "true"})
    assert preemption.poll_azure(metadata_client(metadata.url), NOW) == PendingPreemption(
        "Azure announces Preempt for this machine", 45
    )
    event["EventType"] = "Freeze"  # it recovers some seconds later
    metadata.answers[events] = (json.dumps({"Events": [event]}), {"Metadata": "true"})
    assert preemption.poll_azure(metadata_client(metadata.url), NOW) is None


def test_notice_requests_a_stop_with_its_deadline(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOOLKIT_METADATA_URL", metadata.url)
    # a proxy that does not exist: metadata requests bypass proxies
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    stop = StopRequest()
    stop._grace_seconds = 3600
    watch_preemption(PreemptionNotice.gce, stop.request, poll_seconds=0.02)
    deadline = time.monotonic() + 10
    while len(metadata.asked) < 3 and time.monotonic() < deadline:  # always 404: no notice
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
    assert caplog.messages == ["Google Cloud preempts this machine: stopping the run, 30 s left"]


def test_failing_metadata_server_is_logged_once_and_polled_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOOLKIT_METADATA_URL", "http://127.0.0.1:9")
    requests: list[str] = []
    ended = watch_preemption(
        PreemptionNotice.aws, lambda words, seconds: requests.append(words), poll_seconds=0.01
    )
    time.sleep(0.5)
    ended.set()
    assert not requests
    assert caplog.text.count("cannot read preemption notices from aws (cluster.notice)") == 1


def test_no_polling_without_a_cloud(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_METADATA_URL", metadata.url)
    before = threading.active_count()
    watch_preemption(PreemptionNotice.none, lambda words, seconds: None, poll_seconds=0.01)
    time.sleep(0.1)
    assert metadata.asked == []
    assert threading.active_count() == before
