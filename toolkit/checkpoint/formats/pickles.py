"""Pickles of the vendors, read without importing or calling anything that they name, and written without importing it either.

Reading: containers, numbers and strings become themselves; tensors become :class:`StoredTensor`, which says where they lie; a few
names of ``ALLOWED`` are what they are; every other class becomes an inert :class:`Foreign`. So a pickle from an untrusted hand can
at worst be wrong. Writing: ``Name("torch", "Size")`` stands for the object of that name, ``Call(name, args)`` for a call of it.

Sources: ``torch/serialization.py`` (persistent ids), ``torch/_utils.py`` (``_rebuild_tensor_v2``). Imports no torch.
"""

from __future__ import annotations

import _compat_pickle  # the names of protocols before 3, as pickle itself maps them
import io
import math
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

# Storage classes of torch by the dtype of their elements.
STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "BFloat16Storage": "bfloat16", "HalfStorage": "float16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "Float8_e4m3fnStorage": "float8_e4m3fn", "Float8_e5m2Storage": "float8_e5m2",
}
STORAGE_OF_DTYPE: Mapping[str, str] = {dtype: name for name, dtype in STORAGES.items()}


@dataclass(frozen=True, slots=True)
class Storage:
    """``numel`` elements from byte ``begin`` of a file on (reading); or record ``key`` of the file that is written.

    ``content``: its bytes, where they are known when the file is laid out (a step count); else pieces fill it.
    """

    key: str
    dtype: str
    numel: int
    file: str = ""
    begin: int = 0
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by its place: nothing of it has been read. ``offset`` and ``strides`` count elements of the storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @staticmethod
    def whole(storage: Storage, shape: tuple[int, ...]) -> StoredTensor:
        return StoredTensor(storage, 0, shape, row_major(shape))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


# ---- reading


class Foreign:
    """An object of a class that is not loaded: ``name`` is the class's, ``args`` what it was made of, ``state`` what was set on it.

    ``_LazyLoader`` and the like carry nothing; enums have their value as ``args[0]``.
    """

    name: ClassVar[str] = ""
    args: tuple[Any, ...] = ()  # where it was made without a call
    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.items: list[Any] = []

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<{self.name} {self.state if self.state is not None else self.args}>"

    @property
    def fields(self) -> Mapping[str, Any]:
        """Attributes that were set, also of classes with slots."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2:
            return {**(state[0] or {}), **(state[1] or {})}
        return state if isinstance(state, Mapping) else {}


def _rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> StoredTensor:
    return StoredTensor(storage, offset, tuple(size), tuple(stride))


def _rebuild_from_type(function: Callable[..., Any], kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    return function(*args)


def _rebuild_parameter(data: StoredTensor, *_: Any) -> StoredTensor:
    return data


def _encode(text: str, encoding: str) -> bytes:
    return text.encode(encoding)


ALLOWED: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("builtins", "set"): set, ("builtins", "frozenset"): frozenset, ("builtins", "list"): list, ("builtins", "dict"): dict,
    ("builtins", "tuple"): tuple, ("builtins", "int"): int, ("builtins", "float"): float, ("builtins", "str"): str,
    ("builtins", "bool"): bool, ("builtins", "bytearray"): bytearray, ("builtins", "complex"): complex, ("builtins", "slice"): slice,
    ("_codecs", "encode"): _encode,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, storage: Callable[[str, str, int], Storage]) -> None:
        super().__init__(io.BytesIO(data))
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name))
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and name in STORAGE_OF_DTYPE:  # torch.float32: by its name
            return name
        return type(name, (Foreign,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or dtype not in STORAGE_OF_DTYPE:
            raise pickle.UnpicklingError(f"persistent id {pid!r}")
        return self._storage(dtype, str(key), numel)


def loads(data: bytes, storage: Callable[[str, str, int], Storage]) -> Any:
    """The object of a pickle; ``storage`` finds a storage by (dtype, key, numel). Raises what ``pickle`` raises for what is none."""
    return _Unpickler(data, storage).load()


# ---- writing


@dataclass(frozen=True, slots=True)
class Name:
    """The object ``module.name``, by reference. Not imported here."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Call:  # pickle asks that what a call names can be called
        return Call(self, args)


class Call:
    """``name(*args)``, and then ``state`` set on what it gave."""

    def __init__(self, name: Name, args: tuple[Any, ...] = (), state: Any = None) -> None:
        self._reduced = (name, args) if state is None else (name, args, state)

    def __reduce__(self) -> Any:
        return self._reduced


_PythonPickler: Any = pickle._Pickler  # unlike the one in C it can be told how to write a name


class _Pickler(_PythonPickler):
    dispatch: ClassVar[dict[type, Any]] = dict(_PythonPickler.dispatch)

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Storage):
            return "storage", Name("torch", STORAGE_OF_DTYPE[obj.dtype]), obj.key, "cpu", obj.numel
        return None

    def save_name(self, obj: Name) -> None:
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        self.memoize(obj)

    def save_tensor(self, obj: StoredTensor) -> None:
        args: tuple[Any, ...] = (obj.storage, obj.offset, obj.shape, obj.strides, False, OrderedDict())
        self.save_reduce(Name("torch._utils", "_rebuild_tensor_v2"), args, obj=obj)

    dispatch[Name] = save_name
    dispatch[StoredTensor] = save_tensor


def dumps(value: Any) -> bytes:
    """A pickle of protocol 2, as ``torch.save`` writes it: plain values, ``StoredTensor``, ``Name`` and ``Call``."""
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(value)
    return file.getvalue()
