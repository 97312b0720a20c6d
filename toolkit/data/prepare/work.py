"""Tasks over processes: each takes the next number when it is free. What they make is on disk; here goes only how far they are.

A process ends with its parent, however that ends (``kill -9`` too): none works on beside the one that is started next.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from toolkit.errors import ExitCode, InputError, Problem
from toolkit.progress import ProgressTask

Advance = Callable[[int], None]  # by so many bytes
Job = Callable[[int, Advance], None]
LOOK_SECONDS = 0.2


def each(begin: Callable[[], Job], numbers: Sequence[int], workers: int, task: ProgressTask) -> None:
    """Do every one of ``numbers``: ``begin()``, in each process, gives what does one. A single worker is this process.

    Raises:
        InputError: one of them met it, or a process was killed (what is done stays done).
    """
    if not numbers:
        return
    if workers == 1 or len(numbers) == 1:
        job = begin()
        for number in numbers:
            job(number, task.advance)
        return
    context = multiprocessing.get_context(
        "spawn"
    )  # tokenizers and arrow have threads, which a fork would break
    taken, done = context.Value("q", 0), context.Value("q", 0)
    processes, ends = [], []
    try:
        for _ in range(min(workers, len(numbers))):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(begin, numbers, taken, done, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(mine)
        _watch(processes, ends, done, task)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _watch(processes: Sequence[Any], ends: Sequence[Connection], done: Any, task: ProgressTask) -> None:
    told = 0
    running = dict(
        zip([process.sentinel for process in processes], zip(processes, ends, strict=True), strict=True)
    )
    while running:
        ended = wait(list(running), timeout=LOOK_SECONDS)
        now = done.value
        if now > told:
            task.advance(now - told)
            told = now
        for sentinel in ended:
            assert isinstance(sentinel, int)
            process, end = running.pop(sentinel)
            process.join()  # its end shows before its code does
            if process.exitcode:
                raise _failure(process.exitcode, end)


def _failure(code: int, end: Connection) -> Exception:
    if code == ExitCode.FAILURE and end.poll():
        error = end.recv()
        assert isinstance(error, Exception)
        return error
    seen = f"a worker ended with code {code}" + (f" ({signal.Signals(-code).name})" if code < 0 else "")
    remedy = "start it again: it goes on; with fewer workers= or less memory_mib= where memory was short"
    return InputError(Problem("workers", seen, "every worker does its share to the end", remedy))


def _work(begin: Callable[[], Job], numbers: Sequence[int], taken: Any, done: Any, end: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told too, and ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def advance(amount: int) -> None:
        with done.get_lock():
            done.value += amount

    try:
        job = begin()
        while True:
            with taken.get_lock():
                index = taken.value
                taken.value += 1
            if index >= len(numbers):
                return
            job(numbers[index], advance)
    except InputError as error:
        end.send(error)
    except Exception:  # noqa: BLE001 - whatever it is, the parent raises it with this traceback
        end.send(RuntimeError(traceback.format_exc()))
    raise SystemExit(int(ExitCode.FAILURE))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(int(ExitCode.FAILURE))
