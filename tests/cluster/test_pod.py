"""A pod's exit code depends on status.json and not on its launcher's exit code."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from toolkit.cluster.jobs import pod
from toolkit.cluster.jobs.pod import LEFT_RUN
from toolkit.cluster.jobs.requeue import JobBaseline, JobOutcome, StopSignal, decide_requeue
from toolkit.config.cluster import ClusterBackend, ClusterConfig
from toolkit.config.compose import to_yaml
from toolkit.config.schema import RunConfig, RunSection
from toolkit.errors import ExitCode
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

# A fake launcher. argv: run directory, state, reason, checkpoint step (or -), exit code.
FAKE = """
import json, pathlib, signal, sys, time
folder, state, reason, step, code = sys.argv[1:]
folder = pathlib.Path(folder)
if state == "wait":
    caught = []
    signal.signal(signal.SIGTERM, lambda *_: caught.append(1))
    (folder / "ready").touch()
    while not caught:
        time.sleep(0.05)
    time.sleep(0.3)  # a second signal would come now
    state, reason = "stopped", f"SIGTERM x{len(caught)}"
number = len(list((folder / "attempts").iterdir())) + 1 if (folder / "attempts").is_dir() else 1
if state != "none":
    (folder / "attempts" / f"{number:03d}").mkdir(parents=True)
    if step != "-":
        (folder / "checkpoints" / step).mkdir(parents=True)
        (folder / "checkpoints" / step / "manifest.json").touch()
    (folder / "status.json").write_text(json.dumps({"state": state, "attempt": number, "reason": reason}))
sys.exit(int(code))
"""


def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    *,
    reason: str = "",
    step: str = "-",
    code: int = 1,
    cluster: ClusterConfig | None = None,
) -> int:
    config = tmp_path / "config.yaml"
    config.write_text(
        to_yaml(
            RunConfig(
                run=RunSection(dir=str(tmp_path)),
                cluster=cluster or ClusterConfig(where=ClusterBackend.kubernetes, nodes=2),
            )
        )
    )
    monkeypatch.setattr(
        pod,
        "build_command",
        lambda *_, **__: [sys.executable, "-c", FAKE, str(tmp_path), state, reason, step, str(code)],
    )
    monkeypatch.setattr(pod, "SETTLE_SECONDS", 0.0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return pod.main([f"--config={config}", "--meet=a:1", "--ranks=1"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("state", "reason", "step", "launcher", "code"),
    [
        ("done", "", "step-00000001", 1, ExitCode.DONE),  # torchrun failed while stopping
        ("refused", "a mistake", "-", 1, ExitCode.USER),  # torchrun turns each code into 1
        ("stopped", "SIGTERM", "step-00000001", 1, ExitCode.STOPPED),
        ("stopped", "budget.usd=5: 4.9 are used", "step-00000001", 1, ExitCode.USER),
        ("stopped", "SIGINT", "step-00000001", 1, ExitCode.USER),  # stopped by the user: not restarted
        (
            "failed",
            "out of memory",
            "step-00000001",
            1,
            ExitCode.STOPPED,
        ),  # with a newer checkpoint: not counted
        ("failed", "out of memory", "-", 1, ExitCode.USER),  # its launcher has used all restarts
        ("running", "", "-", 0, ExitCode.FAILURE),  # the first rank died without a status: counted
        ("none", "", "-", 2, ExitCode.USER),  # refused by the supervisor before an attempt began
        ("none", "", "-", 1, ExitCode.FAILURE),  # the pods did not meet: counted
    ],
)
def test_pod_exit_code_follows_run_status(
    state: str,
    reason: str,
    step: str,
    launcher: int,
    code: ExitCode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(tmp_path, monkeypatch, state, reason=reason, step=step, code=launcher) == code


def test_checkpoint_of_earlier_start_is_not_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, monkeypatch, "failed", step="step-00000001") == ExitCode.STOPPED
    assert run(tmp_path, monkeypatch, "failed") == ExitCode.USER


def test_status_of_earlier_start_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, monkeypatch, "refused") == ExitCode.USER
    assert run(tmp_path, monkeypatch, "none") == ExitCode.FAILURE  # control: 2 if the old status were used


@pytest.mark.parametrize(
    ("asked", "code"),
    [(StopSignal.TERM, ExitCode.FAILURE), (StopSignal.NONE, ExitCode.USER)],  # counted; the control
)
def test_pod_that_had_no_time_to_save_is_restarted(asked: StopSignal, code: ExitCode) -> None:
    before = JobBaseline(attempt=1, checkpoint="step-00000001")
    outcome = JobOutcome(
        asked=asked,
        code=1,
        attempt=2,
        state=RunState.FAILED,
        reason="rank 0 did not end in time after the stop and was killed (cluster.grace_seconds)",
        checkpoint=before.checkpoint,
    )
    decision = decide_requeue(before, outcome, restarts=3, requeue=True)
    assert pod.choose_exit_code(decision, outcome, before) is code


def test_pod_waits_for_final_status(tmp_path: Path) -> None:
    """A rank of another pod writes it, and the file system shows it later."""
    directory = RunDirectory(tmp_path)
    directory.attempt_folder(1).mkdir(parents=True)
    directory.write_status(Status(state=RunState.RUNNING, attempt=1))
    late = threading.Timer(0.4, lambda: directory.write_status(Status(state=RunState.DONE, attempt=1)))
    late.start()
    assert (
        pod.wait_for_outcome(tmp_path, JobBaseline(), StopSignal.NONE, 1, seconds=20).state is RunState.DONE
    )
    late.join()
    directory.write_status(Status(state=RunState.RUNNING, attempt=1))
    began = time.monotonic()
    assert (
        pod.wait_for_outcome(tmp_path, JobBaseline(), StopSignal.NONE, 1, seconds=0.3).state
        is RunState.RUNNING
    )
    assert time.monotonic() - began < 25


def test_signal_is_forwarded_once(tmp_path: Path) -> None:
    """Even if the whole process group gets the signal, as from ``tini -g``: torchrun abandons its ranks at a
    second one.
    """
    program = (
        f"import sys, pathlib\nfrom toolkit.cluster.jobs import pod\nlauncher = pod.PodLauncher()\n"
        f"arguments = ['-c', {FAKE!r}, {str(tmp_path)!r}, 'wait', '', '-', '75']\n"
        "code = launcher.run([sys.executable, *arguments], {})\n"
        "print(launcher.stop_signal, code)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert out.split() == ["TERM", "75"]
    status = RunDirectory(tmp_path).status()
    assert status is not None
    assert status.reason == "SIGTERM x1"


def test_pod_waits_for_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pod may wait for its node or image; a stop request ends the waiting."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(pod, "PROBE_SECONDS", 0.4)
    launcher = pod.PodLauncher()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        launcher.wait_for(meet, seconds=0.3)  # nothing listens
        assert 0.3 <= time.monotonic() - began < 30
        late = threading.Timer(0.3, server.listen)
        late.start()
        began = time.monotonic()
        launcher.wait_for(meet, seconds=30)
        assert 0.2 <= time.monotonic() - began < 25
        late.join()
    launcher.stop_signal = StopSignal.TERM
    began = time.monotonic()
    launcher.wait_for("host.invalid:1", seconds=30)
    assert time.monotonic() - began < 25
    assert launcher.run(["/nowhere"], {}) == ExitCode.STOPPED


def test_single_node_uses_supervisor_and_several_use_torchrun() -> None:
    config = RunConfig(cluster=ClusterConfig(where=ClusterBackend.kubernetes, nodes=4, restarts=5))
    alone = pod.build_command(config, "/c.yaml", rendezvous_address=None, ranks=0, index=0, id="1")
    assert alone == [sys.executable, "-u", "-m", "toolkit.launch.train", "--frozen=/c.yaml"]
    assert find_spec("toolkit.launch.train") is not None
    first, last = (
        pod.build_command(config, "/c.yaml", rendezvous_address="h:29400", ranks=8, index=index, id="start-1")
        for index in (0, 3)
    )
    assert first[-3:] == last[-3:] == alone[-3:]
    assert {
        "--nnodes=4",
        "--nproc-per-node=8",
        "--rdzv-endpoint=h:29400",
        "--rdzv-id=start-1",
        "--max-restarts=5",
    } < set(first)
    assert set(first) - set(last) == {"--node-rank=0", "--rdzv-conf=is_host=1,join_timeout=1800"}
    assert set(last) - set(first) == {"--node-rank=3", "--rdzv-conf=is_host=0,join_timeout=1800"}


ELASTIC = RunConfig(
    cluster=ClusterConfig(where=ClusterBackend.kubernetes, nodes=4, min_nodes=2, spare_nodes=1, restarts=5)
)


def test_agents_of_elastic_pods_are_clients_with_a_range_of_nodes() -> None:
    words = pod.build_command(
        ELASTIC, "/c.yaml", rendezvous_address="server:29400", ranks=8, index=0, id="start-0"
    )
    assert {
        "--nnodes=2:4",
        "--max-restarts=8",
        "--rdzv-conf=is_host=0,join_timeout=1800,keep_alive_interval=2,last_call_timeout=10",
    } < set(words)
    assert not any(word.startswith("--node-rank") for word in words)


@pytest.mark.parametrize(
    ("state", "reason", "is_open", "code"),
    [
        ("running", "", True, LEFT_RUN),  # evicted, or its agent was killed
        ("stopped", "node 1 left the run", True, LEFT_RUN),  # between two attempts
        ("failed", "lost a node", True, LEFT_RUN),
        ("done", "", True, ExitCode.DONE),
        ("refused", "a mistake", True, ExitCode.USER),
        ("stopped", "SIGTERM", False, ExitCode.STOPPED),
        ("running", "", None, ExitCode.FAILURE),  # the server was lost, so the run has ended
    ],
)
def test_pod_that_leaves_an_elastic_run_is_replaced_alone(
    state: str, reason: str, is_open: bool | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod, "is_open", lambda *_: is_open)
    monkeypatch.setattr(pod.PodLauncher, "wait_for", lambda *_: None)
    assert run(tmp_path, monkeypatch, state, reason=reason, cluster=ELASTIC.cluster) == code
