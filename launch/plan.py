"""Show the plan of a run without starting it: layout, batches, memory per rank, engine settings.

    python launch/plan.py +exp=quickstart
    python launch/plan.py +exp=llama_8b_zero3_offload cluster.nodes=8 cluster.gpus_per_node=8 cluster.gpu=h100
    python launch/plan.py --json +exp=gpt2_125m > plan.json
    python launch/plan.py --help

The arguments are those of launch/train.py. cluster.* may describe machines other than this one. No GPU is
needed. Exit codes: 0 if the run can be planned, 2 for errors, which are printed with rule and remedy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from toolkit.errors import ExitCode, UserError, file_errors
from toolkit.logs import configure_logging


def main(arguments: Sequence[str]) -> int:
    configure_logging()
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help

        return show_help(arguments, above=__doc__ or "")
    try:
        with file_errors():
            show([argument for argument in arguments if argument != "--json"], as_json="--json" in arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    return ExitCode.DONE


def show(overrides: Sequence[str], *, as_json: bool) -> None:
    """Print the plan of ``overrides``. Raises UserError with all problems."""
    from rich.console import Console

    from toolkit.cluster.job import plan_job
    from toolkit.config.compose import compose
    from toolkit.plan.model_target import check_model_target
    from toolkit.plan.present import format_plan, to_json

    plan = plan_job(compose(overrides))  # for the machines of cluster.*, else for this machine
    check_model_target(plan.config.model)
    if as_json:
        print(json.dumps(to_json(plan), indent=2))
    else:
        # rich would wrap at 80 columns in a file or pipe.
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(format_plan(plan))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
