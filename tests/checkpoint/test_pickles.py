"""Forged torch.save files are rejected quickly, in little memory, and without side effects.

pytest tests/checkpoint/test_pickles.py
"""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.damage import flip_byte
from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.formats import torch_zip, unpickle
from toolkit.checkpoint.formats.stored_tensor import Storage, StoredTensor

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


@pytest.mark.timeout(60)
def test_hostile_pickles_are_rejected_in_bounded_memory() -> None:
    """Runs in a separate process, because some of them crashed the interpreter."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))\n"
        "import pickle\nfrom tests.checkpoint.test_pickles import HOSTILE, no_storage\n"
        "from toolkit.checkpoint.formats import unpickle\n"
        "before = dict(vars(unpickle._rebuild_tensor)), unpickle._rebuild_tensor.__defaults__\n"
        "for name, data in HOSTILE.items():\n"
        "    try: unpickle.loads(data, no_storage)\n"
        "    except pickle.UnpicklingError: print(name)\n"
        "assert before == (dict(vars(unpickle._rebuild_tensor)), unpickle._rebuild_tensor.__defaults__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines() == list(HOSTILE), done.stderr[-2000:]
    assert done.returncode == 0


class Anything:
    """A class of the saving program."""

    def __init__(self) -> None:
        self.size = 3


def test_plain_values_are_unpickled() -> None:
    module = OrderedDict({"a": 1})
    module._metadata = {"version": 1}  # type: ignore[attr-defined]  # as torch's modules have it
    nested: Any = 0
    for _ in range(unpickle.MAX_DEPTH - 1):
        nested = [nested]
    value = {
        "module": module,
        "set": {1, 2},
        "frozen": frozenset({"a"}),
        "default": defaultdict(list, {"x": [1]}),
        "key": {(0, 1): 2},
        "bytes": b"\x00\xff",
        "complex": 1j,
        "slice": slice(1, 2),
        "deep": nested[0],
        "shared": [(1, 2)] * 1000,
        "big": 2**200,
    }
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert unpickle.loads(pickle.dumps(value, protocol), no_storage) == value
    found = unpickle.loads(pickle.dumps({"of": Anything()}), no_storage)["of"]
    assert found.name.endswith("Anything")
    assert found.fields == {"size": 3}


@pytest.mark.parametrize(
    "view",
    [
        {"offset": 1},
        {"offset": -1},
        {"shape": (3, 3)},
        {"shape": (-1, 2)},
        {"strides": (3, 1)},
        {"strides": (-2, 1)},
        {"strides": (2,)},
        {"shape": (2.0, 2)},
        {"shape": (True, 2)},
        {"shape": (2**62, 2**62)},
        {"offset": None},
    ],
    ids=str,
)
def test_view_outside_storage_is_rejected(view: dict[str, Any], tmp_path: Path) -> None:
    storage = Storage("0", "float32", 4)
    right = {"offset": 0, "shape": (2, 2), "strides": (2, 1)}

    def load(**parts: Any) -> Any:
        tensor = StoredTensor(storage, parts["offset"], parts["shape"], parts["strides"])
        layout = torch_zip.lay_out("a.pt", tensor, [Storage("0", "float32", 4, content=bytes(range(16)))])
        content = bytearray(layout.file.numbytes)
        for begin, fixed in layout.file.fixed.items():
            content[begin : begin + len(fixed)] = fixed
        (tmp_path / "a.pt").write_bytes(content)
        return torch_zip.load(tmp_path, "a.pt")

    assert load(**right).shape == (2, 2)
    with pytest.raises(DamagedFile, match=r"a\.pt cannot be read"):
        load(**{**right, **view})


def rewritten(file: Path, *, compress: int = zipfile.ZIP_STORED, twice: bool = False) -> None:
    """The same records, written by Python's zipfile."""
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w", compress) as archive:
        for name, content in (
            *records.items(),
            *([("archive/data.pkl", records["archive/data.pkl"])] if twice else []),
        ):
            archive.writestr(name, content)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_compressed_and_duplicate_records_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    bomb = {"a": "0" * 10**7}
    for name, changes in {
        "compressed": {"compress": zipfile.ZIP_DEFLATED},
        "two records": {"twice": True},
    }.items():
        buffer = io.BytesIO()
        torch.save(bomb, buffer)
        with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(file, "w") as renamed:
            for info in archive.infolist():
                renamed.writestr(f"archive/{info.filename.partition('/')[2]}", archive.read(info))
        assert torch_zip.load(tmp_path, "a.pt") == bomb
        rewritten(file, **changes)  # type: ignore[arg-type]
        with pytest.raises(DamagedFile, match=name):
            torch_zip.load(tmp_path, "a.pt")


def test_number_in_tensor_is_validated(tmp_path: Path) -> None:
    """The optimizer's step may be a tensor of one element, which is read separately."""
    torch.save(
        {"step": torch.tensor(7.0), "two": torch.ones(2), "nan": torch.tensor(float("nan"))},
        tmp_path / "a.pt",
    )
    found = torch_zip.load(tmp_path, "a.pt")
    assert torch_zip.read_number(tmp_path, found["step"]) == 7
    for wrong in (found["two"], found["nan"], "7", None, float("inf")):
        with pytest.raises(DamagedFile, match="for a number"):
            torch_zip.read_number(tmp_path, wrong, "a.pt")
    flip_byte(tmp_path / "a.pt", found["step"].storage.begin + 2)
    with pytest.raises(DamagedFile, match="CRC-32"):
        torch_zip.read_number(tmp_path, torch_zip.load(tmp_path, "a.pt")["step"])
