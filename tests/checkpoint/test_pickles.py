"""Forged torch.save files are rejected quickly, in little memory, and without side effects.

pytest tests/checkpoint/test_pickles.py
"""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.hostile_pickles import HOSTILE, no_storage
from tests.damage import flip_byte
from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.formats import torch_zip, unpickle
from toolkit.checkpoint.formats.stored_tensor import Storage, StoredTensor


@pytest.mark.timeout(60)
def test_hostile_pickles_are_rejected_in_bounded_memory() -> None:
    """Runs in a separate process, because some of them crashed the interpreter."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))\n"
        "import pickle\nfrom tests.checkpoint.hostile_pickles import HOSTILE, no_storage\n"
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
