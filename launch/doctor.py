"""Check the machines of a run before it starts: what would make it fail or slow it down, and how to fix it.

    python launch/doctor.py                                          this machine, default configuration
    python launch/doctor.py +exp=quickstart cluster.cpu_ranks=2      also connects the ranks
    torchrun --nnodes 2 ... launch/doctor.py +exp=gpt2_125m        every machine, started like training
    python launch/doctor.py --json +exp=gpt2_125m > report.json
    python launch/doctor.py --help

The arguments are those of training, which runs the same checks if cluster.preflight=true. Every check has
a timeout, so a hanging file system or driver is reported. Exit code: 0 ready (perhaps with
warnings), 2 a check failed; launchers may change it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.cluster.attempt.exit_handling import ExitHandler, exit_now
from toolkit.cluster.doctor.command import JSON, DoctorCommand, Measurements
from toolkit.cluster.doctor.data_access import DataReadResult
from toolkit.cluster.stop.stop_request import StopRequest, find_launchers
from toolkit.cluster.world.environment import read_launch
from toolkit.commands import entry_point
from toolkit.config.schema import RunConfig
from toolkit.layout.axes import Axes
from toolkit.logs import configure_logging
from toolkit.plan.types import BatchPlan

if TYPE_CHECKING:
    import torch


def main(arguments: Sequence[str]) -> int:
    if not {"--help", "-h"}.isdisjoint(arguments):
        from toolkit.config.help import show_help

        return show_help(arguments, above=__doc__ or "")
    stop = StopRequest()
    with ExitHandler(stop) as exit_handler:
        launch, rest = read_launch(os.environ, [word for word in arguments if word != JSON])
        configure_logging(launch.rank)
        exit_handler.launch, stop.abort = launch, exit_handler.abort
        stop.install(find_launchers(launch))
        measurements = Measurements(check_data_read=check_data_read, links=links)
        exit_handler.code = DoctorCommand(
            launch, rest, exit_handler, measurements, script=entry_point("doctor"), as_json=JSON in arguments
        ).run(stop)
    stop.close()
    return exit_handler.code


def check_data_read(config: RunConfig, vocab_size: int | None, batch: BatchPlan | None) -> DataReadResult:
    from toolkit.data.registry import check_data_read

    return check_data_read(config, vocab_size, batch)


def links(axes: Axes | None, device: torch.device, rank: int, ranks: int) -> Sequence[Mapping[str, Any]]:
    from toolkit.observe.comm_benchmark import measure_links

    return measure_links(axes, device, rank, ranks)


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
