"""The word of a cloud that it will take this machine away, asked for every few seconds where ``cluster.notice`` names the cloud.

Each cloud answers machines on an address of their own, which no other network sees:

    gce     GET /computeMetadata/v1/instance/preempted            TRUE or FALSE; then there are about 30 s
            (Google Cloud, "Create and use Spot VMs", section on preemption)
    aws     PUT /latest/api/token, then GET /latest/meta-data/spot/instance-action
            404, or {"action": "terminate", "time": "2017-09-18T08:22:00Z"}, two minutes before
            (Amazon EC2, "Spot Instance interruption notices")
    azure   GET /metadata/scheduledevents?api-version=2020-07-01  {"Events": [{"EventType": "Preempt", "Resources": ["vm"],
            "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"}]}, half a minute before at least; of all machines of a group, so the own
            name is asked for first (Azure, "Scheduled Events for Linux VMs")

``TOOLKIT_METADATA_URL`` puts another server in the place of the cloud's, as tests do. No proxy is asked.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from toolkit.config.cluster import PreemptionNotice

POLL_SECONDS = 5.0
ANSWER_SECONDS = 10.0
GCE_SECONDS = 30.0
LEAST_SECONDS = 5.0  # also where the moment that was told is over: the machine still runs
TOKEN_SECONDS = 21600
BASES = {
    PreemptionNotice.gce: "http://metadata.google.internal",
    PreemptionNotice.aws: "http://169.254.169.254",
    PreemptionNotice.azure: "http://169.254.169.254",
}
LEAVES = (
    "Preempt",
    "Terminate",
    "Reboot",
    "Redeploy",
)  # of Azure's events, those after which nothing runs here

Get = Callable[
    [str, str, Mapping[str, str]], str | None
]  # (method, path, headers) -> the answer's text; None: 404


@dataclass(frozen=True, slots=True)
class Taken:
    """``seconds`` are left, by what the cloud says or promises."""

    words: str
    seconds: float


def gce(get: Get, now: float) -> Taken | None:
    preempted = get("GET", "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return (
        Taken("Google Cloud preempts this machine", GCE_SECONDS)
        if preempted is not None and preempted.strip() == "TRUE"
        else None
    )


def aws(get: Get, now: float) -> Taken | None:
    token = get("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)})
    text = get("GET", "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token or ""})
    if text is None:
        return None
    told = json.loads(text)
    at = datetime.fromisoformat(told["time"].replace("Z", "+00:00"))
    return Taken(
        f"AWS will {told['action']} this machine at {told['time']}", max(LEAST_SECONDS, at.timestamp() - now)
    )


def azure(get: Get, now: float) -> Taken | None:
    own = get(
        "GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text", {"Metadata": "true"}
    )
    text = get("GET", "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    for event in json.loads(text or "{}").get("Events", ()):
        if event["EventType"] in LEAVES and own in event["Resources"]:
            # A moment that has come already is an empty text.
            at = (
                parsedate_to_datetime(event["NotBefore"]).replace(tzinfo=UTC).timestamp()
                if event.get("NotBefore")
                else now
            )
            return Taken(
                f"Azure announces {event['EventType']} for this machine", max(LEAST_SECONDS, at - now)
            )
    return None


CLOUDS: Mapping[PreemptionNotice, Callable[[Get, float], Taken | None]] = {
    PreemptionNotice.gce: gce,
    PreemptionNotice.aws: aws,
    PreemptionNotice.azure: azure,
}


def server(base: str) -> Get:
    """Asks ``base``. Raises OSError where it does not answer, or with anything but a text or a 404."""
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(method: str, path: str, headers: Mapping[str, str]) -> str | None:
        try:
            with opener.open(
                urllib.request.Request(base + path, headers=dict(headers), method=method),
                timeout=ANSWER_SECONDS,
            ) as answer:
                return answer.read().decode("utf-8", errors="replace")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    return get


def watch(
    cloud: PreemptionNotice, request: Callable[[str, float], object], poll_seconds: float = POLL_SECONDS
) -> threading.Event:
    """From now on and in a thread: a notice is a request to stop. Nothing is asked where ``cloud`` is none.

    Args:
        request: ``StopRequest.request``.

    Returns:
        Set, it ends the asking.
    """
    ended = threading.Event()
    if cloud is PreemptionNotice.none:
        return ended
    get, ask = server(os.environ.get("TOOLKIT_METADATA_URL", BASES[cloud]).rstrip("/")), CLOUDS[cloud]

    def look() -> None:
        silent = False
        while not ended.wait(poll_seconds):
            try:
                found = ask(get, time.time())
                silent = False
            except Exception as error:  # noqa: BLE001  no answer, or one of another form: told, and asking goes on
                if not silent:
                    print(
                        f"no notice can be had of {cloud.value} (cluster.notice): {type(error).__name__}: {error}; asking goes on",
                        file=sys.stderr,
                        flush=True,
                    )
                silent, found = True, None
            if found is not None:
                print(
                    f"{found.words}: {found.seconds:.0f} s are left, and the run stops",
                    file=sys.stderr,
                    flush=True,
                )
                request(found.words, found.seconds)
                return

    threading.Thread(target=look, name="notice", daemon=True).start()
    return ended
