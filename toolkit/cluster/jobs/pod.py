"""Entry point of a job's pods: run the node's launcher and report the outcome of the run to Kubernetes.

    python -m toolkit.cluster.jobs.pod --config=/etc/toolkit/config.yaml             single node
    python -m toolkit.cluster.jobs.pod --config=FILE --meet=HOST:PORT --ranks=8      several nodes

A job of one node uses the supervisor, a job of several uses torchrun with its rendezvous on the first pod.
Their exit codes are not specific enough, so the pod's exit code is derived from the run's status.json, which
all pods read from the volume of the run directory: 0 done; 2 a restart would not help; 75 restart; 1 restart,
counted because nothing was gained. The rules of cluster/jobs/backends/kubernetes.py act on these codes.

The pods of an elastic job (``cluster.min_nodes``) meet at a pod of their own, the rendezvous server. If only
this node has left the run, the pod ends with 3 and is replaced, while the others continue.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.cluster.jobs.job import FROZEN
from toolkit.cluster.jobs.rendezvous_server import is_open
from toolkit.cluster.jobs.requeue import (
    SETTLE_SECONDS,
    JobBaseline,
    JobOutcome,
    NextAction,
    RequeueDecision,
    StopSignal,
    decide_requeue,
    read_baseline,
    wait_for_outcome,
)
from toolkit.cluster.world.node_range import NO_AGENT_STORE, RENDEZVOUS_TIMES, agent_restarts, job_node_range
from toolkit.commands import python_arguments
from toolkit.config.schema import RunConfig
from toolkit.errors import ExitCode, UserError

TRAIN = "toolkit.launch.train"
LEFT_RUN = 3  # exit code of a pod whose node has left an elastic run
LAUNCHER_EXIT_SECONDS = 15  # time for a launcher to end after the grace period of its ranks
# Without gang scheduling, some pods wait for nodes or images while others already run.
MAX_RENDEZVOUS_SECONDS = 1800
PROBE_SECONDS = 2.0


class PodLauncher:
    """The process that starts this node's ranks. It has its own session, so each signal reaches it once."""

    def __init__(self) -> None:
        self.stop_signal = StopSignal.NONE
        self._number: int | None = None  # the signal, until it is forwarded
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle_signal)

    def _handle_signal(self, number: int, _: object) -> None:
        if self.stop_signal is StopSignal.NONE:
            self.stop_signal, self._number = (
                StopSignal.TERM if number == signal.SIGTERM else StopSignal.INT,
                number,
            )
            self._forward_signal()

    def _forward_signal(self) -> None:
        if self._process is not None and self._number is not None:
            number, self._number = self._number, None
            self._process.send_signal(number)

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run ``command`` and return its exit code; return STOPPED if a stop was requested before it
        started.
        """
        if self.stop_signal is not StopSignal.NONE:
            return ExitCode.STOPPED
        self._process = subprocess.Popen(command, env=dict(environ), start_new_session=True)
        self._forward_signal()  # a signal that arrived just before the start
        return self._process.wait()

    def wait_for(self, rendezvous_address: str, seconds: float = MAX_RENDEZVOUS_SECONDS) -> None:
        """Wait until ``rendezvous_address`` accepts connections, for at most ``seconds``: torchrun itself
        gives up after a minute.
        """
        host, _, port = rendezvous_address.rpartition(":")
        until = time.monotonic() + seconds
        while self.stop_signal is StopSignal.NONE and time.monotonic() < until:
            try:
                socket.create_connection((host, int(port)), timeout=PROBE_SECONDS).close()
            except OSError:  # the name does not resolve yet, or nothing listens yet
                time.sleep(PROBE_SECONDS / 4)
            else:
                return


def build_command(
    config: RunConfig, config_file: str, *, rendezvous_address: str | None, ranks: int, index: int, id: str
) -> list[str]:
    """Build the command that launches this node's ranks.

    Args:
        rendezvous_address: HOST:PORT of the rendezvous, served by the first pod, or by a pod of its own in an
            elastic job; None: the job has one node.
        ranks: number of ranks on this node.
        index: index of this pod in the job.
        id: identifies this start of the job, so that leftovers of an earlier one cannot join.
    """
    train = [*python_arguments(TRAIN), f"{FROZEN}{config_file}"]
    if rendezvous_address is None:
        return [sys.executable, "-u", *train]
    nodes = job_node_range(config.cluster)
    # torchrun would compare its host name with the address, which also contains the network's name.
    settings = [f"is_host={int(index == 0 and nodes is None)}", f"join_timeout={MAX_RENDEZVOUS_SECONDS}"]
    return [
        sys.executable,
        "-u",
        "-m",
        "torch.distributed.run",
        *(
            [f"--nnodes={config.cluster.nodes}", f"--node-rank={index}"]
            if nodes is None
            else [f"--nnodes={nodes}"]
        ),
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous_address}",
        f"--rdzv-id={id}",
        f"--rdzv-conf={','.join(settings if nodes is None else [*settings, RENDEZVOUS_TIMES])}",
        f"--max-restarts={agent_restarts(config.cluster)}",
        *train,
    ]


def run_continues_without_node(decision: RequeueDecision, rendezvous_is_open: bool | None) -> bool:
    """Return whether an elastic run continues without this node.

    Args:
        decision: about the run, as if it had ended.
        rendezvous_is_open: agents may still start ranks; None: the rendezvous does not answer, so that no
            agent can.
    """
    final = decision.next is NextAction.END and decision.code is not ExitCode.FAILURE
    return not final and rendezvous_is_open is True


def choose_exit_code(decision: RequeueDecision, outcome: JobOutcome, before: JobBaseline) -> ExitCode:
    """Return the exit code that Kubernetes acts on."""
    if decision.next is NextAction.REQUEUE:
        return ExitCode.FAILURE if decision.fruitless else ExitCode.STOPPED
    # the pods did not meet; a restart may help
    if decision.code is ExitCode.FAILURE and outcome.attempt <= before.attempt:
        return ExitCode.FAILURE
    return ExitCode.DONE if decision.code is ExitCode.DONE else ExitCode.USER


def main(arguments: Sequence[str]) -> int:
    from toolkit.config.compose import from_yaml

    parser = argparse.ArgumentParser(prog="python -m toolkit.cluster.jobs.pod")
    parser.add_argument("--config", required=True)
    parser.add_argument("--meet")
    parser.add_argument("--ranks", type=int, default=0)
    given = parser.parse_args(arguments)
    launcher = PodLauncher()
    try:
        config = from_yaml(Path(given.config).read_text(encoding="utf-8"))
    except UserError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    assert config.run.dir is not None, "a frozen configuration has its directory"
    run_dir = Path(config.run.dir)
    index, start = int(os.environ.get("JOB_COMPLETION_INDEX", "0")), os.environ.get("JOBSET_RESTART") or "0"
    before = read_baseline(run_dir)
    elastic = job_node_range(config.cluster) is not None
    if given.meet is not None and (index > 0 or elastic):
        launcher.wait_for(given.meet)
    leave = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(config.cluster.grace_seconds + LAUNCHER_EXIT_SECONDS)
    }  # the default of torchrun is 30 s
    if elastic:
        name, _, value = NO_AGENT_STORE.partition("=")
        leave[name] = value
    id = f"start-{start}"
    command = build_command(
        config, given.config, rendezvous_address=given.meet, ranks=given.ranks, index=index, id=id
    )
    code = launcher.run(command, os.environ | leave)
    # On a single node the supervisor has written the final status before it ended.
    outcome = wait_for_outcome(
        run_dir, before, launcher.stop_signal, code, SETTLE_SECONDS if given.meet is not None else 0.0
    )
    decision = decide_requeue(before, outcome, restarts=config.cluster.restarts, requeue=True)
    if elastic and run_continues_without_node(decision, is_open(given.meet, id)):
        print(f"pod {index} has left the run, which continues without it", flush=True)
        return LEFT_RUN
    print(f"pod {index}, start {start} of the job: {decision.why}", flush=True)
    return choose_exit_code(decision, outcome, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
