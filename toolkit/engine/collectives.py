"""Every collective, send and receive of this process, timed where it is exposed and remembered for who looks into a hang.

DeepSpeed and Megatron-core take functions of ``torch.distributed`` by name when they are imported, so those are left alone. What all of
them end in are methods of ``ProcessGroup``, and waiting is ``Work.wait``: those two classes get other methods, once in a process. Torch
binds both in a way that lets their attributes be set (pybind11's classes are ordinary heap types). What C++ calls by itself is not
seen: torch's own DistributedDataParallel and functional collectives, which neither engine uses.

A collective is two parts: beginning it, which on GPUs puts it into a queue, and waiting for it, wherever in the step that happens; both
are named after the axes of its group. One that has ended when it is waited for costs nothing: only what computing waits for shows.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from toolkit.engine.clock import SideStreams
from toolkit.layout.axes import OTHER, Axes, axis_name
from toolkit.monitor.collective_calls import CollectiveCall
from toolkit.monitor.recorder import StepRecorder

# Methods of ProcessGroup, and what torch.distributed calls the operation. torch 2.13 has new names for some of 2.11's.
OPERATIONS: Mapping[str, str] = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "_start_coalescing": "start",
    "_end_coalescing": "end",
}
PASSING = ("send", "recv")  # between two ranks
EXCHANGING = ("all_to_all", "all_to_all_single")
START, END = "start", "end"  # of calls that are put together into one, as NCCL does for sends and receives
RECENT = 8  # calls of a group that are told
ANYBODY = -1  # the rank to receive from, where it is not said
REMEMBERED = 4096  # works that nobody has waited for, and words for tensors

Part = AbstractContextManager[None]
Note = Callable[
    [str, str, int, str, int | None, float, str], None
]  # group, axis, number, operation, peer, begun, tensors: as in Call

_watched: _Watched | None = None
_originals: dict[tuple[type, str], Any] = {}


@contextmanager
def watched(axes: Axes, recorder: StepRecorder | None) -> Iterator[None]:
    """While it is open calls are remembered, and with a recorder those on its thread are timed. For one run of a process at a time."""
    global _watched
    assert _watched is None, "two runs of one process watch its collectives"
    install()
    _watched = watching = _Watched(axes, recorder)
    try:
        yield
    finally:
        _watched = None
        watching.streams.close()


def last_calls() -> list[CollectiveCall]:
    """Of each group that is there the last ``RECENT`` collectives, and as many sends to and receives from each rank, oldest first. For any
    thread; empty where nobody watches."""
    found = _watched
    return found.snapshot() if found is not None else []


def tell_each(told: Note | None) -> None:
    """``told`` gets each call before it is made, while somebody watches; None: nobody does any more. It gets what there is and no ``Call``:
    hundreds of calls a step wait for it."""
    if _watched is not None:
        _watched.told = told


def install() -> None:
    """Replace the methods. Again: nothing happens."""
    if _originals:
        return
    for name, operation in OPERATIONS.items():
        if name in vars(ProcessGroup):
            _replace(ProcessGroup, name, functools.partial(_calling, operation))
    _replace(Work, "wait", _waiting)


def uninstall() -> None:
    """As before :func:`install`."""
    while _originals:
        (owner, name), original = _originals.popitem()
        setattr(owner, name, original)


def _replace(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    _originals[owner, name] = vars(owner)[name]
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _calling(operation: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        watching = _watched
        if watching is None:
            return original(group, *arguments, **named)
        return watching.call(operation, original, group, arguments, named)

    return call


def _waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Work, *arguments: Any, **named: Any) -> Any:
        watching = _watched
        if watching is None:
            return original(work, *arguments, **named)
        return watching.wait(original, work, arguments, named)

    return wait


class _Group:
    """What is known of a process group, and its last calls: of its collectives, and by operation and rank of what passes between two."""

    __slots__ = ("axis", "calls", "counts", "exchange_axis", "name", "process_group", "ranks", "together")

    def __init__(self, group: ProcessGroup, axes: Axes) -> None:
        self.process_group = weakref.ref(group)
        self.name = group.group_name
        self.ranks = _ranks(group)
        inside = bool(self.ranks) and max(self.ranks) < axes.size
        self.axis = axis_name(self.ranks, axes) if inside else OTHER
        self.exchange_axis = axis_name(self.ranks, axes, exchange=True) if inside else OTHER
        self.counts: dict[Any, int] = {}
        self.calls: dict[Any, deque[_Made]] = {}
        self.together: list[_Made] | None = None  # since calls are being put together into one


class _Made:
    """One call. Of its tensors there are shapes and types only: the tensors themselves would stay in memory.

    ``wait`` is the part of waiting for it, where it is timed.
    """

    __slots__ = ("axis", "begun", "finished", "number", "operation", "peer", "size", "tensors", "wait")

    def __init__(
        self,
        operation: str,
        axis: str,
        number: int,
        peer: int | None,
        tensors: tuple[Any, ...],
        size: int = 0,
    ) -> None:
        self.operation, self.axis, self.number, self.peer, self.tensors, self.size = (
            operation,
            axis,
            number,
            peer,
            tensors,
            size,
        )
        self.begun = time.monotonic()
        self.finished = False
        self.wait: Part | None = None


class _Watched:
    def __init__(self, axes: Axes, recorder: StepRecorder | None) -> None:
        self._axes, self._recorder = axes, recorder
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self.streams = SideStreams(recorder)
        self._groups: dict[
            int, _Group
        ] = {}  # by identity: as a key of a dictionary a group would live as long as that
        self._lock = threading.Lock()
        self._works: OrderedDict[int, tuple[tuple[_Made, ...], Part | None]] = (
            OrderedDict()
        )  # by identity, too
        self._directions: dict[int, str] = {}
        self.told: Note | None = None

    def call(
        self,
        operation: str,
        original: Callable[..., Any],
        process_group: ProcessGroup,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> Any:
        group = self._known(process_group)
        if operation == START:
            group.together = []
            return original(process_group, *arguments, **named)
        made: tuple[_Made, ...]
        if operation == END:
            made, group.together = tuple(group.together or ()), None
            begin, wait = self._parts_together(made)
        else:
            made = (self._make(operation, group, (*arguments, *named.values())),)
            begin, wait = self._parts(made[0])
            if group.together is not None:
                group.together.append(made[0])
        if begin is None:
            work = original(process_group, *arguments, **named)
        else:
            self.streams.carry(begin)
            with begin:
                work = original(process_group, *arguments, **named)
        if work is None:  # done, or on a GPU in the queue
            _finish(made)
        else:
            self._works[id(work)] = made, wait
            if len(self._works) > REMEMBERED:
                self._works.popitem(last=False)
        return work

    def wait(
        self, original: Callable[..., Any], work: Work, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        made, part = self._works.pop(id(work), ((), None))
        if part is None or self._recorder is None or not self._recorder.is_recording():
            answer = original(work, *arguments, **named)
        else:
            with part:
                answer = original(work, *arguments, **named)
        _finish(made)
        return answer

    def snapshot(self) -> list[CollectiveCall]:
        with self._lock:
            groups = list(self._groups.values())
        return [
            _in_public(group, made)
            for group in groups
            if group.process_group() is not None
            for calls in list(group.calls.values())
            for made in list(calls)
        ]

    def _known(self, process_group: ProcessGroup) -> _Group:
        found = self._groups.get(id(process_group))
        if (
            found is None or found.process_group() is not process_group
        ):  # another one may have had its place in memory
            found = _Group(process_group, self._axes)
            with self._lock:
                self._groups[id(process_group)] = found
        return found

    def _make(self, operation: str, group: _Group, arguments: Sequence[Any]) -> _Made:
        """Remember a call."""
        tensors = tuple([found for argument in arguments if (found := _described(argument)) is not None])
        kind: Any = None
        peer: int | None = None
        size = 0
        if operation in PASSING:
            other = arguments[1] if len(arguments) > 2 else None  # receiving from any rank has none
            peer = group.ranks[other] if other is not None and group.ranks else ANYBODY
            kind, size = (operation, peer), sum(tensor.nbytes for tensor in arguments[0])
            axis = group.axis if peer == ANYBODY else self._direction(peer)
        else:
            axis = group.exchange_axis if operation in EXCHANGING else group.axis
        group.counts[kind] = number = group.counts.get(kind, 0) + 1
        made = _Made(operation, axis, number, peer, tensors, size)
        group.calls.setdefault(kind, deque(maxlen=RECENT)).append(made)
        if self.told is not None:
            self.told(group.name, axis, number, operation, peer, made.begun, _in_words(tensors))
        return made

    def _parts(self, made: _Made) -> tuple[Part | None, Part | None]:
        """Of beginning a call, and of waiting for it; None where that is not timed."""
        recorder = self._recorder
        if recorder is None or not made.axis or not recorder.is_recording():
            return None, None
        if made.operation in PASSING:
            return recorder.transfer_start_part(made.axis), recorder.transfer_wait_part(made.axis, made.size)
        made.wait = recorder.collective_part(made.axis)
        return made.wait, made.wait

    def _parts_together(self, made: Sequence[_Made]) -> tuple[Part | None, Part | None]:
        """Of several calls that begin as one."""
        recorder = self._recorder
        if recorder is None or not made or not made[0].axis or not recorder.is_recording():
            return None, None
        if made[0].operation in PASSING:
            return recorder.transfer_start_part(made[0].axis), recorder.transfer_wait_part(
                made[0].axis, sum(one.size for one in made)
            )
        return made[-1].wait, made[-1].wait

    def _direction(self, peer: int) -> str:
        """The axis from this rank to another."""
        found = self._directions.get(peer)
        if found is None:
            inside = max(self._rank, peer) < self._axes.size and self._rank != peer
            found = self._directions[peer] = axis_name((self._rank, peer), self._axes) if inside else OTHER
        return found


def _in_public(group: _Group, made: _Made) -> CollectiveCall:
    return CollectiveCall(
        group=group.name,
        ranks=group.ranks,
        axis=made.axis,
        number=made.number,
        operation=made.operation,
        tensors=_in_words(made.tensors),
        begun=made.begun,
        finished=made.finished,
        peer=made.peer,
    )


def _finish(made: Sequence[_Made]) -> None:
    for one in made:
        one.finished = True


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:  # made behind torch.distributed's back
        return ()


def _described(argument: Any) -> tuple[int, torch.Size, torch.dtype] | None:
    """How many tensors, and the first one's shape and type; None for what is none."""
    if isinstance(argument, torch.Tensor):  # mostly
        return 1, argument.shape, argument.dtype
    count = 1
    while isinstance(argument, (list, tuple)):
        if not argument:
            return None
        count *= len(argument)
        argument = argument[0]
    return (count, argument.shape, argument.dtype) if isinstance(argument, torch.Tensor) else None


@functools.lru_cache(maxsize=REMEMBERED)  # a step's calls are those of the step before
def _in_words(tensors: tuple[tuple[int, torch.Size, torch.dtype], ...]) -> str:
    """``[1024] float32``; ``2 x [512] float32, [1024] float32`` of results and what they are made of."""
    described = [
        (f"{count} x " if count > 1 else "", list(shape), str(dtype).removeprefix("torch."))
        for count, shape, dtype in tensors
    ]
    return ", ".join(f"{several}{shape} {dtype}" for several, shape, dtype in described)
