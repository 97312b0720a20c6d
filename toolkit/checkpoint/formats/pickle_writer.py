"""Write pickles as ``torch.save`` does, without importing what they name.

``GlobalName("torch", "Size")`` stands for the object of that name, ``ReduceCall(name, args)`` for a call of
it. Imports no torch.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

from toolkit.checkpoint.formats.stored_tensor import STORAGE_OF_DTYPE, Storage, StoredTensor


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A reference to the object ``module.name``, which is not imported."""

    module: str
    name: str

    def __call__(self, *args: Any) -> ReduceCall:  # pickle requires the function of a call to be callable
        return ReduceCall(self, args)


class ReduceCall:
    """A call ``name(*args)``, whose result then gets ``state``."""

    def __init__(self, name: GlobalName, args: tuple[Any, ...] = (), state: Any = None) -> None:
        self._reduced = (name, args) if state is None else (name, args, state)

    def __reduce__(self) -> Any:
        return self._reduced


# the Python implementation, unlike the one in C, allows custom output for names
_PythonPickler: Any = pickle._Pickler


class _Pickler(_PythonPickler):
    dispatch: ClassVar[dict[type, Any]] = dict(_PythonPickler.dispatch)

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Storage):
            return "storage", GlobalName("torch", STORAGE_OF_DTYPE[obj.dtype]), obj.key, "cpu", obj.numel
        return None

    def save_name(self, obj: GlobalName) -> None:
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        self.memoize(obj)

    def save_tensor(self, obj: StoredTensor) -> None:
        args: tuple[Any, ...] = (obj.storage, obj.offset, obj.shape, obj.strides, False, OrderedDict())
        self.save_reduce(GlobalName("torch._utils", "_rebuild_tensor_v2"), args, obj=obj)

    dispatch[GlobalName] = save_name
    dispatch[StoredTensor] = save_tensor


def dumps(value: Any) -> bytes:
    """Return a pickle of protocol 2 of plain values, ``StoredTensor``, ``GlobalName`` and ``ReduceCall``."""
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(value)
    return file.getvalue()
