"""The schema of the installed DeepSpeed, read once a version and kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

from toolkit.config.vendors import models, node, source, trace
from toolkit.config.vendors.node import Node


@cache
def deepspeed_schema() -> Node | None:
    """Every key that the installed DeepSpeed reads; None where it is not installed. Never imports it."""
    package = _package()
    if package is None:
        return None
    file = cache_file(package)
    kept = _load(file)
    if kept is not None:
        return kept
    found = trace.read_schema(package)
    _keep(file, found)
    return found


def cache_file(package: Path) -> Path:
    """Named after the version, the source that is read first, and this reader: a change of any of them reads anew."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "deepspeed-megatron-toolkit"
    read_first = (package / trace.CONFIG).stat()
    parts = [f"{package} {read_first.st_size} {read_first.st_mtime_ns}"]
    parts += [Path(module.__file__ or "").read_text(encoding="utf-8") for module in (models, node, source, trace)]
    mark = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
    return folder / f"deepspeed-{version('deepspeed')}-{mark}.json"


def _package() -> Path | None:
    found = importlib.util.find_spec("deepspeed")
    return Path(found.origin).parent if found is not None and found.origin is not None else None


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
