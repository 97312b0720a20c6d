"""Running the doctor's checks: timeouts, reports of several machines, and clocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import NoReturn, cast

import pytest

from toolkit.cluster.doctor import clocks, disk, host
from toolkit.cluster.doctor.preflight import CHECKS, MachinesTimedOut, gather_reports, run_checks
from toolkit.cluster.doctor.timeout import TimedResult, call_with_timeout
from toolkit.cluster.doctor.types import (
    CheckFinding,
    CheckVerdict,
    DoctorCheck,
    MachineReport,
    RunRequirements,
    fail,
    ok,
)
from toolkit.cluster.world.environment import Launch
from toolkit.cluster.world.rendezvous import Rendezvous
from toolkit.config.schema import EngineName
from toolkit.plan.types import Device

NEED = RunRequirements(
    device=Device.CPU,
    engine=EngineName.local,
    ranks=1,
    ranks_per_node=1,
    nodes=1,
    run_dir=Path("runs/x"),
    checkpoint_bytes=1,
    keep_checkpoints=2,
    grace_seconds=60,
    host_bytes=1,
    device_bytes=None,
)


def broken() -> NoReturn:
    raise OSError("Stale file handle")


def test_timed_call_returns_value_or_problem() -> None:
    assert call_with_timeout(lambda: {"a": [1, None]}, 5) == TimedResult({"a": [1, None]})
    assert call_with_timeout(broken, 5) == TimedResult(problem="OSError: Stale file handle")
    assert call_with_timeout(lambda: os._exit(3), 5) == TimedResult(problem="the child process ended with 3")
    assert (
        call_with_timeout(lambda: os.kill(os.getpid(), signal.SIGKILL), 5).problem
        == "the child process ended with -9"
    )
    assert len(call_with_timeout(lambda: "x" * 300_000, 5).value) == 300_000  # more than a pipe buffers


def test_hanging_call_is_killed() -> None:
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = set(path.read_text().split())
    began = time.monotonic()
    assert call_with_timeout(lambda: time.sleep(60), 0.3).timed_out
    assert time.monotonic() - began < 5
    for _ in range(100):  # killed, and reaped here
        left = set(path.read_text().split()) - before
        if all(_gone(int(pid)) for pid in left):
            return
        time.sleep(0.05)
    raise AssertionError(left)


def _gone(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid


LEFT_BEHIND = """
import os, time
from toolkit.cluster.doctor.timeout import call_with_timeout
os.kill = lambda *_: None  # as if it hung in the kernel
print(call_with_timeout(lambda: time.sleep(20), 0.3).timed_out)
"""


def test_abandoned_process_does_not_block_output_pipe() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=15, check=True
    )
    assert done.stdout.strip() == "True"


def test_hanging_disk_measurement_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: time.sleep(60))
    assert call_with_timeout(partial(disk.measure, replace(NEED, run_dir=tmp_path)), 0.4).timed_out
    assert not list(tmp_path.iterdir())


ABOVE = """
from toolkit.cluster.doctor.timeout import call_with_timeout
from toolkit.cluster.doctor.software import measure_arguments
print(*call_with_timeout(lambda: measure_arguments(None), 10).value, sep="\\n")
"""


def test_secrets_of_parent_commands_are_reported_once() -> None:
    inner = [sys.executable, "-c", ABOVE, "HF_TOKEN=hf_" + "a" * 34]
    outer = ["sh", "-c", '"$@"; true', "sh", *inner, "data.path=https://user:word@host/x"]
    done = subprocess.run(outer, capture_output=True, text=True, timeout=60, check=True)
    found = sorted(
        line.rpartition(" of ")[0] + (" of this command" if line.endswith("this command") else "")
        for line in done.stdout.splitlines()
    )
    kinds = ("a Hugging Face token", "a password in a URL")
    assert found == sorted(
        f"{kind} in the command line{whose}" for kind in kinds for whose in ("", " of this command")
    )
    assert "word" not in done.stdout.replace("password", "")


def assess(facts: str, requirements: RunRequirements) -> Iterator[CheckFinding]:
    yield ok(facts) if facts == "well" else fail(facts, "fix it")


CHECK = DoctorCheck(
    name="one",
    how="by asking",
    measure=lambda requirements: "well",
    assess=assess,
    seconds=5,
    hang_remedy="restart the server",
    traits=lambda facts: {"one": facts},
)


def test_checks_run_concurrently_despite_a_hanging_one() -> None:
    slow = replace(CHECK, measure=lambda requirements: time.sleep(0.5) or "well")
    hang_verdict = replace(CHECK, name="nfs", measure=lambda requirements: time.sleep(60), seconds=0.7)
    began = time.monotonic()
    report = run_checks(
        NEED,
        3,
        [
            hang_verdict,
            *[slow] * 4,
            replace(CHECK, measure=lambda requirements: broken()),
            replace(CHECK, measure=lambda requirements: "ill"),
        ],
    )
    assert time.monotonic() - began < 5  # sequentially, this would take at least four seconds
    assert [finding.verdict for finding in report.findings] == [
        CheckVerdict.FAIL,
        *[CheckVerdict.OK] * 4,
        CheckVerdict.WARN,
        CheckVerdict.FAIL,
    ]
    assert report.findings[0] == CheckFinding(
        CheckVerdict.FAIL, "no answer within 0.7 s", "restart the server", "nfs", "by asking"
    )
    assert "Stale file handle" in report.findings[5].evidence
    assert report.findings[6].remedy == "fix it"
    assert (report.node, report.traits) == (3, {"one": "ill"})


def test_every_check_succeeds_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_BYTES", 2 * disk.BLOCK_BYTES)
    report = run_checks(replace(NEED, run_dir=tmp_path, serves_port=0))
    assert {finding.check for finding in report.findings} == {check.name for check in CHECKS}
    assert not [finding for finding in report.findings if "the check failed" in finding.evidence]
    assert {"torch", "deepspeed", "GPUs", "driver"} <= report.traits.keys()
    assert host.measure_memory(NEED).available_bytes <= host.measure_memory(NEED).total_bytes


# ---- several machines


class Messages:
    """A rendezvous as seen by rank 0, which never waits."""

    def __init__(self, **text: object) -> None:
        self.messages = dict(text)

    def publish(self, name: str, message: object) -> None:
        self.messages[name] = message

    def receive(self, *names: str, seconds: float) -> list[object]:
        if not self.messages.keys() >= set(names):
            raise TimeoutError(names)
        return [self.messages[name] for name in names]


def test_missing_machine_is_named_and_other_reports_are_kept() -> None:
    own, other = (
        MachineReport(node=node, host=f"node{node}", findings=(ok("fine"),), traits={}) for node in (0, 2)
    )
    meeting = cast(Rendezvous, Messages(**{"doctor/machine/2": other.to_json()}))
    launch = Launch(ranks=6, ranks_per_node=2)
    with pytest.raises(
        MachinesTimedOut, match=r"machine 1 of 3 \(from 0\) has not reported within 9 s"
    ) as caught:
        gather_reports(own, launch, meeting, 9)
    assert caught.value.reports == [own, other]
    meeting.publish("doctor/machine/1", replace(other, node=1).to_json())
    assert [item.node for item in gather_reports(own, launch, meeting, 9)] == [0, 1, 2]
    assert gather_reports(own, replace(launch, rank=2), meeting, 9) == []


# ---- clocks


class Store:
    """A store within one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not all(key in self._values for key in keys):
            if time.monotonic() > deadline:
                raise TimeoutError(keys)
            time.sleep(0.0005)


@pytest.mark.parametrize("skew", [0.0, 2.5, -700.0])
def test_wrong_clock_is_detected(skew: float) -> None:
    store = Store()
    with ThreadPoolExecutor(1) as threads:
        message = threads.submit(clocks.serve_time, store, 1)
        found = clocks.measure_offset(store, 1, lambda: time.time() + skew)
        message.result(10)
    assert found.seconds == pytest.approx(skew, abs=found.error_seconds + 1e-3)
    assert 0 < found.error_seconds < 1


def test_fastest_clock_round_counts() -> None:
    """Clock readings of the requester with rounds of 0.8, 0.1, 0.8 s ...; the first machine's clock stays at
    100.
    """
    spans = [0.8, 0.1, 0.8, 0.8, 0.8]
    times: Queue[float] = Queue()
    for span in spans:
        times.put(110.0)
        times.put(110.0 + span)
    store = Store()
    for turn in range(clocks.ROUNDS):
        store.set(f"clock/1/{turn}/time", "100.0")
    found = clocks.measure_offset(store, 1, times.get_nowait)
    assert (found.seconds, found.error_seconds) == (pytest.approx(10.05), pytest.approx(0.05))
    with pytest.raises(Empty):
        times.get_nowait()


def test_first_clock_round_has_a_longer_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "ANSWER_SECONDS", 0.5)
    store = Store()
    with ThreadPoolExecutor(1) as threads:
        asks = threads.submit(clocks.measure_offset, store, 1)
        time.sleep(0.8)
        clocks.serve_time(store, 1)
        assert asks.result(10).error_seconds < 1


def test_clock_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "ANSWER_SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        clocks.serve_time(Store(), 1)
