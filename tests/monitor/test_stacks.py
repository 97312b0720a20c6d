"""The stacks of this process and the states of other processes.

pytest tests/monitor/test_stacks.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.waiting import wait_until
from toolkit.monitor.hangs.diagnosis import diagnose
from toolkit.monitor.hangs.rank_reports import RankReport, combine_reports
from toolkit.monitor.hangs.stacks import (
    GONE,
    MODEL,
    SAMPLES,
    Frame,
    ProcessId,
    ThreadStack,
    describe_activity,
    format_frames,
    read_frames,
    read_frozen_stacks,
    read_process_state,
    read_thread_stacks,
    short_path,
    this_process,
)
from toolkit.train.task import ModelLossTask, NextTokenTask
from toolkit.train.vision import ImageClassificationTask

# Native code that holds the interpreter's lock: ctypes' PyDLL does not release it.
FROZEN = """
import ctypes, faulthandler, os, sys
notes = os.memfd_create("stacks")
faulthandler.dump_traceback_later(0.3, file=notes)
print(notes, flush=True)
def in_native_code():
    ctypes.PyDLL(None).sleep(30)
in_native_code()
"""


def test_stacks_of_all_threads_start_with_the_main_thread() -> None:
    entered, leave = threading.Event(), threading.Event()

    def waiting_here() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=waiting_here, name="waiter")
    thread.start()
    entered.wait()
    found = read_thread_stacks()
    leave.set()
    thread.join()
    assert found[0].main
    assert any("test_stacks_of_all_threads" in frame.function for frame in found[0].frames)
    waiter = next(stack for stack in found if stack.name == "waiter")
    assert any(frame.function.endswith("waiting_here") and frame.file == __file__ for frame in waiter.frames)
    assert waiter.state[0] in "SR"


def test_activity_is_that_of_the_innermost_listed_frame() -> None:
    ours = [
        Frame("/a/toolkit/train/loop.py", 1, "train"),
        Frame("/a/toolkit/data/stream.py", 2, "steps"),
        Frame("/usr/lib/threading.py", 3, "wait"),
    ]
    assert describe_activity(ours) == SAMPLES
    assert describe_activity(ours[:1]) == "between steps"
    assert describe_activity(ours[2:]) == ""


class FrameRecorder(nn.Module):
    """Record the stack of its forward."""

    def forward(self, **inputs: Any) -> torch.Tensor:
        self.frames = read_frames(sys._getframe())
        return torch.zeros(())


def test_hang_in_a_model_is_not_described_as_making_a_batch() -> None:
    model = FrameRecorder()
    ModelLossTask("x.FrameRecorder").loss_sum(
        model, {"input_ids": torch.zeros(1, 4), "labels": torch.zeros(1, 4)}
    )
    assert describe_activity(model.frames) == MODEL
    report = RankReport(
        rank=0,
        host="h",
        pid=1,
        at=0.0,
        step=3,
        last="step 2",
        idle=9.0,
        threads=(ThreadStack("MainThread", "S", model.frames),),
    )
    diagnosis = diagnose(combine_reports({0: report}, [ProcessId("h", 1, "1", 0, 0)], {}))
    assert diagnosis.cause.startswith("rank 0 is in the model's forward, in FrameRecorder.forward (")


def test_part_of_the_step_describes_the_engine() -> None:
    engine = Frame("/a/toolkit/engine/megatron/engine.py", 2, "Step.run")
    report = RankReport(
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
    assert report.activity == "in the model's backward, in Step.run (toolkit/engine/megatron/engine.py:2)"
    assert replace(report, part="").activity == "in the engine"


def test_every_method_of_a_task_has_an_activity() -> None:
    """A method without an activity would be described as its caller."""
    for task in (NextTokenTask, ModelLossTask, ImageClassificationTask):
        for name in ("collate", "units", "loss_sum", "eval_sums"):
            function = getattr(task, name)
            frame = Frame(function.__code__.co_filename, 1, function.__qualname__)
            assert "protocol.py" in frame.file or describe_activity([frame]) in (MODEL, "making a batch"), (
                frame
            )


def test_formatted_frames_are_short_and_have_their_source() -> None:
    frame = Frame("/opt/v/lib/python3.11/site-packages/torch/distributed/x.py", 3, "f")
    assert format_frames([frame], lambda file, line: "   go()\n") == ["torch/distributed/x.py:3 f:  go()"]
    assert short_path("/home/me/toolkit-main/toolkit/train/loop.py") == "toolkit/train/loop.py"
    assert short_path("/elsewhere/x.py") == "/elsewhere/x.py"


def test_process_state_is_running_stopped_or_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = process_fields(child.pid)
        process = ProcessId("here", child.pid, started, 0, 0)
        assert read_process_state(process) in "RSD"
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: read_process_state(process) == "T")
        assert read_process_state(ProcessId("here", child.pid, "1", 0, 0)) == GONE, (
            "another process with that number"
        )
    finally:
        child.kill()
        child.wait()
    assert read_process_state(process) == GONE


def test_stacks_of_a_blocked_interpreter_can_be_read_by_other_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", FROZEN], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        process = ProcessId("here", child.pid, process_fields(child.pid), int(child.stdout.readline()), 0)
        wait_until(lambda: "in_native_code" in read_frozen_stacks(process))
        assert read_process_state(process) == "S"
    finally:
        child.kill()
        child.wait()
    assert read_frozen_stacks(process) == ""


def test_this_process_is_identified() -> None:
    own = this_process("here", 3, 4)
    assert own.pid == os.getpid()
    assert read_process_state(own) in "RS"
    assert own.shares_host(this_process("here", 5, 6))
    assert not own.shares_host(this_process("there", 3, 4))
    assert not own.shares_host(replace(own, pid_namespace="pid:[1]")), (
        "a container with its own process numbers"
    )


def process_fields(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        text = file.read()
    return text[text.rindex(")") + 2 :].split()[19]
