"""Read the stacks of this process's threads, and the states of other processes on the host.

Only memory and ``/proc`` are read: no source files and no locks, so that this works when a disk or a thread
hangs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

MAX_FRAMES = 64  # innermost frames of a thread
MAIN = "MainThread"

SAMPLES, ENGINE = "waiting for samples", "in the engine"
OWN_DATASET = "reading samples of data.target"
MODEL = "in the model's forward"
# Part of a file's path, function name (empty: any), and what a thread does there. The innermost listed frame
# decides: a task's loss calls the model, whose files are not listed.
ACTIVITIES: tuple[tuple[str, str, str], ...] = (
    ("toolkit/data/custom/", "", OWN_DATASET),
    ("toolkit/data/", "", SAMPLES),
    ("toolkit/checkpoint/", "", "saving or loading a checkpoint"),
    ("toolkit/train/saving.py", "", "saving a checkpoint"),
    ("toolkit/engine/rank_sync.py", "", "agreeing with the other ranks"),
    ("toolkit/models/", "", "building the model"),
    ("toolkit/engine/", "", ENGINE),
    *(
        (f"toolkit/train/{file}.py", function, activity)
        for file in ("task", "vision")
        for function, activity in (
            ("collate", "making a batch"),
            ("units", "making a batch"),
            ("loss_sum", MODEL),
            ("evaluate", MODEL),
            ("eval_sums", MODEL),
            ("_logits", MODEL),
        )
    ),
    ("toolkit/train/evaluation.py", "", "evaluating"),
    ("toolkit/monitor/", "", "logging"),
    ("toolkit/train/loop.py", "", "between steps"),
    ("toolkit/train/run.py", "", "before or after training"),
)
LIBRARIES = (
    "/site-packages/torch/",
    "/dist-packages/torch/",
    f"/lib/python{sys.version_info.major}.{sys.version_info.minor}/",
)

# State letters of /proc/PID/stat (proc(5)).
STATES: Mapping[str, str] = {
    "T": "stopped by a signal",
    "t": "held by a debugger",
    "D": "waiting in the kernel for a disk or a device",
    "Z": "ended",
    "X": "ended",
    "R": "running",
    "S": "sleeping",
    "I": "idle",
}
GONE = "X"
ENDED = ("Z", "X")
SILENT = ("T", "t", "D", *ENDED)  # states in which a process cannot respond


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One Python thread.

    Attributes:
        state: the letter of proc(5) and what the thread waits for in the kernel, as ``S futex_wait_queue``;
            empty if it cannot be read.
        frames: outermost first.
    """

    name: str
    state: str
    frames: tuple[Frame, ...]

    @property
    def main(self) -> bool:
        return self.name == MAIN

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> ThreadStack:
        return ThreadStack(
            fields["name"], fields["state"], tuple(Frame(**frame) for frame in fields["frames"])
        )


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identify a process. Process numbers are reused, so its start time is part of the identity.

    Attributes:
        started: ticks since the machine booted.
        stacks_fd, last_call_fd: descriptors of the process that others may read: :func:`read_frozen_stacks`
            and ``last_collective.LastCollective``.
        pid_namespace: containers may have their own process numbers.
    """

    host: str
    pid: int
    started: str
    stacks_fd: int
    last_call_fd: int
    pid_namespace: str = ""

    def shares_host(self, other: ProcessId) -> bool:
        """Return whether the processes share a host and its process numbers."""
        return (self.host, self.pid_namespace) == (other.host, other.pid_namespace)


def read_thread_stacks() -> list[ThreadStack]:
    """Return the stacks of this process, the main thread's first.

    The calling thread is left out unless it is the main thread.
    """
    own, by_ident = threading.get_ident(), {thread.ident: thread for thread in threading.enumerate()}
    thread_stacks: list[ThreadStack] = []
    for ident, frame in sys._current_frames().items():
        if ident == own and own != threading.main_thread().ident:
            continue
        thread = by_ident.get(ident)
        task = thread.native_id if thread is not None else None
        name = (
            MAIN
            if thread is threading.main_thread()
            else thread.name
            if thread is not None
            else f"thread {ident}"
        )
        thread_stacks.append(ThreadStack(name, _task_state(task) if task else "", read_frames(frame)))
    return sorted(thread_stacks, key=lambda stack: not stack.main)


def read_frames(frame: FrameType | None) -> tuple[Frame, ...]:
    """Return the innermost MAX_FRAMES of a stack, outermost first."""
    frames: list[Frame] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(reversed(frames))


def describe_activity(frames: Sequence[Frame]) -> str:
    """Describe what a thread with these frames does; empty if no frame is in a listed file."""
    for frame in reversed(frames):
        for part, function, activity in ACTIVITIES:
            if f"/{part}" in frame.file and function in ("", frame.function.rpartition(".")[2]):
                return activity
    return ""


def format_location(frames: Sequence[Frame]) -> str:
    """Format the innermost frame, preferably outside torch and the standard library: ``Model.forward
    (model.py:7)``.
    """

    def in_library(frame: Frame) -> bool:
        return any(part in frame.file for part in LIBRARIES) and (
            "-packages/" not in frame.file or "/torch/" in frame.file
        )

    inner = next((frame for frame in reversed(frames) if not in_library(frame)), frames[-1])
    return f"{inner.function} ({short_path(inner.file)}:{inner.line})"


def read_process_state(process: ProcessId) -> str:
    """Return the letter of proc(5) of a process on this host; GONE if it no longer exists."""
    fields = _stat(Path(f"/proc/{process.pid}/stat"))
    return fields[0] if fields is not None and fields[19] == process.started else GONE


def this_process(host: str, stacks_fd: int, last_call_fd: int) -> ProcessId:
    fields = _stat(Path("/proc/self/stat"))
    assert fields is not None, "/proc/self exists"
    namespace = str(Path("/proc/self/ns/pid").readlink())
    return ProcessId(host, os.getpid(), fields[19], stacks_fd, last_call_fd, namespace)


def read_frozen_stacks(process: ProcessId) -> str:
    """Read what ``faulthandler`` wrote into another process's ``stacks_fd``; empty if that cannot be read."""
    try:
        return Path(f"/proc/{process.pid}/fd/{process.stacks_fd}").read_text(
            encoding="utf-8", errors="replace"
        )
    except OSError:
        return ""


def _task_state(task: int) -> str:
    fields = _stat(Path(f"/proc/self/task/{task}/stat"))
    if fields is None:
        return ""
    try:
        channel = Path(f"/proc/self/task/{task}/wchan").read_text(encoding="utf-8").strip("0\n ")
    except OSError:
        channel = ""
    return f"{fields[0]} {channel}".strip()


def _stat(file: Path) -> list[str] | None:
    """Return the fields of a ``stat`` file after the name: state at [0], start time at [19]."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


# ---- formatting


def short_path(file: str) -> str:
    """Shorten a path to start at the package."""
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in file:
            return file.rpartition(mark)[2]
    for mark in ("/toolkit/", "/launch/"):
        if mark in file:
            return mark[1:] + file.rpartition(mark)[2]
    return file


def format_frames(stack: Sequence[Frame], source: Callable[[str, int], str]) -> list[str]:
    """Return one line per frame, outermost first. ``source`` returns a line of a file, or an empty string."""
    lines: list[str] = []
    for frame in stack:
        text = source(frame.file, frame.line).strip()
        lines.append(
            f"{short_path(frame.file)}:{frame.line} {frame.function}" + (f":  {text}" if text else "")
        )
    return lines
