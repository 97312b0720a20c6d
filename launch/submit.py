"""Submit a run as one job to Slurm, Kubernetes or this machine, or show what would be submitted.

    python launch/submit.py +exp=gpt2_125m cluster=slurm cluster.nodes=4 cluster.gpus_per_node=8
    python launch/submit.py +exp=gpt2_125m cluster=slurm cluster.gpus_per_node=8 dry_run=true
    python launch/submit.py +exp=gpt2_125m cluster=kubernetes cluster.kubernetes.image=IMAGE
    python launch/submit.py +exp=quickstart            this machine, in the background
    python launch/submit.py --help

The arguments are those of training. The run is composed and planned here, and every mistake is
reported before anything is written. Exit code: 0 submitted or shown, 2 a mistake or rejected by the cluster.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.commands import entry_point
from toolkit.errors import ConfigError, ExitCode, Problem, UserError, file_errors
from toolkit.logs import configure_logging
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.start_checks import NothingToDo, check_remaining_work

DRY_RUN = "dry_run"


def main(arguments: Sequence[str]) -> int:
    configure_logging()
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help

        return show_help(arguments, above=__doc__ or "")
    try:
        with file_errors():
            overrides, dry_run = parse_arguments(arguments)
            submit_or_print(overrides, dry_run=dry_run)
    except UserError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    except NothingToDo as reason:
        print(reason)
    return ExitCode.DONE


def parse_arguments(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the run's arguments, and whether to only show the job. Raises ConfigError."""
    values = [word.partition("=")[2] for word in arguments if word.partition("=")[0] == DRY_RUN]
    for value in values:
        if value.lower() not in ("true", "false"):
            raise ConfigError(
                Problem(
                    DRY_RUN, f"{DRY_RUN}={value}", f"{DRY_RUN} must be true or false", f"set {DRY_RUN}=true"
                )
            )
    return [word for word in arguments if word.partition("=")[0] != DRY_RUN], bool(values) and values[
        -1
    ].lower() == "true"


def submit_or_print(overrides: Sequence[str], *, dry_run: bool) -> None:
    """Submit the run, or print the job. Raises UserError or NothingToDo if nothing was submitted."""
    from toolkit.cluster.jobs import backends, submission
    from toolkit.cluster.jobs.job import create_job, plan_job
    from toolkit.config.compose import compose
    from toolkit.estimate.plan_report import warn_about_budget
    from toolkit.plan.schedule import check_schedule
    from toolkit.rundir.budget import check_budget
    from toolkit.user_code import check_user_code

    plan = plan_job(compose(overrides))
    check_user_code(plan.config)
    check_schedule(plan)
    plan = warn_about_budget(plan)
    for warning in plan.warnings:
        print(f"{warning.severity}: {warning}", file=sys.stderr)
    check_remaining_work(plan.config, RunDirectory(plan.run_dir))
    check_budget(plan.config, plan.world.ranks, RunDirectory(plan.run_dir))
    entry = entry_point("train")
    job = create_job(plan, Path(entry).resolve() if entry.endswith(".py") else entry)
    backend = backends.get_backend(job.config.cluster.where)
    if dry_run:
        for name, text in backend.render(job).items():
            print(f"# ---- {job.folder / name}\n{text.rstrip()}\n")
        print(f"# ---- then\n{shlex.join(backend.argv(job))}")
        return
    job, id = submission.submit(job)
    ranks, nodes = job.world.ranks, job.world.nodes
    size = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    print(f"{id.where.value} {id.id}: run {job.run_dir}, job {job.number}, {size}")
    print(f"files and output: {job.folder}; status of the run: {Path(job.run_dir) / 'status.json'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
