"""A link between two simulated machines that delays or loses frames, in both directions or in one.

Kernels of many test machines lack netem. Here each machine has a TAP device, and a thread moves the Ethernet
frames between the two (https://docs.kernel.org/networking/tuntap.html), so every connection suffers, whatever
library opened it. Needs ``/dev/net/tun``, and root.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.simulated_nodes import Node, TwoNodes

TUN = Path("/dev/net/tun")
NAME = "wire"  # of the device, as of the cable that it replaces
FRAME_BYTES = 1 << 16
# linux/if_tun.h, linux/sched.h
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000


class LossyLink:
    """Moves frames between two TAP devices until :meth:`close`.

    Attributes:
        delay_seconds: of each frame.
        lost: share of the frames that are lost, from 0 to 1.
        blocked: the machines whose frames are all lost; one of two: a connection is half open.
    """

    def __init__(self, taps: tuple[int, int], seed: int) -> None:
        self.delay_seconds, self.lost, self.blocked = 0.0, 0.0, frozenset[int]()
        self._taps, self._random = taps, random.Random(seed)
        self._wakes, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._move, name="lossy-link")
        self._thread.start()

    def _move(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []  # due, number, receiver, frame
        number = 0
        while True:
            seconds = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            readable, _, _ = select.select([*self._taps, self._wakes], [], [], seconds)
            if self._wakes in readable:
                return
            for sender, tap in enumerate(self._taps):
                if tap not in readable:
                    continue
                frame = os.read(tap, FRAME_BYTES)
                if sender not in self.blocked and self._random.random() >= self.lost:
                    number += 1
                    heapq.heappush(
                        waiting, (time.monotonic() + self.delay_seconds, number, 1 - sender, frame)
                    )
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, receiver, frame = heapq.heappop(waiting)
                try:
                    os.write(self._taps[receiver], frame)
                except OSError:
                    continue  # the device is down: the frame is lost

    def close(self) -> None:
        os.close(self._wake)
        self._thread.join()
        for descriptor in (self._wakes, *self._taps):
            os.close(descriptor)  # the kernel removes the devices


@contextmanager
def replace_with_lossy_link(nodes: TwoNodes, seed: int) -> Iterator[LossyLink]:
    """Replace the cable between two machines by a :class:`LossyLink`."""
    nodes[0].run("ip", "link", "delete", NAME)
    link = LossyLink((_open_tap(nodes[0]), _open_tap(nodes[1])), seed)
    try:
        for node in nodes:
            node.run("ip", "address", "add", f"{node.address}/24", "dev", NAME)
            node.run("ip", "link", "set", NAME, "up")
        yield link
    finally:
        link.close()


def _open_tap(node: Node) -> int:
    """Create a TAP device in the network namespace of a machine, and return its descriptor."""
    found: list[int] = []
    errors: list[OSError] = []

    def create() -> None:
        """The namespace is that of the calling thread, which ends."""
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            namespace = os.open(f"/proc/{node.pid}/ns/net", os.O_RDONLY)
            try:
                if libc.setns(namespace, CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(namespace)
            tap = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", NAME.encode(), IFF_TAP | IFF_NO_PI))
            except OSError:
                os.close(tap)
                raise
            found.append(tap)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def why_no_lossy_link() -> str | None:
    """Return why the cable cannot be replaced here, apart from what the machines need; None: it can."""
    return None if os.access(TUN, os.R_OK | os.W_OK) else f"{TUN} cannot be opened"
