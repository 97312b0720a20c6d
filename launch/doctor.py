"""Look at the machines of a run before it is started: what would make it fail, or slow, and what to do about it.

    python launch/doctor.py                                                      this machine, and the run of all defaults
    python launch/doctor.py +exp=quickstart cluster.cpu_ranks=2                  and its ranks meet
    torchrun --nnodes 2 ... launch/doctor.py +exp=gpt2_125m                      every machine; started as launch/train.py will be
    python launch/doctor.py --json +exp=gpt2_125m > report.json
    python launch/doctor.py --help

The words are those of launch/train.py, which looks by itself too where cluster.preflight=true. Every check has a bound: a file system or
driver that hangs is told. Exit code: 0 ready (perhaps with warnings), 2 something fails; a launcher may change it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.cluster.doctor.command import JSON, DoctorCommand, Measurements
from toolkit.cluster.doctor.data import FirstRead
from toolkit.cluster.environment import read_launch
from toolkit.cluster.exit_handling import ExitHandler, exit_now
from toolkit.cluster.stop import StopRequest, launchers
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
        launch, words = read_launch(os.environ, [word for word in arguments if word != JSON])
        configure_logging(launch.rank)
        exit_handler.launch, stop.abort = launch, exit_handler.abort
        stop.install(launchers(launch))
        measurements = Measurements(first_read=first_read, links=links)
        exit_handler.code = DoctorCommand(
            launch, words, exit_handler, measurements, script=sys.argv[0], as_json=JSON in arguments
        ).examine(stop)
    stop.close()
    return exit_handler.code


def first_read(config: RunConfig, vocab_size: int | None, batch: BatchPlan | None) -> FirstRead:
    from toolkit.data.first_read import first_read

    return first_read(config, vocab_size, batch)


def links(axes: Axes | None, device: torch.device, rank: int, ranks: int) -> Sequence[Mapping[str, Any]]:
    from toolkit.observe.comm_benchmark import measure_links

    return measure_links(axes, device, rank, ranks)


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
