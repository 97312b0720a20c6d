"""The families' tables compared with the parameters of real Megatron-core models."""

from __future__ import annotations

import pytest
import torch

from toolkit.config.schema import EngineName
from toolkit.families import FAMILIES, get_family
from toolkit.testing.dist import RankPool
from toolkit.testing.tiny import tiny_plan

Named = dict[str, tuple[int, ...]]


def parameter_shapes(rank: int, ranks: int, family: str, tie: bool) -> Named:
    """Shapes of the model's parameters on one rank, by name."""
    from toolkit.engine.megatron import cpu, patches

    cpu.enable()
    patches.apply()
    from toolkit.engine.megatron import model
    from toolkit.engine.megatron.build import destroy_process_groups, initialize_process_groups

    plan = tiny_plan(family, engine__name=EngineName.megatron, model__tie_word_embeddings=tie)
    initialize_process_groups(plan)
    (chunk,) = model.build_chunks(plan, model.transformer_config(plan), torch.device("cpu"))
    found = {name: tuple(parameter.shape) for name, parameter in chunk.named_parameters()}
    destroy_process_groups()
    return found


@pytest.mark.parametrize("tie", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_table_lists_exactly_the_models_parameters(family: str, tie: bool, pool: RankPool) -> None:
    shape = tiny_plan(family, model__tie_word_embeddings=tie).shape
    assert shape is not None
    ours = {tensor.name: tensor.shape for tensor in get_family(family).megatron_tensors(shape)}
    assert pool.run(parameter_shapes, family, tie, ranks=1)[0] == ours
