"""A family outside of the toolkit (``model.family=my.package.FAMILY``) trains like the local engine.

pytest tests/engine/test_family_plugin.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.engine.cases import Cell
from tests.engine.checks import check_cell
from toolkit.config.model import ModelConfig
from toolkit.config.schema import EngineName
from toolkit.plan import make_plan
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.tiny import MICRO_BATCH, SIZES, tiny_config


@dataclass(frozen=True)
class PluginCell(Cell):
    family: str | None = "tests.families.plugin.MISTRAL"
    engine: EngineName = EngineName.deepspeed

    def plan(self) -> RunPlan:
        config = tiny_config(
            None,
            engine__name=EngineName.local if self.stage is None else self.engine,
            zero__stage=self.stage or 0,
            train__global_batch=self.data * MICRO_BATCH * self.accumulation,
            **dict(self.more),
        )
        config.model = ModelConfig(family=self.family, **SIZES)
        return make_plan(config, replace(self.world(), ranks=self.ranks, ranks_per_node=self.ranks))


CELLS = [
    PluginCell(2),
    PluginCell(1, more=(("parallel__tensor", 2),), engine=EngineName.megatron),
    pytest.param(PluginCell(3), marks=pytest.mark.full),
    pytest.param(
        PluginCell(0, more=(("parallel__pipeline", 2),), engine=EngineName.megatron), marks=pytest.mark.full
    ),
]


@pytest.mark.parametrize("case", CELLS, ids=lambda case: f"{case.engine.value}-zero{case.stage}")
def test_engines_match_local(case: PluginCell, pool: RankPool) -> None:
    check_cell(case, pool)
