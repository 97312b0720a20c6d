"""What the threads of this process are doing, and what state its neighbours' processes are in. Reads memory and ``/proc`` only: no source
file, no lock of anybody else, so that it answers when a disk or another thread does not."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

FRAMES = 64  # of a thread: the innermost ones
MAIN = "MainThread"

SAMPLES, ENGINE = "waiting for samples", "in the engine"
MODEL = "in the model's forward"
# Where a thread is -> what it does there: a part of the file's path, and the function's name if the file has several purposes. The
# innermost frame that is listed decides: a task's loss calls the model, whose own files are not listed.
DOING: tuple[tuple[str, str, str], ...] = (
    ("toolkit/data/", "", SAMPLES),
    ("toolkit/checkpoint/", "", "saving or loading a checkpoint"),
    ("toolkit/train/saving.py", "", "saving a checkpoint"),
    ("toolkit/engine/rank_sync.py", "", "agreeing with the other ranks"),
    ("toolkit/models/", "", "building the model"),
    ("toolkit/engine/", "", ENGINE),
    *(
        (f"toolkit/train/{file}.py", function, words)
        for file in ("task", "vision")
        for function, words in (
            ("collate", "making a batch"),
            ("units", "making a batch"),
            ("loss_sum", MODEL),
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

# Letters of /proc/PID/stat, of proc(5), where they say why a process does not answer.
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
SILENT = ("T", "t", "D", *ENDED)  # in one of these no answer can be expected


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One Python thread.

    Attributes:
        state: of ``/proc``: a letter of proc(5), and what it waits for in the kernel, as ``S futex_wait_queue``; empty where that cannot
            be read.
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
    """A process that cannot be mistaken for another one: numbers are used again, and the time of its start tells them apart.

    Attributes:
        started: ticks since the start of the machine.
        notes, box: file descriptors of it that others may read: :func:`notes_of`, ``last_collective.LastCollective``.
        space: of the numbers, which containers may have of their own.
    """

    host: str
    pid: int
    started: str
    notes: int
    box: int
    space: str = ""

    def beside(self, other: ProcessId) -> bool:
        """Whether the two can see each other under their numbers: on one host, and not in containers that count apart."""
        return (self.host, self.space) == (other.host, other.space)


def threads() -> list[ThreadStack]:
    """Of this process, the main thread first; without the caller's, unless that is the main thread."""
    own, known = threading.get_ident(), {thread.ident: thread for thread in threading.enumerate()}
    found: list[ThreadStack] = []
    for ident, frame in sys._current_frames().items():
        if ident == own and own != threading.main_thread().ident:
            continue
        thread = known.get(ident)
        task = thread.native_id if thread is not None else None
        name = (
            MAIN
            if thread is threading.main_thread()
            else thread.name
            if thread is not None
            else f"thread {ident}"
        )
        found.append(ThreadStack(name, _task_state(task) if task else "", frames_of(frame)))
    return sorted(found, key=lambda stack: not stack.main)


def frames_of(frame: FrameType | None) -> tuple[Frame, ...]:
    """The innermost FRAMES of a stack, outermost first."""
    found: list[Frame] = []
    while frame is not None and len(found) < FRAMES:
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(reversed(found))


def doing(frames: Sequence[Frame]) -> str:
    """What a thread with these frames is at, in words; empty: nothing of the toolkit."""
    for frame in reversed(frames):
        for part, function, words in DOING:
            if f"/{part}" in frame.file and function in ("", frame.function.rpartition(".")[2]):
                return words
    return ""


def place(frames: Sequence[Frame]) -> str:
    """The innermost frame, if possible outside of torch and Python's own library: ``Model.forward (model.py:7)``."""

    def of_a_library(frame: Frame) -> bool:
        return any(part in frame.file for part in LIBRARIES) and (
            "-packages/" not in frame.file or "/torch/" in frame.file
        )

    inner = next((frame for frame in reversed(frames) if not of_a_library(frame)), frames[-1])
    return f"{inner.function} ({short(inner.file)}:{inner.line})"


def process_state(process: ProcessId) -> str:
    """A letter of proc(5); GONE where that process is no more. On the host that it runs on."""
    fields = _stat(Path(f"/proc/{process.pid}/stat"))
    return fields[0] if fields is not None and fields[19] == process.started else GONE


def this_process(host: str, notes: int, box: int) -> ProcessId:
    fields = _stat(Path("/proc/self/stat"))
    assert fields is not None, "a process sees itself"
    return ProcessId(host, os.getpid(), fields[19], notes, box, str(Path("/proc/self/ns/pid").readlink()))


def notes_of(process: ProcessId) -> str:
    """What that process, of this host and user, has written into its descriptor ``notes``; empty where it cannot be read."""
    try:
        return Path(f"/proc/{process.pid}/fd/{process.notes}").read_text(encoding="utf-8", errors="replace")
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
    """The fields of a ``stat`` file after the name: state first, start time at [19]. None: no such process."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


# ---- in words


def short(file: str) -> str:
    """A path as people know it: from the package on."""
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in file:
            return file.rpartition(mark)[2]
    for mark in ("/toolkit/", "/launch/"):
        if mark in file:
            return mark[1:] + file.rpartition(mark)[2]
    return file


def lines(stack: Sequence[Frame], source: Callable[[str, int], str]) -> list[str]:
    """One line a frame, outermost first. ``source`` gives the text of a line of a file, or nothing."""
    found: list[str] = []
    for frame in stack:
        text = source(frame.file, frame.line).strip()
        found.append(f"{short(frame.file)}:{frame.line} {frame.function}" + (f":  {text}" if text else ""))
    return found
