"""Find the installed engines without importing them, and load the schema of their keys.

A schema file is generated for one version of a package (``generate.py``). If the installed version has no
file of its own, the file of the newest version is used, and errors about unknown keys name both versions.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from toolkit.config.vendors.key_schema import KeySchema

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class EnginePackage:
    """An engine's Python package.

    Attributes:
        module: import name of its top folder.
        distribution: name of the package for pip.
        marker: a file that the folder has if the package is installed (``megatron`` is a namespace of several
            packages).
    """

    module: str
    distribution: str
    marker: str

    @property
    def installed(self) -> bool:
        spec = importlib.util.find_spec(self.module)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        return any((Path(folder) / self.marker).is_file() for folder in folders)

    @property
    def installed_version(self) -> str:
        """The version according to pip's metadata; empty for a folder on ``sys.path`` that pip did not
        install.
        """
        return _version(self.distribution)

    @property
    def schema_file(self) -> Path:
        """The file of the installed version if there is one, else the file of the newest version."""
        exact = FOLDER / f"{self.distribution}-{self.installed_version}.json"
        return exact if exact.is_file() else max(FOLDER.glob(f"{self.distribution}-*.json"), key=_version_of)

    @property
    def schema_version(self) -> str:
        return self.schema_file.stem.removeprefix(f"{self.distribution}-")

    def version_note(self) -> str:
        """Return a note for errors if keys are checked against the schema of another version, else empty."""
        if self.schema_version == self.installed_version:
            return ""
        return (
            f"{self.distribution} {self.installed_version or 'of unknown version'} is installed, and keys "
            f"are checked against "
            f"{self.schema_version}: python -m toolkit.config.vendors.generate writes the schema of the "
            f"installed version"
        )


DEEPSPEED = EnginePackage("deepspeed", "deepspeed", "runtime/config.py")
MEGATRON = EnginePackage("megatron", "megatron-core", "core/transformer/transformer_config.py")
# It has no keys of its own: Megatron-core uses its layers.
TRANSFORMER_ENGINE = EnginePackage("transformer_engine", "transformer-engine", "__init__.py")


def deepspeed_schema() -> KeySchema | None:
    """Return every key that DeepSpeed reads; None if DeepSpeed is not installed."""
    return _load(DEEPSPEED.schema_file) if DEEPSPEED.installed else None


def megatron_schema() -> KeySchema | None:
    """Return the sections ``transformer``, ``ddp`` and ``optimizer`` of Megatron-core; None if it is not
    installed.
    """
    return _load(MEGATRON.schema_file) if MEGATRON.installed else None


def load_schema(package: EnginePackage) -> KeySchema:
    """Return the keys of ``package``, whether or not it is installed."""
    return _load(package.schema_file)


@cache
def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


@cache
def _load(file: Path) -> KeySchema:
    return KeySchema.from_json(json.loads(file.read_text(encoding="utf-8")))


def _version_of(file: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in file.stem.rpartition("-")[2].split(".") if part.isdigit())
