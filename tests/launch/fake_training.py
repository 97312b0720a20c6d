"""``launch/train.py`` with a fake training, for fast tests of starting and ending.

    deepspeed --num_gpus 2 tests/launch/fake_training.py +exp=quickstart

Environment variables:

    FAKE_STEP_SECONDS, FAKE_SAVE_SECONDS    durations
    FAKE_FAILS                              a rank that fails, or ``all``
    FAKE_REFUSES                            a rank that fails with a user's mistake
    FAKE_DIVERGES                           step at which all ranks end as diverged
    FAKE_SAVE_EVERY                         steps between saves, 0: never; a save creates a checkpoint folder
    FAKE_KILLS                              ATTEMPT:RANK:STEP,...: the rank kills itself before this step
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

from toolkit.errors import ConfigError, ExitCode, Problem
from toolkit.plan.types import RunPlan
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

ROOT = Path(__file__).resolve().parents[2]


def run(
    plan: RunPlan,
    *,
    rank: int,
    local_rank: int,
    stop: Callable[[], str | None],
    attempt: int,
    data: str,
    launcher: str,
    **others: object,
) -> ExitCode:
    import torch
    import torch.distributed as dist

    assert dist.get_world_size() == plan.world.ranks
    assert dist.get_rank() == rank
    assert data == "data"
    directory = RunDirectory(plan.run_dir)

    def status(state: RunState, step: int, checkpoint: str | None = None) -> None:
        if rank == 0:
            directory.write_status(Status(state=state, attempt=attempt, step=step, checkpoint=checkpoint))

    first, every = directory.saved_step() or 0, int(os.environ.get("FAKE_SAVE_EVERY", "0"))
    if rank == 0:
        print(f"attempt {attempt} begins with step {first}", flush=True)
    for step in range(first, plan.config.train.steps):
        status(RunState.RUNNING, step)
        if every and step and step % every == 0 and rank == 0:
            folder = directory.checkpoints / f"step-{step:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "manifest.json").write_text("{}")
        dist.barrier()  # no rank dies before something is saved
        if f"{attempt}:{rank}:{step}" in os.environ.get("FAKE_KILLS", "").split(","):
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("FAKE_REFUSES") == str(rank):
            raise ConfigError(Problem("train", "train=fake", "the fake training refuses", "let it be"))
        time.sleep(float(os.environ.get("FAKE_STEP_SECONDS", "0")))
        if os.environ.get("FAKE_FAILS") in (str(rank), "all"):
            raise RuntimeError("the fake training fails")
        if os.environ.get("FAKE_DIVERGES") == str(step):
            return ExitCode.DIVERGED
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
