"""Run Megatron-core on CPUs with gloo, for tests, laptops and runs with ``cluster.gpus_per_node=0``.

Megatron-core 0.16 hard-codes ``cuda``: ``torch.cuda.current_device()``, ``device="cuda"``, ``tensor.cuda()``,
``tensor.type() == "torch.cuda.FloatTensor"``, streams, events, CUDA's random state. Its modules, and only
they, see a proxy of ``torch`` that replaces those names. ``torch`` itself does not change, except for two
methods of ``Tensor`` that behave differently when called from Megatron-core.

A global ``TorchFunctionMode`` was considered, but it is slower, local to a thread (backward runs in others),
and would hide mistakes about devices in this toolkit.
"""

from __future__ import annotations

import functools
import importlib.abc
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

PACKAGE = "megatron.core"
CPU = torch.device("cpu")
FACTORIES = (
    "tensor",
    "as_tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "eye",
    "linspace",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
)


@functools.cache
def enable() -> None:
    """Patch loaded and future modules of Megatron-core, for the rest of the process.

    Only runs that are planned for CPUs call it. Whether torch sees a GPU does not matter.
    """
    import megatron.core.jit
    import megatron.core.tensor_parallel.random as random

    megatron.core.jit.disable_jit_fuser()  # torch.compile would build C++ kernels
    _patch_tensor_method("cuda", lambda tensor, *_args, **_settings: tensor)
    tensor_type = torch.Tensor.type
    _patch_tensor_method(
        "type",
        lambda tensor, *args, **settings: (
            tensor_type(tensor, *args, **settings)
            if args or settings
            else tensor_type(tensor).replace("torch.", "torch.cuda.")
        ),
    )
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGE) and module is not None:
            _rebind(module)
    sys.meta_path.insert(0, _Finder())
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


class _Proxy(ModuleType):
    """A module with its own ``answers`` and all other attributes of ``module``."""

    def __init__(self, module: ModuleType, answers: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(answers, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _NoOp:
    """A stream, event or profiler range; on a CPU all work has finished when a call returns."""

    def __init__(self, *_args: Any, **_settings: Any) -> None:
        pass

    def __enter__(self) -> _NoOp:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: _NoOp | None = None) -> _NoOp:
        return event or _NoOp()

    def wait(self, *_others: object) -> None:
        """Wait for another stream, for an event, or for the host."""

    wait_stream = wait_event = synchronize = record = wait


def _nothing(*_args: object, **_settings: object) -> None:
    pass


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def wrapped(*args: Any, **settings: Any) -> torch.Tensor:
        if str(settings.get("device")).startswith("cuda"):
            settings["device"] = CPU
        if settings.get("pin_memory"):
            settings["pin_memory"] = False
        return make(*args, **settings)

    return wrapped


def _set_state(state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _all_gather(
    tensors: Sequence[torch.Tensor], mine: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Gather tensors of different lengths, which gloo does not support; experts need it."""
    if len({tensor.shape for tensor in tensors}) == 1:
        return dist.all_gather(list(tensors), mine, group, async_op)
    assert not async_op, "gathering unequal parts is not asynchronous"
    rows = max(len(tensor) for tensor in tensors)
    buffer = mine.new_empty(len(tensors) * rows, *mine.shape[1:])
    dist.all_gather_into_tensor(buffer, _padded(mine, rows), group)
    for tensor, part in zip(tensors, buffer.chunk(len(tensors)), strict=True):
        tensor.copy_(part[: len(tensor)])
    return None


def _reduce_scatter(
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce-scatter tensors of different shapes."""
    if len({tensor.shape for tensor in inputs}) == 1:
        return dist.reduce_scatter(output, list(inputs), op, group, async_op)
    assert not async_op, "scattering unequal parts is not asynchronous"
    rows = max(len(tensor) for tensor in inputs)
    buffer = output.new_empty(rows, *output.shape[1:])
    dist.reduce_scatter_tensor(buffer, torch.cat([_padded(tensor, rows) for tensor in inputs]), op, group)
    output.copy_(buffer[: len(output)])
    return None


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - len(tensor)
    return (
        torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor.contiguous()
    )


@functools.cache
def _cpu_torch() -> ModuleType:
    """Return the proxy of ``torch`` for modules of Megatron-core. The "CUDA" random state is the CPU's."""
    state = {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": _set_state,
        "manual_seed": torch.manual_seed,
    }
    ranges = _Proxy(torch.cuda.nvtx, {"range_push": _nothing, "range_pop": _nothing, "range": _NoOp})
    cuda = _Proxy(
        torch.cuda,
        {
            **state,
            "random": _Proxy(torch.cuda.random, state),
            "nvtx": ranges,
            "current_device": lambda: CPU,
            "set_device": _nothing,
            "synchronize": _nothing,
            "empty_cache": _nothing,
            "Stream": _NoOp,
            "Event": _NoOp,
            "stream": _NoOp,
            "current_stream": _NoOp,
            "default_stream": _NoOp,
        },
    )
    collectives = _Proxy(dist, {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter})
    return _Proxy(
        torch,
        {
            **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES},
            "cuda": cuda,
            "distributed": collectives,
        },
    )


def _patch_tensor_method(method: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of ``Tensor`` for callers in Megatron-core."""
    original = getattr(torch.Tensor, method)

    @functools.wraps(original)
    def wrapped(self: torch.Tensor, *args: Any, **settings: Any) -> Any:
        from_megatron = str(sys._getframe(1).f_globals.get("__name__", "")).startswith(PACKAGE)
        return (replacement if from_megatron else original)(self, *args, **settings)

    setattr(torch.Tensor, method, wrapped)


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert CPU tensors too; the original passes them to ``all_to_all_single`` as split sizes."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


# Functions without a branch for CPUs, replaced in every module that imports them by name.
REPLACED: dict[str, Callable[..., Any]] = {
    "maybe_move_tensor_to_cpu": _as_numpy,
    "_set_cuda_rng_state": _set_state,
}


def _rebind(module: ModuleType) -> None:
    names = vars(module)
    if names.get("torch") is torch:
        names["torch"] = _cpu_torch()
    names.update({name: function for name, function in REPLACED.items() if name in names})
    for name, value in list(names.items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            for inner, method in list(vars(value).items()):
                if hasattr(method, "_torchdynamo_orig_callable"):
                    setattr(value, inner, method._torchdynamo_orig_callable)
        elif hasattr(value, "_torchdynamo_orig_callable"):  # compiled before the fuser was switched off
            names[name] = value._torchdynamo_orig_callable


class _Finder(importlib.abc.MetaPathFinder):
    """Rebinds ``torch`` in modules of Megatron-core that are imported later."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(PACKAGE):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(
            (found for finder in others if (found := finder.find_spec(name, path, target)) is not None), None
        )
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _rebind(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
