"""Run jobs on Slurm: a batch script with one task per node, requeued until ``status.json`` reports that the
run is done.

Options are passed to sbatch on its command line, because ``#SBATCH`` lines have their own quoting rules. The
user's texts inside the script are quoted with ``shlex``.

The batch shell receives the signal before the time limit and, if the site's PreemptParameters include
send_user_signal, before preemption (``--signal=B:TERM@SECONDS``, sbatch(1)). It forwards the signal through
Slurm, waits for the tasks and runs ``toolkit.cluster.jobs.requeue``, which reads status.json, since
torchrun's exit codes are not specific enough. submitit could write such scripts too, but it starts a pickled
Python function per task and has its own signal handler; the ranks already handle both, and the frozen file is
readable.

A job with ``cluster.min_nodes`` continues without a node that it loses (``--no-kill``). Its script serves the
rendezvous of torchrun's agents, so only the loss of the script's own node, the first one, ends the run. Slurm
then keeps the job without its script, and the other nodes requeue it (jobs/requeue_after_node_loss.py).
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from toolkit.cluster.jobs.backends.cluster_tool import ClusterTool
from toolkit.cluster.jobs.job import CONFIG_FILE, JobId, JobState, TrainingJob
from toolkit.cluster.jobs.requeue import join_hosts
from toolkit.cluster.world.node_range import (
    NO_AGENT_STORE,
    RENDEZVOUS_TIMES,
    NodeRange,
    agent_restarts,
    job_node_range,
    requested_nodes,
)
from toolkit.commands import command_line, inherited_form
from toolkit.config.cluster import ClusterBackend, ClusterConfig, SlurmConfig
from toolkit.errors import ConfigError, InputError, Problem

SCRIPT_FILE = "job.sh"
OUTPUT = "output.txt"
SLURM = ClusterTool(
    rule="cluster=slurm uses the commands of Slurm",
    install="submit from a login node of the cluster; dry_run=true works anywhere",
    ping="scontrol ping",
    accepts="Slurm must accept the command",
    correct=f"correct the options; {command_line('submit', 'dry_run=true')} shows all of them",
)
# In addition to cluster.grace_seconds: launchers end after their ranks, and the script decides how to
# continue.
END_SECONDS = 30
MAX_SIGNAL_SECONDS = 65535  # sbatch(1): the time of --signal is a 16-bit integer
# Below the ephemeral ports of Linux (ip_local_port_range: 32768 and up).
FIRST_PORT, PORTS = 20000, 10000

# States of squeue(1), section JOB STATE CODES; every other state is an end.
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

# Options that this module sets, with the key that controls each.
OPTION_KEYS = {
    "job-name": "run.name",
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes",
    "ntasks-per-node": "cluster.cpu_ranks",
    "signal": "cluster.grace_seconds",
    "no-kill": "cluster.min_nodes",
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
# if the user sets one of these, it replaces --gres=gpu:N
GPU_OPTIONS = {"gres", "gpus", "gpus-per-node", "gpus-per-task"}
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")


def render(job: TrainingJob) -> dict[str, str]:
    problems = list(_find_problems(job.config.cluster))
    if problems:
        raise ConfigError(*problems)
    return {CONFIG_FILE: job.yaml, SCRIPT_FILE: render_script(job)}


def argv(job: TrainingJob) -> list[str]:
    return ["sbatch", "--parsable", *sbatch_options(job), str(job.folder / SCRIPT_FILE)]


def sbatch_options(job: TrainingJob) -> list[str]:
    """Return the options of sbatch. ``--chdir`` keeps relative paths of the configuration valid."""
    cluster, slurm = job.config.cluster, job.config.cluster.slurm
    asked: list[tuple[str, object]] = [
        ("job-name", job.name),
        ("nodes", requested_nodes(cluster)),
        ("no-kill", None if cluster.min_nodes is None else ""),
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
        ("exclude", join_hosts(slurm.exclude, job.excluded_hosts)),
        ("reservation", slurm.reservation),
        ("signal", f"B:TERM@{cluster.grace_seconds + END_SECONDS}"),
        ("requeue" if slurm.requeue else "no-requeue", ""),
        ("open-mode", "append"),
        ("output", str(job.folder / OUTPUT).replace("%", "%%")),
        ("chdir", Path.cwd()),
        *slurm.options.items(),
    ]
    return [f"--{name}={value}" if value != "" else f"--{name}" for name, value in asked if value is not None]


def render_script(job: TrainingJob, python: str = sys.executable) -> str:
    """Return the batch script. Golden files: tests/golden/slurm.

    Args:
        python: the interpreter on the nodes; ``cluster.slurm.setup`` may prepare its environment.
    """
    cluster, slurm = job.config.cluster, job.config.cluster.slurm
    nodes, elastic = requested_nodes(cluster), job_node_range(cluster)
    # A node that ends first leaves the others time to save, or goes without them. A task may use all cores of
    # the job on its node; since Slurm 22.05 srun no longer inherits cpus-per-task from sbatch.
    srun = [
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        "--input=none",
        "--kill-on-bad-exit=0",
        *(["--no-kill", "--wait=0"] if elastic else [f"--wait={cluster.grace_seconds + END_SECONDS}"]),
    ]
    if slurm.cpus_per_task is not None:
        srun.append(f"--cpus-per-task={slurm.cpus_per_task}")
    parts = [
        "#!/bin/bash",
        f"# {job.name}, job {job.number}: one distributed training, one task per node ({nodes}). "
        "Generated by the command submit.",
        "",
        _TRAPS,
        *(["# cluster.slurm.setup", *slurm.setup, ""] if slurm.setup else []),
        "set -uo pipefail",
        f"python={shlex.quote(python)}",
        f"folder={shlex.quote(str(job.folder))}",
        f"train=({_quote_words(job.command())})",
        f"srun=({_quote_words(srun)})",
        _ONE_NODE if nodes == 1 else _several_nodes(job, elastic),
        _RUN,
        *([_END_SERVER] if elastic else []),
        _DECIDE,
    ]
    return "\n".join(parts)


def _several_nodes(job: TrainingJob, elastic: NodeRange | None) -> str:
    cluster = job.config.cluster
    return _SEVERAL_NODES.format(
        nodes=elastic or job.world.nodes,
        ranks=job.world.ranks_per_node,
        first=FIRST_PORT,
        ports=PORTS,
        restarts=agent_restarts(cluster),
        leave=cluster.grace_seconds + END_SECONDS // 2,
        task=_ELASTIC_TASK.format(export=NO_AGENT_STORE, times=RENDEZVOUS_TIMES, output=OUTPUT)
        if elastic
        else _TASK,
    )


_TRAPS = """\
asked=none  # the signal that asked this script to end
ask() {
  asked=$1
  # srun would kill its tasks on SIGTERM; Slurm forwards the signal to them.
  # A controller that fails over does not answer for a while.
  for _ in 1 2 3 4 5; do
    scancel --signal=TERM "$SLURM_JOB_ID" && break
    sleep 5
  done
}
trap 'ask TERM' TERM  # the time limit or a preemption is near: save and requeue
trap 'ask INT' INT    # the user stops the run: save without requeue
"""

# One node: the supervisor starts the ranks, forwards signals and restarts them (cluster.restarts).
_ONE_NODE = """\
task=("$python" -u "${train[@]}")
"""

# Several nodes: torchrun on each. The host of the rendezvous is set explicitly, since torchrun would compare
# its host name with the address. Each node passes the address by which Slurm reaches it, because its name
# need not resolve on the others (torchrun orders nodes by address, so the first rank may be on any of them).
_SEVERAL_NODES = """\
addresses=" $(scontrol --oneliner show node "$SLURM_JOB_NODELIST" |
  sed -n 's/^NodeName=\\([^ ]*\\) .* NodeAddr=\\([^ ]*\\).*/\\1=\\2/p' | tr '\\n' ' ')"  # " n1=10.0.0.1 "
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=${{addresses#* "$first"=}}
address=${{address%% *}}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={leave}  # time for the ranks to save; the default is 30 s
endpoint="${{address:-$first}}:$(({first} + SLURM_JOB_ID % {ports}))"
{task}
  -m torch.distributed.run --nnodes={nodes} --nproc-per-node={ranks}
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$endpoint"
  --max-restarts={restarts} "${{train[@]}}")
"""

_TASK = """\
# shellcheck disable=SC2016  # expanded by the task's shell
node='own=${1#* $SLURMD_NODENAME=}; shift
export PET_LOCAL_ADDR=${own%% *} PET_RDZV_CONF=is_host=$((SLURM_NODEID == 0)); exec "$@"'
task=(bash -c "$node" node "$addresses" "$python" -u\
"""

# The task's shell outlives the agent and its ranks, which receive signals themselves.
_ELASTIC_TASK = """\
export {export}  # without it, no node can join later
{{
  trap '' TERM
  "$python" -m toolkit.cluster.jobs.rendezvous_server "${{endpoint##*:}}" --id="$SLURM_JOB_ID" ||
    while true; do scancel --signal=TERM "$SLURM_JOB_ID"; sleep 10; done  # no agent can go on without it
}} &
server=$!
disown  # the shell does not report its end
# shellcheck disable=SC2016  # expanded by the task's shell
node='trap : TERM INT HUP USR1 USR2
own=${{1#* $SLURMD_NODENAME=}} output=$2; shift 2
export PET_LOCAL_ADDR=${{own%% *}} PET_RDZV_CONF=is_host=0,{times}
"$@"
code=$?
trap "" TERM INT HUP USR1 USR2
# Requeue the job if nothing else can. Then srun, which would print this output, has gone too.
"$1" -m toolkit.cluster.jobs.requeue_after_node_loss "$0" >> "$output" 2>&1
exit "$code"'
task=(bash -c "$node" "$endpoint" "$addresses" "$folder/{output}" "$python" -u\
"""

_RUN = """\
code=75
if [ "$asked" = none ]; then
  srun "${srun[@]}" "${task[@]}" &
  step=$!
  while kill -0 "$step" 2>/dev/null; do  # a signal interrupts wait, not the tasks
    wait "$step"
    code=$?
  done
fi
trap '' TERM INT  # the decision below must not be interrupted\
"""

_END_SERVER = """\
kill -KILL "$server" 2>/dev/null  # all agents have ended, and the server ends with its parent process\
"""

_DECIDE = """\
"$python" -m toolkit.cluster.jobs.requeue "$folder" --asked="$asked" --code="$code"
"""


def submit(job: TrainingJob) -> JobId:
    printed = SLURM.run(argv(job), submission_environment(os.environ) | inherited_form())
    # --parsable prints the number, followed by ;NAME if there are several clusters
    return JobId(ClusterBackend.slurm, printed.strip().partition(";")[0])


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the job: the submitting shell's, without the variables of an enclosing job
    or launcher.

    Those variables would change how srun and the ranks of the new job start.
    """
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
    """Return the job's state. squeue forgets a job some minutes after its end and then rejects its number."""
    states = _run_for_job("squeue", "--noheader", f"--jobs={id.id}", "--format=%T").split()
    if states and states[0] in QUEUED:
        return JobState.QUEUED
    return JobState.RUNNING if states and states[0] in RUNNING else JobState.ENDED


def cancel(id: JobId) -> None:
    _run_for_job("scancel", "--state=PENDING", id.id)
    if state(id) is not JobState.ENDED:
        # the script's signal for a stop without requeue
        _run_for_job("scancel", "--batch", "--signal=INT", id.id)


def _run_for_job(*command: str) -> str:
    """Run a command and return its output; empty if Slurm no longer knows the job."""
    try:
        return SLURM.run(command)
    except InputError as error:
        if "Invalid job id" not in str(error):
            raise
        return ""


def _quote_words(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def parse_time_limit(time: str) -> int | None:
    """Convert a Slurm time limit to seconds: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S (sbatch(1), --time). None
    if invalid.
    """
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


def _find_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    slurm = cluster.slurm
    warned = cluster.grace_seconds + END_SECONDS
    if warned > MAX_SIGNAL_SECONDS:
        yield Problem(
            "cluster.grace_seconds",
            f"cluster.grace_seconds={cluster.grace_seconds}",
            f"Slurm signals a job at most {MAX_SIGNAL_SECONDS} s before its end",
            f"set cluster.grace_seconds={MAX_SIGNAL_SECONDS - END_SECONDS} or less",
        )
    if slurm.time is not None:
        limit = parse_time_limit(slurm.time)
        seen = f"cluster.slurm.time={slurm.time}"
        if limit is None:
            yield Problem(
                "cluster.slurm.time",
                seen,
                "a time limit is MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS",
                'set cluster.slurm.time="1-12:00:00", quoted because of the colons',
            )
        elif limit <= warned:
            yield Problem(
                "cluster.slurm.time",
                seen,
                f"a job is signalled {warned} s before its limit "
                f"(cluster.grace_seconds={cluster.grace_seconds} plus {END_SECONDS} s), so a limit of "
                f"{limit} s leaves no time to train",
                "increase the limit, or reduce cluster.grace_seconds",
            )
    yield from _check_texts(slurm)
    for name, value in slurm.options.items():
        seen = f"cluster.slurm.options={{{name}: {value}}}"
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            yield Problem(
                "cluster.slurm.options",
                seen,
                "options are long options of sbatch without the dashes",
                "for example {mail-type: END}",
            )
        elif name in OPTION_KEYS:
            yield Problem(
                "cluster.slurm.options",
                seen,
                f"--{name} is controlled by {OPTION_KEYS[name]}",
                f"remove it, and set {OPTION_KEYS[name]}",
            )


def _check_texts(slurm: SlurmConfig) -> Iterator[Problem]:
    """Check that every text is a single line, since it becomes one argument of sbatch."""
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
                "remove line breaks, tabs and control characters",
            )
