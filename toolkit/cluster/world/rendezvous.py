"""Exchange messages between ranks through a shared store, and create the process group on it.

Only rank 0 reads the user's configuration and publishes the result. So nothing is resolved twice, a mistake
is reported once, and starting needs no shared file system.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from toolkit.cluster.world.environment import Launch, Launcher
from toolkit.errors import InputError, Problem
from toolkit.plan.types import Device

if TYPE_CHECKING:
    from torch.distributed import Store

RENDEZVOUS_SECONDS = 300.0
# how long rank 0 keeps serving the store for ranks that are still importing torch
LINGER_SECONDS = 30.0
# Importing torch occupies a whole core; delaying it on the other ranks lets rank 0 report a mistake sooner.
# This costs nothing, since the store opens only after rank 0 has imported torch as well.
HEAD_START_SECONDS = 0.5
POLL_SECONDS = 0.05
LOOPBACK = "127.0.0.1"  # used by ranks of one machine instead of MASTER_ADDR
ERROR = "error"


class PeerExited(Exception):
    """This rank must end with ``code`` and print nothing, since another rank has reported the reason."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(code)


# The store of this process by address, port and rank: a launcher gives a process one port, and a program of
# the user may train several times.
_OPEN_STORES: dict[tuple[str, int, int], Store] = {}


class Rendezvous:
    """Messages between the ranks of one launch. The store needs torch, so it is opened on first use.

    Args:
        overrides: the user's arguments; together with the launcher's process ID they identify the launch.
        seconds: how long to wait for another rank.
    """

    def __init__(self, launch: Launch, overrides: Sequence[str], seconds: float = RENDEZVOUS_SECONDS) -> None:
        self._launch = launch
        self._seconds = seconds
        self._kv_store: Store | None = None
        self._has_group = False
        self._prefix = f"toolkit/{_launch_token(launch, overrides)}"

    # ---- messages

    def publish(self, name: str, message: Mapping[str, Any]) -> None:
        """Publish a message to all ranks; once per name."""
        self._store().set(name, json.dumps(message))

    def receive(self, *names: str, seconds: float | None = None) -> list[dict[str, Any]]:
        """Return the messages of these names, waiting up to ``seconds`` (None: the default of this object)
        for all of them.

        Raises:
            PeerExited: another rank has aborted its peers.
            TimeoutError: a message did not arrive.
        """
        if self._kv_store is None:
            time.sleep(HEAD_START_SECONDS)
        store = self._store()
        self._wait(lambda: store.check([ERROR]) or store.check(list(names)), " and ".join(names), seconds)
        if store.check([ERROR]):
            store.add("heard", 1)
            raise PeerExited(int(store.get(ERROR)))
        return [json.loads(store.get(name)) for name in names]

    def confirm(self, name: str) -> None:
        """Report that this rank has received the message ``name``."""
        self._store().add(f"confirmed/{name}", 1)

    def wait_for_confirmations(self, name: str, ranks: int, seconds: float) -> None:
        """Wait until so many ranks have confirmed the message ``name``: this process may serve their store.
        Raises TimeoutError.
        """
        store = self._store()
        confirmed = f"{ranks} confirmations of {name}"
        self._wait(lambda: store.add(f"confirmed/{name}", 0) >= ranks, confirmed, seconds)

    def abort_peers(self, code: int) -> None:
        """Make the other ranks exit with ``code``; the reason has been printed.

        Before the process group exists, wait until they have received it, since this process may serve the
        store.
        """
        try:
            store = self._store(LINGER_SECONDS)
        except (InputError, TimeoutError):  # no store, so no peers to abort
            return
        deadline = time.monotonic() + (0 if self._has_group else LINGER_SECONDS)
        try:
            store.set(ERROR, str(int(code)))
            while time.monotonic() < deadline and store.add("heard", 0) < self._launch.ranks - 1:
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # raised by torch.distributed: the rank that serves the store has exited
            return

    def wait_for_abort(self, seconds: float) -> bool:
        """Return whether another rank aborts this one within ``seconds``; True if the store has gone with its
        rank, False if there is none.
        """
        deadline = time.monotonic() + seconds
        try:
            while not self._store(seconds).check([ERROR]):
                if time.monotonic() > deadline:
                    return False
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # raised by torch.distributed
            return True
        except (InputError, TimeoutError):
            return False
        return True

    @property
    def is_open(self) -> bool:
        """Whether this process is connected to the store. Opening it loads torch."""
        return self._kv_store is not None

    def is_first(self, name: str, seconds: float) -> bool:
        """Return whether this rank is the first to call this with ``name``.

        Args:
            seconds: how long to wait for the store, if it is not open.

        Raises:
            RuntimeError: the store has gone.
            TimeoutError: it does not exist.
        """
        return self._store(seconds).add(f"first/{name}", 1) == 1

    # ---- the process group

    @contextmanager
    def process_group(self, device: Device) -> Iterator[None]:
        """Create the default process group on the same store: gloo, or NCCL on this rank's GPU. DeepSpeed
        adopts it.

        It is destroyed only if the body succeeds. After an error the other ranks may be blocked in a
        collective, and the exit of this process releases them.
        """
        import torch
        import torch.distributed as dist

        store = dist.PrefixStore("group", self._store())
        rank, ranks = self._launch.rank, self._launch.ranks
        if device is Device.CUDA:
            torch.cuda.set_device(self._launch.local_rank)
            # Not bound to the device by ``device_id``: every later group, of which Megatron-core creates
            # hundreds, would then be split off the communicator of all ranks, collectively and at once.
            dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        self._has_group = True
        yield
        dist.destroy_process_group()

    # ---- the store

    @property
    def kv_store(self) -> Store:
        """The underlying store, for frequent small messages; opened on first use."""
        return self._store()

    def _store(self, seconds: float | None = None) -> Store:
        if self._kv_store is None:
            import torch.distributed as dist

            key = (self._launch.address, self._launch.port, self._launch.rank)
            opened = _OPEN_STORES.get(key) or self._open(seconds)
            if self._launch.launcher is not Launcher.NONE:
                _OPEN_STORES[key] = opened
            store = dist.PrefixStore(self._prefix, opened)
            if self._launch.agent_store:
                # The agent's store outlives the ranks and still has the messages of earlier generations.
                store = dist.PrefixStore(self._join_generation(store, seconds), store)
            self._kv_store = store
        return self._kv_store

    def _join_generation(self, store: Store, seconds: float | None) -> str:
        """Return the key prefix of this generation of ranks: rank 0 creates it and hands it to each rank.

        The restart count of torchrun cannot be used: each agent counts only failures of its own ranks (torch
        2.13, ``_invoke_run``: "membership changes do not count as retries"), so nodes may disagree. Instead
        each rank posts a random token, and only a live rank 0 answers it.
        """
        token = secrets.token_hex(8)
        if self._launch.rank == 0:
            self._wait(
                _GenerationServer(store, token, self._launch.ranks - 1),
                f"all {self._launch.ranks} ranks to join",
                seconds,
            )
            return token
        store.set(f"asked/{store.add('asked', 1)}", token)
        self._wait(lambda: store.check([f"answer/{token}"]), "rank 0", seconds)
        name = store.get(f"answer/{token}").decode()
        store.add(f"{name}/here", 1)
        return name

    def _open(self, seconds: float | None = None) -> Store:
        import torch.distributed as dist

        if self._launch.launcher is Launcher.NONE:
            return dist.HashStore()
        alone = self._launch.nodes == 1 and not self._launch.agent_store
        address = LOOPBACK if alone else self._launch.address
        port, timeout = self._launch.port, timedelta(seconds=self._seconds)
        if self._launch.rank == 0 and not self._launch.agent_store:
            try:
                # By default the store listens on every interface and accepts unauthenticated reads and
                # writes.
                listener = bind_loopback(port).detach() if alone else None
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
                remedy = "set deepspeed --master_port N or torchrun --master_port N"
                if self._launch.launcher is Launcher.SUPERVISOR:
                    remedy = "repeat the same command, which chooses another port"
                raise InputError(
                    Problem(
                        "MASTER_PORT",
                        f"port {port} of {address} cannot be served ({str(error).splitlines()[0]})",
                        "rank 0 serves the store of the rendezvous at MASTER_ADDR:MASTER_PORT",
                        f"another process may use the port: {remedy}",
                    )
                ) from error
        # Probe the port first to avoid the warnings that the store's client prints while nothing listens.
        door = _PortProbe(address, port)
        what = f"the store at {address}:{port}, served by rank 0 or its launcher"
        self._wait(door, what, seconds, why=door.why)
        return dist.TCPStore(address, port, is_master=False, timeout=timeout)

    def _wait(
        self, holds: Callable[[], bool], what: str, seconds: float | None = None, why: Callable[[], str] = str
    ) -> None:
        """Poll until ``holds()``. ``why``: text to append to the message of a timeout."""
        seconds = seconds or self._seconds
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._launch.rank} waited {seconds:g} s for {what}{why()}")
            time.sleep(POLL_SECONDS)


def bind_loopback(port: int = 0) -> socket.socket:
    """Return a socket that is bound to a port of the loopback interface; 0: a free one.

    As long as this socket does not listen, another process can bind the same port by this function, and
    listen there. So a process can reserve a port for another one; the kernel gives it to no program that asks
    for any free port.

    Raises:
        OSError: the port is taken.
    """
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform != "linux":  # elsewhere two sockets share a port only with this option
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((LOOPBACK, port))
    except BaseException:
        bound.close()
        raise
    return bound


class _GenerationServer:
    """Rank 0's side of a generation: each call answers new join requests and returns whether all ranks have
    joined.

    Args:
        name: of the generation.
        others: number of ranks other than 0.
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
            # otherwise its rank is about to write it, or was killed before
            if self._store.check([f"asked/{number}"]):
                self._store.set(f"answer/{self._store.get(f'asked/{number}').decode()}", self._name)
                self._open.remove(number)
        return self._store.add(f"{self._name}/here", 0) >= self._others


class _PortProbe:
    """Check whether something listens at ``address``:``port``."""

    def __init__(self, address: str, port: int) -> None:
        self._place, self._error = (address, port), ""

    def __call__(self) -> bool:
        try:
            socket.create_connection(self._place, timeout=1).close()
        except OSError as error:
            self._error = str(error)
            if isinstance(error, socket.gaierror):
                self._error += (
                    "; the first node's name does not resolve here: start torchrun there with "
                    "--local-addr=ADDRESS"
                )
            return False
        return True

    def why(self) -> str:
        return f" ({self._error})" if self._error else ""


def _launch_token(launch: Launch, overrides: Sequence[str]) -> str:
    """Return a token that is equal on all ranks of a launch, and different for another launch on the same
    port.
    """
    token = [str(launch.ranks), *overrides]
    if launch.nodes == 1 and launch.launcher in (
        Launcher.DEEPSPEED,
        Launcher.TORCHELASTIC,
        Launcher.SUPERVISOR,
    ):
        token.append(str(launch.launcher_pid))
    return hashlib.sha256("\0".join(token).encode()).hexdigest()[:16]
