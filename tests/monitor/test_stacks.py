"""What a process says of its threads, and what others see of it.

pytest tests/monitor/test_stacks.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from toolkit.monitor.hangs.diagnosis import diagnose
from toolkit.monitor.hangs.reports import Report, found_of
from toolkit.monitor.hangs.stacks import (
    GONE,
    MODEL,
    SAMPLES,
    Frame,
    ProcessId,
    ThreadStack,
    doing,
    frames_of,
    lines,
    notes_of,
    process_state,
    short,
    this_process,
    threads,
)
from toolkit.train.task import NextToken, OwnLoss
from toolkit.train.vision import Vision

# Native code that keeps the interpreter: ctypes' PyDLL does not let go of it.
FROZEN = """
import ctypes, faulthandler, os, sys
notes = os.memfd_create("stacks")
faulthandler.dump_traceback_later(0.3, file=notes)
print(notes, flush=True)
def in_native_code():
    ctypes.PyDLL(None).sleep(30)
in_native_code()
"""


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_threads_are_told_the_main_one_first() -> None:
    entered, leave = threading.Event(), threading.Event()

    def waiting_here() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=waiting_here, name="waiter")
    thread.start()
    entered.wait()
    found = threads()
    leave.set()
    thread.join()
    assert found[0].main
    assert any("test_all_threads_are_told" in frame.function for frame in found[0].frames)
    waiter = next(stack for stack in found if stack.name == "waiter")
    assert any(frame.function.endswith("waiting_here") and frame.file == __file__ for frame in waiter.frames)
    assert waiter.state[0] in "SR"


def test_what_a_thread_does_is_read_from_its_innermost_frame_of_ours() -> None:
    ours = [
        Frame("/a/toolkit/train/loop.py", 1, "train"),
        Frame("/a/toolkit/data/stream.py", 2, "steps"),
        Frame("/usr/lib/threading.py", 3, "wait"),
    ]
    assert doing(ours) == SAMPLES
    assert doing(ours[:1]) == "between steps"
    assert doing(ours[2:]) == ""


class Hangs(nn.Module):
    """Its forward only looks where it is."""

    def forward(self, **inputs: Any) -> torch.Tensor:
        self.frames = frames_of(sys._getframe())
        return torch.zeros(())


def test_a_model_that_hangs_is_not_called_making_a_batch() -> None:
    model = Hangs()
    OwnLoss("x.Hangs").loss_sum(model, {"input_ids": torch.zeros(1, 4), "labels": torch.zeros(1, 4)})
    assert doing(model.frames) == MODEL
    report = Report(
        rank=0,
        host="h",
        pid=1,
        at=0.0,
        step=3,
        last="step 2",
        idle=9.0,
        threads=(ThreadStack("MainThread", "S", model.frames),),
    )
    said = diagnose(found_of({0: report}, [ProcessId("h", 1, "1", 0, 0)], {}))
    assert said.cause.startswith("rank 0 is in the model's forward, in Hangs.forward (")


def test_the_part_of_the_step_says_what_an_engine_does() -> None:
    engine = Frame("/a/toolkit/engine/megatron/step.py", 2, "Step.run")
    report = Report(
        rank=0,
        host="h",
        pid=1,
        at=0.0,
        step=3,
        last="step 2",
        idle=9.0,
        part="backward",
        threads=(ThreadStack("MainThread", "S", (engine,)),),
    )
    assert report.does == "in the model's backward, in Step.run (toolkit/engine/megatron/engine.py:2)"
    assert replace(report, part="").does == "in the engine"


def test_every_method_of_a_task_is_known() -> None:
    """A method without words would be taken for its caller's work."""
    for task in (NextToken, OwnLoss, Vision):
        for name in ("collate", "units", "loss_sum", "eval_sums"):
            function = getattr(task, name)
            frame = Frame(function.__code__.co_filename, 1, function.__qualname__)
            assert "protocol.py" in frame.file or doing([frame]) in (MODEL, "making a batch"), frame


def test_lines_are_short_and_have_their_source() -> None:
    frame = Frame("/opt/v/lib/python3.11/site-packages/torch/distributed/x.py", 3, "f")
    assert lines([frame], lambda file, line: "   go()\n") == ["torch/distributed/x.py:3 f:  go()"]
    assert short("/home/me/toolkit-main/toolkit/train/loop.py") == "toolkit/train/loop.py"
    assert short("/elsewhere/x.py") == "/elsewhere/x.py"


def test_a_process_is_seen_running_stopped_and_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = process_fields(child.pid)
        process = ProcessId("here", child.pid, started, 0, 0)
        assert process_state(process) in "RSD"
        child.send_signal(signal.SIGSTOP)
        until(lambda: process_state(process) == "T")
        assert process_state(ProcessId("here", child.pid, "1", 0, 0)) == GONE, (
            "another process of that number"
        )
    finally:
        child.kill()
        child.wait()
    assert process_state(process) == GONE


def test_stacks_of_a_process_whose_interpreter_is_held_can_be_read_by_others() -> None:
    child = subprocess.Popen([sys.executable, "-c", FROZEN], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        process = ProcessId("here", child.pid, process_fields(child.pid), int(child.stdout.readline()), 0)
        until(lambda: "in_native_code" in notes_of(process))
        assert process_state(process) == "S"
    finally:
        child.kill()
        child.wait()
    assert notes_of(process) == ""


def test_this_process_knows_itself() -> None:
    own = this_process("here", 3, 4)
    assert own.pid == os.getpid()
    assert process_state(own) in "RS"
    assert own.beside(this_process("here", 5, 6))
    assert not own.beside(this_process("there", 3, 4))
    assert not own.beside(replace(own, space="pid:[1]")), "its numbers are others"


def process_fields(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        text = file.read()
    return text[text.rindex(")") + 2 :].split()[19]
