"""Build the catalog of a DeepSpeed checkpoint from what each rank's files contain.

With 16-bit weights the model's files have the weights and the optimizer's the masters. In fp32 both have the
weights: the optimizer's are read, because training continues from them, and the model's are copies. Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit import families
from toolkit.checkpoint.catalog import Catalog, DamagedFile, LazyPieces
from toolkit.checkpoint.formats.deepspeed.contents import PlacedContent, RankParameter
from toolkit.checkpoint.formats.deepspeed.names import CanonicalPart, ParameterNames, rank_boxes
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.errors import CheckpointError, Problem
from toolkit.families.base import ModelShape

TensorRanks = Sequence[
    Mapping[str, RankParameter]
]  # for each tensor rank of a pipeline stage, its parameters by stored name


@dataclass(slots=True)
class _TensorStates:
    """The contents of one canonical tensor, by state. Those of a tied alias come last."""

    model_dtype: str | None = None
    states: dict[str, list[tuple[bool, PlacedContent]]] = field(default_factory=dict)

    def add(self, state: str, part: CanonicalPart, placed: PlacedContent) -> None:
        self.states.setdefault(state, []).append((part.alias, placed))

    def resolve(self) -> Iterator[tuple[str, list[PlacedContent], list[PlacedContent]]]:
        """Yield each state with the contents to read and their copies."""
        ordered = {
            state: [placed for _, placed in sorted(contents, key=lambda item: item[0])]
            for state, contents in self.states.items()
        }
        masters, models = ordered.get(MASTER, []), ordered.get(WEIGHT, [])
        dtype = models[0].content.dtype if models else self.model_dtype
        if masters and masters[0].content.dtype == dtype:
            ordered = {
                WEIGHT: masters + models,
                **{state: placed for state, placed in ordered.items() if state not in (WEIGHT, MASTER)},
            }
        for state, contents in ordered.items():
            read: dict[Box, PlacedContent] = {}
            copies = []
            for placed in contents:
                if read.setdefault(placed.box, placed).content != placed.content:
                    copies.append(placed)
            yield state, list(read.values()), copies


def build_catalog(
    folder: Path, shape: ModelShape, stages: Sequence[TensorRanks], scalars: Mapping[str, object]
) -> Catalog:
    """Build the catalog of ``stages``. A parameter that several stages have becomes a copy.

    Raises:
        CheckpointError: Names or shapes are not the model's, or a parameter is missing. DamagedFile: A file
            has unexpected content.
    """
    stored = {name: local.shape for ranks in stages for rank in ranks for name, local in rank.items()}
    parts = ParameterNames(shape, stored, folder).parts
    gathered: dict[str, _TensorStates] = {}
    for ranks in stages:
        for parameters in ranks:
            _check_unique(parameters, parts, folder)
        for name in dict.fromkeys(name for parameters in ranks for name in parameters):
            part, locals_ = parts[name], [parameters.get(name) for parameters in ranks]
            tensor_states = gathered.setdefault(part.name, _TensorStates())
            sizes = [None if local is None else local.shape for local in locals_]
            for box, local in zip(rank_boxes(part, name, sizes, folder), locals_, strict=True):
                if box is not None and local is not None:
                    _gather(tensor_states, part, box, local)
    return _finish(folder, shape, gathered, scalars)


def _gather(tensor_states: _TensorStates, part: CanonicalPart, box: Box, local: RankParameter) -> None:
    tensor_states.model_dtype = tensor_states.model_dtype or local.model_dtype
    if local.master is not None:
        tensor_states.add(MASTER, part, PlacedContent(box, local.master))
    if local.model is not None:
        tensor_states.add(WEIGHT, part, PlacedContent(box, local.model))
    for state, content in (*local.moments.items(), *local.copies):
        tensor_states.add(state, part, PlacedContent(box, content))


def _finish(
    folder: Path, shape: ModelShape, gathered: Mapping[str, _TensorStates], scalars: Mapping[str, object]
) -> Catalog:
    tensors: dict[TensorKey, TensorInfo] = {}
    read: dict[TensorKey, list[PlacedContent]] = {}
    copies: dict[TensorKey, list[PlacedContent]] = {}
    missing = []
    for spec in families.get_family(shape.family).parameters(shape):
        states = (
            {state: rest for state, *rest in gathered[spec.name].resolve()} if spec.name in gathered else {}
        )
        if not states.keys() & {WEIGHT, MASTER}:
            missing.append(spec.name)
        for state, (contents, duplicates) in states.items():
            key, dtypes = TensorKey(state, spec.name), {content.content.dtype for content in contents}
            numel = sum(content.box.numel for content in contents)
            if len(dtypes) > 1 or numel != spec.numel:
                raise DamagedFile(
                    "",
                    f"{folder} has {numel} of {spec.numel} elements of {key}, as {', '.join(sorted(dtypes))}",
                    "the files of all ranks contain every element once, in one dtype",
                )
            tensors[key], read[key] = TensorInfo(dtypes.pop(), spec.shape), contents
            if duplicates:
                copies[key] = duplicates
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(
            Problem(
                str(folder),
                f"{folder} has no weight of {listed}",
                "a checkpoint must have every parameter of its model",
                "set the model options to those of the checkpoint",
            )
        )
    return Catalog(folder, tensors, _lazy_pieces(tensors, read), scalars, _lazy_pieces(tensors, copies))


def _lazy_pieces(
    tensors: Mapping[TensorKey, TensorInfo], contents: Mapping[TensorKey, Sequence[PlacedContent]]
) -> LazyPieces:
    """Return pieces that are created on access."""
    return LazyPieces(
        {key: tensors[key] for key in contents},
        lambda key: tuple(
            piece for content in contents[key] for piece in content.pieces(key, tensors[key].shape)
        ),
    )


def _check_unique(
    parameters: Mapping[str, RankParameter], parts: Mapping[str, CanonicalPart], folder: Path
) -> None:
    """Raise CheckpointError if two parameters of one rank are the same canonical tensor.

    A tied alias may be stored too, but without its own optimizer state.
    """
    claimed: dict[tuple[object, ...], str] = {}
    for name, local in parameters.items():
        part = parts[name]
        trained = local.master is not None or bool(local.moments)
        for claim in ((part,), *([(part.name, part.offset, part.extent)] if trained else [])):
            other = claimed.setdefault(claim, name)
            if parameters[other] is not local:
                raise CheckpointError(
                    Problem(
                        str(folder),
                        f"{folder} has separate tensors {other} and {name}",
                        f"this model has one {part.name}",
                        "set the model options to those of the checkpoint: model.tie_word_embeddings=false "
                        "if they are not tied",
                    )
                )
