"""The pods of an elastic Kubernetes job, as processes with their own commands: a pod that is evicted leaves
the run, which continues in the other pod.

    pytest tests/launch/test_pod_eviction.py -m full
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.processes import ROOT, RunningCommand, read_status, send_signal
from tests.launch.test_elastic import (
    CHANGE_SECONDS,
    END_SECONDS,
    KEYS,
    START_SECONDS,
    Nodes,
    check_completed,
    train_unbroken,
)
from toolkit.cluster.jobs.pod import LEFT_RUN
from toolkit.config.compose import compose, to_yaml
from toolkit.errors import ExitCode
from toolkit.rundir.status import RunState

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

LENGTH = "train.steps=20"


class Pods(Nodes):
    """Pods that meet at a rendezvous server, which is another process. All read the same file."""

    def __init__(self, folder: Path, words: tuple[str, ...]) -> None:
        super().__init__(folder, words)
        self._config = folder / "config.yaml"
        self._config.write_text(to_yaml(compose([*KEYS, f"run.dir={self.run_dir}", *words])))

    @property
    def server(self) -> list[str]:
        return ["-m", "toolkit.cluster.jobs.rendezvous_server", str(self._port), "--id=start-0"]

    def start(self, address: str = "127.0.0.1", **environ: str) -> RunningCommand:
        index = len(self.started)
        folder = self._folder / f"pod-{index}"
        folder.mkdir()
        argv = [
            *(sys.executable, "-m", "toolkit.cluster.jobs.pod", f"--config={self._config}"),
            *(f"--meet=127.0.0.1:{self._port}", "--ranks=1"),
        ]
        ours = {
            "PYTHONPATH": str(ROOT),
            "TORCHDYNAMO_DISABLE": "1",
            "JOB_COMPLETION_INDEX": str(index),
            "PET_LOCAL_ADDR": address,  # the name of this machine need not resolve
        }
        self.started.append(RunningCommand(argv, self._folder, cwd=folder, environ={**ours, **environ}))
        return self.started[-1]


@contextmanager
def two_pods(folder: Path, data: Path) -> Iterator[Pods]:
    folder.mkdir()
    job = ("cluster=kubernetes", "cluster.gpus_per_node=0", "cluster.nodes=2", "cluster.min_nodes=1")
    pace = "+hooks.pace.target=tests.launch.paced_steps.PacedSteps"
    pods = Pods(folder, (f"data.path={data}", "zero=stage1", LENGTH, pace, *job))
    server = subprocess.Popen([sys.executable, *pods.server], cwd=ROOT)
    try:
        pods.start()
        pods.start()
        pods.wait_for_step(1, 3, START_SECONDS)
        yield pods
    finally:
        for pod in pods.started:
            pod.__exit__()
        server.kill()
        server.wait(timeout=10)


@pytest.mark.parametrize("evicted", [0, 1])
def test_evicted_pod_leaves_the_run_and_the_other_one_finishes_it(
    evicted: int, data: Path, tmp_path: Path
) -> None:
    unbroken = train_unbroken(tmp_path / "unbroken", data, LENGTH)
    with two_pods(tmp_path / "pods", data) as pods:
        gone, other = pods.started[evicted], pods.started[1 - evicted]
        send_signal(signal.SIGTERM, gone.process.pid)
        assert gone.wait_for_exit(CHANGE_SECONDS) == LEFT_RUN, pods.output
        assert "has left the run, which continues without it" in gone.output
        assert other.wait_for_exit(CHANGE_SECONDS + END_SECONDS) == ExitCode.DONE, pods.output
        assert pods.worlds == [2, 1]
        state, reason = pods.end_of(1)
        assert state == "stopped"
        assert reason is not None
        assert " left the run, which continues on the others: SIGTERM (on node " in reason
        assert pods.times(2).first == pods.times(1).step, "the ranks saved before the pod left"
        check_completed(pods, unbroken, len(unbroken))


def test_run_whose_pods_are_all_evicted_stops(data: Path, tmp_path: Path) -> None:
    """The control: JobSet then starts all pods again."""
    with two_pods(tmp_path / "pods", data) as pods:
        for pod in pods.started:
            send_signal(signal.SIGTERM, pod.process.pid)
        codes = [pod.wait_for_exit(END_SECONDS) for pod in pods.started]
        assert codes == [ExitCode.STOPPED] * 2, pods.output
        assert pods.worlds == [2]
        status = read_status(pods.run_dir)
        assert status is not None
        assert (status.state, status.exit_code) == (RunState.STOPPED, ExitCode.STOPPED)
        assert status.checkpoint is not None
