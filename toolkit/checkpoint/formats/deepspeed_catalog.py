"""From what each rank's files hold to one catalog: canonical names, boxes of tensor ranks, and which of several copies is read.

In 16 bits the model's files have the weights and the optimizer's the masters. In fp32 both have the weights; those of the optimizer
are read, because training goes on from them, and the model's are copies. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit import families
from toolkit.checkpoint.catalog import Catalog, Damage, Made
from toolkit.checkpoint.formats.deepspeed_held import Held, Local
from toolkit.checkpoint.formats.deepspeed_names import Names, Part, boxes
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.errors import CheckpointError, Problem
from toolkit.families.base import ModelShape

Ranks = Sequence[Mapping[str, Local]]  # of each tensor rank of a pipeline stage, parameters by stored name


@dataclass(slots=True)
class _Gathered:
    """Of one canonical tensor, by state. Those of a tied alias come last."""

    model_dtype: str | None = None
    states: dict[str, list[tuple[bool, Held]]] = field(default_factory=dict)

    def add(self, state: str, part: Part, held: Held) -> None:
        self.states.setdefault(state, []).append((part.alias, held))

    def settle(self) -> Iterator[tuple[str, list[Held], list[Held]]]:
        """Each state, what is read and what is a copy of it."""
        ordered = {
            state: [held for _, held in sorted(found, key=lambda item: item[0])]
            for state, found in self.states.items()
        }
        masters, models = ordered.get(MASTER, []), ordered.get(WEIGHT, [])
        dtype = models[0].content.dtype if models else self.model_dtype
        if masters and masters[0].content.dtype == dtype:
            ordered = {
                WEIGHT: masters + models,
                **{state: held for state, held in ordered.items() if state not in (WEIGHT, MASTER)},
            }
        for state, found in ordered.items():
            read: dict[Box, Held] = {}
            copies = []
            for held in found:
                if read.setdefault(held.box, held).content != held.content:
                    copies.append(held)
            yield state, list(read.values()), copies


def catalog_of(
    folder: Path, shape: ModelShape, stages: Sequence[Ranks], scalars: Mapping[str, object]
) -> Catalog:
    """The catalog of ``stages``: a parameter that several of them have is a copy.

    Raises:
        CheckpointError: names or shapes are not the model's, or a parameter is missing. Damage: a file is not what it should be.
    """
    stored = {name: local.shape for ranks in stages for held in ranks for name, local in held.items()}
    parts = Names(shape, stored, folder).parts
    gathered: dict[str, _Gathered] = {}
    for ranks in stages:
        for held in ranks:
            _refuse_two(held, parts, folder)
        for name in dict.fromkeys(name for held in ranks for name in held):
            part, locals_ = parts[name], [held.get(name) for held in ranks]
            found = gathered.setdefault(part.name, _Gathered())
            sizes = [None if local is None else local.shape for local in locals_]
            for box, local in zip(boxes(part, name, sizes, folder), locals_, strict=True):
                if box is not None and local is not None:
                    _gather(found, part, box, local)
    return _finish(folder, shape, gathered, scalars)


def _gather(found: _Gathered, part: Part, box: Box, local: Local) -> None:
    found.model_dtype = found.model_dtype or local.model_dtype
    if local.master is not None:
        found.add(MASTER, part, Held(box, local.master))
    if local.model is not None:
        found.add(WEIGHT, part, Held(box, local.model))
    for state, content in (*local.moments.items(), *local.copies):
        found.add(state, part, Held(box, content))


def _finish(
    folder: Path, shape: ModelShape, gathered: Mapping[str, _Gathered], scalars: Mapping[str, object]
) -> Catalog:
    tensors: dict[TensorKey, TensorInfo] = {}
    read: dict[TensorKey, list[Held]] = {}
    copies: dict[TensorKey, list[Held]] = {}
    missing = []
    for spec in families.get_family(shape.family).parameters(shape):
        states = (
            {state: rest for state, *rest in gathered[spec.name].settle()} if spec.name in gathered else {}
        )
        if not states.keys() & {WEIGHT, MASTER}:
            missing.append(spec.name)
        for state, (held, more) in states.items():
            key, dtypes = TensorKey(state, spec.name), {one.content.dtype for one in held}
            numel = sum(one.box.numel for one in held)
            if len(dtypes) > 1 or numel != spec.numel:
                raise Damage(
                    "",
                    f"{folder} holds {numel} of {spec.numel} elements of {key}, as {', '.join(sorted(dtypes))}",
                    "the files of all ranks hold every element once, in one dtype",
                )
            tensors[key], read[key] = TensorInfo(dtypes.pop(), spec.shape), held
            if more:
                copies[key] = more
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(
            Problem(
                str(folder),
                f"{folder} holds no weight of {listed}",
                "a checkpoint has every parameter of its model",
                "give the model that the checkpoint was made of",
            )
        )
    return Catalog(folder, tensors, _made(tensors, read), scalars, _made(tensors, copies))


def _made(tensors: Mapping[TensorKey, TensorInfo], held: Mapping[TensorKey, Sequence[Held]]) -> Made:
    """Pieces, when they are asked for."""
    return Made(
        {key: tensors[key] for key in held},
        lambda key: tuple(piece for one in held[key] for piece in one.pieces(key, tensors[key].shape)),
    )


def _refuse_two(held: Mapping[str, Local], parts: Mapping[str, Part], folder: Path) -> None:
    """Raises CheckpointError where two parameters of one rank would be one canonical tensor. A tied alias may stand beside it, but has no
    optimizer state of its own."""
    taken: dict[tuple[object, ...], str] = {}
    for name, local in held.items():
        part = parts[name]
        trained = local.master is not None or bool(local.moments)
        for claim in ((part,), *([(part.name, part.offset, part.extent)] if trained else [])):
            other = taken.setdefault(claim, name)
            if held[other] is not local:
                raise CheckpointError(
                    Problem(
                        str(folder),
                        f"{folder} has {other} and {name}, each for itself",
                        f"this model has one {part.name}",
                        "give the model that the checkpoint was made of: model.tie_word_embeddings=false where they are not tied",
                    )
                )
