"""Jobs of Slurm: a batch script with one task a node, which starts itself again until ``status.json`` says that the run is done.

What sbatch is asked for stands in its argv and not in ``#SBATCH`` lines: those are read by a parser of Slurm's own, whose quotes
are not a shell's, and an argv needs none. Inside the script, texts of the user are quoted with ``shlex``.

The batch shell, not the tasks, is signalled before the time limit and, where the site's PreemptParameters have send_user_signal,
before preemption (``--signal=B:TERM@SECONDS`` of sbatch(1)). It has Slurm pass the signal on, waits for the tasks, and
leaves the rest to ``toolkit.cluster.requeue``, which reads status.json: exit codes of torchrun say too little. submitit, which could
write such scripts too, would start a pickled Python function in each task and requeue by its own signal handler there; the ranks
here have both already, and the frozen file can be read by people.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from toolkit.cluster.job import CONFIG_FILE, Job, JobId, JobState
from toolkit.config.cluster import ClusterBackend, ClusterConfig, SlurmConfig
from toolkit.errors import ConfigError, InputError, Problem

SCRIPT_FILE = "job.sh"
OUTPUT = "output.txt"
# Besides cluster.grace_seconds, in which the ranks save: launchers end after them, and the script decides what comes next.
END_SECONDS = 30
COMMAND_SECONDS = 120.0
MOST_SIGNAL_SECONDS = 65535  # sbatch(1): --signal's time is an integer of 16 bits
# Ports below those that Linux hands out by itself (ip_local_port_range: 32768 and up).
FIRST_PORT, PORTS = 20000, 10000

# States of squeue(1), section JOB STATE CODES; every other one is an end.
QUEUED = {
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
}
RUNNING = {"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"}

# What this file asks sbatch for by itself, and the key that decides it.
KEYS = {
    "job-name": "run.name",
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes",
    "ntasks-per-node": "cluster.cpu_ranks",
    "signal": "cluster.grace_seconds",
    "requeue": "cluster.slurm.requeue",
    "no-requeue": "cluster.slurm.requeue",
    "output": "run.dir",
    "chdir": "run.dir",
    "open-mode": "run.dir",
    "parsable": "run.dir",
    "account": "cluster.slurm.account",
    "partition": "cluster.slurm.partition",
    "qos": "cluster.slurm.qos",
    "time": "cluster.slurm.time",
    "priority": "cluster.slurm.priority",
    "constraint": "cluster.slurm.constraint",
    "exclude": "cluster.slurm.exclude",
    "reservation": "cluster.slurm.reservation",
    "cpus-per-task": "cluster.slurm.cpus_per_task",
    "mem": "cluster.slurm.memory",
}
GPU_OPTIONS = {
    "gres",
    "gpus",
    "gpus-per-node",
    "gpus-per-task",
}  # written by the user, they stand for --gres=gpu:N
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")


def render(job: Job) -> dict[str, str]:
    problems = list(_problems(job.config.cluster))
    if problems:
        raise ConfigError(*problems)
    return {CONFIG_FILE: job.yaml, SCRIPT_FILE: script(job)}


def argv(job: Job) -> list[str]:
    return ["sbatch", "--parsable", *options(job), str(job.folder / SCRIPT_FILE)]


def options(job: Job) -> list[str]:
    """What is asked of sbatch, in its long options. ``--chdir`` makes relative paths of the configuration mean what they meant here."""
    cluster, slurm = job.config.cluster, job.config.cluster.slurm
    asked: list[tuple[str, object]] = [
        ("job-name", job.name),
        ("nodes", job.world.nodes),
        ("ntasks-per-node", 1),
        (
            "gres",
            f"gpu:{cluster.gpus_per_node}"
            if cluster.gpus_per_node and not GPU_OPTIONS & slurm.options.keys()
            else None,
        ),
        ("cpus-per-task", slurm.cpus_per_task),
        ("mem", slurm.memory),
        ("time", slurm.time),
        ("account", slurm.account),
        ("partition", slurm.partition),
        ("qos", slurm.qos),
        ("priority", slurm.priority),
        ("constraint", slurm.constraint),
        ("exclude", slurm.exclude),
        ("reservation", slurm.reservation),
        ("signal", f"B:TERM@{cluster.grace_seconds + END_SECONDS}"),
        ("requeue" if slurm.requeue else "no-requeue", ""),
        ("open-mode", "append"),
        ("output", str(job.folder / OUTPUT).replace("%", "%%")),
        ("chdir", Path.cwd()),
        *slurm.options.items(),
    ]
    return [f"--{name}={value}" if value != "" else f"--{name}" for name, value in asked if value is not None]


def script(job: Job, python: str = sys.executable) -> str:
    """The batch script. Golden files: tests/golden/slurm.

    Args:
        python: the same on the nodes; ``cluster.slurm.setup`` may prepare what it needs.
    """
    cluster, slurm = job.config.cluster, job.config.cluster.slurm
    # A node that ended first leaves the others the time to save; and a task may use all cores of the job on its node, which srun
    # learns from sbatch no more since Slurm 22.05.
    srun = [
        f"--nodes={job.world.nodes}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        "--input=none",
        "--kill-on-bad-exit=0",
        f"--wait={cluster.grace_seconds + END_SECONDS}",
    ]
    if slurm.cpus_per_task is not None:
        srun.append(f"--cpus-per-task={slurm.cpus_per_task}")
    nodes = job.world.nodes
    parts = [
        "#!/bin/bash",
        f"# {job.name}, job {job.number}: one distributed training, one task a node ({nodes}). Made by launch/submit.py.",
        "",
        _ASKED,
        *(["# cluster.slurm.setup", *slurm.setup, ""] if slurm.setup else []),
        "set -uo pipefail",
        f"python={shlex.quote(python)}",
        f"folder={shlex.quote(str(job.folder))}",
        f"train=({_words(job.command())})",
        f"srun=({_words(srun)})",
        _ONE
        if nodes == 1
        else _SEVERAL.format(
            nodes=nodes,
            ranks=job.world.ranks_per_node,
            first=FIRST_PORT,
            ports=PORTS,
            restarts=cluster.restarts,
            leave=cluster.grace_seconds + END_SECONDS // 2,
        ),
        _RUN,
    ]
    return "\n".join(parts)


_ASKED = """\
asked=none  # by which signal this script was asked to end
ask() {
  asked=$1
  # srun itself answers SIGTERM by killing its tasks; Slurm passes it on.
  scancel --signal=TERM "$SLURM_JOB_ID"
}
trap 'ask TERM' TERM  # the time limit or a preemption is near: save, and go on later
trap 'ask INT' INT    # somebody stops the run: save, and that is all
"""

# One node: the parent starts the ranks, passes signals on, and starts them again (cluster.restarts).
_ONE = """\
task=("$python" -u "${train[@]}")
"""

# Several: torchrun on each. Which of them serves the rendezvous is said, since torchrun would compare its host's name with the address;
# and each gives away, for the case that the first rank is its own, the address by which Slurm itself reaches it: a node's name need not
# resolve on the others. (torchrun numbers nodes by address, so that the first rank may be on any.)
_SEVERAL = """\
addresses=" $(scontrol --oneliner show node "$SLURM_JOB_NODELIST" |
  sed -n 's/^NodeName=\\([^ ]*\\) .* NodeAddr=\\([^ ]*\\).*/\\1=\\2/p' | tr '\\n' ' ')"  # " n1=10.0.0.1 n2=10.0.0.2 "
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=${{addresses#* "$first"=}}
address=${{address%% *}}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={leave}  # what torchrun leaves its ranks to save in; else 30 s
# shellcheck disable=SC2016  # the task's own shell fills these in
node='own=${{1#* $SLURMD_NODENAME=}}; shift
export PET_LOCAL_ADDR=${{own%% *}} PET_RDZV_CONF=is_host=$((SLURM_NODEID == 0)); exec "$@"'
task=(bash -c "$node" node "$addresses" "$python" -u -m torch.distributed.run --nnodes={nodes} --nproc-per-node={ranks}
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="${{address:-$first}}:$(({first} + SLURM_JOB_ID % {ports}))"
  --max-restarts={restarts} "${{train[@]}}")
"""

_RUN = """\
code=75
if [ "$asked" = none ]; then
  srun "${srun[@]}" "${task[@]}" &
  step=$!
  while kill -0 "$step" 2>/dev/null; do  # a signal ends a wait, and not the tasks
    wait "$step"
    code=$?
  done
fi
trap '' TERM INT  # from here on it is decided, whoever asks
"$python" -m toolkit.cluster.requeue "$folder" --asked="$asked" --code="$code"
"""


def submit(job: Job) -> JobId:
    printed = _run(argv(job), clean(os.environ))
    return JobId(
        ClusterBackend.slurm, printed.strip().partition(";")[0]
    )  # --parsable: the number, with several clusters ;NAME


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that the job begins with, which is the submitting shell's: but for what a job around that shell, or a
    launcher, has set for itself. It would decide how srun and the ranks of the new job are started."""
    launcher = {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    return {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF"
        or not (name in launcher or name.startswith(("SLURM_", "SRUN_", "PMI", "PET_", "TORCHELASTIC_")))
    }


def state(id: JobId) -> JobState:
    """squeue forgets a job some minutes after its end, and then does not know its number."""
    found = _of_known_job("squeue", "--noheader", f"--jobs={id.id}", "--format=%T").split()
    if found and found[0] in QUEUED:
        return JobState.QUEUED
    return JobState.RUNNING if found and found[0] in RUNNING else JobState.ENDED


def cancel(id: JobId) -> None:
    _of_known_job("scancel", "--state=PENDING", id.id)
    if state(id) is not JobState.ENDED:
        _of_known_job("scancel", "--batch", "--signal=INT", id.id)  # the script's own word for a stop


def _of_known_job(*command: str) -> str:
    """What it prints; nothing where Slurm no longer knows the job."""
    try:
        return _run(command)
    except InputError as error:
        if "Invalid job id" not in str(error):
            raise
        return ""


def _run(command: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    seen = shlex.join(command)
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except FileNotFoundError:
        raise InputError(
            Problem(
                "cluster",
                f"{command[0]} is not here",
                "cluster=slurm talks to Slurm by its own commands",
                "submit from a login node of the cluster; dry_run=true works anywhere",
            )
        ) from None
    except subprocess.TimeoutExpired:
        raise InputError(
            Problem(
                "cluster",
                f"{seen} took more than {COMMAND_SECONDS:g} s",
                "Slurm answers",
                "look at it with: scontrol ping",
            )
        ) from None
    if done.returncode:
        raise InputError(
            Problem(
                "cluster",
                f"{seen}: {done.stderr.strip() or f'exit code {done.returncode}'}",
                "Slurm accepts the command",
                "change what it names; launch/submit.py dry_run=true shows all of it",
            )
        )
    return done.stdout


def _words(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def limit_seconds(time: str) -> int | None:
    """Slurm's forms of a time limit: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S (sbatch(1), --time). None: it is none of them."""
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    numbers = [int(number) for number in match["rest"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def _problems(cluster: ClusterConfig) -> Iterator[Problem]:
    slurm = cluster.slurm
    warned = cluster.grace_seconds + END_SECONDS
    if warned > MOST_SIGNAL_SECONDS:
        yield Problem(
            "cluster.grace_seconds",
            f"cluster.grace_seconds={cluster.grace_seconds}",
            f"Slurm warns a job at most {MOST_SIGNAL_SECONDS} s before its end",
            f"write cluster.grace_seconds={MOST_SIGNAL_SECONDS - END_SECONDS} or less",
        )
    if slurm.time is not None:
        limit = limit_seconds(slurm.time)
        seen = f"cluster.slurm.time={slurm.time}"
        if limit is None:
            yield Problem(
                "cluster.slurm.time",
                seen,
                "a limit is MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS",
                'write cluster.slurm.time="1-12:00:00", with the quotes for the colons',
            )
        elif limit <= warned:
            yield Problem(
                "cluster.slurm.time",
                seen,
                f"a job is asked to end {warned} s before its limit (cluster.grace_seconds="
                f"{cluster.grace_seconds} and {END_SECONDS} s), so a limit of {limit} s leaves nothing to train in",
                "write a longer limit, or a smaller cluster.grace_seconds",
            )
    yield from _texts(slurm)
    for name, value in slurm.options.items():
        seen = f"cluster.slurm.options={{{name}: {value}}}"
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            yield Problem(
                "cluster.slurm.options",
                seen,
                "an option is a long one of sbatch, without its dashes",
                "write {mail-type: END}",
            )
        elif name in KEYS:
            yield Problem(
                "cluster.slurm.options",
                seen,
                f"{KEYS[name]} decides --{name}",
                f"leave it out, and write {KEYS[name]}",
            )


def _texts(slurm: SlurmConfig) -> Iterator[Problem]:
    """Every text is one word of sbatch's argv; a line end in it can only be a slip."""
    texts: dict[str, str | None] = {
        name: getattr(slurm, name)
        for name in ("account", "partition", "qos", "constraint", "exclude", "reservation", "memory")
    }
    texts |= {f"options.{name}": value for name, value in slurm.options.items()}
    for name, text in texts.items():
        if text is not None and not text.isprintable():
            yield Problem(
                f"cluster.slurm.{name}",
                f"cluster.slurm.{name}={text!r}",
                "options of sbatch are one line of printable text",
                "write it without line ends, tabs and control characters",
            )
