"""A CUDA device without a GPU: tensors that claim to be on ``cuda:N``, with their values in host memory.

A machine with GPUs refuses an operator whose operands are on different devices. So does this device, with the
names of the operands, and computes everything else on the CPU. Values are real, so reading them on the host,
routing of experts and comparing losses with a run on CPUs all work.

PyTorch's own fake tensors check devices too, but have no values, and their backward aborts in a build of
torch without CUDA. Tensors here occupy torch's device type for other vendors (PrivateUse1), which can be
implemented in Python, and call themselves ``cuda`` in Python.

    fake_cuda.install(0)      # once, in a process that does nothing else
    torch.ones(2, device="cuda") + torch.ones(2)          # raises WrongDevice

Not checked, because no kernel of CUDA runs: compiled code, what Triton and other extensions do with pointers,
asynchronous execution (streams and events do nothing, collectives return when they are done), and whether
memory is pinned.
"""

from __future__ import annotations

import gc
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Work
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

BACKEND = "fakecuda"  # the name of the device type in C++
CPU = torch.device("cpu")
aten = torch.ops.aten

# Operators that take operands on several devices on GPUs, too.
COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default, aten.set_.source_Tensor}
# A GPU's tensor may be indexed by a tensor on the host, but not the reverse.
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
POINT_TO_POINT = {
    torch.ops.c10d.send.default,
    torch.ops.c10d.recv_.default,
    torch.ops.c10d.recv_any_source_.default,
}
# Kernels that CUDA has and the CPU lacks for some dtypes.
ON_HOST: dict[Any, Callable[..., Any]] = {
    aten.addmm.dtype_out: lambda bias, left, right, dtype, *, out, **factors: out.copy_(
        aten.addmm(bias.float(), left.float(), right.float(), **factors)
    ),
    aten.histc.default: lambda values, *bounds: aten.histc(values.float(), *bounds).to(values.dtype),
}


class WrongDevice(RuntimeError):
    """An operator or collective got a tensor on the CPU that has to be on the GPU."""


class FakeCudaTensor(torch.Tensor):
    """A tensor "on" the GPU. ``memory`` has its values; views share it as on a real device."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> FakeCudaTensor:
        tensor: FakeCudaTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=_backend_device(),
        )
        tensor.memory = memory
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    # What Python code reads to find out the device; C++ sees the device type of BACKEND.
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    device = property(lambda self: torch.device("cuda", _index))

    def get_device(self) -> int:
        return _index

    def type(self, *args: Any, **settings: Any) -> Any:
        if args or settings:
            return super().type(*args, **settings)
        return self.memory.type().replace("torch.", "torch.cuda.")

    def numpy(self, **_settings: Any) -> Any:
        raise WrongDevice(f"numpy() needs a tensor in host memory, not {describe(self)}")

    def tolist(self) -> Any:
        return self.memory.tolist()

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def untyped_storage(self) -> Any:
        return self.memory.untyped_storage()

    def record_stream(self, _stream: object) -> None:
        pass

    def __repr__(self, **_settings: Any) -> str:  # type: ignore[override]
        return f"FakeCudaTensor({self.memory!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (FakeCudaTensor, (self.memory,))


_index = 0  # of this process's device


def _backend_device() -> torch.device:
    return torch.device(BACKEND, 0)


def describe(tensor: torch.Tensor) -> str:
    """``embedding.weight, float32 [264, 64] on cpu``, with the name of a parameter or buffer."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    name = _find_name(tensor)
    return f"{f'{name}, ' if name else ''}{dtype} {list(tensor.shape)} on {tensor.device}"


def _find_name(tensor: torch.Tensor) -> str | None:
    """Return the longest path to a parameter or buffer with this memory in any module of the process."""
    if tensor.device.type == "meta":
        return None
    place, found = tensor.data_ptr(), ""
    for module in [entry for entry in gc.get_objects() if isinstance(entry, nn.Module)]:
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if value.device.type != "meta" and value.data_ptr() == place and len(name) > len(found):
                found = name
    return found or None


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operator in host memory, after checking the devices of its operands."""
    flat, spec = tree_flatten((args, kwargs))
    fakes = [item for item in flat if isinstance(item, FakeCudaTensor)]
    on_host = [
        item for item in flat if isinstance(item, torch.Tensor) and not isinstance(item, FakeCudaTensor)
    ]
    target = kwargs.get("device")
    to_fake = _is_fake_device(target) if target is not None else bool(fakes)
    if func.namespace in ("c10d", "_c10d_functional"):
        _check_collective(func, args, on_host)
    elif fakes and on_host:
        _check_operands(func, args, kwargs, fakes, on_host)
    if func is aten.is_pinned.default:
        return False
    if func is aten._pin_memory.default:
        return args[0].clone()
    wrappers = {id(fake.memory): fake for fake in fakes}
    inner_args, inner_kwargs = tree_unflatten(
        [item.memory if isinstance(item, FakeCudaTensor) else item for item in flat], spec
    )
    if _is_fake_device(inner_kwargs.get("device")):
        inner_kwargs["device"] = CPU
    inner_kwargs.pop("pin_memory", None)
    output = ON_HOST.get(func, func)(*inner_args, **inner_kwargs)
    if func.namespace == "c10d" and func not in POINT_TO_POINT:
        # Engines may wait for the device instead of the collective, which gloo runs in a thread.
        for item in tree_flatten(output)[0]:
            if isinstance(item, torch.ScriptObject):
                Work.unbox(item).wait()

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        if id(value) in wrappers:
            return wrappers[id(value)]
        return FakeCudaTensor(value) if to_fake else value

    return tree_map(wrap, output)


def _is_fake_device(device: Any) -> bool:
    return device is not None and torch.device(device).type in (BACKEND, "cuda")


def _check_operands(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    fakes: Sequence[torch.Tensor],
    on_host: Sequence[torch.Tensor],
) -> None:
    """Refuse what CUDA refuses; the rules are those of TensorIterator (aten/src/ATen/TensorIterator.cpp).

    One operand may be a scalar tensor on the host, if it is not written and the kernel is elementwise. Other
    kernels are not distinguished, as in PyTorch's fake tensors, except for fused optimizers.
    """
    real = [tensor for tensor in on_host if tensor.device.type != "meta"]
    if not real or func in COPIES:
        return
    if func in INDEXING and isinstance(args[0], FakeCudaTensor):
        values = args[2] if len(args) > 2 else None
        if not isinstance(values, torch.Tensor) or isinstance(values, FakeCudaTensor) or values.dim() == 0:
            return
    strict = "_fused_" in func.name()
    written = _written(func, args, kwargs)
    scalars = [tensor for tensor in real if tensor.dim() == 0 and not any(tensor is w for w in written)]
    if not strict and len(scalars) == len(real) and (len(real) == 1 or "_foreach_" in func.name()):
        return
    raise WrongDevice(
        f"{func.name()} got {', '.join(map(describe, real))} together with {describe(fakes[0])}, "
        f"at {_caller()}"
    )


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [
        tensor
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_flatten(given.get(argument.name))[0]
        if isinstance(tensor, torch.Tensor)
    ]


def _check_collective(func: Any, args: Sequence[Any], on_host: Sequence[torch.Tensor]) -> None:
    """Refuse tensors on the host in NCCL's groups. Groups created with ``backend="gloo"`` take them."""
    group: Any = next((item for item in args if isinstance(item, torch.ScriptObject)), None)
    if on_host and group is not None and not is_gloo(dist.ProcessGroup.unbox(group)):
        raise WrongDevice(f"{func.name()} over NCCL got {', '.join(map(describe, on_host))}, at {_caller()}")


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether a run on GPUs would have created ``group`` with gloo."""
    return group in _gloo_groups


_gloo_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def _caller() -> str:
    """Return the innermost line outside torch and this file, as ``folder/file.py:12``."""
    own = str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((own, __file__, "<")):
            return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} in {frame.name}"
    return "the backward pass"


def install(index: int = 0) -> None:
    """Give this process the device ``cuda:index`` for the rest of its life.

    ``torch.cuda`` reports a GPU, and torch's process groups report NCCL unless they were created as gloo's.
    Call it before engines are imported or built: what they decide about devices, they decide once.
    """
    global _index
    import torch._dynamo  # it lists the functions of torch.cuda, which must be the real ones

    assert not torch.cuda.is_available(), "this device is for processes without a GPU"
    _index = index
    _setup_privateuseone_for_python_backend(BACKEND, backend_module=torch.cuda)
    torch.Tensor.data = property(torch._C.TensorBase.data.__get__, _set_data)  # type: ignore[attr-defined, assignment]
    # ``Module.to`` then assigns ``parameter.data``, as it does from a CPU to a GPU.
    torch._has_compatible_shallow_copy_type = lambda _tensor, _other: True  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, *_args: self  # type: ignore[method-assign]
    for name, value in _cuda_functions().items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.nccl.version = lambda: (2, 29, 0)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _nothing
    # torch.tensor(..., device="cuda") then copies a tensor on the CPU.
    torch._C._set_only_lift_cpu_tensors(True)
    _patch_distributed()
    _enter_modes()
    start = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def start_with_modes(thread: threading.Thread) -> None:
        _enter_modes()  # they belong to a thread
        start(thread)

    threading.Thread._bootstrap_inner = start_with_modes  # type: ignore[attr-defined]


def _enter_modes() -> None:
    _FakeDeviceNames().__enter__()
    _FakeDeviceMode().__enter__()


class _FakeDeviceMode(TorchDispatchMode):
    """Sees operators without an operand on the device: constructors, copies to it, collectives."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _FakeDeviceNames(TorchFunctionMode):
    """Replaces ``cuda`` in arguments of torch's functions by the device type that C++ knows."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        if func is torch.tensor and isinstance(args[0], (list, tuple)):  # torch reads them below this mode
            args = (
                tree_map(lambda item: item.item() if isinstance(item, FakeCudaTensor) else item, args[0]),
            )
        if func is torch.Tensor.cuda:
            return args[0].to(_backend_device())
        if any(map(_names_cuda, args)):
            args = [_backend_device() if _names_cuda(item) else item for item in args]
        if "device" in kwargs and _names_cuda(kwargs["device"], number=True):
            kwargs = {**kwargs, "device": _backend_device()}
        return func(*args, **kwargs)


def _names_cuda(value: Any, *, number: bool = False) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    if isinstance(value, int) and not isinstance(value, bool):
        return number
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def _set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Assign ``tensor.data``; between devices too, which torch cannot do for tensors of two classes."""
    fake, new_fake = isinstance(tensor, FakeCudaTensor), isinstance(new, FakeCudaTensor)
    if fake == new_fake:
        torch._C.TensorBase.data.__set__(tensor, new)  # type: ignore[attr-defined]
        if isinstance(tensor, FakeCudaTensor) and isinstance(new, FakeCudaTensor):
            tensor.memory = new.memory
        return
    attributes = {name: value for name, value in vars(tensor).items() if name != "memory"}
    other: torch.Tensor
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(new.detach(), requires_grad=tensor.requires_grad)
    else:
        other = new.detach().requires_grad_(tensor.requires_grad)
    del new
    torch.utils.swap_tensors(tensor, other)
    vars(tensor).update(attributes)


def _nothing(*_args: object, **_settings: object) -> None:
    pass


class _Idle:
    """A stream, event or range of a device whose calls return when their work is done."""

    def __init__(self, *_args: Any, **_settings: Any) -> None:
        self.device, self.cuda_stream, self.device_index = torch.device("cuda", _index), 0, _index

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: object) -> float:
        return 0.0

    def record_event(self, event: _Idle | None = None) -> _Idle:
        return event or _Idle()

    wait = wait_stream = wait_event = synchronize = record = _nothing


def _cuda_functions() -> dict[str, Any]:
    """Replacements of functions of ``torch.cuda``: one Hopper with 80 GB that is always idle and empty."""
    properties = SimpleNamespace(
        name="fake H100", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132
    )
    stats: dict[str, Any] = {"allocated_bytes": {"all": dict.fromkeys(("current", "peak"), 0)}}
    return {
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda *_: 0,
            cudaHostUnregister=lambda *_: 0,
            cudaError=SimpleNamespace(success=0),
        ),
        "_lazy_init": _nothing,
        "_lazy_call": lambda function, **_settings: function(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: int(os.environ["LOCAL_WORLD_SIZE"]),
        "current_device": lambda: _index,
        "set_device": _nothing,
        "device": lambda _device: nullcontext(),
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda *_: True,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "mem_get_info": lambda *_: (80 * 2**30, 80 * 2**30),
        "memory_stats_as_nested_dict": lambda *_: stats,
        **dict.fromkeys(
            ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
            lambda *_: 0,
        ),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), _nothing),
        "default_generators": (torch.default_generator,) * (_index + 1),
        "get_rng_state": lambda *_args, **_settings: torch.get_rng_state(),
        "set_rng_state": lambda state, *_args, **_settings: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "initial_seed": torch.initial_seed,
        "Stream": _Idle,
        "Event": _Idle,
        "stream": _Idle,
        "current_stream": _Idle,
        "default_stream": _Idle,
        "is_current_stream_capturing": lambda: False,
    }


def _patch_distributed() -> None:
    """Report gloo's groups as NCCL's, and let collectives of objects use the device, as with NCCL."""
    c10d: Any = dist.distributed_c10d
    public: Any = dist
    new_group = dist.new_group

    def new_group_of_a_backend(
        ranks: Any = None, timeout: Any = None, backend: Any = None, **more: Any
    ) -> Any:
        group = new_group(ranks, timeout, "gloo", **{**more, "pg_options": None, "device_id": None})
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):
            _gloo_groups.add(group)
        return group

    public.new_group = c10d.new_group = new_group_of_a_backend
    public.get_backend = lambda group=None: "gloo" if group is not None and is_gloo(group) else "nccl"
    object_device = c10d._get_object_coll_device
    c10d._get_object_coll_device = lambda group=None: (
        object_device(group) if group is not None and is_gloo(group) else "cuda"
    )
