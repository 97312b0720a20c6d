"""Exchange small objects and files between ranks in the background, on a gloo process group of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from toolkit.engine.rank_sync import FINALIZE_SECONDS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

CHUNK_BYTES = 16 * 2**20  # sent at once; a rank that sends and receives has two such buffers
BACKGROUND_SEND_SHARE = 0.5  # share of the time in which a background copy may use the network


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file to send to, or to receive from, the rank ``peer``."""

    path: Path
    numbytes: int
    peer: int


@dataclass(frozen=True, slots=True)
class RankExchange:
    """Collectives and messages of all ranks. All ranks call them in the same order, from one thread each.

    Rank arithmetic: rank = node * ranks_per_node + local rank.

    Attributes:
        group: the gloo process group; None for a single rank.
    """

    rank: int
    ranks: int
    ranks_per_node: int
    group: ProcessGroup | None

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        return self.rank % self.ranks_per_node

    @property
    def next_rank(self) -> int:
        """The rank with the same local rank on the next node of the ring of nodes: this rank's partner."""
        return (self.rank + self.ranks_per_node) % self.ranks

    @property
    def previous_rank(self) -> int:
        return (self.rank - self.ranks_per_node) % self.ranks

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order. Collective."""
        if self.group is None:
            return [value]
        values = [value] * self.ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T | None, source: int) -> T:
        """Return the value of rank ``source``. Collective."""
        values: list[Any] = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, src=source, group=self.group)
        return values[0]

    def transfer(
        self, outgoing: FilePart | None, incoming: FilePart | None, share: Callable[[], float] = lambda: 1.0
    ) -> None:
        """Send a file and receive another one at the same time, in chunks. The peers call it too.

        All bytes are exchanged in any case, so that an error of the file system on one rank does not block
        its peers; the error is raised at the end.

        Args:
            outgoing, incoming: None: nothing is sent, or nothing is received.
            share: returns the share of the time that is spent in sending; the rest is spent asleep. It is
                called after each chunk.

        Raises:
            OSError: a file could not be read or written.
        """
        sizes = [0 if part is None else part.numbytes for part in (outgoing, incoming)]
        chunk = min(CHUNK_BYTES, max(sizes))
        buffers = [torch.empty(chunk, dtype=torch.uint8) for _ in sizes]
        with ExitStack() as files:
            source, target, error = _open_files(files, outgoing, incoming)
            for begin in range(0, max(sizes), CHUNK_BYTES):
                started = time.monotonic()
                sent, received = (
                    buffer[: max(0, min(CHUNK_BYTES, size - begin))]
                    for buffer, size in zip(buffers, sizes, strict=True)
                )
                messages = []
                if outgoing is not None and sent.numel():
                    try:
                        if source is not None and source.readinto(sent.numpy()) != sent.numel():
                            raise OSError(f"{outgoing.path} ends before {outgoing.numbytes} bytes")
                    except OSError as failed:
                        error, source = error or failed, None
                    messages.append(dist.isend(sent, outgoing.peer, group=self.group))
                if incoming is not None and received.numel():
                    messages.append(dist.irecv(received, incoming.peer, group=self.group))
                for message in messages:
                    assert message is not None, "this rank is in the group"
                    message.wait()
                try:
                    if target is not None:
                        target.write(received.numpy())
                except OSError as failed:
                    error, target = error or failed, None
                time.sleep((time.monotonic() - started) * (1 / share() - 1))
        if error is not None:
            raise error


def _open_files(
    files: ExitStack, outgoing: FilePart | None, incoming: FilePart | None
) -> tuple[Any, Any, OSError | None]:
    """Open both files. None replaces a file that is not wanted or cannot be opened."""
    source = target = error = None
    try:
        if outgoing is not None:
            source = files.enter_context(outgoing.path.open("rb"))
        if incoming is not None:
            target = files.enter_context(incoming.path.open("wb"))
    except OSError as failed:
        error = failed
    return source, target, error


def open_exchange(rank: int, ranks: int, ranks_per_node: int) -> RankExchange:
    """Create the process group of an exchange. Collective."""
    timeout = timedelta(seconds=FINALIZE_SECONDS)
    group = dist.new_group(backend="gloo", timeout=timeout) if ranks > 1 else None
    return RankExchange(rank, ranks, ranks_per_node, group)


def group_by_node(values: Sequence[T], ranks_per_node: int) -> list[Sequence[T]]:
    """Group the values of all ranks, in the order of ranks, by node."""
    return [values[first : first + ranks_per_node] for first in range(0, len(values), ranks_per_node)]
