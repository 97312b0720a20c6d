"""Read vendors' pickles without importing or calling anything that they name.

Containers, numbers and strings are built as usual, tensors become ``StoredTensor``, a few names have entries
in ``ALLOWED``, and every other class becomes an inert ``ForeignObject``. The worst that a malicious pickle
can do is to give wrong values.

Sources: ``torch/serialization.py`` (persistent ids), ``torch/_utils.py`` (``_rebuild_tensor_v2``). Imports no
torch.
"""

from __future__ import annotations

import _compat_pickle  # maps names of protocols before 3
import io
import math
import pickle
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, ClassVar

from toolkit.checkpoint.formats.stored_tensor import STORAGE_OF_DTYPE, STORAGES, Storage, StoredTensor

MAX_DEPTH = 100
MAX_NODES_PER_BYTE = 16  # Shared objects are counted each time they occur.
MAX_CLASSES = 10_000
MAX_KEY_LENGTH = 16  # maximum length of a tuple that is a key
# Operations that no checkpoint needs: instances in protocols 0 and 1, registered extensions and out-of-band
# buffers.
_REFUSED = (
    pickle.INST,
    pickle.OBJ,
    pickle.NEWOBJ_EX,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.BYTEARRAY8,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)


class ForeignObject:
    """An object of a class that is not imported. ``name`` is the class's name, ``args`` its arguments and
    ``state`` its state.

    Enums have their value in ``args[0]``.
    """

    name: ClassVar[str] = ""
    args: tuple[Any, ...] = ()  # if it was created without a call
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
        """The attributes, also for classes with slots."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2:
            return {**(state[0] or {}), **(state[1] or {})}
        return state if isinstance(state, Mapping) else {}


def _rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> StoredTensor:
    """Describe a pickled tensor. Raises UnpicklingError if it is not a view that lies within its storage."""
    shape, strides = tuple(size), tuple(stride)
    counts = (offset, *shape, *strides)
    if (
        not isinstance(storage, Storage)
        or len(shape) != len(strides)
        or any(type(count) is not int or count < 0 for count in counts)
    ):
        raise pickle.UnpicklingError(
            f"a tensor of shape {shape} and strides {strides} at element {offset} of a storage"
        )
    last = offset + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= storage.numel:
        raise pickle.UnpicklingError(
            f"a tensor ends at element {last} of storage {storage.key}, which has {storage.numel}"
        )
    return StoredTensor(storage, offset, shape, strides)


def _rebuild_from_type(function: Callable[..., Any], kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    if function is not _rebuild_tensor and not _is_foreign(function):
        raise pickle.UnpicklingError(f"an object rebuilt by {function}")
    return function(*args)


def _rebuild_parameter(data: StoredTensor, *_: Any) -> StoredTensor:
    return data


def _encode(text: str, encoding: str) -> bytes:
    """Rebuild bytes as protocol 2 stores them."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode(encoding)


def _text(text: str = "") -> str:
    """Accept only a string: the text of another object may need unbounded memory."""
    if not isinstance(text, str):
        raise pickle.UnpicklingError("str() of an object")
    return text


def _is_foreign(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, ForeignObject)


def _bytearray(*args: Any) -> bytearray:
    """Accept no number: it would allocate as much memory as the pickle requests."""
    if args and not isinstance(args[0], (bytes, str)):
        raise pickle.UnpicklingError("a bytearray that is not built from bytes")
    return bytearray(*args)


def _set(items: Any = ()) -> set[Any]:
    return {_key(item) for item in items}


def _frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(items))


def _dict(items: Any = ()) -> dict[Any, Any]:
    return {_key(key): value for key, value in (items.items() if isinstance(items, Mapping) else items)}


def _ordered(items: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict(_dict(items))


def _default(factory: Any = None, items: Any = ()) -> defaultdict[Any, Any]:
    return defaultdict(None, _dict(items))  # the factory is never needed


def _key(key: Any) -> Any:
    """Return a dictionary key or set element, whose hash is cheap to compute. Raises UnpicklingError."""
    if type(key) is tuple and len(key) <= MAX_KEY_LENGTH and all(type(part) in _SCALARS for part in key):
        return key
    if type(key) not in _SCALARS and not isinstance(key, (ForeignObject, StoredTensor, frozenset)):
        raise pickle.UnpicklingError(f"a key of type {type(key).__name__}")
    return key


_SCALARS = (str, int, float, bool, bytes, complex, type(None))
ALLOWED: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _ordered,
    ("collections", "defaultdict"): _default,
    ("builtins", "set"): _set,
    ("builtins", "frozenset"): _frozenset,
    ("builtins", "list"): list,
    ("builtins", "dict"): _dict,
    ("builtins", "tuple"): tuple,
    ("builtins", "int"): int,
    ("builtins", "float"): float,
    ("builtins", "str"): _text,
    ("builtins", "bool"): bool,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "slice"): slice,
    ("_codecs", "encode"): _encode,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
}


# the Python implementation, unlike the one in C, allows operations to be replaced
_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):
    """An unpickler whose memory and time are proportional to the pickle's length, whatever it contains."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: operation
        for code, operation in _PythonUnpickler.dispatch.items()
        if bytes((code,)) not in _REFUSED
    }

    def __init__(self, data: bytes, storage: Callable[[str, str, int], Storage]) -> None:
        super().__init__(io.BytesIO(data))
        self._storage = storage
        self._classes: dict[tuple[str, str], type[ForeignObject]] = {}
        self._copied, self._most_copied = 0, MAX_NODES_PER_BYTE * len(data)

    def load_reduce(self) -> None:
        """Limit the items that calls copy in total to what a pickle of this length can contain."""
        args, function = self.stack.pop(), self.stack.pop()
        self._copied += sum(len(arg) for arg in args if isinstance(arg, Sized))
        if self._copied > self._most_copied:
            raise pickle.UnpicklingError(f"its calls copy {self._copied} items")
        self.append(function(*args))

    def load_newobj(self) -> None:
        args, cls = self.stack.pop(), self.stack.pop()
        if not _is_foreign(cls):
            raise pickle.UnpicklingError(f"a new object of {cls}")
        self.append(cls.__new__(cls, *args))

    def load_build(self) -> None:
        """Set state on inert objects only: on an object of ``ALLOWED`` it would affect all later pickles."""
        state, built = self.stack.pop(), self.stack[-1]
        if isinstance(built, ForeignObject):
            built.state = state
        elif not isinstance(
            built, OrderedDict
        ):  # the attributes of a module's state dict (``_metadata``) are not needed
            raise pickle.UnpicklingError(f"state for an object of type {type(built).__name__}")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put(self.stack[-1], key, value)

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._put(self.stack[-1], key, value)

    def _put(self, into: Any, key: Any, value: Any) -> None:
        if not isinstance(into, (dict, ForeignObject)):
            raise pickle.UnpicklingError(f"an item of an object of type {type(into).__name__}")
        into[_key(key)] = value

    def load_additems(self) -> None:
        items, into = self.pop_mark(), self.stack[-1]
        if not isinstance(into, set):
            raise pickle.UnpicklingError(f"an element of an object of type {type(into).__name__}")
        into.update(map(_key, items))

    def load_frozenset(self) -> None:
        items = self.pop_mark()  # pop_mark replaces ``self.append``
        self.append(_frozenset(items))

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.ADDITEMS[0]] = load_additems
    dispatch[pickle.FROZENSET[0]] = load_frozenset

    def find_class(self, module: str, name: str) -> Any:
        module, name = _compat_pickle.NAME_MAPPING.get(
            (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        )
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and name in STORAGE_OF_DTYPE:  # such as torch.float32
            return name
        if (module, name) not in self._classes:
            if len(self._classes) == MAX_CLASSES:
                raise pickle.UnpicklingError(f"more than {MAX_CLASSES} classes")
            self._classes[module, name] = type(name, (ForeignObject,), {"name": f"{module}.{name}"})
        return self._classes[module, name]

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or dtype not in STORAGE_OF_DTYPE or type(numel) is not int or numel < 0:
            raise pickle.UnpicklingError(f"persistent id {pid!r}")
        return self._storage(dtype, str(key), numel)


def loads(data: bytes, storage: Callable[[str, str, int], Storage]) -> Any:
    """Return the object of a pickle, a tree of at most ``MAX_DEPTH`` levels. ``storage`` finds a storage by
    (dtype, key, numel).

    Raises:
        UnpicklingError: It is not a pickle, or not one that a checkpoint contains.
    """
    try:
        found = _Unpickler(data, storage).load()
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise pickle.UnpicklingError(f"{type(error).__name__}: {str(error)[:200]}") from error
    _check_tree(found, MAX_NODES_PER_BYTE * len(data) + 10**6)
    return found


def _check_tree(root: Any, most: int) -> None:
    """Raise UnpicklingError if the object contains itself, is deeper than ``MAX_DEPTH`` or has more than
    ``most`` nodes.

    A shared part is counted each time it occurs.
    """
    measured: dict[int, tuple[int, int]] = {}  # object id -> depth and number of nodes
    open_nodes: set[int] = set()
    stack = [(root, False)]
    while stack:
        node, leaving = stack.pop()
        parts = _parts(node)
        if parts is None or (id(node) in measured and not leaving):
            continue
        if leaving:
            open_nodes.discard(id(node))
            of_parts = [measured.get(id(part), (0, 1)) for part in parts]
            depth, nodes = (
                1 + max((depth for depth, _ in of_parts), default=0),
                1 + sum(nodes for _, nodes in of_parts),
            )
            if depth > MAX_DEPTH or nodes > most:
                raise pickle.UnpicklingError(f"its objects are nested {depth} deep and {nodes} in number")
            measured[id(node)] = depth, nodes
            continue
        if id(node) in open_nodes:
            raise pickle.UnpicklingError("an object that contains itself")
        open_nodes.add(id(node))
        stack.append((node, True))
        stack += [(part, False) for part in parts if id(part) not in measured]


def _parts(node: Any) -> Sequence[Any] | None:
    """Return the objects that ``node`` contains, or None if it is not a container."""
    if isinstance(node, ForeignObject):
        return (
            (node.args, node.kwargs, node.state, node.items)
            if hasattr(node, "items")
            else (node.args, node.state)
        )
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    if isinstance(node, slice):
        return node.start, node.stop, node.step
    return list(node) if isinstance(node, (list, tuple, set, frozenset)) else None
