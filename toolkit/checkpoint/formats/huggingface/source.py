"""Read the format of ``transformers``: ``config.json`` and safetensors. ``target.py`` writes it.

    config.json  model.safetensors | model-00001-of-0000N.safetensors ...  model.safetensors.index.json
    tokenizer files
    optimizer/state.json               added by this toolkit: scalars, and which files contain which state
    optimizer/exp_avg.safetensors ...  added by this toolkit: an optimizer state under published names, split
    as weights are

Transformers reads only the files of the first line. The family maps published names to canonical ones.
Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import families
from toolkit.checkpoint.catalog import Catalog, DamagedFile, TensorPiece, resolve_file
from toolkit.checkpoint.formats import safetensors
from toolkit.checkpoint.formats.safetensors import TensorEntry
from toolkit.checkpoint.planner import find_coverage_errors
from toolkit.checkpoint.scalars import STEP
from toolkit.checkpoint.shard import WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import CheckpointSource
from toolkit.errors import CheckpointError, InputError, Problem
from toolkit.families.base import Family, HubTensor, ModelShape
from toolkit.families.model_files import parse_model_config
from toolkit.paths import Location, UnsafePath, relative_name

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OPTIMIZER = "optimizer"
STATE = f"{OPTIMIZER}/state.json"
STATE_FORMAT, STATE_VERSION = "toolkit-optimizer", 1
STATE_RULE = "the optimizer's files are complete and unmodified"

Slots = Mapping[str, tuple[str, TensorEntry]]  # published name -> file, and position in it
Pieces = dict[TensorKey, tuple[TensorPiece, ...]]


def find(path: Path) -> Path | None:
    """Return ``path`` if it has a ``config.json``."""
    return path if (path / CONFIG).is_file() else None


def open_source(folder: Path, model: ModelShape | None = None) -> CheckpointSource:
    """Open a published or exported folder; tensors keep their stored dtypes. ``config.json`` describes the
    model.

    Raises:
        CheckpointError: A file or tensor is missing or does not match ``config.json``.
        InputError: The toolkit does not support the family or the variant.
    """
    try:
        return _open(folder)
    except DamagedFile as damage:
        raise _damage_error(folder, damage) from damage


def open_state_dict(folder: Path) -> CheckpointSource:
    """Open the weights of any model: the tensors under the names of their files, which are those of a state
    dict.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    try:
        config = _read_json(folder, CONFIG)
        slots = _slots(folder, _files(folder))
    except DamagedFile as damage:
        raise _damage_error(folder, damage) from damage
    hub = tuple(
        HubTensor(name, entry.shape, name, (0,) * len(entry.shape), entry.shape)
        for name, (_, entry) in slots.items()
    )
    pieces = _Published(hub, {tensor.name: tensor.shape for tensor in hub}, {}).weights(folder, slots)
    return CheckpointSource(
        format="huggingface",
        catalog=Catalog(
            folder,
            {key: TensorInfo(of_key[0].dtype, of_key[0].global_shape) for key, of_key in pieces.items()},
            pieces,
            {},
            {},
        ),
        namespace=f"transformers/{config.get('model_type')}",
        step=None,
        shape=None,
        description=_description(config),
        omitted=(),
        damage_error=_damage_error,
    )


def _open(folder: Path) -> CheckpointSource:
    """Do the work of :func:`open_source`. Raises DamagedFile in addition to its errors."""
    config = _read_json(folder, CONFIG)
    family = families.FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise InputError(
            Problem(
                str(folder / CONFIG),
                f"model_type={config.get('model_type')} in {folder / CONFIG}",
                f"the toolkit supports these model families: {', '.join(families.FAMILIES)}",
                f"train it with model=huggingface model.pretrained={folder}",
            )
        )
    shape = family.resolve_shape(parse_model_config(family, config, folder / CONFIG))
    published = _Published.create(family, shape)
    weights = _slots(folder, _files(folder))
    scalars, states = _optimizer(folder)
    pieces = published.weights(folder, weights)
    for state, slots in states.items():
        pieces |= published.state(state, slots)
    tensors = {key: TensorInfo(of_key[0].dtype, of_key[0].global_shape) for key, of_key in pieces.items()}
    step = scalars.get(STEP)
    return CheckpointSource(
        format="huggingface",
        catalog=Catalog(folder, tensors, pieces, scalars, published.copies(weights)),
        namespace=family.namespace,
        step=step if isinstance(step, int) else None,
        shape=shape,
        description=_description(config),
        omitted=published.omitted(weights),
        damage_error=_damage_error,
    )


def _description(config: Mapping[str, Any]) -> dict[str, str]:
    recorded = {
        "architecture": ", ".join(config.get("architectures") or ()),
        "transformers": config.get("transformers_version"),
    }
    return {name: str(value) for name, value in recorded.items() if value}


def _read_json(folder: Path, file: str) -> dict[str, Any]:
    """Read a JSON object. Raises DamagedFile."""
    path, rule = resolve_file(folder, file), "a Hugging Face folder contains it"
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedFile(file, f"{path} is missing", rule) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile(file, f"{path} is not JSON ({error})", f"{rule} as JSON") from error
    if not isinstance(content, dict):
        raise DamagedFile(file, f"{path} is not a JSON object", f"{rule} as an object")
    return content


def _files(folder: Path) -> list[str]:
    """Return the names of the weights' files. ``model.safetensors`` takes precedence over an index, as in
    transformers.
    """
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not (folder / INDEX).is_file():
        raise DamagedFile(
            SINGLE, f"{folder} has neither {SINGLE} nor {INDEX}", "weights are read from safetensors files"
        )
    names = _read_json(folder, INDEX).get("weight_map")
    if not isinstance(names, dict) or not _are_names(names.values()):
        raise DamagedFile(
            INDEX,
            f"{folder / INDEX} has no weight_map of files in the same folder",
            "an index names the file of each tensor",
        )
    return sorted(set(names.values()))


def _are_names(values: Any) -> bool:
    """Return whether the values are names of files in one folder."""
    try:
        return all("/" not in relative_name(value) for value in values)
    except UnsafePath:
        return False


def _slots(folder: Path, files: Sequence[str]) -> Slots:
    found: dict[str, tuple[str, TensorEntry]] = {}
    for file in files:
        try:
            slots, _ = safetensors.read_header(resolve_file(folder, file))
        except DamagedFile as damage:
            raise DamagedFile(file, damage.seen, damage.rule) from damage  # by its path within the folder
        found |= {slot.name: (file, slot) for slot in slots}
    return found


def _optimizer(folder: Path) -> tuple[dict[str, Any], dict[str, Slots]]:
    """Return the scalars, and each state's tensors; both are empty if no optimizer was saved. Raises
    DamagedFile.
    """
    path = folder / STATE
    if not path.is_file():
        return {}, {}
    content = _read_json(folder, STATE)
    if (content.get("format"), content.get("format_version")) != (STATE_FORMAT, STATE_VERSION):
        raise DamagedFile(
            STATE,
            f"{path} has format={content.get('format')} and format_version={content.get('format_version')}",
            f"this toolkit reads {STATE_FORMAT} of version {STATE_VERSION}",
        )
    scalars, states = content.get("scalars"), content.get("states")
    if not isinstance(scalars, dict) or not isinstance(states, dict):
        raise DamagedFile(STATE, f"{path} has no scalars or no states", STATE_RULE)
    if not all(isinstance(files, list) and _are_names(files) for files in states.values()):
        raise DamagedFile(STATE, f"{path} does not name the files of each state", STATE_RULE)
    return scalars, {
        state: _slots(folder, [f"{OPTIMIZER}/{file}" for file in files]) for state, files in states.items()
    }


def _damage_error(folder: Location, damage: DamagedFile) -> CheckpointError:
    remedy = (
        "download or export the folder again; other formats become safetensors with transformers' "
        "save_pretrained"
    )
    return CheckpointError(Problem(str(folder / damage.file), damage.seen, damage.rule, remedy))


@dataclass(frozen=True, slots=True)
class _Published:
    """The published tensors of a model.

    Attributes:
        hub: Published tensors of the family.
        sizes: Shapes of canonical tensors.
        tied: Alias -> the canonical tensor that stores it.
    """

    hub: tuple[HubTensor, ...]
    sizes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]

    @staticmethod
    def create(family: Family, shape: ModelShape) -> _Published:
        return _Published(
            family.hub_tensors(shape),
            {spec.name: spec.shape for spec in family.parameters(shape)},
            family.tied_weights(shape),
        )

    def weights(self, folder: Path, slots: Slots) -> Pieces:
        """Return the pieces of all weights. Raises CheckpointError naming every tensor that is missing or has
        another shape.
        """
        problems: list[Problem] = []
        pieces: Pieces = {}
        for tensor in self.hub:
            key = TensorKey(WEIGHT, tensor.canonical)
            found = next((slots[name] for name in (tensor.name, *tensor.aliases) if name in slots), None)
            if found is None:
                problems.append(
                    Problem(
                        str(folder),
                        f"{folder} has no tensor {tensor.name}",
                        "a folder must have every tensor of its config.json",
                        "download or export it again, or correct config.json",
                    )
                )
                continue
            file, slot = found
            dtype = pieces[key][0].dtype if key in pieces else slot.dtype
            if slot.shape != tensor.shape or slot.dtype != dtype:
                problems.append(
                    Problem(
                        str(folder / file),
                        f"{tensor.name} is {slot.dtype} {slot.shape} in {folder / file}",
                        f"config.json requires {dtype} {tensor.shape}",
                        "correct config.json or restore the original",
                    )
                )
                continue
            pieces[key] = (*pieces.get(key, ()), self._piece(key, tensor, file, slot))
        if problems:
            raise CheckpointError(*problems[:8])
        return pieces

    def state(self, state: str, slots: Slots) -> Pieces:
        """Return the pieces of an optimizer state, which may lack parameters but not parts of one. Raises
        DamagedFile.
        """
        pieces: Pieces = {}
        for tensor in self.hub:
            if tensor.name not in slots:
                continue
            key, (file, slot) = TensorKey(state, tensor.canonical), slots[tensor.name]
            if slot.shape != tensor.shape:
                raise DamagedFile(
                    file,
                    f"{state} of {tensor.name} is {slot.shape} in {file}, its weight {tensor.shape}",
                    STATE_RULE,
                )
            pieces[key] = (*pieces.get(key, ()), self._piece(key, tensor, file, slot))
        for sentence in find_coverage_errors(pieces):
            raise DamagedFile(STATE, sentence, STATE_RULE)
        return pieces

    def copies(self, slots: Slots) -> Pieces:
        """Return tensors that are stored twice: tied tensors under both names, tensors under an old and a
        new name.
        """
        found: Pieces = {}
        for tensor in self.hub:
            key, names = TensorKey(WEIGHT, tensor.canonical), (tensor.name, *tensor.aliases)
            stored = [name for name in names if name in slots][1:]
            whole = tensor.shape == self.sizes[tensor.canonical]
            stored += [
                name
                for name, canonical in self.tied.items()
                if canonical == tensor.canonical and whole and name in slots
            ]
            same = [slots[name] for name in stored if slots[name][1].shape == tensor.shape]
            if same:
                found[key] = (
                    *found.get(key, ()),
                    *(self._piece(key, tensor, file, slot) for file, slot in same),
                )
        return found

    def omitted(self, slots: Slots) -> tuple[str, ...]:
        """Return a description of stored tensors that are not parameters, such as rotary tables and masks."""
        known = {name for tensor in self.hub for name in (tensor.name, *tensor.aliases)} | self.tied.keys()
        names = [name for name in slots if name not in known]
        more = f" and {len(names) - 3} more" if names[3:] else ""
        return (f"tensors that are no parameters: {', '.join(names[:3])}{more}",) if names else ()

    def _piece(self, key: TensorKey, tensor: HubTensor, file: str, slot: TensorEntry) -> TensorPiece:
        box = Box(tensor.offset, tensor.extent)
        return TensorPiece(key, slot.dtype, self.sizes[tensor.canonical], box, file, slot.begin, slot.end)
