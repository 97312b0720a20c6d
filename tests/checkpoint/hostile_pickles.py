"""Forged pickles that a reader must reject, without torch, so that a process of its own reads them soon."""

from __future__ import annotations

import struct

from toolkit.checkpoint.formats.stored_tensor import Storage

SIZE = 200_000  # levels: far more than fit the C stack
MARK, TUPLE1, TUPLE2, DICT, LIST, STOP = b"(", b"\x85", b"\x86", b"}", b"]", b"."


def put(number: int) -> bytes:
    return b"r" + struct.pack("<I", number)


def get(number: int) -> bytes:
    return b"j" + struct.pack("<I", number)


def called(module: str, name: str, *args: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + MARK + b"".join(args) + b"tR"


LONG = b"]" + put(0) + MARK + b"K\x01" * 1000 + b"e"
DOUBLED = b"K\x01" + b"".join(put(n) + get(n) + TUPLE2 for n in range(60))
FUNCTION = b"ctorch._utils\n_rebuild_tensor_v2\n"
HOSTILE: dict[str, bytes] = {
    "a deep tuple": b")" + TUPLE1 * SIZE + STOP,
    "a deep tuple as a key": DICT + b")" + TUPLE1 * SIZE + b"K\x01s" + STOP,
    "a deep list": b"".join((LIST * SIZE, b"a" * (SIZE - 1), STOP)),
    "a list that holds itself": LIST + put(0) + get(0) + b"a" + STOP,
    "a dictionary that holds itself": DICT + put(0) + b"K\x01" + get(0) + b"s" + STOP,
    "a tuple of itself through a list": LIST + put(0) + get(0) + TUPLE1 + b"a" + STOP,
    "doubled sixty times": DOUBLED + STOP,
    "doubled sixty times, as a key": DICT + DOUBLED + b"K\x01s" + STOP,
    "doubled sixty times, as text": called("builtins", "str", DOUBLED) + STOP,
    "one list copied again and again": LONG
    + LIST
    + MARK
    + b"".join(called("builtins", "list", get(0)) for _ in range(2000))
    + b"e"
    + STOP,
    "a bytearray of 2^60 bytes": called("builtins", "bytearray", b"\x8a\x08" + struct.pack("<q", 2**60))
    + STOP,
    "room for 2^60 bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**60) + STOP,
    "bytes of 2^60": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + STOP,
    "a frame of 2^60": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + STOP,
    "a place in the memo that is far away": b"K\x01r\xff\xff\xff\xff" + get(0) + STOP,
    "attributes of a function": FUNCTION + DICT + b"X\x01\x00\x00\x00aK\x01sb" + STOP,
    "slots of a function": FUNCTION
    + b"N"
    + DICT
    + b"X\x0c\x00\x00\x00__defaults__K\x01"
    + TUPLE1
    + b"s"
    + TUPLE2
    + b"b"
    + STOP,
    "an item of a function": FUNCTION + b"K\x01K\x02s" + STOP,
    "a new object of a builtin": b"cbuiltins\ntuple\n)" + b"\x81" + STOP,
    "a function that rebuilds": called(
        "torch._tensor", "_rebuild_from_type_v2", b"cbuiltins\nlist\n", b"N", b")", b"N"
    )
    + STOP,
    "an encoding": called("_codecs", "encode", b"X\x01\x00\x00\x00a", b"X\x04\x00\x00\x00idna") + STOP,
    "an extension": b"\x82\x01" + STOP,
    "an unknown operation": b"\xff" + STOP,
    "nothing": b"",
    "no end": b"K\x01",
    "an empty stack": STOP,
}


def no_storage(dtype: str, key: str, numel: int) -> Storage:
    return Storage(key, dtype, numel)
