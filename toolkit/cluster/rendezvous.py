"""Where the ranks meet: one store, from rank 0's first word to the process group.

Rank 0 alone reads the user's configuration; the others are told what it came to. So nothing is resolved twice, a mistake is
answered once, and no shared file system is needed to start.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from toolkit.cluster.environment import Launch, Launcher
from toolkit.errors import InputError, Problem
from toolkit.plan.types import Device

if TYPE_CHECKING:
    from torch.distributed import Store

MEETING_SECONDS = 300.0
FAREWELL_SECONDS = 30.0  # rank 0 serves the store this much longer, for ranks that are still importing torch
# Importing torch takes all of a core: meanwhile rank 0 composes, and a mistake is answered sooner. It costs nothing, since the store
# opens only when rank 0 has imported torch after that.
HEAD_START_SECONDS = 0.5
POLL_SECONDS = 0.05
ERROR = "error"


class Left(Exception):
    """This rank ends with ``code`` and prints nothing: another one has said why."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(code)


class Meeting:
    """Messages between the ranks of one launch. The store is opened at the first use, since it needs torch.

    Args:
        overrides: what the user typed; with the launcher's process they tell this launch from another one at the same port.
        seconds: how long to wait for another rank.
    """

    def __init__(self, launch: Launch, overrides: Sequence[str], seconds: float = MEETING_SECONDS) -> None:
        self._launch = launch
        self._seconds = seconds
        self._opened: Store | None = None
        self._grouped = False
        # Each restart by the launcher is a meeting of its own: keys of the one before would mix with it.
        self._prefix = f"toolkit/{launch.restart}/{_token(launch, overrides)}"

    # ---- messages

    def publish(self, name: str, message: Mapping[str, Any]) -> None:
        """For all ranks, once a name."""
        self._store().set(name, json.dumps(message))

    def receive(self, *names: str, seconds: float | None = None) -> list[dict[str, Any]]:
        """The messages of these names, waiting up to ``seconds`` (None: the meeting's own bound) for the last one.

        Raises:
            Left: another rank has sent this one away.
            TimeoutError: they did not come.
        """
        if self._opened is None:
            time.sleep(HEAD_START_SECONDS)
        store = self._store()
        self._wait(lambda: store.check([ERROR]) or store.check(list(names)), " and ".join(names), seconds)
        if store.check([ERROR]):
            store.add("heard", 1)
            raise Left(int(store.get(ERROR)))
        return [json.loads(store.get(name)) for name in names]

    def dismiss(self, code: int) -> None:
        """Send the other ranks away; why has been printed. Before the process group starts, stay until they have heard it, since
        this process may be the one that serves the store."""
        try:
            store = self._store()
        except InputError:  # there is no meeting to end
            return
        store.set(ERROR, str(int(code)))
        deadline = time.monotonic() + (0 if self._grouped else FAREWELL_SECONDS)
        while time.monotonic() < deadline and store.add("heard", 0) < self._launch.ranks - 1:
            time.sleep(POLL_SECONDS)

    def dismissed(self, seconds: float) -> bool:
        """Whether another rank sends, within ``seconds``, this one away. Where the store is gone, its rank left before: yes."""
        from torch.distributed import DistError

        deadline = time.monotonic() + seconds
        try:
            while not self._store().check([ERROR]):
                if time.monotonic() > deadline:
                    return False
                time.sleep(POLL_SECONDS)
        except (DistError, RuntimeError):
            return True
        return True

    # ---- the process group

    @contextmanager
    def process_group(self, device: Device) -> Iterator[None]:
        """``torch.distributed`` over the same store: gloo, or NCCL on this rank's GPU. DeepSpeed adopts it. Torn down where the
        body ends well; else the other ranks may be waiting in it, and the end of this process tells them."""
        import torch
        import torch.distributed as dist

        store = dist.PrefixStore("group", self._store())
        rank, ranks = self._launch.rank, self._launch.ranks
        if device is Device.CUDA:
            own = torch.device("cuda", self._launch.local_rank)
            torch.cuda.set_device(own)
            dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=own)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        self._grouped = True
        yield
        dist.destroy_process_group()

    # ---- the store

    @property
    def store(self) -> Store:
        """For what messages are too slow for; opened at the first use."""
        return self._store()

    def _store(self) -> Store:
        if self._opened is None:
            import torch.distributed as dist

            self._opened = dist.PrefixStore(self._prefix, self._open())
        return self._opened

    def _open(self) -> Store:
        import torch.distributed as dist

        if self._launch.launcher is Launcher.NONE:
            return dist.HashStore()
        address, port, timeout = self._launch.address, self._launch.port, timedelta(seconds=self._seconds)
        if self._launch.rank == 0 and not self._launch.agent_store:
            try:
                return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timeout)
            except dist.DistNetworkError as error:
                raise InputError(Problem("MASTER_PORT", f"port {port} of {address} cannot be served ({str(error).splitlines()[0]})",
                                         "rank 0 serves the ranks' meeting at MASTER_ADDR:MASTER_PORT",
                                         "another run may use it: write deepspeed --master_port N or torchrun --master_port N")) from error
        # Looking first avoids the warnings that the store's client prints while nobody answers.
        self._wait(lambda: _answers(address, port), f"the store at {address}:{port}, which rank 0 or its launcher serves")
        return dist.TCPStore(address, port, is_master=False, timeout=timeout)

    def _wait(self, holds: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        seconds = seconds or self._seconds
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._launch.rank} waited {seconds:g} s for {what}")
            time.sleep(POLL_SECONDS)


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _token(launch: Launch, overrides: Sequence[str]) -> str:
    """Equal in all ranks of a launch; another launch that took the same port by mistake has another one."""
    own = [str(launch.ranks), *overrides]
    if launch.nodes == 1 and launch.launcher in (Launcher.DEEPSPEED, Launcher.TORCHELASTIC, Launcher.PARENT):
        own.append(str(os.getppid()))
    return hashlib.sha256("\0".join(own).encode()).hexdigest()[:16]
