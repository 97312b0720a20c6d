"""Which part of a step each instruction of DeepSpeed's pipeline is. Imported after ``deepspeed_compat.load``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from deepspeed.runtime.pipe import schedule

from toolkit.monitor.step_parts import BACKWARD, FORWARD, OPTIMIZER, TRANSFER, Recorder

# What passes between stages and over data ranks is timed by itself (``collectives.py``); here is what is left around it.
PARTS = {
    schedule.LoadMicroBatch: TRANSFER,
    schedule.RecvActivation: FORWARD,
    schedule.ForwardPass: FORWARD,
    schedule.SendActivation: FORWARD,
    schedule.RecvGrad: BACKWARD,
    schedule.BackwardPass: BACKWARD,
    schedule.SendGrad: BACKWARD,
    schedule.ReduceTiedGrads: BACKWARD,
    schedule.ReduceGrads: BACKWARD,
    schedule.OptimizerStep: OPTIMIZER,
}


def tell(engine: Any, recorder: Recorder) -> None:
    """Let ``engine`` tell the part of what it executes."""
    engine._INSTRUCTION_MAP = {
        kind: _telling(execute, recorder, PARTS[kind]) if kind in PARTS else execute
        for kind, execute in engine._INSTRUCTION_MAP.items()
    }


def _telling(execute: Callable[..., None], recorder: Recorder, part: str) -> Callable[..., None]:
    @wraps(execute)
    def telling(engine: Any, **arguments: Any) -> None:
        with recorder.part(part):
            execute(engine, **arguments)

    return telling
