"""Where the ranks meet: one store, from rank 0's first word to the process group.

Rank 0 alone reads the user's configuration; the others are told what it came to. So nothing is resolved twice, a mistake is
answered once, and no shared file system is needed to start.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
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

RENDEZVOUS_SECONDS = 300.0
FAREWELL_SECONDS = 30.0  # rank 0 serves the store this much longer, for ranks that are still importing torch
# Importing torch takes all of a core: meanwhile rank 0 composes, and a mistake is answered sooner. It costs nothing, since the store
# opens only when rank 0 has imported torch after that.
HEAD_START_SECONDS = 0.5
POLL_SECONDS = 0.05
LOOPBACK = "127.0.0.1"  # where ranks of one machine meet, whatever MASTER_ADDR says
ERROR = "error"


class PeerExited(Exception):
    """This rank ends with ``code`` and prints nothing: another one has said why."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(code)


class Rendezvous:
    """Messages between the ranks of one launch. The store is opened at the first use, since it needs torch.

    Args:
        overrides: what the user typed; with the launcher's process they tell this launch from another one at the same port.
        seconds: how long to wait for another rank.
    """

    def __init__(self, launch: Launch, overrides: Sequence[str], seconds: float = RENDEZVOUS_SECONDS) -> None:
        self._launch = launch
        self._seconds = seconds
        self._opened: Store | None = None
        self._grouped = False
        self._prefix = f"toolkit/{_launch_token(launch, overrides)}"

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
            raise PeerExited(int(store.get(ERROR)))
        return [json.loads(store.get(name)) for name in names]

    def abort_peers(self, code: int) -> None:
        """Send the other ranks away; why has been printed. Before the process group starts, stay until they have heard it, since
        this process may be the one that serves the store."""
        try:
            store = self._store(FAREWELL_SECONDS)
        except (InputError, TimeoutError):  # there is no meeting to end
            return
        deadline = time.monotonic() + (0 if self._grouped else FAREWELL_SECONDS)
        try:
            store.set(ERROR, str(int(code)))
            while time.monotonic() < deadline and store.add("heard", 0) < self._launch.ranks - 1:
                time.sleep(POLL_SECONDS)
        except (
            RuntimeError
        ):  # of torch.distributed: the rank that serves the store has left, perhaps since it has heard
            return

    def wait_for_abort(self, seconds: float) -> bool:
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

    def is_first(self, name: str) -> bool:
        """Whether this rank is the first to ask, for each name. Raises RuntimeError if the store is gone."""
        return self._store().add(f"first/{name}", 1) == 1

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
            dist.init_process_group("nccl", kv_store=store, rank=rank, world_size=ranks, device_id=own)
        else:
            dist.init_process_group("gloo", kv_store=store, rank=rank, world_size=ranks)
        self._grouped = True
        yield
        dist.destroy_process_group()

    # ---- the store

    @property
    def kv_store(self) -> Store:
        """For what messages are too slow for; opened at the first use."""
        return self._store()

    def _store(self, seconds: float | None = None) -> Store:
        if self._opened is None:
            import torch.distributed as dist

            store = dist.PrefixStore(self._prefix, self._open())
            if (
                self._launch.agent_store
            ):  # it outlives the ranks, and has what those before them have said; rank 0's own ends with it
                store = dist.PrefixStore(self._gathering(store, seconds), store)
            self._opened = store
        return self._opened

    def _gathering(self, store: Store, seconds: float | None) -> str:
        """The name of this gathering of ranks: rank 0 makes it, and answers each rank by itself.

        torchrun says how often it has started a rank again. But the agent of each node counts by itself, and only failures of its own
        ranks (torch 2.13, ``_invoke_run``: "membership changes do not count as retries"): when a rank was killed, those of two nodes have
        different numbers. So each rank asks with a word that nobody had before, and who answers that one is alive.
        """
        own = secrets.token_hex(8)
        if self._launch.rank == 0:
            self._wait(
                _GenerationServer(store, own, self._launch.ranks - 1),
                f"all {self._launch.ranks} ranks to come",
                seconds,
            )
            return own
        store.set(f"asked/{store.add('asked', 1)}", own)
        self._wait(lambda: store.check([f"answer/{own}"]), "rank 0", seconds)
        name = store.get(f"answer/{own}").decode()
        store.add(f"{name}/here", 1)
        return name

    def _open(self) -> Store:
        import torch.distributed as dist

        if self._launch.launcher is Launcher.NONE:
            return dist.HashStore()
        alone = self._launch.nodes == 1 and not self._launch.agent_store
        address = LOOPBACK if alone else self._launch.address
        port, timeout = self._launch.port, timedelta(seconds=self._seconds)
        if self._launch.rank == 0 and not self._launch.agent_store:
            try:
                # Left to itself the store listens on every interface, and whoever reaches it may read and write: it asks for no password.
                listener = _loopback_socket(port) if alone else None
                return dist.TCPStore(
                    address,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    multi_tenant=True,
                    timeout=timeout,
                    master_listen_fd=listener,
                )
            except (dist.DistNetworkError, OSError) as error:
                raise InputError(
                    Problem(
                        "MASTER_PORT",
                        f"port {port} of {address} cannot be served ({str(error).splitlines()[0]})",
                        "rank 0 serves the ranks' meeting at MASTER_ADDR:MASTER_PORT",
                        "another run may use it: write deepspeed --master_port N or torchrun --master_port N",
                    )
                ) from error
        # Looking first avoids the warnings that the store's client prints while nobody answers.
        door = _PortProbe(address, port)
        self._wait(door, f"the store at {address}:{port}, which rank 0 or its launcher serves", why=door.why)
        return dist.TCPStore(address, port, is_master=False, timeout=timeout)

    def _wait(
        self, holds: Callable[[], bool], what: str, seconds: float | None = None, why: Callable[[], str] = str
    ) -> None:
        """``why``: what to add to the words of a time-out."""
        seconds = seconds or self._seconds
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._launch.rank} waited {seconds:g} s for {what}{why()}")
            time.sleep(POLL_SECONDS)


def _loopback_socket(port: int) -> int:
    """A socket at ``port`` that only this machine reaches; its descriptor belongs to the caller. Raises OSError if the port is taken."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((LOOPBACK, port))
        return bound.detach()


class _GenerationServer:
    """Rank 0's part of a gathering: each call answers those that have asked since, and says whether everybody has heard it.

    Args:
        name: of the gathering.
        others: how many ranks there are besides.
    """

    def __init__(self, store: Store, name: str, others: int) -> None:
        self._store, self._name, self._others = store, name, others
        self._seen = 0
        self._open: list[int] = []

    def __call__(self) -> bool:
        asked = self._store.add("asked", 0)
        self._open += range(self._seen + 1, asked + 1)
        self._seen = asked
        for number in list(self._open):
            if self._store.check(
                [f"asked/{number}"]
            ):  # else its rank is about to write it, or was killed before it could
                self._store.set(f"answer/{self._store.get(f'asked/{number}').decode()}", self._name)
                self._open.remove(number)
        return self._store.add(f"{self._name}/here", 0) >= self._others


class _PortProbe:
    """Whether somebody listens at ``address``:``port``."""

    def __init__(self, address: str, port: int) -> None:
        self._place, self._error = (address, port), ""

    def __call__(self) -> bool:
        try:
            socket.create_connection(self._place, timeout=1).close()
        except OSError as error:
            self._error = str(error)
            if isinstance(error, socket.gaierror):
                self._error += "; the first node's name does not resolve here: torchrun --local-addr=ADDRESS there says its address instead"
            return False
        return True

    def why(self) -> str:
        return f" ({self._error})" if self._error else ""


def _launch_token(launch: Launch, overrides: Sequence[str]) -> str:
    """Equal in all ranks of a launch; another launch that took the same port by mistake has another one."""
    own = [str(launch.ranks), *overrides]
    if launch.nodes == 1 and launch.launcher in (Launcher.DEEPSPEED, Launcher.TORCHELASTIC, Launcher.PARENT):
        own.append(str(os.getppid()))
    return hashlib.sha256("\0".join(own).encode()).hexdigest()[:16]
