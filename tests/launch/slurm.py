"""A Slurm cluster for tests: munged, slurmctld and three slurmd on loopback, in the test's folder.

    with loopback_slurm(folder) as slurm:
        slurm.run("sinfo")

Several slurmd on one host need a Slurm that was built for it, like Debian's (``--enable-multiple-slurmd``).
Needs root, since slurmd runs jobs of any user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.waiting import wait_until
from toolkit.testing.dist import find_free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol")
NODES = ("node1", "node2")  # of the partitions main and urgent
ASIDE = "node3"  # of the partition aside: for a slow job that runs next to others
EVERY = (*NODES, ASIDE)
START_SECONDS = 30.0

CONFIG = """\
ClusterName=loopback
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1
{nodes}
PartitionName=main Nodes={main} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes={main} MaxTime=INFINITE State=UP PriorityTier=2
PartitionName=aside Nodes={aside} MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=all Nodes={main},{aside} MaxTime=INFINITE State=UP PriorityTier=1
"""


def missing() -> str | None:
    """Return why Slurm cannot be started here; None: it can."""
    if os.geteuid() != 0:
        return "not root"
    absent = [name for name in (*DAEMONS, *COMMANDS) if shutil.which(name, path=_path()) is None]
    return (
        f"without {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
        if absent
        else None
    )


@dataclass(frozen=True)
class Slurm:
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))
        }
        return {**clean, "PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def job_state(self, job: str) -> str:
        """Return Slurm's state of the job: PENDING, RUNNING, ..."""
        found = self.run("scontrol", "--oneliner", "show", "job", job)
        return next(word.partition("=")[2] for word in found.split() if word.startswith("JobState="))

    def processes(self, node: str) -> list[psutil.Process]:
        """Return the processes of a node's tasks and batch scripts."""
        own = {"SLURMD_NODENAME": node, "SLURM_CONF": self.environ["SLURM_CONF"]}
        return [process for process in psutil.process_iter() if own.items() <= _environ(process).items()]

    def has_rank(self, node: str) -> bool:
        return any("LOCAL_RANK" in _environ(process) for process in self.processes(node))

    def process_names(self, node: str) -> set[str]:
        names = set()
        for process in self.processes(node):
            with suppress(psutil.NoSuchProcess):
                names.add(process.name())
        return names

    def lose_node(self, node: str) -> None:
        """Kill a node's slurmd and all processes of its jobs, and report the node as down, as Slurm itself
        does after SlurmdTimeout.
        """
        lost = self.processes(node)
        stepds = [parent for process in lost if (parent := process.parent()) and _is_stepd(parent)]
        daemons = [
            process
            for process in psutil.process_iter()
            if (words := _command_line(process))[:1] == ["slurmd"] and node in words
        ]
        for process in dict.fromkeys([*daemons, *stepds, *lost]):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _is_stepd(process: psutil.Process) -> bool:
    return _command_line(process)[:1] != [] and _command_line(process)[0].startswith("slurmstepd")


@contextmanager
def loopback_slurm(folder: Path, cores: int = 2) -> Iterator[Slurm]:
    """Start the daemons; at the end of the block each is ended by its PID, and its jobs with it."""
    slurm = Slurm(folder)
    for name in ("state", "munge"):
        (folder / name).mkdir(parents=True)
    host = os.uname().nodename.partition(".")[0]
    nodes = [
        (
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={find_free_port()} CPUs={cores} "
            "State=UNKNOWN"
        )
        for node in EVERY
    ]
    (folder / "slurm.conf").write_text(
        CONFIG.format(
            folder=folder, nodes="\n".join(nodes), main=",".join(NODES), aside=ASIDE, control=find_free_port()
        )
    )
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o600)
    config = str(folder / "slurm.conf")
    with ExitStack() as stack:
        own = folder / "munge"
        stack.enter_context(
            _daemon(
                slurm,
                "munge",
                [
                    "munged",
                    "--foreground",
                    "--force",
                    f"--socket={own}/socket",
                    f"--key-file={own}/key",
                    f"--log-file={own}/log",
                    f"--pid-file={own}/pid",
                    f"--seed-file={own}/seed",
                ],
            )
        )
        _wait_for(lambda: (own / "socket").exists(), "served by munged", slurm)
        stack.enter_context(_daemon(slurm, "slurmctld", ["slurmctld", "-D", "-f", config]))
        for node in EVERY:
            stack.enter_context(_daemon(slurm, node, ["slurmd", "-D", "-N", node, "-f", config]))
        _wait_for(lambda: _idle(slurm), "idle on every node", slurm)
        try:
            yield slurm
        finally:
            for words in (["--full", "--signal=KILL"], []):
                subprocess.run(
                    ["scancel", *words, "--user=root"],
                    env=slurm.environ,
                    capture_output=True,
                    timeout=60,
                    check=False,
                )
            time.sleep(1)


def _idle(slurm: Slurm) -> bool:
    words = ["sinfo", "--noheader", "--Node", "--partition=main,aside", "--format=%T"]
    shown = subprocess.run(words, env=slurm.environ, capture_output=True, text=True, timeout=60, check=False)
    return shown.stdout.split() == ["idle"] * len(EVERY)


@contextmanager
def _daemon(slurm: Slurm, name: str, argv: Sequence[str]) -> Iterator[None]:
    with (slurm.folder / f"{name}.out").open("wb") as output:
        process = subprocess.Popen(
            argv, env=slurm.environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=15)


def _wait_for(holds: Callable[[], bool], what: str, slurm: Slurm) -> None:
    def output() -> str:
        files = slurm.folder.glob("*.out")
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in files)

    wait_until(holds, START_SECONDS, what, output=output)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
