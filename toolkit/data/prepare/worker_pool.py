"""Run tasks in processes that take the next number when free. Results are on disk.

A process ends with its parent, even after ``kill -9``, so that none runs on when the parent is started again.
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

Advance = Callable[[int], None]  # reports a number of bytes
NumberedTask = Callable[[int, Advance], None]
POLL_SECONDS = 0.2


def run_tasks(
    start_task: Callable[[], NumberedTask], numbers: Sequence[int], workers: int, task: ProgressTask
) -> None:
    """Run the task of every one of ``numbers``; ``start_task()`` in each process returns the task.

    Raises:
        InputError: a task raised it, or a process was killed (finished tasks stay finished).
    """
    if not numbers:
        return
    if workers == 1 or len(numbers) == 1:
        job = start_task()
        for number in numbers:
            job(number, task.advance)
        return
    # Tokenizers and arrow have threads, so processes cannot be forked.
    context = multiprocessing.get_context("spawn")
    next_index, progress_bytes = context.Value("q", 0), context.Value("q", 0)
    processes, receivers = [], []
    try:
        for _ in range(min(workers, len(numbers))):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_worker,
                args=(start_task, numbers, next_index, progress_bytes, sender),
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        _watch(processes, receivers, progress_bytes, task)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _watch(
    processes: Sequence[Any], receivers: Sequence[Connection], progress_bytes: Any, task: ProgressTask
) -> None:
    reported = 0
    running = dict(
        zip([process.sentinel for process in processes], zip(processes, receivers, strict=True), strict=True)
    )
    while running:
        ended = wait(list(running), timeout=POLL_SECONDS)
        current = progress_bytes.value
        if current > reported:
            task.advance(current - reported)
            reported = current
        for sentinel in ended:
            assert isinstance(sentinel, int)
            process, pipe = running.pop(sentinel)
            process.join()  # the sentinel is ready before the exit code
            if process.exitcode:
                raise _worker_error(process.exitcode, pipe)


def _worker_error(code: int, pipe: Connection) -> Exception:
    if code == ExitCode.FAILURE and pipe.poll():
        error = pipe.recv()
        assert isinstance(error, Exception)
        return error
    seen = f"a worker ended with code {code}" + (f" ({signal.Signals(-code).name})" if code < 0 else "")
    remedy = "start again to continue; if memory ran out, with fewer workers= or a smaller memory_mib="
    return InputError(Problem("workers", seen, "all worker processes must finish", remedy))


def _run_worker(
    start_task: Callable[[], NumberedTask],
    numbers: Sequence[int],
    next_index: Any,
    progress_bytes: Any,
    pipe: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the signal too, and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def advance(amount: int) -> None:
        with progress_bytes.get_lock():
            progress_bytes.value += amount

    try:
        job = start_task()
        while True:
            with next_index.get_lock():
                index = next_index.value
                next_index.value += 1
            if index >= len(numbers):
                return
            job(numbers[index], advance)
    except InputError as error:
        pipe.send(error)
    except Exception:  # noqa: BLE001 - the parent raises it with this traceback
        pipe.send(RuntimeError(traceback.format_exc()))
    raise SystemExit(int(ExitCode.FAILURE))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(int(ExitCode.FAILURE))
