"""The schemas of the installed engines, read once a version and kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from toolkit.config.vendors import megatron, models, node, source, trace
from toolkit.config.vendors.node import Node
from toolkit.files import user_cache


@dataclass(frozen=True)
class Package:
    """An engine's package: ``module`` is its folder's import name, ``distribution`` its name for pip, ``first`` a file that is read."""

    module: str
    distribution: str
    first: str
    read: Callable[[Path], Node]

    def folder(self) -> Path | None:
        """None where it is not installed. Never imports it."""
        found = importlib.util.find_spec(self.module)
        folders = list(found.submodule_search_locations or ()) if found is not None else []
        return next((Path(folder) for folder in folders if (Path(folder) / self.first).is_file()), None)


DEEPSPEED = Package("deepspeed", "deepspeed", trace.CONFIG, trace.read_schema)
MEGATRON = Package("megatron", "megatron-core", megatron.CLASSES["transformer"][0], megatron.read_schema)


@cache
def deepspeed_schema() -> Node | None:
    """Every key that the installed DeepSpeed reads; None where it is not installed."""
    return _schema(DEEPSPEED)


@cache
def megatron_schema() -> Node | None:
    """Sections transformer, ddp and optimizer with the fields of the installed Megatron-core; None where it is not installed."""
    return _schema(MEGATRON)


def _schema(package: Package) -> Node | None:
    folder = package.folder()
    if folder is None:
        return None
    file = cache_file(package, folder)
    kept = _load(file)
    if kept is not None:
        return kept
    found = package.read(folder)
    _keep(file, found)
    return found


def cache_file(package: Package, folder: Path) -> Path:
    """Named after the version, the source that is read first, and these readers: a change of any of them reads anew."""
    read_first = (folder / package.first).stat()
    parts = [f"{folder} {read_first.st_size} {read_first.st_mtime_ns}"]
    parts += [
        Path(module.__file__ or "").read_text(encoding="utf-8")
        for module in (megatron, models, node, source, trace)
    ]
    mark = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
    return user_cache() / f"{package.distribution}-{version(package.distribution)}-{mark}.json"


def _load(file: Path) -> Node | None:
    """None for a file that is absent, torn or not ours: then the source is read again."""
    try:
        kept = Node.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return kept if kept.fields else None


def _keep(file: Path, schema: Node) -> None:
    """Whole or not at all. A cache that cannot be written costs a tenth of a second each time, and nothing else."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                json.dump(schema.to_json(), stream)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(file)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
