"""Folders import in one direction, and heavy packages only where they belong.

pytest tests/test_imports.py
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Each row may import the rows above it, and itself; places in one row do not import each other.
ORDER: tuple[tuple[str, ...], ...] = (
    ("errors", "logs", "progress", "files", "paths", "rows"),
    ("config", "layout", "goodput", "checkpoint_folder"),
    ("families",),
    ("plan",),
    ("data", "checkpoint", "monitor", "rundir"),
    ("models",),
    ("engine",),
    ("hooks",),
    ("observe",),
    ("train",),
    ("testing",),
    ("launch",),
)
# cluster stands beside the chain: it may use plan and rundir, and only launch may use it.
CLUSTER_USES = {
    "logs",
    "errors",
    "progress",
    "files",
    "paths",
    "rows",
    "config",
    "layout",
    "families",
    "plan",
    "rundir",
    "goodput",
    "cluster",
}

ONLY_IN = {
    "deepspeed": ("toolkit/engine/", "toolkit/testing/"),
    "megatron": ("toolkit/engine/", "toolkit/models/"),
    "wandb": ("toolkit/monitor/sinks/wandb.py",),
    "pynvml": ("toolkit/cluster/", "toolkit/monitor/system/gpu.py"),
    "obstore": ("toolkit/data/remote/",),
    "omegaconf": ("toolkit/config/",),
    "hydra": ("toolkit/config/",),
}
TORCH_FREE = (
    "toolkit.errors",
    "toolkit.progress",
    "toolkit.files",
    "toolkit.paths",
    "toolkit.config.compose",
    "toolkit.layout.axes",
    "toolkit.families",
    "toolkit.plan.make",
    "toolkit.rundir.directory",
    "toolkit.cluster.submission",
    "toolkit.cluster.backends.slurm",
    "toolkit.cluster.requeue",
    "toolkit.monitor.sinks.subprocess_sink",
    "toolkit.monitor.sinks.wandb",
)


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, however deep in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "toolkit" else {module}
    return found


def place(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "launch" else parts[1]


FILES = sorted(
    path
    for folder in ("toolkit", "launch")
    for path in (ROOT / folder).rglob("*.py")
    if path != ROOT / "toolkit/__init__.py"
)


def allowed(of: str) -> set[str]:
    if of == "cluster":
        return CLUSTER_USES
    row = next(index for index, row in enumerate(ORDER) if of in row)
    below = {name for row in ORDER[:row] for name in row}
    return below | {of} | ({"cluster"} if of == "launch" else set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    """``toolkit/__init__.py`` has the version and imports nothing."""
    used = {
        name.split(".")[1] for name in imports(path) - {"toolkit.__version__"} if name.startswith("toolkit.")
    }
    assert used <= allowed(place(path)), (
        f"{place(path)} must not import {sorted(used - allowed(place(path)))}"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_stay_in_their_place(path: Path) -> None:
    where = str(path.relative_to(ROOT))
    for name in {name.split(".")[0] for name in imports(path)} & ONLY_IN.keys():
        assert where.startswith(ONLY_IN[name]), f"{where} imports {name}"


def test_deciding_is_free_of_torch() -> None:
    """``--help``, ``plan.py`` and configuration errors answer fast because nothing on their way imports torch."""
    code = f"import sys, {', '.join(TORCH_FREE)}; print([m for m in ('torch', 'deepspeed', 'transformers', 'wandb') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
