"""How a process of a run ends: the exit code, what is printed, and the run's status."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from toolkit.cluster.environment import Launch, Launcher
from toolkit.cluster.output_log import unwrap_stream
from toolkit.cluster.rendezvous import PeerExited, Rendezvous
from toolkit.cluster.tracebacks import format_user_frames
from toolkit.errors import ExitCode, InputError, UserError
from toolkit.rundir.continuing import NothingToDo
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

LOST_CONNECTION = "a connection to another rank was lost, which ended or cannot be reached"
SIGNS_OF_LOSS = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
TAKE_OVER_SECONDS = 1.0  # how long another rank waits for the lock of a rank 0 that is dying; then it leaves
POLL_SECONDS = 0.05
PEER_ERROR_SECONDS = 3.0  # how long another rank with a mistake waits for rank 0 to say the same


def is_lost_connection(error: Exception) -> bool:
    """Whether gloo, NCCL or the store of ``torch.distributed`` say in their own way that a process is there no longer."""
    words = str(error)
    return (type(error).__name__.startswith("Dist") or "/gloo/" in words) and any(
        sign in words for sign in SIGNS_OF_LOSS
    )


def exit_now(code: int) -> NoReturn:
    """End this process now, without taking the interpreter apart.

    Threads of gloo and of engines let go of tensors while the interpreter goes, and a thread that then asks for it aborts the
    process: a run that was done would end with SIGABRT ("terminate called without an active exception").
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it is gone
            stream.flush()
    os._exit(code)


class ExitHandler:
    """Around everything that a process does. A user's mistake is printed as text, once over all ranks; anything else with its
    traceback.

    Attributes:
        code: what to exit with.
        launch: set as soon as it is known.
        directory, attempt: set as soon as the run has a folder; rank 0 writes its status there.
        meeting: set where there are other ranks, which are then sent away.
    """

    def __init__(self, stop: Callable[[], str | None]) -> None:
        self.code = ExitCode.DONE
        self.launch = Launch()
        self.rendezvous: Rendezvous | None = None
        self.directory: RunDirectory | None = None
        self.attempt = 0
        self._stop = stop

    def __enter__(self) -> ExitHandler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False
        reason = self._stop()
        if isinstance(error, PeerExited):
            self.code = ExitCode(error.code)
        elif isinstance(error, NothingToDo):
            self.code = ExitCode.DONE
            print(error, flush=True)
        elif isinstance(error, UserError):
            self.code, reason = ExitCode.USER, str(error)
            self._answer(error)
        elif error is not None:
            notes = getattr(error, "__notes__", [])  # what was found out about it
            self.code, reason = ExitCode.FAILURE, "\n".join([f"{type(error).__name__}: {error}", *notes])
            if not notes and is_lost_connection(error):
                reason = f"{LOST_CONNECTION}: its own words, or its node's, say why\n{reason}"
            self._report(error)
        elif self.code is ExitCode.STOPPED and reason is None:
            reason = "another rank was asked to stop"
        self.record(reason if self.code is not ExitCode.DONE else None)
        if error is not None and not isinstance(error, PeerExited) and self.rendezvous is not None:
            self.rendezvous.abort_peers(self.code)
        if self._must_end_agent():
            os.kill(os.getppid(), signal.SIGTERM)
        if self.code is ExitCode.FAILURE and self.launch.rank == 0 and (words := self._next_start()):
            print(words, file=sys.stderr, flush=True)
        return True

    def _must_end_agent(self) -> bool:
        """Whether torchrun would restart ranks that must not be restarted: after a user's mistake, after numbers that are
        not finite, or after a request to stop.

        An elastic agent sends its ranks SIGTERM whenever a node joins, and then restarts them. They cannot distinguish this from a
        request to stop, so the agent stays: whoever wants to stop an elastic run signals torchrun itself.
        """
        if self.launch.restarts_left == 0 or self.launch.local_rank != 0:
            return False
        return self.code in (ExitCode.USER, ExitCode.DIVERGED) or (
            self.code is ExitCode.STOPPED and not self.launch.elastic
        )

    def _next_start(self) -> str:
        """After a failure of a run, what becomes of it; nothing where our parent says it."""
        if self.directory is None:
            return ""
        match self.launch.launcher:
            case Launcher.PARENT:
                return ""
            case Launcher.TORCHELASTIC if self.launch.restarts_left > 0:
                return f"torchrun starts the ranks again, {self.launch.restarts_left} more times at most"
            case Launcher.TORCHELASTIC:
                return "torchrun does not start the ranks again (--max-restarts=N would); the same command continues"
            case Launcher.DEEPSPEED:
                return "deepspeed does not start ranks again (plain python and torchrun do); the same command continues"
        return "the same command continues"

    def record(self, reason: str | None, *, anew: bool = False) -> None:
        """Write how this attempt ended to ``status.json``.

        Rank 0 writes it. If rank 0 is gone without having done so, the first other rank that takes the lock of the run's directory
        writes it: the kernel frees that lock when the process that holds it dies. Our parent records the end of its own ranks.

        Args:
            anew: replace an end that is already recorded.
        """
        if self.directory is None:
            return
        rank = self.launch.rank
        if rank == 0 or (self.launch.launcher is not Launcher.PARENT and self._takes_over()):
            states = {ExitCode.DONE: RunState.DONE, ExitCode.STOPPED: RunState.STOPPED}
            if not self._has_trained():
                states[ExitCode.USER] = RunState.REFUSED
            if rank != 0 and reason is not None:
                reason = f"{reason}\nrecorded by rank {rank}, because rank 0 ended without recording why"
            self.directory.finish(
                states.get(self.code, RunState.FAILED),
                int(self.code),
                reason,
                attempt=self.attempt,
                anew=anew,
            )

    def _has_trained(self) -> bool:
        """Whether training has begun in this attempt: a run that stops then, for whatever reason, has failed."""
        assert self.directory is not None
        status = self.directory.status()
        return status is not None and status.attempt == self.attempt and status.step is not None

    def _takes_over(self) -> bool:
        """Whether this rank, which is not rank 0, has to record the end of the attempt."""
        assert self.directory is not None
        if self.code is ExitCode.DONE:
            return False
        deadline = time.monotonic() + TAKE_OVER_SECONDS
        while (
            (status := self.directory.status()) is not None
            and status.attempt == self.attempt
            and status.state.live
        ):
            if self.directory.try_lock():
                return True
            if time.monotonic() > deadline:
                return False  # rank 0 is alive: it learns of this end when this process is gone
            time.sleep(POLL_SECONDS)
        return False

    def abort(self, reason: str, code: ExitCode) -> None:
        """For the thread that is about to end the process."""
        if self.launch.rank == 0 or code is ExitCode.FAILURE:
            os.write(2, f"{reason}\n".encode())  # not through sys.stderr, whose lock the main thread may hold
        self.code = code
        self.record(reason)

    def log_signal(self, signal_name: str) -> None:
        """To people, once: what they asked for takes until the step under way is done and saved."""
        if self.launch.rank == 0 and self.launch.launcher is not Launcher.PARENT:
            words = f"{signal_name}: the run saves after the step under way, and stops; Ctrl-C ends it at once, without saving\n"
            with suppress(OSError):  # the terminal is gone, which is why SIGHUP came
                os.write(2, words.encode())

    def _answer(self, error: UserError) -> None:
        if self.launch.rank != 0 and self.rendezvous is not None and self.rendezvous.wait_for_abort(PEER_ERROR_SECONDS):
            return
        words = str(error) if self.launch.rank == 0 else f"rank {self.launch.rank}: {error}"
        print(words, file=sys.stderr, flush=True)
        if self.launch.launcher is Launcher.TORCHELASTIC and (
            file := os.environ.get("TORCHELASTIC_ERROR_FILE")
        ):
            # torchrun prints thirty lines of its own after any failure; with this file they end with what was refused.
            Path(file).write_text(
                json.dumps({"message": words, "timestamp": int(time.time())}), encoding="utf-8"
            )

    def _report(self, error: Exception) -> None:
        """Log the whole traceback; print it once over all ranks, by the rank that comes first, and of it the lines of the user's code if
        there are any."""
        whole, logged = traceback.format_exc(), ""
        log = self.directory.log_file(self.attempt) if self.directory is not None else None
        if log is not None and log.parent.is_dir():
            with log.open("a", encoding="utf-8") as file:
                file.write(f"rank {self.launch.rank}: {whole}")
            logged = f"the whole traceback is in {log}\n"
        comes_first = self._comes_first()
        text = (format_user_frames(error) or whole) if comes_first or not logged else ""
        if not text and comes_first is None:
            text = f"{type(error).__name__}: {error}\n"
        if text:
            rank = f"rank {self.launch.rank}: " if self.launch.ranks > 1 else ""
            # Past the log, which has it.
            print(f"{rank}{text}{logged if text != whole else ''}", file=unwrap_stream(sys.stderr), end="", flush=True)

    def _comes_first(self) -> bool | None:
        """Whether no other rank has reported a failure; None if the ranks' store is gone, with rank 0."""
        if self.rendezvous is None:
            return True
        try:
            return self.rendezvous.is_first("report")
        except (RuntimeError, TimeoutError, InputError):  # of torch.distributed, or there never was a store
            return None
