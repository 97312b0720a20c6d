"""Count how often the host waits for the device, on the fake device of ``fake_cuda.py``.

On a GPU an operation returns before it is computed. The host waits only if it needs a value: to read it
(``item``, ``tolist``, ``bool``), to know a shape that depends on it (``nonzero``, a boolean index), to copy
between the device and pageable memory, or because it synchronizes. While it waits it launches nothing, and
the device runs out of work.

    with count_host_reads() as found:
        engine.train_step(batches, settings)
    assert len(found.waits) == 1, found.describe()
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.testing import fake_cuda
from toolkit.testing.fake_cuda import FakeCudaTensor

REPOSITORY = Path(__file__).parents[2]
# Frames that are not the caller of interest.
PASSED = (str(Path(torch.__file__).parent), __file__, fake_cuda.__file__, "<")
# Operators whose result has a shape that depends on values. ``bincount`` reads the largest one.
SHAPED_BY_VALUES = frozenset(
    {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
)


@dataclass(frozen=True, slots=True)
class HostWait:
    """One wait for the device.

    Attributes:
        kind: the operator or method.
        site: ``file:line`` of the call outside torch.
        caller: ``file:line`` of the innermost call in the toolkit; the same as ``site`` for its own calls.
    """

    kind: str
    site: str
    caller: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.site}" + ("" if self.caller == self.site else f", from {self.caller}")


@dataclass(slots=True)
class HostWaits:
    waits: list[HostWait] = field(default_factory=list)

    def describe(self) -> str:
        """Return a line for each place, with the number of waits."""
        return "\n".join(f"{count}x {wait}" for wait, count in Counter(self.waits).most_common()) or "none"


@contextmanager
def count_host_reads() -> Iterator[HostWaits]:
    """Record the waits of this thread, and of the threads in which autograd runs its backward pass."""
    found = HostWaits()

    def record(kind: str) -> None:
        found.waits.append(HostWait(kind, *_locate(sys._getframe(2))))

    def recorded(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **settings: Any) -> Any:
            record(kind)
            return function(*args, **settings)

        return wrapper

    def pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        pinned = tensor.clone()
        pinned._pinned = True  # type: ignore[attr-defined]
        return pinned

    with ExitStack() as stack:
        for owner in (torch.cuda, torch.cuda.Stream):
            stack.enter_context(
                mock.patch.object(owner, "synchronize", recorded("synchronize", owner.synchronize))
            )
        stack.enter_context(
            mock.patch.object(FakeCudaTensor, "tolist", recorded("tolist", FakeCudaTensor.tolist))
        )
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", pin))
        stack.enter_context(_Operators(record))
        yield found


class _Operators(TorchDispatchMode):
    def __init__(self, record: Callable[[str], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _reason(func, args, kwargs or {})
        if kind is not None:
            self._record(kind)
        return func(*args, **(kwargs or {}))


def _reason(func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    """Return why the host waits in an operator; None if it does not."""
    name = func._schema.name.removeprefix("aten::")
    if name == "_to_copy":
        target = kwargs.get("device")
        to_device = isinstance(args[0], FakeCudaTensor) if target is None else _is_device(target)
        return _copy(args[0], to_device, bool(kwargs.get("non_blocking")))
    if name == "copy_":
        quick = bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))
        return _copy(args[1], isinstance(args[0], FakeCudaTensor), quick)
    if not any(isinstance(value, FakeCudaTensor) for value in tree_leaves((args, kwargs))):
        return None
    if name == "_local_scalar_dense" or name in SHAPED_BY_VALUES:
        return name
    if name == "repeat_interleave" and func._overloadname == "Tensor" and not kwargs.get("output_size"):
        return "repeat_interleave without output_size"
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [index for index in args[1] if isinstance(index, torch.Tensor)]
        # torch fills with one number by ``masked_fill``, which needs no shape.
        fills = name != "index" and len(indices) == 1 and args[2].numel() == 1
        if not fills and any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return f"{name} with a boolean mask"
    return None


def _copy(source: torch.Tensor, to_device: bool, non_blocking: bool) -> str | None:
    from_device = isinstance(source, FakeCudaTensor)
    if from_device == to_device or source.device.type == "meta":
        return None
    if from_device:
        return None if non_blocking else "copy to the host"
    pinned = getattr(source, "_pinned", False)
    return None if non_blocking and pinned else "copy from pageable memory"


def _is_device(target: Any) -> bool:
    return torch.device(target).type in ("cuda", fake_cuda.BACKEND)


def _locate(frame: FrameType | None) -> tuple[str, str]:
    """Return the innermost line outside torch, and that in the toolkit."""
    site = caller = None
    while frame is not None and caller is None:
        file = frame.f_code.co_filename
        if not file.startswith(PASSED) and "deepspeed/accelerator" not in file:
            line = f"{_shorten(file)}:{frame.f_lineno}"
            site = site or line
            caller = line if file.startswith(f"{REPOSITORY / 'toolkit'}") else None
        frame = frame.f_back
    return site or "torch", caller or site or "torch"


def _shorten(file: str) -> str:
    if file.startswith(str(REPOSITORY / "toolkit")):
        return str(Path(file).relative_to(REPOSITORY))
    return file.rpartition("site-packages/")[2]
