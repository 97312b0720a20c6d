"""Poll the cloud's metadata service for preemption notices, if ``cluster.notice`` names the cloud.

Each cloud serves its machines at a link-local address:

    gce     GET /computeMetadata/v1/instance/preempted            TRUE or FALSE; about 30 s remain
            (Google Cloud, "Create and use Spot VMs", section on preemption)
    aws     PUT /latest/api/token, then GET /latest/meta-data/spot/instance-action
            404, or {"action": "terminate", "time": "2017-09-18T08:22:00Z"}, two minutes before (Amazon EC2,
            "Spot Instance interruption notices")
    azure   GET /metadata/scheduledevents?api-version=2020-07-01
            {"Events": [{"EventType": "Preempt", "Resources": ["vm"], "NotBefore": "Mon, 19 Sep 2016 18:29:47
            GMT"}]}, at least half a minute before; lists all machines of a group, so this machine's name is
            read first (Azure, "Scheduled Events for Linux VMs")

``TOOLKIT_METADATA_URL`` replaces the metadata server, for tests. Proxies are not used.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from toolkit.config.cluster import PreemptionNotice

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
REQUEST_SECONDS = 10.0
GCE_SECONDS = 30.0
MIN_SECONDS = 5.0  # used even if the announced time has passed, since the machine still runs
TOKEN_SECONDS = 21600
METADATA_URLS = {
    PreemptionNotice.gce: "http://metadata.google.internal",
    PreemptionNotice.aws: "http://169.254.169.254",
    PreemptionNotice.azure: "http://169.254.169.254",
}
TERMINAL_EVENTS = (
    "Preempt",
    "Terminate",
    "Reboot",
    "Redeploy",
)  # Azure events after which this machine stops

# (method, path, headers) -> response text; None: 404
Get = Callable[[str, str, Mapping[str, str]], str | None]


@dataclass(frozen=True, slots=True)
class PendingPreemption:
    """A notice that the machine will stop in ``seconds``."""

    reason: str
    seconds: float


def poll_gce(get: Get, now: float) -> PendingPreemption | None:
    preempted = get("GET", "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return (
        PendingPreemption("Google Cloud preempts this machine", GCE_SECONDS)
        if preempted is not None and preempted.strip() == "TRUE"
        else None
    )


def poll_aws(get: Get, now: float) -> PendingPreemption | None:
    token = get("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)})
    text = get("GET", "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token or ""})
    if text is None:
        return None
    notice = json.loads(text)
    at = datetime.fromisoformat(notice["time"].replace("Z", "+00:00"))
    return PendingPreemption(
        f"AWS will {notice['action']} this machine at {notice['time']}",
        max(MIN_SECONDS, at.timestamp() - now),
    )


def poll_azure(get: Get, now: float) -> PendingPreemption | None:
    own = get(
        "GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text", {"Metadata": "true"}
    )
    text = get("GET", "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    for event in json.loads(text or "{}").get("Events", ()):
        if event["EventType"] in TERMINAL_EVENTS and own in event["Resources"]:
            # NotBefore is empty if the event has already started.
            at = (
                parsedate_to_datetime(event["NotBefore"]).replace(tzinfo=UTC).timestamp()
                if event.get("NotBefore")
                else now
            )
            return PendingPreemption(
                f"Azure announces {event['EventType']} for this machine", max(MIN_SECONDS, at - now)
            )
    return None


POLLERS: Mapping[PreemptionNotice, Callable[[Get, float], PendingPreemption | None]] = {
    PreemptionNotice.gce: poll_gce,
    PreemptionNotice.aws: poll_aws,
    PreemptionNotice.azure: poll_azure,
}


def metadata_client(base: str) -> Get:
    """Return a client of ``base``. Its calls raise OSError on a failed request or an HTTP error other than
    404.
    """
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(method: str, path: str, headers: Mapping[str, str]) -> str | None:
        try:
            with opener.open(
                urllib.request.Request(base + path, headers=dict(headers), method=method),
                timeout=REQUEST_SECONDS,
            ) as answer:
                return answer.read().decode("utf-8", errors="replace")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    return get


def watch_preemption(
    cloud: PreemptionNotice, request: Callable[[str, float], object], poll_seconds: float = POLL_SECONDS
) -> threading.Event:
    """Poll for preemption notices in a thread and request a stop when one arrives; do nothing if ``cloud`` is
    none.

    Args:
        request: ``StopRequest.request``.

    Returns:
        An event; setting it ends the polling.
    """
    ended = threading.Event()
    if cloud is PreemptionNotice.none:
        return ended
    get, poll = (
        metadata_client(os.environ.get("TOOLKIT_METADATA_URL", METADATA_URLS[cloud]).rstrip("/")),
        POLLERS[cloud],
    )

    def run() -> None:
        failing = False
        while not ended.wait(poll_seconds):
            try:
                preemption = poll(get, time.time())
                failing = False
            except Exception as error:  # noqa: BLE001  request errors and unexpected responses; keep polling
                if not failing:
                    log.warning(
                        "cannot read preemption notices from %s (cluster.notice): %s: %s; will keep trying",
                        cloud.value,
                        type(error).__name__,
                        error,
                    )
                failing, preemption = True, None
            if preemption is not None:
                log.warning("%s: stopping the run, %.0f s left", preemption.reason, preemption.seconds)
                request(preemption.reason, preemption.seconds)
                return

    threading.Thread(target=run, name="notice", daemon=True).start()
    return ended
