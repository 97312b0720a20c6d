"""Pipeline stages: every parameter once (tied parameters at both ends), no empty stage, best balance.

pytest tests/plan/test_pipeline_stages.py
"""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from toolkit.families import FAMILIES
from toolkit.families.base import ParameterSpec
from toolkit.plan.pipeline_stages import split_into_stages
from toolkit.testing.tiny import tiny_plan


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("layers", "count"), [(2, 2), (3, 2), (5, 2), (4, 4), (7, 3)])
def test_stages_cover_every_family(family: str, layers: int, count: int) -> None:
    plan = tiny_plan(family, model__num_hidden_layers=layers)
    assert plan.shape is not None
    tied = set(FAMILIES[family].tied_weights(plan.shape).values())
    stages = split_into_stages(plan.parameters, count, tied)
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert all(len(stage.layers) for stage in stages)
    names = [spec.name for stage in stages for spec in stage.parameters]
    assert sorted(names) == sorted([spec.name for spec in plan.parameters] + sorted(tied))
    assert all(
        spec.layer is None or spec.layer in stage.layers for stage in stages for spec in stage.parameters
    )
    assert tied <= {spec.name for spec in stages[0].parameters} & {
        spec.name for spec in stages[-1].parameters
    }


def model(embedding: int, blocks: list[int], head: int) -> list[ParameterSpec]:
    inside = [ParameterSpec(f"h.{number}", (size,), number) for number, size in enumerate(blocks)]
    return [ParameterSpec("embed", (embedding,)), *inside, ParameterSpec("head", (head,))]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("embedding", "blocks", "head"),
    [(0, [10] * 7, 0), (25, [10] * 6, 25), (100, [10] * 5, 0), (3, [9, 1, 1, 1, 9, 4], 7)],
)
def test_split_is_the_most_balanced(embedding: int, blocks: list[int], head: int, count: int) -> None:
    """Compare with all splits."""

    def unevenness(bounds: tuple[int, ...]) -> int:
        sizes = [sum(blocks[low:high]) for low, high in pairwise((0, *bounds, len(blocks)))]
        sizes[0] += embedding
        sizes[-1] += head
        return sum(size * size for size in sizes)

    stages = split_into_stages(model(embedding, blocks, head), count, ())
    found = unevenness(tuple(stage.layers.start for stage in stages[1:]))
    assert found == min(unevenness(bounds) for bounds in combinations(range(1, len(blocks)), count - 1))
    assert found == sum(sum(spec.numel for spec in stage.parameters) ** 2 for stage in stages)
