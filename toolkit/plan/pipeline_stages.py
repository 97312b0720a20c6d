"""Split a model into the stages of a pipeline.

DeepSpeed's stages are contiguous blocks, balanced by parameters. The first stage has the embeddings, the last
stage the final norm and the head. Tied embeddings are on both, each with its own optimizer state.

    five blocks of 10, embedding 12, head 12, two stages     12+10+10 | 10+10+10+12

Megatron-core's stages have equally many blocks, unless the user sets the size of the first or the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from toolkit.families.base import ModelShape, ParameterSpec


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """``layers`` are global block indices; ``parameters`` are all parameters of the stage."""

    layers: range
    parameters: tuple[ParameterSpec, ...]


def split_into_stages(
    parameters: Sequence[ParameterSpec], count: int, tied: Collection[str]
) -> tuple[PipelineStage, ...]:
    """Return the stages of a model with ``parameters`` in ``state_dict`` order.

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


def stage_layers(shape: ModelShape, stages: int, given: Mapping[str, object]) -> list[int]:
    """Return the number of blocks of each of Megatron-core's stages.

    ``given`` are the user's keys, which may set the size of the first and last stage.
    """
    sized = {
        0: given.get("num_layers_in_first_pipeline_stage"),
        stages - 1: given.get("num_layers_in_last_pipeline_stage"),
    }
    fixed = {stage: size for stage, size in sized.items() if isinstance(size, int)}
    between = max(1, stages - len(fixed))
    even = -(-(shape.num_hidden_layers - sum(fixed.values())) // between)
    return [fixed.get(stage, max(0, even)) for stage in range(stages)]


def stage_chunks(layers: Sequence[int], chunks: int) -> list[list[range]]:
    """Global block indices of each chunk of each of Megatron-core's stages.

    Virtual stages are interleaved: with 8 blocks, 2 stages and 2 chunks, stage 0 has blocks 0 1 and 4 5.
    """
    found: list[list[range]] = [[] for _ in layers]
    first = 0
    for _ in range(chunks):
        for stage, count in enumerate(layers):
            found[stage].append(range(first, first + count // chunks))
            first += count // chunks
    return found
