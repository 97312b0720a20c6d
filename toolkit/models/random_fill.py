"""Draw parts of parameters with exactly the numbers of torch's initializers on a CPU.

Random numbers of CUDA differ from those of a CPU, so weights are drawn on the CPU whatever the device. On a
CPU ``Tensor.normal_`` takes one number from the generator for each element, in memory order, and transforms
blocks of 16 (ATen/native/cpu/DistributionTemplates.h, ``normal_fill``). A tensor can therefore be drawn in
chunks, and elements that no shard needs are skipped by taking as many integers, which is twice as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.checkpoint.catalog import flat_span
from toolkit.checkpoint.file_reader import view_box
from toolkit.checkpoint.planner import shift_box
from toolkit.checkpoint.shard import Shard, flat_boxes

BLOCK = 16  # elements that normal_ transforms together
CHUNK = 2**20  # elements drawn at once: 4 MB, which stay in the processor's cache

aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Fill:
    """One operation of an initializer on a whole parameter.

    Attributes:
        mean, std: of a normal distribution; without ``std`` every element is ``mean``.
    """

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float | None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def record_fills(
    parameters: Mapping[str, torch.Tensor], initialize: Callable[[], object]
) -> list[Fill] | None:
    """Run ``initialize`` on ``parameters``, which are on the meta device, and return what it does to them.

    Returns:
        The operations in their order, or None if they are not all normal distributions and constants of
        whole parameters. Random numbers for other meta tensors are not drawn at all, so they do not count.
    """
    recorder = _FillRecorder(parameters)
    with recorder:
        initialize()
    complete = parameters.keys() == {fill.name for fill in recorder.fills}
    return recorder.fills if complete and recorder.exact else None


class _FillRecorder(TorchDispatchMode):
    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.fills: list[Fill] = []
        self.exact = True
        self._parameters = {_storage(value): (name, value) for name, value in parameters.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        own = [value for value in _tensors((*args, *kwargs.values())) if _storage(value) in self._parameters]
        fill = self._fill(func, args, kwargs) if own else None
        if fill is not None:
            self.fills.append(fill)
            return args[0]
        result = func(*args, **kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if own or (draws and any(not value.is_meta for value in _tensors((result,)))):
            self.exact = False
        return result

    def _fill(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fill | None:
        name, parameter = self._parameters.get(_storage(args[0]), ("", None))
        whole = parameter is not None and args[0].shape == parameter.shape and args[0].is_contiguous()
        if not whole or kwargs.get("generator") is not None:
            return None
        shape = tuple(args[0].shape)
        if func is aten.normal_.default:
            given = {**dict(zip(("mean", "std"), args[1:], strict=False)), **kwargs}
            return Fill(name, shape, float(given.get("mean", 0.0)), float(given.get("std", 1.0)))
        if func is aten.fill_.Scalar:
            return Fill(name, shape, float(args[1]), None)
        return Fill(name, shape, 0.0, None) if func is aten.zero_.default else None


@torch.no_grad()
def draw(
    fills: Sequence[Fill],
    shards: Mapping[str, Sequence[Shard]],
    seed: int,
    on_drawn: Callable[[int], None] = lambda count: None,
) -> None:
    """Fill ``shards``, by the names of their parameters, as ``fills`` under ``torch.manual_seed(seed)`` do.

    Memory is one chunk. Safe to call from several threads for different shards.

    Args:
        on_drawn: called with the number of elements that have been drawn or skipped since the last call.
    """
    generator = torch.Generator().manual_seed(seed)
    last = {fill.name: number for number, fill in enumerate(fills)}
    wanted = [
        [shard for shard in shards.get(fill.name, ()) if shard.box.numel] if last[fill.name] == number else []
        for number, fill in enumerate(fills)
    ]
    final = max(
        (number for number, fill in enumerate(fills) if wanted[number] and fill.std is not None), default=-1
    )
    on_gpu = any(shard.data.is_cuda for some in wanted for shard in some)
    for number, (fill, targets) in enumerate(zip(fills, wanted, strict=True)):
        if fill.std is None:
            for shard in targets:
                shard.data.fill_(fill.mean)
        elif number <= final:
            # After the last element that is needed, the state of the generator does not matter.
            stop = max(flat_span(fill.shape, s.box)[1] for s in targets) if number == final else fill.numel
            buffer = torch.empty(min(CHUNK + BLOCK, fill.numel), pin_memory=on_gpu)
            for start, end in _chunks(fill.numel):
                if start >= stop:
                    break
                _draw_chunk(fill, start, buffer[: end - start], targets, generator)
                on_drawn(end - start)


def _draw_chunk(
    fill: Fill, start: int, chunk: torch.Tensor, shards: Iterable[Shard], generator: torch.Generator
) -> None:
    copies, at = [], 0
    for box in flat_boxes(fill.shape, start, start + chunk.numel()):
        values = chunk[at : at + box.numel].view(box.shape)
        at += box.numel
        for shard in shards:
            if (common := box.intersect(shard.box)) is not None:
                to = view_box(shard.data, shift_box(common, [-offset for offset in shard.box.offset]))
                copies.append((to, view_box(values, shift_box(common, [-offset for offset in box.offset]))))
    if not copies and chunk.numel() % BLOCK == 0:
        chunk.view(torch.int32).random_(generator=generator)  # one number for each element, as normal_ takes
        return
    assert fill.std is not None, "constants are not drawn"
    chunk.normal_(fill.mean, fill.std, generator=generator)
    for to, values in copies:
        to.copy_(values)


def _chunks(numel: int) -> Iterator[tuple[int, int]]:
    """Split a tensor so that chunks start at blocks, and the last one has a block.

    ``normal_`` draws the last 16 elements again if the number of elements is not divisible by 16.
    """
    start = 0
    while start < numel:
        end = numel if numel - start < CHUNK + BLOCK else start + CHUNK
        yield start, end
        start = end


def _storage(tensor: Any) -> int | None:
    return tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else None


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                yield item
