"""The life of a training process around the training: signals, exit codes, logging, sweeps."""

from __future__ import annotations

import os
from collections.abc import Sequence

from toolkit.cluster.attempt.exit_handling import ExitHandler
from toolkit.cluster.launch_process import RunCallbacks, launch_process
from toolkit.cluster.standbys.relay import hand_over_to_standby
from toolkit.cluster.standbys.standby_pool import is_standby, wait_for_rank
from toolkit.cluster.stop.stop_request import StopRequest, find_launchers
from toolkit.cluster.world.environment import read_launch
from toolkit.logs import configure_logging


def run_entry_point(arguments: Sequence[str], callbacks: RunCallbacks, *, script: str) -> int:
    """Train, start the ranks that train, or run a sweep, depending on the arguments. A standby first waits
    until it is needed. A worker of torchrun first looks for a standby, to which it hands its place.

    Args:
        script: the file or module that every rank runs, if this process starts the ranks.

    Returns:
        the exit code.
    """
    relay, phases = None, None
    if is_standby(arguments):
        assignment = wait_for_rank(arguments, callbacks.warm_up)
        arguments, relay, phases = assignment.arguments, assignment.relay, assignment.restart
    else:
        phases = hand_over_to_standby(arguments, os.environ)
    environ = dict(os.environ)
    stop = StopRequest()
    with ExitHandler(stop) as exit_handler:
        launch, overrides = read_launch(environ, arguments, relay=relay, phases=phases)
        exit_handler.launch, stop.abort = launch, exit_handler.abort
        stop.install(find_launchers(launch))
        if {"-m", "--multirun"}.isdisjoint(overrides):
            exit_handler.code = launch_process(
                launch, overrides, exit_handler, stop, callbacks, script=script, environ=environ
            )
        else:
            from toolkit.cluster.sweep.run import sweep

            configure_logging()
            exit_handler.code = sweep(overrides, launch, stop, script)
    stop.close()
    return exit_handler.code
