"""Split a model into the stages of a DeepSpeed pipeline: contiguous blocks, balanced by parameters.

The first stage has the embeddings, the last stage the final norm and the head. Tied embeddings are on both,
each with its own optimizer state.

    five blocks of 10, embedding 12, head 12, two stages     12+10+10 | 10+10+10+12
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

from toolkit.families.base import ParameterSpec


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """``layers`` are global block indices; ``parameters`` are all parameters of the stage."""

    layers: range
    parameters: tuple[ParameterSpec, ...]


def split_into_stages(
    parameters: Sequence[ParameterSpec], count: int, tied: Collection[str]
) -> tuple[PipelineStage, ...]:
    """The stages of a model with ``parameters`` in ``state_dict`` order.

    The head also has those named in ``tied``.
    """
    first = next(index for index, spec in enumerate(parameters) if spec.layer is not None)
    blocks: dict[int, list[ParameterSpec]] = {}
    last = first
    for index, spec in enumerate(parameters):
        if spec.layer is not None:
            blocks.setdefault(spec.layer, []).append(spec)
            last = index + 1
    before = list(parameters[:first])
    after = (
        [*parameters[last:], *(spec for spec in before if spec.name in tied)]
        if count > 1
        else list(parameters[last:])
    )
    sizes = [sum(spec.numel for spec in block) for block in blocks.values()]
    sizes[0] += sum(spec.numel for spec in before)
    sizes[-1] += sum(spec.numel for spec in after)
    bounds = _bounds(tuple(sizes), count)
    stages = []
    for stage in range(count):
        layers = range(bounds[stage], bounds[stage + 1])
        inner = [spec for layer in layers for spec in blocks[layer]]
        specs = (before if stage == 0 else []) + inner + (after if stage == count - 1 else [])
        stages.append(PipelineStage(layers, tuple(specs)))
    return tuple(stages)


def _bounds(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Bounds of ``count`` non-empty runs of ``sizes`` with the least sum of squares."""
    assert 1 <= count <= len(sizes), f"{count} stages of {len(sizes)} blocks"
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)

    @cache
    def best(stop: int, runs: int) -> tuple[int, tuple[int, ...]]:
        """Cost and bounds of the first ``stop`` sizes in ``runs`` runs."""
        if runs == 1:
            return sums[stop] ** 2, (0, stop)
        found = []
        for start in range(runs - 1, stop):
            cost, bounds = best(start, runs - 1)
            found.append((cost + (sums[stop] - sums[start]) ** 2, (*bounds, stop)))
        return min(found)

    return best(len(sizes), count)[1]
