"""Separate documents in a window: every engine compared with ``local``, and controls in which attention
crosses documents.

    pytest tests/engine/test_documents.py

One cell of every axis; ``launch/verify.py --cells '*documents*'`` runs all of them with both optimizers.
tests/models/test_document_masks.py checks ``local`` itself, document by document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engine.cases import quick
from tests.engine.matrix_checks import (
    CONTROL_STEPS,
    References,
    changed,
    check,
    far,
    named,
    right,
    wrong_on_rank,
)
from toolkit.engine.protocol import MicroBatch
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import OptimizerCase
from toolkit.testing.tiny import micro_batches

CELLS = (
    "deepspeed/llama/dp2-zero2",
    "deepspeed/llama/pp2-zero1",
    "deepspeed/llama/cp2-zero1",
    "megatron/gpt2/one",
    "megatron/llama/tp2-sp",
    "megatron/llama/pp2",
    "megatron/llama/cp2",
)


@pytest.mark.parametrize("name", quick(CELLS, 0, 2, 5))
def test_separate_documents_match_local(name: str, pool: RankPool, references: References) -> None:
    check(named(f"{name}-documents"), OptimizerCase.ADAM, pool, references)


def joined(plan: RunPlan, step: int, data_rank: int) -> list[MicroBatch]:
    """The same samples without document positions."""
    return [
        {name: tensor for name, tensor in batch.items() if name != "position_ids"}
        for batch in micro_batches(plan, step, data_rank)
    ]


@contextmanager
def without_mask_on_megatrons_last_stage(plan: RunPlan) -> Iterator[None]:
    from megatron.core import parallel_state

    from toolkit.engine.megatron.build import MegatronModel

    cut = MegatronModel.slice_for_context_rank

    def without(self: MegatronModel, batch: MicroBatch) -> dict[str, Any]:
        last = parallel_state.get_pipeline_model_parallel_rank() > 0
        return {
            name: tensor for name, tensor in cut(self, batch).items() if name != "attention_mask" or not last
        }

    with changed(MegatronModel, "slice_for_context_rank", without):
        yield


@contextmanager
def without_mask_on_deepspeeds_last_stage(plan: RunPlan) -> Iterator[None]:
    from toolkit.models.stage import StageModel

    forward = StageModel.forward
    with changed(
        StageModel,
        "forward",
        lambda self, given, places: forward(self, given, places if self._input == "input_ids" else None),
    ):
        yield


CONTROLS: dict[str, tuple[str, Callable[[RunPlan], Any], dict[str, Any]]] = {
    "joined, DeepSpeed": ("deepspeed/llama/dp2-zero2", right, {"batches": joined}),
    "joined, Megatron-core": ("megatron/gpt2/one", right, {"batches": joined}),
    "no mask on the last stage, DeepSpeed": (
        "deepspeed/llama/pp2-zero1",
        without_mask_on_deepspeeds_last_stage,
        {},
    ),
    "no mask on the last stage, Megatron-core": (
        "megatron/llama/pp2",
        without_mask_on_megatrons_last_stage,
        {},
    ),
}


@pytest.mark.parametrize("name", quick(CONTROLS, 0, 3))
def test_controls(name: str, pool: RankPool, references: References) -> None:
    cell_name, wrong, settings = CONTROLS[name]
    cell = named(f"{cell_name}-documents")
    far(
        cell,
        OptimizerCase.ADAM,
        pool.run(
            wrong_on_rank, cell.plan(OptimizerCase.ADAM), wrong, settings, CONTROL_STEPS, ranks=cell.ranks
        )[0],
        references,
    )
