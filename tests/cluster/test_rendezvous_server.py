"""The rendezvous of elastic jobs has its own process, which no agent takes with it.

pytest tests/cluster/test_rendezvous_server.py
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.waiting import wait_until
from toolkit.cluster.jobs import rendezvous_server
from toolkit.cluster.jobs.rendezvous_server import connect, is_open
from toolkit.testing.dist import find_free_port


def test_server_ends_when_it_is_asked_to_and_the_agents_have_closed_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = find_free_port()
    endpoint = f"127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "toolkit.cluster.jobs.rendezvous_server", str(port), "--id=one"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert f"served at port {port}" in server.stdout.readline()
        agent = connect(endpoint, "one")
        assert is_open(endpoint, "one") is True
        server.terminate()
        time.sleep(1.0)
        assert server.poll() is None, "agents still need it"
        agent.set_closed()
        assert is_open(endpoint, "one") is False
        assert is_open(endpoint, "another") is True
        wait_until(lambda: server.poll() == 0, 60, "ended")
    finally:
        server.kill()
        server.wait()
    monkeypatch.setattr(rendezvous_server, "QUERY_SECONDS", 1)
    assert is_open(endpoint, "one") is None
