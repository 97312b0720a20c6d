"""Describe a checkpoint from its metadata, without reading a tensor. Imports no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from toolkit import families
from toolkit.checkpoint.catalog import byte_length
from toolkit.checkpoint.shard import MASTER, WEIGHT, TensorKey
from toolkit.checkpoint.source import MODEL, CheckpointSource
from toolkit.progress import quantity

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
MAX_NAMES = 8


def describe(source: CheckpointSource) -> list[str]:
    """Return the lines of ``action=inspect``."""
    return [f"{label:<10} {text}" for label, text in _description(source)] + [""] + _tensors(source)


def _description(source: CheckpointSource) -> Iterator[tuple[str, str]]:
    yield "format", source.format
    yield "folder", str(source.folder)
    yield from source.description.items()
    yield "names", source.namespace
    if source.shape is not None:
        sizes = {name: value for name, value in asdict(source.shape).items() if name != "family" and value}
        yield (
            "model",
            f"{source.shape.family}: " + ", ".join(f"{name}={value}" for name, value in sizes.items()),
        )
    yield "parameters", _parameters(source)
    yield "step", "none (no training step)" if source.step is None else str(source.step)
    for name, value in source.catalog.scalars.items():
        if name not in (MODEL, "step"):
            yield "scalar", _shortened(f"{name}={value}")
    if isinstance(source.folder, Path):
        files = [path.stat().st_size for path in source.folder.rglob("*") if path.is_file()]
        yield "on disk", f"{quantity(sum(files), 'B')} in {len(files)} files"
    for label in source.omitted:
        yield "left out", label


def _parameters(source: CheckpointSource) -> str:
    shapes = {key.name: info.shape for key, info in source.catalog.tensors.items()}
    text = f"{sum(map(math.prod, shapes.values())):,} in {len(shapes)} tensors"
    if source.shape is None:
        return text
    wanted = {spec.name for spec in families.get_family(source.shape.family).parameters(source.shape)}
    absent = wanted - shapes.keys()
    return (
        f"{text}; {summarize_keys(TensorKey(WEIGHT, name) for name in sorted(absent))} missing"
        if absent
        else f"{text}: the whole model"
    )


def _tensors(source: CheckpointSource) -> list[str]:
    """Return one line per kind of tensor (layers and experts are counted, not listed), and one line per
    state.
    """
    tensors = source.catalog.tensors
    kinds: dict[tuple[str, tuple[int, ...]], dict[str, list[TensorKey]]] = {}
    for key, info in tensors.items():
        kinds.setdefault((_generic_name(key.name), info.shape), {}).setdefault(key.state, []).append(key)
    rows = [
        ("tensor", "count", "shape", "states"),
        *(
            (kind, str(max(map(len, states.values()))), str(list(shape)), " ".join(_in_order(states)))
            for (kind, shape), states in kinds.items()
        ),
    ]
    lines = _columns(rows)
    totals = [("state", "tensors", "bytes", "dtypes")]
    for state in _in_order(key.state for key in tensors):
        infos = [info for key, info in tensors.items() if key.state == state]
        numbytes = sum(byte_length(info.dtype, info.shape) for info in infos)
        totals.append(
            (
                state,
                str(len(infos)),
                quantity(numbytes, "B"),
                " ".join(sorted({info.dtype for info in infos})),
            )
        )
    return [*lines, "", *_columns(totals)]


def _in_order(states: Iterable[str]) -> list[str]:
    found = list(dict.fromkeys(states))
    return sorted(found, key=lambda state: (state != WEIGHT, state != MASTER, found.index(state)))


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def summarize_keys(keys: Iterable[TensorKey], among: Collection[TensorKey] = ()) -> str:
    """Summarize tensors: ``exp_avg:model.layers.*.mlp.up_proj.weight (22), exp_avg:model.norm.weight``.

    If they are all tensors of a state in ``among``: ``weight (all 291)``.
    """
    by_state: dict[str, list[TensorKey]] = {}
    for key in keys:
        by_state.setdefault(key.state, []).append(key)
    shown: list[str] = []
    for state, same_state in by_state.items():
        if len(same_state) == sum(key.state == state for key in among):
            shown.append(f"{state} (all {len(same_state)})")
            continue
        counts = Counter(_generic_name(key.name) for key in same_state)
        shown += [
            f"{state}:{kind} ({count})" if "*" in kind else f"{state}:{kind}"
            for kind, count in counts.items()
        ]
    return ", ".join(shown[:MAX_NAMES]) + (
        f" and {len(shown) - MAX_NAMES} more kinds" if len(shown) > MAX_NAMES else ""
    )


def _generic_name(name: str) -> str:
    return _NUMBER.sub("*", name)


def _shortened(text: str, most: int = 120) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."
