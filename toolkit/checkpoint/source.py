"""Any checkpoint, whoever wrote it: found, recognised, and made one catalog under canonical names.

A format is a module of ``formats/`` with two functions: ``find(path)`` gives the checkpoint that a path is or points to (a run's
folder, a folder with a tracker file), or None; ``open_source(folder, model)`` reads its metadata, no tensor. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol

import xxhash

from toolkit.checkpoint import directory, manifest, nearby
from toolkit.checkpoint.blocks import stamps
from toolkit.checkpoint.catalog import Catalog, Damage
from toolkit.checkpoint.reader import CatalogReader
from toolkit.errors import CheckpointError, Problem, UserError
from toolkit.families.base import ModelShape
from toolkit.families.model_files import parse_model_shape
from toolkit.paths import MOST_PATH_BYTES, UnsafePath, check_links, inside

MODEL = "model"  # among the scalars: the model's sizes, so that a checkpoint says what it is of
TRACKERS = (
    "latest",
    "latest_universal",
    "latest_checkpointed_iteration.txt",
)  # of the vendors: the name of the newest
# In the order in which they are tried: what is surest to be known by its files comes first.
FORMATS = ("native", "deepspeed", "universal", "megatron", "dcp", "huggingface")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint that is open: everything is known of it but its tensors' bytes.

    Attributes:
        format: of ``FORMATS``.
        namespace: of the catalog's names: ``llama/1``.
        step: optimizer steps done; None where it is of no step (published weights).
        shape: of the model; None where it is not known (``model.target``).
        facts: what a person wants to know of it, by name, in words: engine and version, layout.
        left_out: what it holds and the catalog does not, in words: random state, the scheduler's.
        refuse: the error to raise for a damaged file.
    """

    format: str
    catalog: Catalog
    namespace: str
    step: int | None
    shape: ModelShape | None
    facts: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    refuse: Callable[[Path, Damage], CheckpointError]

    @property
    def folder(self) -> Path:
        return self.catalog.folder

    def reader(self) -> CatalogReader:
        return CatalogReader(self.catalog, namespace=self.namespace, step=self.step, refuse=self.refuse)

    def origin(self) -> str:
        """Its path and the length and time of each of its files: equal while nobody changes it."""
        of_files = (f"{name} {size} {time}" for name, (size, time) in stamps(self.folder).items())
        return "\n".join([str(self.folder.resolve()), *of_files])


class FormatModule(Protocol):
    def find(self, path: Path) -> Path | None:
        """The checkpoint of this format that ``path`` is or points to. Looks at names of files only."""

    def open_source(self, folder: Path, model: ModelShape | None) -> Source:
        """What ``find`` found, opened.

        Args:
            model: what the user says the model is; None: as the checkpoint says.

        Raises:
            CheckpointError, InputError: it is damaged, or of a kind that cannot be read. ModelUnknown: the model must be said.
        """


def locate(path: Path) -> tuple[str | None, Path]:
    """The format of the checkpoint that ``path`` is or points to, and its folder. None: of a foreign format, written by this toolkit,
    whose manifest lies beside.

    Raises:
        CheckpointError: there is none.
    """
    path = (
        directory.checkpoint_at(path) or path
    )  # where a run left word of what it went back to: whatever format that is
    if (path / manifest.BESIDE).is_file() and not _outlived(path):
        return None, path
    for name in FORMATS:
        try:
            folder = _module(name).find(path)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            seen = f"{path} points to a checkpoint by a name that no folder can have ({type(error).__name__}: {str(error)[:200]})"
            rule = f"a tracker file ({', '.join(TRACKERS)}) names a folder beside it"
            raise CheckpointError(
                Problem(str(path), seen, rule, "correct the tracker file, or name the folder")
            ) from error
        if folder is not None:
            return name, folder
    raise CheckpointError(
        Problem(
            str(path),
            f"{path} {'holds no checkpoint' if path.is_dir() else 'is not there'}",
            f"a checkpoint is a folder in one of the formats {', '.join(FORMATS)}, or a run's directory that has one",
            "correct the path",
        )
    )


def _outlived(path: Path) -> bool:
    """Whether somebody saved to the folder since this toolkit wrote it: going on in the folder that one began from is what the vendors'
    programs do, and then its tracker names another checkpoint than our manifest is of."""
    try:
        records = manifest.load(path, manifest.BESIDE).files
    except Damage:
        return False  # refused by name when it is opened
    trackers = (record for record in records if record.file in TRACKERS and (path / record.file).is_file())
    return any(
        xxhash.xxh3_128_hexdigest((path / record.file).read_bytes()) != record.header_hash
        for record in trackers
    )


def open_source(path: str | Path, model: ModelShape | None = None) -> Source:
    """The checkpoint that ``path`` is or points to, of whatever format.

    Raises:
        CheckpointError: there is none, or it is damaged. InputError: the model must be said.
    """
    name, folder = locate(Path(path).expanduser())
    if name is None:
        return open_manifest(folder, manifest.BESIDE, model)
    check_whole_inside(folder)
    module = _module(name)
    try:
        return _open(module, folder, model)
    except nearby.ModelUnknown:
        found = nearby.model_near(folder)
        if found is None:
            raise
        return _open(module, folder, found)


def _open(module: FormatModule, folder: Path, model: ModelShape | None) -> Source:
    """Raises CheckpointError for metadata that are not built as the format's own programs build them, too."""
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
        seen = f"{folder} is not built as its format has it ({type(error).__name__}: {str(error)[:200]})"
        raise vendors_refusal(
            folder, Damage("", seen, "metadata name what is there, in the format's own types")
        ) from error


def _module(name: str) -> FormatModule:
    module: FormatModule = import_module(f"toolkit.checkpoint.formats.{name}")
    return module


def named_in(path: Path, tracker: str, folder_of: Callable[[str], str] = str) -> Path:
    """The folder that a vendor's ``tracker`` file in ``path`` names, whose text ``folder_of`` turns into a name.

    Raises CheckpointError if the folder does not lie below ``path``.
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
                f"{tracker} names a folder beside it",
                "name the checkpoint's own folder instead of the one above it",
            )
        ) from error


def check_whole_inside(folder: Path) -> None:
    """Raises CheckpointError if a file of a vendor's checkpoint is a link to another place."""
    try:
        check_links(folder)
    except UnsafePath as error:
        raise CheckpointError(
            Problem(
                str(folder),
                f"{folder}: {error}",
                "the files of a checkpoint lie in its folder",
                "put the file itself there in place of the link",
            )
        ) from error


def open_manifest(folder: Path, name: str, model: ModelShape | None) -> Source:
    """A folder that this toolkit wrote, in whatever format: its manifest says where everything lies. Raises CheckpointError."""
    try:
        found = directory.load_manifest(folder, name)
        manifest.check_together(found, name)
        manifest.check_files(folder, found.files)
    except Damage as damage:
        raise directory.refusal(folder, damage) from damage
    return of_manifest(folder, found, model)


def of_manifest(folder: Path, found: manifest.Manifest, model: ModelShape | None) -> Source:
    """What a manifest describes. Looks at no file of it."""
    sizes = found.scalars.get(MODEL)
    said = parse_model_shape(sizes, folder / manifest.NAME) if isinstance(sizes, dict) else None
    shape = model or said or nearby.model_near(folder)
    facts = {"written by": ", ".join(f"{package} {version}" for package, version in found.software.items())}
    return Source(
        format=found.written_as,
        catalog=found.catalog(folder),
        namespace=found.namespace,
        step=found.step,
        shape=shape,
        facts=facts,
        refuse=directory.refusal,
    )


def vendors_refusal(folder: Path, damage: Damage) -> CheckpointError:
    """For checkpoints of others, which have no hashes and no neighbour that is known to be whole."""
    return CheckpointError(
        Problem(
            str(folder / damage.file),
            damage.seen,
            damage.rule,
            "take another checkpoint, or copy this one again",
        )
    )
