"""Folders import in one direction, heavy packages are imported only in their folders, and class names are
unique.

pytest tests/test_imports.py
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A folder or module may import those in the rows above it, and itself, but not others in its row.
ORDER: tuple[tuple[str, ...], ...] = (
    ("errors", "logs", "progress", "files", "paths", "rows", "step_parts"),
    ("commands", "conf", "callable_package"),
    ("config", "layout", "goodput", "restart_phases", "checkpoint_folder"),
    ("user_code", "remote"),
    ("optimizers",),
    ("families",),
    ("plan",),
    ("estimate",),
    ("data", "checkpoint", "monitor", "rundir"),
    ("models",),
    ("engine",),
    ("hooks",),
    ("observe",),
    ("train",),
    ("tasks",),
    ("testing", "new", "adopt"),
    ("launch",),
    ("api", "cli"),
)
# cluster is outside of this order: it may import these, and only launch, api and cli may import it.
CLUSTER_USES = {
    "logs",
    "errors",
    "progress",
    "files",
    "paths",
    "rows",
    "commands",
    "config",
    "user_code",
    "layout",
    "optimizers",
    "families",
    "plan",
    "estimate",
    "data",  # the number of samples, for train.epochs
    "rundir",
    "goodput",
    "restart_phases",
    "cluster",
}
# The same order inside toolkit/cluster.
CLUSTER_ORDER: tuple[tuple[str, ...], ...] = (
    ("world",),
    ("stop",),
    ("jobs",),
    ("attempt",),
    ("standbys",),
    ("doctor", "sweep"),
    ("cpu_affinity", "supervisor"),
    ("launch_process",),
    ("entry_point",),
)

ONLY_IN = {
    "deepspeed": ("toolkit/engine/", "toolkit/testing/"),
    "megatron": ("toolkit/engine/", "toolkit/models/"),
    "wandb": ("toolkit/monitor/sinks/wandb.py",),
    "mlflow": ("toolkit/monitor/sinks/mlflow.py",),
    "aim": ("toolkit/monitor/sinks/aim.py",),
    "pynvml": ("toolkit/cluster/", "toolkit/monitor/system/gpu.py"),
    "obstore": ("toolkit/remote/",),
    "omegaconf": ("toolkit/config/",),
    "hydra": ("toolkit/config/",),
}
TORCH_FREE = (
    "toolkit.errors",
    "toolkit.progress",
    "toolkit.files",
    "toolkit.paths",
    "toolkit.config.compose",
    "toolkit.user_code",
    "toolkit.layout.axes",
    "toolkit.families",
    "toolkit.plan.make",
    "toolkit.rundir.directory",
    "toolkit.cluster.jobs.submission",
    "toolkit.cluster.jobs.backends.slurm",
    "toolkit.cluster.jobs.requeue",
    "toolkit.monitor.sinks.subprocess_sink",
    "toolkit.monitor.sinks.wandb",
)


@cache
def scan(path: Path) -> tuple[set[str], list[str]]:
    """Every module that a file imports, also inside functions, and its public classes."""
    imports: set[str] = set()
    classes: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            named = module in ("toolkit", "toolkit.cluster")
            imports |= {f"{module}.{alias.name}" for alias in node.names} if named else {module}
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            classes.append(node.name)
    return imports, classes


def part_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "launch" else parts[1]


FILES = sorted(
    path
    for folder in ("toolkit", "launch")
    for path in (ROOT / folder).rglob("*.py")
    if path != ROOT / "toolkit/__init__.py" and not path.is_relative_to(ROOT / "toolkit/new/project")
)


def allowed_imports(part: str) -> set[str]:
    if part == "cluster":
        return CLUSTER_USES
    return parts_up_to(part, ORDER) | ({"cluster"} if part in ("launch", "api", "cli") else set())


def parts_up_to(part: str, order: tuple[tuple[str, ...], ...]) -> set[str]:
    row = next(index for index, row in enumerate(order) if part in row)
    return {name for row in order[:row] for name in row} | {part}


def test_folders_import_in_one_direction() -> None:
    for path in FILES:
        used = {name.split(".")[1] for name in scan(path)[0] if name.startswith("toolkit.")} - {"__version__"}
        wrong = used - allowed_imports(part_of(path))
        assert not wrong, f"{path.relative_to(ROOT)} must not import {sorted(wrong)}"


def test_folders_of_cluster_import_in_one_direction() -> None:
    folder = ROOT / "toolkit/cluster"
    for path in FILES:
        if path.is_relative_to(folder) and path != folder / "__init__.py":
            part = path.relative_to(folder).with_suffix("").parts[0]
            used = {name.split(".")[2] for name in scan(path)[0] if name.startswith("toolkit.cluster.")}
            wrong = used - parts_up_to(part, CLUSTER_ORDER)
            assert not wrong, f"{path.relative_to(ROOT)} must not import {sorted(wrong)} of cluster"


def test_heavy_packages_are_imported_only_in_their_folders() -> None:
    for path in FILES:
        file = str(path.relative_to(ROOT))
        for name in {name.split(".")[0] for name in scan(path)[0]} & ONLY_IN.keys():
            assert file.startswith(ONLY_IN[name]), f"{file} imports {name}"


def test_public_classes_have_unique_names() -> None:
    """A class can be found by its name alone."""
    files: dict[str, list[str]] = defaultdict(list)
    for folder in ("toolkit", "launch", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in scan(path)[1]:
                files[name].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in files.items() if len(paths) > 1}


def test_planning_does_not_import_torch() -> None:
    """``--help``, ``plan.py`` and configuration errors are fast because they do not import torch."""
    heavy = ("torch", "deepspeed", "transformers", "wandb")
    code = f"import sys, {', '.join(TORCH_FREE)}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
