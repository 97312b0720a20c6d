"""The Python interface, the same in a notebook, in a script, and in a script under a launcher.

    from toolkit import load_config, plan, train

    config = load_config("+exp=quickstart", "train.steps=20")
    print(plan(config).batch)
    result = train(config)
    result.metrics.to_pandas().plot("step", "loss")

Errors of the user are raised as ``toolkit.errors.UserError``; nothing ends the process.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, ExitCode, Problem
from toolkit.plan.types import RunPlan
from toolkit.rows import float_or_nan, last_row, read_rows
from toolkit.rundir.directory import RunDirectory

if TYPE_CHECKING:
    import pyarrow as pa

    from toolkit.cluster.world.environment import Launch

STATUS_SECONDS = 10.0  # how long other ranks wait until rank 0 has recorded the end of the run
_STATES = {ExitCode.DONE: "done", ExitCode.STOPPED: "stopped", ExitCode.DIVERGED: "diverged"}
_trainings = 0  # of this process; distinguishes their messages to other ranks


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a training: its state, its last step and its files.

    Attributes:
        state: ``done``; ``stopped`` by Ctrl-C or a signal, after saving; or ``diverged`` if a loss, gradient
            or weight became infinite or NaN.
        step: the number of completed steps.
        loss: the training loss of the last step, per token or sample; NaN if it is not finite.
        directory: the run directory, whose files the tables below are read from.
        reason: why the run stopped or diverged; None if it is done.
    """

    state: str
    step: int
    loss: float
    directory: Path
    reason: str | None = None

    @property
    def metrics(self) -> pa.Table:
        """One row per step: ``step``, ``loss``, ``grad_norm``, ``lr``, ... Empty values are null."""
        return _table(RunDirectory(self.directory).metrics_file)

    @property
    def evaluations(self) -> pa.Table:
        """One row per evaluation and set: ``step``, ``set``, ``loss``, ..."""
        return _table(RunDirectory(self.directory).eval_file)

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint, for ``toolkit.checkpoint.open_reader``; None if there is none."""
        return RunDirectory(self.directory).newest_checkpoint()


def load_config(*overrides: str) -> RunConfig:
    """Compose a configuration from the arguments of the command ``train``.

    The project of the working folder (``[tool.dmt]`` in ``pyproject.toml``) is searched for groups and
    experiments, and so is ``--config-dir=FOLDER``. Fields of the result may be changed.

    Raises:
        UserError: with every mistake that was found.
    """
    from toolkit.cluster.world.environment import read_launch
    from toolkit.config.compose import compose

    _, rest = read_launch({}, overrides)  # without the option that deepspeed adds to sys.argv
    return compose(rest)


def plan(config: RunConfig) -> RunPlan:
    """Plan a run without starting it, for the machines of ``cluster``, or else for this one.

    Raises:
        UserError: with every rule that the run breaks.
    """
    from toolkit.cluster.jobs.job import plan_job
    from toolkit.user_code import check_user_code

    planned = plan_job(copy.deepcopy(config))
    check_user_code(planned.config)
    return planned


def train(config: RunConfig) -> TrainResult:
    """Train in this process: the only rank, or one of those that a launcher started, which all call this.

    Ctrl-C makes the run save and stop; a second Ctrl-C raises KeyboardInterrupt. The same call continues the
    run, and a finished run is not trained again. Logging, signal handlers, output and environment variables
    are afterwards as they were, so a process may train several times. The random state is not restored.

    Raises:
        UserError: the configuration, the data or the machine cannot train.
    """
    from toolkit.cluster.attempt.exit_handling import ExitHandler
    from toolkit.cluster.launch_process import launch_process
    from toolkit.cluster.stop.stop_request import ProgramStopRequest, find_launchers
    from toolkit.cluster.world.environment import detect_world, read_launch
    from toolkit.cluster.world.rendezvous import PeerExited
    from toolkit.launch.train import make_callbacks
    from toolkit.rundir.start_checks import NothingToDo

    global _trainings
    _trainings += 1
    launch, _ = read_launch(os.environ, [])
    config = copy.deepcopy(config)
    config.cluster = replace(config.cluster, restarts=0)  # restarts belong to a supervisor of processes
    _check_process(launch, detect_world(config.cluster, launch).ranks)
    code = ExitCode.FAILURE
    with _restored_process(), _closed_group(launch):
        stop = ProgramStopRequest(find_launchers(launch))
        handler = ExitHandler(stop, raises=True)
        handler.launch, stop.abort = launch, handler.abort
        try:
            with handler:
                arguments = [f"training {_trainings}"]
                handler.code = launch_process(
                    launch, arguments, handler, stop, make_callbacks(), script="", config=config
                )
            code = handler.code
        except NothingToDo:
            code = ExitCode.DONE
        except PeerExited as error:
            raise _peer_error(ExitCode(error.code)) from None
        finally:
            stop.close()
            if handler.directory is not None:
                handler.directory.release()
    return _read_result(code, handler.directory or RunDirectory(plan(config).run_dir))


def _read_result(code: ExitCode, directory: RunDirectory) -> TrainResult:
    """Return the result from the files of the run, which rank 0 has written, or writes in a moment."""
    deadline = time.monotonic() + STATUS_SECONDS
    while (status := directory.status()) is not None and status.state.live and time.monotonic() < deadline:
        time.sleep(0.05)
    row = last_row(directory.metrics_file) or {"step": 0, "loss": None}
    reason = status.reason if status is not None and code is not ExitCode.DONE else None
    return TrainResult(_STATES[code], int(row["step"]), float_or_nan(row["loss"]), directory.path, reason)


def _check_process(launch: Launch, ranks: int) -> None:
    """Check that this process can be a rank, before anything is written. Raises ConfigError."""
    from toolkit.cluster.world.environment import Launcher

    if launch.launcher is Launcher.NONE and ranks > 1:
        raise ConfigError(
            Problem(
                "cluster",
                f"{ranks} ranks, and no launcher started this process",
                "train() is one rank: the only one, or one of a launcher's",
                "add cluster.gpus_per_node=1 (cluster.cpu_ranks=1 on the CPU), or start the script with "
                f"torchrun --nproc_per_node {ranks}",
            )
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ConfigError(
            Problem(
                "torch.distributed",
                "this process has a process group",
                "train() creates the process group of its run",
                "call torch.distributed.destroy_process_group() before",
            )
        )


def _peer_error(code: ExitCode) -> Exception:
    """Return the error of a rank that ends because of another one, which raises the reason."""
    if code is not ExitCode.USER:
        return RuntimeError("another rank failed: see its output")
    problem = Problem(
        "train",
        "another rank found a mistake",
        "all ranks must be able to train",
        "correct what that rank reports",
    )
    return ConfigError(problem)


@contextmanager
def _restored_process() -> Iterator[None]:
    """Restore environment variables, logging, and the streams whose output a run copies."""
    from toolkit.cluster.attempt.output_log import untee_output
    from toolkit.logs import ROOT

    environ, logger = dict(os.environ), logging.getLogger(ROOT)
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    try:
        yield
    finally:
        untee_output()
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)


@contextmanager
def _closed_group(launch: Launch) -> Iterator[None]:
    """Destroy the process group of a single rank also after an error, so that the next training can create
    one. Other ranks may be blocked in a collective, which only the end of this process releases.
    """
    try:
        yield
    finally:
        torch: Any = sys.modules.get("torch")
        if torch is not None and launch.ranks == 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _table(file: Path) -> pa.Table:
    import pyarrow as pa

    rows: Sequence[dict[str, Any]] = list(read_rows(file))
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})
