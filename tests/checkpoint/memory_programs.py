"""Programs for the memory tests, on ``folder / "run"`` and ``folder / "other"``. Imports no torch, like the
tool itself.

python -m tests.checkpoint.memory_programs NAME FOLDER      prints the peak resident memory (bytes)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from toolkit.checkpoint.formats import native
from toolkit.checkpoint.formats.huggingface.target import export
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.offline.diff import diff
from toolkit.checkpoint.source import open_source
from toolkit.checkpoint.target_tensors import select_target_tensors
from toolkit.checkpoint.verify import verify


def convert(folder: Path) -> None:
    source = open_source(folder / "run")
    target = native.lay_out(source, select_target_tensors(source, None, optimizer=True))
    Conversion(source, target, folder / "out").run()


def export_for_transformers(folder: Path) -> None:
    export(open_source(folder / "run"), folder / "hub", dtype="float32")


def verify_run(folder: Path) -> None:
    assert verify(folder / "run") == []


def compare(folder: Path) -> None:
    assert diff(folder / "run", folder / "other").equal


PROGRAMS: Mapping[str, Callable[[Path], None]] = {
    work.__name__: work for work in (convert, export_for_transformers, verify_run, compare)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]))
    assert "torch" not in sys.modules
    # Not getrusage: its maximum includes the parent's memory before this program was loaded.
    status = Path("/proc/self/status").read_text()
    print(1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))))
