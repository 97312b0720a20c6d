"""Open a checkpoint of any format: find it, recognise the format, and read its metadata into a catalog of
canonical names.

A format is a module of ``formats/`` with two functions. ``find(path)`` returns the checkpoint that a path is
or leads to (a run's folder, a folder with a tracker file), or None. ``open_source(folder, model)`` reads its
metadata but no tensor. To add a format, add it to ``FORMATS``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol

import xxhash

from toolkit.checkpoint import directory, manifest, model_discovery
from toolkit.checkpoint.catalog import Catalog, DamagedFile
from toolkit.checkpoint.catalog_reader import CatalogReader
from toolkit.checkpoint.file_reader import read_stamps
from toolkit.config.urls import is_url
from toolkit.errors import CheckpointError, Problem, UserError
from toolkit.families.base import ModelShape
from toolkit.families.model_files import parse_model_shape
from toolkit.paths import MOST_PATH_BYTES, Location, UnsafePath, Url, check_links, inside
from toolkit.remote.storage import parse_location

MODEL = "model"  # scalar with the model's sizes, so that a checkpoint describes its model
TRACKERS = (
    "latest",
    "latest_universal",
    "latest_checkpointed_iteration.txt",
)  # vendors' files with the name of the newest checkpoint
# Format -> module in ``formats/``, in the order in which formats are tried: the most distinctive come first.
FORMATS: Mapping[str, str] = {
    "native": "native",
    "deepspeed": "deepspeed.source",
    "universal": "universal.source",
    "megatron": "megatron.source",
    "dcp": "dcp.source",
    "huggingface": "huggingface.source",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """An open checkpoint: its metadata are read, its tensors are not.

    Attributes:
        format: A key of ``FORMATS``.
        catalog: Where the tensors are stored.
        namespace: Namespace of the catalog's names, such as ``llama/1``.
        step: Completed optimizer steps; None if it has no step (published weights).
        shape: Shape of the model; None if unknown (``model.target``).
        description: What ``action=inspect`` prints, by label: engine, version, layout.
        omitted: Descriptions of content that the catalog lacks, such as random state.
        damage_error: Creates the error for a damaged file.
    """

    format: str
    catalog: Catalog
    namespace: str
    step: int | None
    shape: ModelShape | None
    description: Mapping[str, str] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()
    damage_error: Callable[[Location, DamagedFile], CheckpointError]

    @property
    def folder(self) -> Location:
        return self.catalog.folder

    def reader(self) -> CatalogReader:
        return CatalogReader(
            self.catalog, namespace=self.namespace, step=self.step, damage_error=self.damage_error
        )

    def origin(self) -> str:
        """Return a text that changes if any file of the checkpoint changes: the path, and each file's size
        and time.
        """
        if isinstance(self.folder, Url):
            return self.folder  # its name contains the hash of the manifest
        of_files = (f"{name} {size} {time}" for name, (size, time) in read_stamps(self.folder).items())
        return "\n".join([str(self.folder.resolve()), *of_files])


class FormatModule(Protocol):
    def find(self, path: Path) -> Path | None:
        """Return the checkpoint of this format that ``path`` is or leads to. Looks at file names only."""

    def open_source(self, folder: Path, model: ModelShape | None) -> CheckpointSource:
        """Open the checkpoint that ``find`` returned.

        Args:
            folder: The checkpoint.
            model: Shape of the model from the user; None uses the checkpoint's own description.

        Raises:
            CheckpointError, InputError: The checkpoint is damaged or cannot be read. UnknownModelError:
                ``model`` is required.
        """


def locate_checkpoint(path: Path) -> tuple[str | None, Path]:
    """Return the format of the checkpoint that ``path`` is or leads to, and its folder.

    The format is None if this toolkit wrote the checkpoint in a foreign format, with a manifest.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    found = directory.find_checkpoint(path)  # a run that went back may point to a checkpoint of any format
    path = found if isinstance(found, Path) else path
    if (path / manifest.FOREIGN_NAME).is_file() and not _was_saved_over(path):
        return None, path
    for name in FORMATS:
        try:
            folder = _module(name).find(path)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            seen = f"{path} names a folder that cannot exist ({type(error).__name__}: {str(error)[:200]})"
            rule = f"a tracker file ({', '.join(TRACKERS)}) names a folder next to it"
            raise CheckpointError(
                Problem(str(path), seen, rule, "correct the tracker file, or give the path of the folder")
            ) from error
        if folder is not None:
            return name, folder
    raise CheckpointError(
        Problem(
            str(path),
            f"{path} {'contains no checkpoint' if path.is_dir() else 'does not exist'}",
            f"a checkpoint is a folder in one of the formats {', '.join(FORMATS)}, or a run directory that "
            "contains one",
            "correct the path",
        )
    )


def _was_saved_over(path: Path) -> bool:
    """Return whether a program saved to the folder after this toolkit wrote it.

    A vendor's program that continues in the folder makes its tracker name another checkpoint than the
    manifest describes.
    """
    try:
        records = manifest.load(path, manifest.FOREIGN_NAME).files
    except DamagedFile:
        return False  # opening the checkpoint reports it
    trackers = (record for record in records if record.file in TRACKERS and (path / record.file).is_file())
    return any(
        xxhash.xxh3_128_hexdigest((path / record.file).read_bytes()) != record.header_hash
        for record in trackers
    )


def open_source(path: str | Path, model: ModelShape | None = None) -> CheckpointSource:
    """Open the checkpoint that ``path`` is or leads to, in any format; of a URL, this toolkit's own.

    Raises:
        CheckpointError: There is none, or it is damaged. InputError: The model must be given, or the store
            refuses. StorageError: The store does not answer.
    """
    if is_url(path):
        location = parse_location(path, "resume")
        if isinstance(location, Url):
            from toolkit.checkpoint.remote.source import open_url

            return open_url(location, model)
        path = location
    newest = directory.find_checkpoint(Path(path).expanduser())
    if isinstance(newest, Url):  # a run that continued from a store and has not saved since
        return open_source(newest, model)
    name, folder = locate_checkpoint(Path(path).expanduser())
    if name is None:
        return open_manifest(folder, manifest.FOREIGN_NAME, model)
    check_links_inside(folder)
    module = _module(name)
    try:
        return _open(module, folder, model)
    except model_discovery.UnknownModelError:
        found = model_discovery.find_model(folder)
        if found is None:
            raise
        return _open(module, folder, found)


def _open(module: FormatModule, folder: Path, model: ModelShape | None) -> CheckpointSource:
    """Open a checkpoint with a module of ``FORMATS``. Raises CheckpointError also for metadata with an
    unexpected structure.
    """
    try:
        return module.open_source(folder, model)
    except UserError:
        raise
    except (
        AssertionError,
        AttributeError,
        LookupError,
        OSError,
        OverflowError,
        TypeError,
        ValueError,
    ) as error:
        seen = (
            f"{folder} does not have the structure of its format ({type(error).__name__}: {str(error)[:200]})"
        )
        raise foreign_damage_error(
            folder, DamagedFile("", seen, "metadata have the types and names of their format")
        ) from error


def _module(name: str) -> FormatModule:
    module: FormatModule = import_module(f"toolkit.checkpoint.formats.{FORMATS[name]}")
    return module


def read_tracker(path: Path, tracker: str, folder_of: Callable[[str], str] = str) -> Path:
    """Return the folder that the vendor's ``tracker`` file in ``path`` names. ``folder_of`` converts its text
    to a folder name.

    Raises:
        CheckpointError: The folder is not below ``path``.
    """
    with (path / tracker).open(encoding="utf-8", errors="replace") as file:
        name = file.read(MOST_PATH_BYTES).strip()
    try:
        return inside(path, folder_of(name))
    except UnsafePath as error:
        raise CheckpointError(
            Problem(
                str(path / tracker),
                f"{path / tracker}: {error}",
                f"{tracker} names a folder next to it",
                "give the path of the checkpoint's own folder",
            )
        ) from error


def check_links_inside(folder: Path) -> None:
    """Raise CheckpointError if a file of a vendor's checkpoint is a link that leads out of its folder."""
    try:
        check_links(folder)
    except UnsafePath as error:
        raise CheckpointError(
            Problem(
                str(folder),
                f"{folder}: {error}",
                "the files of a checkpoint must be in its folder",
                "replace the link by the file itself",
            )
        ) from error


def open_manifest(folder: Path, name: str, model: ModelShape | None) -> CheckpointSource:
    """Open a folder that this toolkit wrote in any format, from its manifest. Raises CheckpointError."""
    try:
        loaded = directory.load_manifest(folder, name)
        manifest.check_consistency(loaded, name)
        manifest.check_files(folder, loaded.files)
    except DamagedFile as damage:
        raise directory.damage_error(folder, damage) from damage
    return source_from_manifest(folder, loaded, model)


def source_from_manifest(
    folder: Location, loaded: manifest.Manifest, model: ModelShape | None
) -> CheckpointSource:
    """Return the source that a manifest describes. Opens no file."""
    sizes = loaded.scalars.get(MODEL)
    recorded = parse_model_shape(sizes, folder / manifest.NAME) if isinstance(sizes, dict) else None
    shape = model or recorded
    if shape is None and isinstance(folder, Path):
        shape = model_discovery.find_model(folder)
    description = {
        "written by": ", ".join(f"{package} {version}" for package, version in loaded.software.items())
    }
    return CheckpointSource(
        format=loaded.written_as,
        catalog=loaded.catalog(folder),
        namespace=loaded.namespace,
        step=loaded.step,
        shape=shape,
        description=description,
        damage_error=native_damage_error,
    )


def native_damage_error(folder: Location, damage: DamagedFile) -> CheckpointError:
    """Return the error for a damaged checkpoint of this toolkit; its remedy names a complete one."""
    if isinstance(folder, Path):
        return directory.damage_error(folder, damage)
    from toolkit.checkpoint.remote.source import stored_damage_error

    return stored_damage_error(folder, damage)


def foreign_damage_error(folder: Location, damage: DamagedFile) -> CheckpointError:
    """Return the error for a damaged checkpoint of another program, which has no hashes."""
    return CheckpointError(
        Problem(
            str(folder / damage.file),
            damage.seen,
            damage.rule,
            "use another checkpoint, or copy this one again",
        )
    )
