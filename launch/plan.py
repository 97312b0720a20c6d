"""Show the plan of a run without starting it: layout, batches, memory per rank, engine settings.

    python launch/plan.py +exp=quickstart
    python launch/plan.py +exp=llama_8b_zero3_offload cluster.nodes=8 cluster.gpus_per_node=8 cluster.gpu=h100
    python launch/plan.py --json +exp=gpt2_125m > plan.json
    python launch/plan.py --trace +exp=qwen3_8b          compare the formulas with a trace of the module
    python launch/plan.py scaling=1..1024 +exp=bench_8b cluster.gpus_per_node=8 cluster.gpu=h100
    python launch/plan.py advise=true +exp=qwen3_8b cluster.nodes=8 cluster.gpus_per_node=8 cluster.gpu=h100
    python launch/plan.py --help

advise=true searches the best layout of the run for these machines; out=NAME writes it as an experiment.
scaling=1..1024 shows strong and weak scaling, as a table and as a page with charts; measured=RUN_DIR,RUN_DIR
corrects it by measured runs.

The other arguments are those of training. cluster.* may describe machines other than this one. No GPU is
needed. The module of a model without a family is traced on fake tensors, which runs its code; --trace also
reads samples if their shapes are not known otherwise. Exit codes: 0 if the run can be planned, 2 for errors,
which are printed with rule and remedy.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.commands import in_this_form
from toolkit.errors import InputError, Problem, run_command
from toolkit.logs import configure_logging

if TYPE_CHECKING:
    from rich.console import RenderableType

    from toolkit.config.plan_arguments import PlanArguments
    from toolkit.config.schema import RunConfig
    from toolkit.estimate.module_traces import Tracer
    from toolkit.estimate.types import StepEstimate
    from toolkit.plan.formula_check import CheckedFormulas
    from toolkit.plan.trace import ModuleTrace, NotTraced
    from toolkit.plan.types import RunPlan

JSON, TRACE = "--json", "--trace"


def main(arguments: Sequence[str]) -> int:
    configure_logging()
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help

        return show_help(arguments, above=__doc__ or "")
    rest = [argument for argument in arguments if argument not in (JSON, TRACE)]
    return run_command(partial(show, rest, as_json=JSON in arguments, trace=TRACE in arguments))


def show(arguments: Sequence[str], *, as_json: bool, trace: bool = False) -> None:
    """Print the plan of ``arguments``, the advice or the scaling.

    Args:
        trace: compare the formulas of a family with a trace of its module; read samples to trace other models
            if their shapes are not known otherwise.

    Raises:
        UserError: with all problems.
    """
    from toolkit.cluster.jobs.job import plan_job
    from toolkit.config.compose import compose, compose_plan_arguments
    from toolkit.estimate.plan_report import format_plan, to_json, warn_about_budget
    from toolkit.plan.schedule import check_schedule
    from toolkit.user_code import check_user_code

    own, overrides = compose_plan_arguments(arguments)
    config = compose(overrides)
    if own.advise:
        show_advice(config, own, overrides, as_json=as_json, trace=trace)
        return
    if own.scaling is not None:
        show_scaling(config, own, overrides, as_json=as_json, trace=trace)
        return
    check_user_code(config)  # before a trace imports torch
    # For the machines of cluster.*, else for this machine.
    plan = plan_job(config, trace=create_tracer(read_data=trace))
    check_schedule(plan)
    plan = warn_about_budget(plan)
    checked = _trace_family(plan) if trace and plan.shape is not None else None
    if as_json:
        print(json.dumps({**to_json(plan), **({"trace": checked.to_json()} if checked else {})}, indent=2))
    else:
        print_tables(format_plan(plan))
        if checked is not None:
            print_tables(checked.format())


def create_tracer(*, read_data: bool) -> Tracer:
    """Return the function that traces models without a family."""

    def trace(plan: RunPlan) -> ModuleTrace | NotTraced:
        from toolkit.train.trace import trace_model  # imports torch

        return trace_model(plan, read_data=read_data)

    return trace


def _trace_family(plan: RunPlan) -> CheckedFormulas:
    """Trace the module of a family, and compare the formulas with it."""
    from toolkit.plan.formula_check import CheckedFormulas, whole_model
    from toolkit.train.trace import trace_model

    whole = whole_model(plan)
    return CheckedFormulas(whole, trace_model(whole))


def show_scaling(
    config: RunConfig, own: PlanArguments, overrides: Sequence[str], *, as_json: bool, trace: bool
) -> None:
    """Print strong and weak scaling of ``config``, and write the page and the plot to the folder
    ``own.out``.

    Args:
        trace: read samples to trace a model without a family, if their shapes are not known otherwise.
    """
    from toolkit.cluster.jobs.job import resolve_from_files, resolve_world
    from toolkit.config.overrides import overridden_keys
    from toolkit.estimate.measured_factors import fit_speed_factors
    from toolkit.estimate.module_traces import ModuleTraces
    from toolkit.estimate.profile import load_profile
    from toolkit.estimate.scaling import Planner, parse_ranks
    from toolkit.estimate.scaling_report import create_report, format_scaling, scaling_to_json
    from toolkit.estimate.step import estimate_step
    from toolkit.files import write_whole
    from toolkit.monitor.report.scaling_page import render_scaling_page, render_scaling_plot
    from toolkit.monitor.scaling_runs import estimate_measured
    from toolkit.plan import make_plan
    from toolkit.progress import Progress
    from toolkit.rundir.find import find_run
    from toolkit.user_code import check_user_code

    def estimate(plan: RunPlan) -> StepEstimate | None:
        profile = load_profile(config.cluster, plan.world)
        if profile is None:
            raise InputError(
                Problem(
                    "cluster.gpu",
                    f"cluster.gpu={plan.world.gpu or 'null'}",
                    "a step time is predicted for a kind of GPU whose speed is known",
                    "name a GPU of toolkit/plan/devices.py, for example cluster.gpu=h100",
                )
            )
        return estimate_step(plan, profile)

    ranks = parse_ranks(own.scaling or "")
    check_user_code(config)
    config = resolve_from_files(config)
    world = resolve_world(config.cluster)
    plan: Planner = make_plan
    if config.model.source_key != "model.family":
        train, tracer = config.train, create_tracer(read_data=trace)
        traces = ModuleTraces(config, world, tracer, most=train.global_batch)
        traces.get(train.activation_checkpointing, train.micro_batch or 1)  # refuse what cannot be traced
        plan = traces.plan
    folders = [find_run(folder, "measured") for folder in (own.measured or "").split(",") if folder]
    measured = estimate_measured(folders, config, world, estimate, plan)
    factors = fit_speed_factors(measured) if measured else None
    with Progress() as progress, progress.task("planning", total=4 * len(ranks)) as task:
        report = create_report(
            config,
            world,
            ranks,
            estimate,
            measured=measured,
            factors=factors,
            fixed=overridden_keys(overrides),
            advance=lambda: task.advance(1),
            plan=plan,
        )
    folder = Path(own.out or f"scaling/{config.run.name}")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "scaling.html", render_scaling_page(report, time.time()), durable=False)
    write_whole(folder / "scaling.svg", render_scaling_plot(report), durable=False)
    if as_json:
        print(json.dumps(scaling_to_json(report), indent=2))
    else:
        print_tables(format_scaling(report))
    print(f"wrote {folder / 'scaling.html'} and scaling.svg", file=sys.stderr)


def show_advice(
    config: RunConfig, own: PlanArguments, overrides: Sequence[str], *, as_json: bool, trace: bool
) -> None:
    """Print the best layouts of ``config``, and write the first to the file that ``own.out`` names.

    Args:
        trace: read samples to trace a model without a family, if their shapes are not known otherwise.
    """
    from toolkit.cluster.jobs.job import resolve_from_files, resolve_world
    from toolkit.config.experiment import experiment_file, experiment_text
    from toolkit.config.numbers import hours_until
    from toolkit.config.overrides import overridden_keys, split_options
    from toolkit.estimate.advice import advise
    from toolkit.estimate.advice_table import forecast_lines, format_advice, start_command, to_json
    from toolkit.files import write_whole
    from toolkit.user_code import check_user_code

    check_user_code(config)
    hours = [
        hours_until(moment, datetime.now())
        for moment in (own.deadline, config.budget.until)
        if moment is not None
    ]
    path = None if own.out is None else experiment_file(own.out, split_options(overrides)[1])
    advice = advise(
        resolve_from_files(config),
        resolve_world(config.cluster),
        fixed=overridden_keys(overrides),
        hours=min(hours, default=None),
        trace=create_tracer(read_data=trace),
    )
    if as_json:
        print(json.dumps(to_json(advice), indent=2))
    else:
        print_tables(format_advice(advice))
    if path is not None:
        plan = advice.best[0].plan
        comment = [in_this_form(start_command(plan, f"+exp={path.stem}")), *forecast_lines(advice)]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, experiment_text(advice.best[0].layout.apply(config), comment))
        print(f"wrote {path}: {comment[0]}", file=sys.stderr)


def print_tables(shown: RenderableType) -> None:
    """Print to the terminal, below the project's folder. rich would wrap files and pipes at 80 columns."""
    from rich.console import Console

    from toolkit.config.project import find_project

    console = Console(width=None if sys.stdout.isatty() else 140)
    if (project := find_project()) is not None:
        console.print(str(project), soft_wrap=True, markup=False, highlight=False)
    console.print(shown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
