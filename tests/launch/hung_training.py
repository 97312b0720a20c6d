"""``launch/train.py`` with a fault on one rank that blocks the others.

    FAULT=skip:1:3 python tests/launch/hung_training.py ...

``FAULT`` is KIND:RANK:STEP, with steps from 0. The fault happens once; its time is written to the file that
``FAULT_TIME`` names, and no fault happens while that file exists. ``slow:ALL:SECONDS`` is not a fault: each
step, evaluation batch and save takes that long. With ``APART`` ranks do not see each other's files. Without
either variable it is ``launch/train.py``.
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


def moment() -> Path:
    return Path(os.environ["FAULT_TIME"])


def now() -> None:
    moment().write_text(str(time.time()))


def faulty(kind: str, step: int) -> Callable[[Any, bool, Any], None]:
    """What a rank does before each step: (its group, whether it is the faulty rank, the step's settings)."""
    import torch
    import torch.distributed as dist

    happened = moment().exists()

    def before(group: Any, odd: bool, settings: Any) -> None:
        odd = odd and settings.step == step and not happened
        if odd:
            now()
        if kind in ("skip", "shapes") and not (odd and kind == "skip"):
            dist.all_reduce(torch.ones(512 if odd else 1024), group=group)
        if odd and kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if odd and kind == "frozen":
            ctypes.PyDLL(None).sleep(600)  # native code that holds the GIL

    return before


def with_steps(kind: str, rank: str, step: int) -> None:
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


def without_samples(kind: str, rank: str, step: int) -> None:
    """Make the read-ahead thread stop after the samples of ``step`` steps: it blocks, or exits silently."""
    from toolkit.data.order.prefetch import _Buffer
    from toolkit.data.order.stream import Stream

    if os.environ.get("RANK") != rank or moment().exists():
        return
    read = Stream._read
    count = [0]

    def blocked(stream: Any, *places: Any) -> Any:
        count[0] += 1
        if count[0] == step:
            now()
            threading.Event().wait()
        return read(stream, *places)

    def dead(buffer: Any, items: Any) -> None:
        for number, item in enumerate(items):
            if number == step - 2:  # the first was not this thread's
                return now()
            buffer._put(item)

    if kind == "loader":
        Stream._read = blocked  # type: ignore[method-assign]
    else:
        _Buffer.fill = dead  # type: ignore[method-assign]


def apart() -> None:
    """Each rank sees only its own files, as on nodes without a shared disk."""
    from toolkit.rundir.directory import RunDirectory

    own = f"hang-{os.environ.get('RANK')}"
    RunDirectory.hang_folder = lambda self, attempt: self.attempt_folder(attempt) / own  # type: ignore[method-assign]


def slow(seconds: float) -> None:
    import toolkit.train.run as training

    build = training.build_engine

    def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return call(*arguments, **named)

        return wrapped

    def build_engine(*arguments: Any, **named: Any) -> Any:
        engine = build(*arguments, **named)
        engine.train_step, engine.eval_step = slowly(engine.train_step), slowly(engine.eval_step)
        return engine

    training.build_engine = build_engine
    training.CheckpointStore.save = slowly(training.CheckpointStore.save)  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.argv[0] = str(Path(__file__).resolve())  # the supervisor starts the ranks with it
    sys.path.insert(0, str(ROOT))
    if os.environ.get("APART"):
        apart()
    if fault := os.environ.get("FAULT"):
        kind, rank, step = fault.split(":")
        if kind == "slow":
            slow(float(step))
        elif kind in ("loader", "dead"):
            without_samples(kind, rank, int(step))
        else:
            with_steps(kind, rank, int(step))
    from launch.train import exit_now, main

    exit_now(main(sys.argv[1:]))
