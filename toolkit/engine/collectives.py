"""Record and time every collective, send and receive of this process.

DeepSpeed and Megatron-core import functions of ``torch.distributed`` by name, so patching those would miss
calls. All of them end in methods of ``ProcessGroup`` and in ``Work.wait``: those two classes are patched,
once per process (pybind11 classes allow setting attributes). Collectives started from C++ are not seen:
torch's DistributedDataParallel and functional collectives, which neither engine uses.

A collective is timed in two parts, both named after the axes of its group: starting it, which enqueues it on
GPUs, and waiting for it. Waiting for a finished collective takes no time, so only exposed communication
shows.
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

# Methods of ProcessGroup and the names of their operations in torch.distributed. torch 2.13 renamed some of
# 2.11's.
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
POINT_TO_POINT = ("send", "recv")
ALL_TO_ALL = ("all_to_all", "all_to_all_single")
START, END = "start", "end"  # of calls that are coalesced into one, as NCCL does with sends and receives
CALLS_PER_GROUP = 8  # calls of a group that are recorded
ANY_RANK = -1  # the peer of a receive that does not name its source
CACHE_SIZE = 4096  # works that have not been waited for, and formatted tensor specs

TimedPart = AbstractContextManager[None]
# group, axis, number, operation, peer, begun, tensors: the fields of Call
CallListener = Callable[[str, str, int, str, int | None, float, str], None]

_recorder: _CollectiveRecorder | None = None
_originals: dict[tuple[type, str], Any] = {}


@contextmanager
def record_collectives(axes: Axes, recorder: StepRecorder | None) -> Iterator[None]:
    """Record calls inside the context, and time those on the recorder's thread if there is one.

    Only one such context may be open in a process.
    """
    global _recorder
    assert _recorder is None, "collectives of this process are already being recorded"
    install()
    _recorder = opened = _CollectiveRecorder(axes, recorder)
    try:
        yield
    finally:
        _recorder = None
        opened.streams.close()


def last_calls() -> list[CollectiveCall]:
    """Return the last ``CALLS_PER_GROUP`` collectives of each group and the last sends and receives per peer.

    Oldest first; empty if nothing is being recorded. May be called from any thread.
    """
    recorder = _recorder
    return recorder.snapshot() if recorder is not None else []


def set_call_listener(listener: CallListener | None) -> None:
    """Pass each call to ``listener`` before it starts; None removes it. No effect if nothing is recorded.

    The listener gets plain fields instead of a ``Call``, because it runs hundreds of times per step.
    """
    if _recorder is not None:
        _recorder.listener = listener


def install() -> None:
    """Patch ``ProcessGroup`` and ``Work``. Calling it again has no effect."""
    if _originals:
        return
    for name, operation in OPERATIONS.items():
        if name in vars(ProcessGroup):
            _replace(ProcessGroup, name, functools.partial(_wrap_collective, operation))
    _replace(Work, "wait", _wrap_wait)


def uninstall() -> None:
    """Undo :func:`install`."""
    while _originals:
        (owner, name), original = _originals.popitem()
        setattr(owner, name, original)


def _replace(owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    _originals[owner, name] = vars(owner)[name]
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrap(original)))


def _wrap_collective(operation: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        recorder = _recorder
        if recorder is None:
            return original(group, *arguments, **named)
        return recorder.call(operation, original, group, arguments, named)

    return call


def _wrap_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Work, *arguments: Any, **named: Any) -> Any:
        recorder = _recorder
        if recorder is None:
            return original(work, *arguments, **named)
        return recorder.wait(original, work, arguments, named)

    return wait


class _Group:
    """A process group, its axes and its last calls.

    ``counts`` and ``calls`` have the key None for collectives, and (operation, peer) for sends and receives.
    """

    __slots__ = ("axis", "calls", "coalesced", "counts", "exchange_axis", "name", "process_group", "ranks")

    def __init__(self, group: ProcessGroup, axes: Axes) -> None:
        self.process_group = weakref.ref(group)
        self.name = group.group_name
        self.ranks = _group_ranks(group)
        inside = bool(self.ranks) and max(self.ranks) < axes.size
        self.axis = axis_name(self.ranks, axes) if inside else OTHER
        self.exchange_axis = axis_name(self.ranks, axes, exchange=True) if inside else OTHER
        self.counts: dict[Any, int] = {}
        self.calls: dict[Any, deque[_RecordedCall]] = {}
        self.coalesced: list[_RecordedCall] | None = None  # the calls since coalescing started


class _RecordedCall:
    """One call. It stores shapes and dtypes only, because the tensors themselves would stay in memory.

    ``wait`` is the timed part of waiting for it, if it is timed.
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
        self.operation, self.axis, self.number = operation, axis, number
        self.peer, self.tensors, self.size = peer, tensors, size
        self.begun = time.monotonic()
        self.finished = False
        self.wait: TimedPart | None = None


class _CollectiveRecorder:
    def __init__(self, axes: Axes, recorder: StepRecorder | None) -> None:
        self._axes, self._recorder = axes, recorder
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self.streams = SideStreams(recorder)
        # Keyed by id: as a dictionary key, a group would be kept alive.
        self._groups: dict[int, _Group] = {}
        self._works: OrderedDict[int, tuple[tuple[_RecordedCall, ...], TimedPart | None]] = OrderedDict()
        self._lock = threading.Lock()
        self._directions: dict[int, str] = {}
        self.listener: CallListener | None = None

    def call(
        self,
        operation: str,
        original: Callable[..., Any],
        process_group: ProcessGroup,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> Any:
        group = self._group(process_group)
        if operation == START:
            group.coalesced = []
            return original(process_group, *arguments, **named)
        calls: tuple[_RecordedCall, ...]
        if operation == END:
            calls, group.coalesced = tuple(group.coalesced or ()), None
            begin, wait = self._coalesced_parts(calls)
        else:
            calls = (self._record(operation, group, (*arguments, *named.values())),)
            begin, wait = self._parts(calls[0])
            if group.coalesced is not None:
                group.coalesced.append(calls[0])
        if begin is None:
            work = original(process_group, *arguments, **named)
        else:
            self.streams.carry(begin)
            with begin:
                work = original(process_group, *arguments, **named)
        if work is None:  # finished, or enqueued on a GPU
            _mark_finished(calls)
        else:
            self._works[id(work)] = calls, wait
            if len(self._works) > CACHE_SIZE:
                self._works.popitem(last=False)
        return work

    def wait(
        self, original: Callable[..., Any], work: Work, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        calls, part = self._works.pop(id(work), ((), None))
        if part is None or self._recorder is None or not self._recorder.is_recording():
            result = original(work, *arguments, **named)
        else:
            with part:
                result = original(work, *arguments, **named)
        _mark_finished(calls)
        return result

    def snapshot(self) -> list[CollectiveCall]:
        with self._lock:
            groups = list(self._groups.values())
        return [
            _to_call(group, call)
            for group in groups
            if group.process_group() is not None
            for calls in list(group.calls.values())
            for call in list(calls)
        ]

    def _group(self, process_group: ProcessGroup) -> _Group:
        group = self._groups.get(id(process_group))
        if group is None or group.process_group() is not process_group:  # ids are reused
            group = _Group(process_group, self._axes)
            with self._lock:
                self._groups[id(process_group)] = group
        return group

    def _record(self, operation: str, group: _Group, arguments: Sequence[Any]) -> _RecordedCall:
        tensors = tuple([spec for argument in arguments if (spec := _tensor_spec(argument)) is not None])
        key: Any = None
        peer: int | None = None
        size = 0
        if operation in POINT_TO_POINT:
            other = arguments[1] if len(arguments) > 2 else None  # absent when receiving from any rank
            peer = group.ranks[other] if other is not None and group.ranks else ANY_RANK
            key, size = (operation, peer), sum(tensor.nbytes for tensor in arguments[0])
            axis = group.axis if peer == ANY_RANK else self._direction(peer)
        else:
            axis = group.exchange_axis if operation in ALL_TO_ALL else group.axis
        group.counts[key] = number = group.counts.get(key, 0) + 1
        call = _RecordedCall(operation, axis, number, peer, tensors, size)
        group.calls.setdefault(key, deque(maxlen=CALLS_PER_GROUP)).append(call)
        if self.listener is not None:
            self.listener(group.name, axis, number, operation, peer, call.begun, _format_tensors(tensors))
        return call

    def _parts(self, call: _RecordedCall) -> tuple[TimedPart | None, TimedPart | None]:
        """Contexts that time starting a call and waiting for it; None if the call is not timed."""
        recorder = self._recorder
        if recorder is None or not call.axis or not recorder.is_recording():
            return None, None
        if call.operation in POINT_TO_POINT:
            return recorder.transfer_start_part(call.axis), recorder.transfer_wait_part(call.axis, call.size)
        call.wait = recorder.collective_part(call.axis)
        return call.wait, call.wait

    def _coalesced_parts(self, calls: Sequence[_RecordedCall]) -> tuple[TimedPart | None, TimedPart | None]:
        """Return what :meth:`_parts` returns, for several calls that start as one."""
        recorder = self._recorder
        if recorder is None or not calls or not calls[0].axis or not recorder.is_recording():
            return None, None
        axis = calls[0].axis
        if calls[0].operation in POINT_TO_POINT:
            return recorder.transfer_start_part(axis), recorder.transfer_wait_part(
                axis, sum(call.size for call in calls)
            )
        return calls[-1].wait, calls[-1].wait

    def _direction(self, peer: int) -> str:
        """Return the axis from this rank to ``peer``."""
        direction = self._directions.get(peer)
        if direction is None:
            inside = max(self._rank, peer) < self._axes.size and self._rank != peer
            direction = self._directions[peer] = (
                axis_name((self._rank, peer), self._axes) if inside else OTHER
            )
        return direction


def _to_call(group: _Group, call: _RecordedCall) -> CollectiveCall:
    return CollectiveCall(
        group=group.name,
        ranks=group.ranks,
        axis=call.axis,
        number=call.number,
        operation=call.operation,
        tensors=_format_tensors(call.tensors),
        begun=call.begun,
        finished=call.finished,
        peer=call.peer,
    )


def _mark_finished(calls: Sequence[_RecordedCall]) -> None:
    for call in calls:
        call.finished = True


def _group_ranks(group: ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:  # not created through torch.distributed
        return ()


def _tensor_spec(argument: Any) -> tuple[int, torch.Size, torch.dtype] | None:
    """Return the number of tensors, and shape and dtype of the first; None if there is no tensor."""
    if isinstance(argument, torch.Tensor):  # the common case
        return 1, argument.shape, argument.dtype
    count = 1
    while isinstance(argument, (list, tuple)):
        if not argument:
            return None
        count *= len(argument)
        argument = argument[0]
    return (count, argument.shape, argument.dtype) if isinstance(argument, torch.Tensor) else None


@functools.lru_cache(maxsize=CACHE_SIZE)
def _format_tensors(tensors: tuple[tuple[int, torch.Size, torch.dtype], ...]) -> str:
    """``[1024] float32``; ``2 x [512] float32, [1024] float32`` for several arguments."""
    formatted = [
        f"{f'{count} x ' if count > 1 else ''}{list(shape)} {str(dtype).removeprefix('torch.')}"
        for count, shape, dtype in tensors
    ]
    return ", ".join(formatted)
