"""Handle the end of a process: exit code, error output and the run's status."""

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

from toolkit.cluster.attempt.output_log import unwrap_stream
from toolkit.cluster.attempt.tracebacks import format_user_frames
from toolkit.cluster.stop.elastic_stop import AfterStop, StopDecision
from toolkit.cluster.stop.stop_request import parent_pid
from toolkit.cluster.world.environment import Launch, Launcher
from toolkit.cluster.world.rendezvous import PeerExited, Rendezvous
from toolkit.errors import ExitCode, InputError, UserError
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.start_checks import NothingToDo
from toolkit.rundir.status import RunState

LOST_CONNECTION = "the connection to another rank was lost: that rank has ended or is unreachable"
LOST_CONNECTION_MESSAGES = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
TAKE_OVER_SECONDS = 1.0  # how long another rank waits for the lock of a dying rank 0
POLL_SECONDS = 0.05
PEER_ERROR_SECONDS = 3.0  # how long a rank waits for another one to report the same mistake or failure


def _describe_error(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"SystemExit: sys.exit({error.code!r}) was called during the run"
    return f"{type(error).__name__}: {error}"


def is_lost_connection(error: BaseException) -> bool:
    """Return whether gloo, NCCL or the ``torch.distributed`` store reports that a peer process has gone."""
    text = str(error)
    return (type(error).__name__.startswith("Dist") or "/gloo/" in text) and any(
        sign in text for sign in LOST_CONNECTION_MESSAGES
    )


def exit_now(code: int) -> NoReturn:
    """End this process immediately, without shutting down the interpreter.

    Threads of gloo and of the engines release tensors during interpreter shutdown; a thread that then needs
    the interpreter aborts the process, so a successful run would end with SIGABRT ("terminate called without
    an active exception").
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader has gone
            stream.flush()
    os._exit(code)


class ExitHandler:
    """Context manager around a whole process, which turns exceptions into exit codes, messages and the run's
    status.

    A user's mistake is printed once over all ranks, without a traceback; any other exception is printed with
    its traceback.

    Attributes:
        code: exit code of the process.
        launch: set as soon as it is known.
        directory, attempt: set as soon as the run has a folder; rank 0 writes its status there.
        rendezvous: set if there are other ranks; they are aborted on an error.
        requeued: whether the ranks belong to a job that is queued again after a failure.
        after_stop: set if the ranks of an elastic run have stopped: whether and where the run continues.

    Args:
        raises: exceptions pass after they are recorded, for the program of the user that called the run.
    """

    def __init__(self, stop: Callable[[], str | None], *, raises: bool = False) -> None:
        self._raises = raises
        self.code = ExitCode.DONE
        self.launch = Launch()
        self.rendezvous: Rendezvous | None = None
        self.directory: RunDirectory | None = None
        self.attempt = 0
        self.requeued = False
        self.after_stop: StopDecision | None = None
        self._stop = stop
        self._parent = os.getppid()

    def __enter__(self) -> ExitHandler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and not isinstance(error, Exception | SystemExit):
            if self._raises:  # the program continues, and the run must not look as if it did
                self.code = ExitCode.FAILURE
                self.record(kind.__name__ if kind is not None else None)
            return False
        reason = self._stop()
        if isinstance(error, PeerExited):
            self.code = ExitCode(error.code)
        elif isinstance(error, NothingToDo):
            self.code = ExitCode.DONE
            if not self._raises:
                print(error, flush=True)
        elif isinstance(error, UserError):
            self.code, reason = ExitCode.USER, str(error)
            if not self._raises:
                with suppress(OSError):
                    self._report_mistake(error)
        elif error is not None:
            notes = getattr(error, "__notes__", [])  # diagnosis added to the exception
            self.code, reason = ExitCode.FAILURE, "\n".join([_describe_error(error), *notes])
            if not notes and is_lost_connection(error):
                reason = f"{LOST_CONNECTION}; see that rank's own output or its node's log\n{reason}"
            with suppress(OSError):  # the terminal has closed; the end must be recorded
                self._report_failure(error)
        elif self.code is ExitCode.STOPPED:
            agreed = self.after_stop.reason if self.after_stop is not None else None
            reason = agreed or reason or "another rank was asked to stop"
        self.record(reason if self.code is not ExitCode.DONE else None)
        if error is not None and not isinstance(error, PeerExited) and self.rendezvous is not None:
            self.rendezvous.abort_peers(self.code)
        if self._must_end_agent() and (agent := self._find_agent()) is not None:
            os.kill(agent, signal.SIGTERM)
        if self.code is ExitCode.FAILURE and self.launch.rank == 0 and (text := self._describe_next_start()):
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)
        return not self._raises

    def _must_end_agent(self) -> bool:
        """Return whether to stop torchrun's agent so that it does not restart the ranks.

        Ranks must not be restarted after a user's mistake, after non-finite numbers, or after a request to
        stop. The ranks of an elastic run are also stopped when a node joins or leaves, and then
        ``after_stop`` decides.
        """
        if self.launch.local_rank != 0:
            return False
        if self.code is ExitCode.STOPPED and self.launch.node_range is not None:
            decision = self.after_stop
            after = AfterStop.RESTART if decision is None else decision.on_node(self.launch.node)
            # An agent that may not restart its ranks ends by itself, but closes the rendezvous for all nodes.
            return after is AfterStop.LEAVE or (after is AfterStop.END and self.launch.restarts_left > 0)
        return self.launch.restarts_left > 0 and self.code in (
            ExitCode.USER,
            ExitCode.DIVERGED,
            ExitCode.STOPPED,
        )

    def _find_agent(self) -> int | None:
        """Return the PID of torchrun's agent; None if it has died, and another process adopted its child."""
        relay = self.launch.relay
        if relay is not None:
            return relay.agent if parent_pid(relay.pid) == relay.agent else None
        return self._parent if os.getppid() == self._parent else None

    def _describe_next_start(self) -> str:
        """Describe what happens after a failure; empty if the supervisor or the job does."""
        if self.directory is None or self.launch.launcher is Launcher.SUPERVISOR:
            return ""
        restarts = self.launch.restart + self.launch.restarts_left
        match self.launch.launcher:
            case Launcher.TORCHELASTIC if self.launch.restarts_left > 0:
                return f"torchrun restarts the ranks, up to {self.launch.restarts_left} more times"
            case Launcher.TORCHELASTIC if restarts > 0:
                why = f"torchrun does not restart the ranks again (--max-restarts={restarts})"
            case Launcher.TORCHELASTIC:
                why = "torchrun does not restart the ranks (--max-restarts=N would)"
            case Launcher.DEEPSPEED:
                why = "deepspeed does not restart ranks (plain python and torchrun do)"
            case _:
                why = ""
        resume = "" if self.requeued else "run the same command to resume"
        return "; ".join(filter(None, (why, resume)))

    def record(self, reason: str | None, *, overwrite: bool = False) -> None:
        """Write the end of this attempt to ``status.json``.

        Rank 0 writes it. If rank 0 has died without doing so, the first other rank that acquires the lock of
        the run directory writes it; the kernel releases that lock when its owner dies. The supervisor records
        the end of its own ranks.

        Args:
            overwrite: replace an end that is already recorded.
        """
        if self.directory is None:
            return
        rank = self.launch.rank
        if rank == 0 or (self.launch.launcher is not Launcher.SUPERVISOR and self._takes_over()):
            states = {ExitCode.DONE: RunState.DONE, ExitCode.STOPPED: RunState.STOPPED}
            if not self._has_trained():
                states[ExitCode.USER] = RunState.REFUSED
            if rank != 0 and reason is not None:
                reason = f"{reason}\nrecorded by rank {rank}, because rank 0 ended without recording a reason"
            self.directory.finish(
                states.get(self.code, RunState.FAILED),
                int(self.code),
                reason,
                attempt=self.attempt,
                overwrite=overwrite,
            )

    def _has_trained(self) -> bool:
        """Return whether this attempt has trained: a run that ends after its first step has failed, not been
        refused.
        """
        assert self.directory is not None
        return self.directory.has_stepped(self.attempt)

    def _takes_over(self) -> bool:
        """Return whether this rank, which is not rank 0, must record the end of the attempt."""
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
                # rank 0 is alive and notices when this process has gone
                return False
            time.sleep(POLL_SECONDS)
        return False

    def abort(self, reason: str, code: ExitCode) -> None:
        """Record the end from the thread that is about to terminate the process."""
        if self.launch.rank == 0 or code is ExitCode.FAILURE:
            with suppress(OSError):  # the terminal has closed
                os.write(2, f"{reason}\n".encode())  # sys.stderr may be locked by the main thread
        self.code = code
        self.record(reason)

    def log_signal(self, signal_name: str) -> None:
        """Log once that a stop signal was received and what happens next."""
        if self.launch.rank == 0 and self.launch.launcher is not Launcher.SUPERVISOR:
            then = "stops" if self.launch.node_range is None else "stops, unless a node joins it"
            text = (
                f"{signal_name}: the run saves after the current step and then {then}; press Ctrl-C to "
                "end it at once without saving\n"
            )
            with suppress(OSError):  # the terminal has closed, which is why SIGHUP was sent
                os.write(2, text.encode())

    def _report_mistake(self, error: UserError) -> None:
        if (
            self.launch.rank != 0
            and self.rendezvous is not None
            and self.rendezvous.wait_for_abort(PEER_ERROR_SECONDS)
        ):
            return
        if self.rendezvous is not None and self.rendezvous.is_open:
            self._is_first_failure()  # the other ranks, which now lose their connection, print no traceback
        text = str(error) if self.launch.rank == 0 else f"rank {self.launch.rank}: {error}"
        print(text, file=sys.stderr, flush=True)
        if self.launch.launcher is Launcher.TORCHELASTIC and (
            file := os.environ.get("TORCHELASTIC_ERROR_FILE")
        ):
            # torchrun prints a long report after any failure; with this file it ends with the actual problem.
            Path(file).write_text(
                json.dumps({"message": text, "timestamp": int(time.time())}), encoding="utf-8"
            )

    def _report_failure(self, error: BaseException) -> None:
        """Write the whole traceback to the log, and print it once over all ranks.

        The rank that fails first prints it, reduced to the frames of the user's code if there are any.
        """
        whole, logged = traceback.format_exc(), ""
        log = self.directory.log_file(self.attempt) if self.directory is not None else None
        if log is not None and log.parent.is_dir():
            with suppress(OSError):  # the disk is full
                with log.open("a", encoding="utf-8") as file:
                    file.write(f"rank {self.launch.rank}: {whole}")
                logged = f"the full traceback is in {log}\n"
        is_first = self._is_first_failure()
        if self._raises:
            return
        text = (format_user_frames(error) or whole) if is_first or not logged else ""
        if not text and is_first is None:
            text = f"{_describe_error(error)}\n"
        if text:
            rank = f"rank {self.launch.rank}: " if self.launch.ranks > 1 else ""
            # Bypass the log copy, which already has the traceback.
            print(
                f"{rank}{text}{logged if text != whole else ''}",
                file=unwrap_stream(sys.stderr),
                end="",
                flush=True,
            )

    def _is_first_failure(self) -> bool | None:
        """Return whether no other rank has reported a failure; None if the store has gone with rank 0."""
        if self.rendezvous is None:
            return True
        try:
            return self.rendezvous.is_first("report", PEER_ERROR_SECONDS)
        except (RuntimeError, TimeoutError, InputError):  # the store has gone, or was never opened
            return None
