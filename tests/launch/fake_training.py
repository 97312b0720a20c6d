"""The entry point of ``launch/train.py`` with a training that only keeps time: what starting and ending look like, quickly.

    deepspeed --num_gpus 2 tests/launch/fake_training.py +exp=quickstart

``FAKE_STEP_SECONDS``, ``FAKE_SAVE_SECONDS`` and ``FAKE_FAILS`` (a rank) set what it does.
"""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

from toolkit.errors import ExitCode
from toolkit.plan.types import RunPlan
from toolkit.rundir import RunDirectory, RunState, Status

ROOT = Path(__file__).resolve().parents[2]


def run(plan: RunPlan, *, rank: int, local_rank: int, stop: Callable[[], str | None], attempt: int, data: str,
        launcher: str) -> ExitCode:
    import torch
    import torch.distributed as dist

    assert dist.get_world_size() == plan.world.ranks
    assert dist.get_rank() == rank
    assert data == "data"
    directory = RunDirectory(plan.run_dir)

    def status(state: RunState, step: int, checkpoint: str | None = None) -> None:
        if rank == 0:
            directory.write_status(Status(state=state, attempt=attempt, step=step, checkpoint=checkpoint))

    for step in range(plan.config.train.steps):
        status(RunState.RUNNING, step)
        time.sleep(float(os.environ.get("FAKE_STEP_SECONDS", "0")))
        if os.environ.get("FAKE_FAILS") == str(rank):
            raise RuntimeError("the fake training fails")
        flag = torch.tensor(float(stop() is not None))
        dist.all_reduce(flag)
        if flag:
            time.sleep(float(os.environ.get("FAKE_SAVE_SECONDS", "0")))
            status(RunState.RUNNING, step, "saved")
            dist.barrier()
            return ExitCode.STOPPED
    status(RunState.RUNNING, plan.config.train.steps, "saved")
    return ExitCode.DONE


def main() -> int:
    module = types.ModuleType("toolkit.train.run")
    module.run = run  # type: ignore[attr-defined]
    sys.modules["toolkit.train.run"] = module
    sys.path.insert(0, str(ROOT))
    from launch import train

    train.make_data_ready = lambda plan: "data"
    return train.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
