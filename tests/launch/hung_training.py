"""``launch/train.py``, except that one rank injects a fault that blocks the others.

    FAULT=skip:1:3 python tests/launch/hung_training.py ...

``FAULT`` is KIND:RANK:STEP, with steps counted from 0. It happens once: its time is written to the file that
``FAULT_TIME`` names, and if the file exists nothing happens. ``slow:ALL:SECONDS`` is no fault: each step,
evaluation batch and save takes that long. With ``SEPARATE_DISKS`` ranks do not see each other's files.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def fault_file() -> Path:
    return Path(os.environ["FAULT_TIME"])


def record_fault() -> None:
    fault_file().write_text(str(time.time()))


def faulty(kind: str, step: int) -> Callable[[Any, bool, Any], None]:
    """What a rank does before each step: (its group, whether it is the odd one, the step's settings)."""
    import torch
    import torch.distributed as dist

    happened = fault_file().exists()

    def before(group: Any, odd: bool, settings: Any) -> None:
        odd = odd and settings.step == step and not happened
        if odd:
            record_fault()
        if kind in ("skip", "shapes") and not (odd and kind == "skip"):
            dist.all_reduce(torch.ones(512 if odd else 1024), group=group)
        if odd and kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if odd and kind == "frozen":
            ctypes.PyDLL(None).sleep(600)  # native code that holds the interpreter's lock

    return before


def inject_in_step(kind: str, rank: str, step: int) -> None:
    import toolkit.train.run as training

    build = training.build_engine

    def build_engine(*arguments: Any, **named: Any) -> Any:
        import torch.distributed as dist

        engine = build(*arguments, **named)
        group, before, own = dist.new_group(), faulty(kind, step), engine.train_step

        def train_step(batches: Any, settings: Any) -> Any:
            before(group, os.environ["RANK"] == rank, settings)
            return own(batches, settings)

        engine.train_step = train_step
        return engine

    training.build_engine = build_engine


def inject_in_loader(kind: str, rank: str, step: int) -> None:
    """Block or end the prefetch thread after the samples of ``step`` steps."""
    from toolkit.data.order.prefetch import _Buffer
    from toolkit.data.order.stream import Stream

    if os.environ.get("RANK") != rank or fault_file().exists():
        return
    read = Stream._read
    count = [0]

    def blocked(stream: Any, *places: Any) -> Any:
        count[0] += 1
        if count[0] == step:
            record_fault()
            threading.Event().wait()
        return read(stream, *places)

    def dead(buffer: Any, items: Any) -> None:
        for number, item in enumerate(items):
            if number == step - 2:  # the first was not this thread's
                return record_fault()
            buffer._put(item)

    if kind == "loader":
        Stream._read = blocked  # type: ignore[method-assign]
    else:
        _Buffer.fill = dead  # type: ignore[method-assign]


def separate_disks() -> None:
    """Let each rank see only its own messages, as on nodes without a shared disk."""
    from toolkit.rundir.directory import RunDirectory

    own = f"hang-{os.environ.get('RANK')}"
    RunDirectory.hang_folder = lambda self, attempt: self.attempt_folder(attempt) / own  # type: ignore[method-assign]


def slow_down(seconds: float) -> None:
    import toolkit.train.run as training
    from toolkit.checkpoint.online.store import CheckpointStore

    build = training.build_engine

    def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return call(*arguments, **named)

        return wrapped

    def build_engine(*arguments: Any, **named: Any) -> Any:
        engine = build(*arguments, **named)
        engine.train_step, engine.eval_step = delayed(engine.train_step), delayed(engine.eval_step)
        return engine

    training.build_engine = build_engine
    CheckpointStore.save = delayed(CheckpointStore.save)  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.argv[0] = str(Path(__file__).resolve())  # our parent starts the ranks with it
    sys.path.insert(0, str(ROOT))
    if os.environ.get("SEPARATE_DISKS"):
        separate_disks()
    if fault := os.environ.get("FAULT"):
        kind, rank, step = fault.split(":")
        if kind == "slow":
            slow_down(float(step))
        elif kind in ("loader", "dead"):
            inject_in_loader(kind, rank, int(step))
        else:
            inject_in_step(kind, rank, int(step))
    from launch.train import exit_now, main

    exit_now(main(sys.argv[1:]))
