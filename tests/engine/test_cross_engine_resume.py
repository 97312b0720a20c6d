"""Resuming in other engines and layouts matches ``local``; transformers opens every engine's export.

    pytest tests/engine/test_cross_engine_resume.py
    pytest tests/engine/test_cross_engine_resume.py -m full        exports of every family from both engines

Four steps each, through checkpoints on disk that every rank writes and reads. With zeroed moments the losses
must leave the tolerance.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.cases import quick
from tests.engine.hops import EACH, TOLERANCE, save, stretch
from toolkit.checkpoint.formats.huggingface import target as huggingface_target
from toolkit.checkpoint.source import open_source
from toolkit.config.schema import EngineName
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.errors import PlanError
from toolkit.families import FAMILIES
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.measure import EVALUATION_STEP
from toolkit.testing.parity import rank_samples, train_steps
from toolkit.testing.tiny import micro_batches
from toolkit.train.task import IGNORE_INDEX, text_task

STAYS = Cell(engine=EngineName.local, family="llama")
HOPS = (
    deepspeed("llama", 3, data=4),
    megatron("llama", tensor=2, pipeline=2),
    deepspeed("llama", 1, pipeline=2),
    deepspeed("llama", 1, tensor=2),
    megatron("llama", data=2, zero=1),
    deepspeed("llama", 2, context=2),
    STAYS,
)


# Most experts get no token; three ranks divide neither four experts nor a batch of eight.
IDLE_STAYS = Cell(engine=EngineName.local, family="mixtral", idle=True, experts=12, batch=24)
IDLE_HOPS = tuple(
    replace(cell, idle=True, experts=12, batch=24)
    for cell in (
        deepspeed("mixtral", 1, data=2, expert=2),
        deepspeed("mixtral", 2, data=3, expert=3),
        megatron("mixtral", data=4, expert=4),
        deepspeed("mixtral", 0, data=2),
        deepspeed("mixtral", 2, data=4, expert=4),
        megatron("mixtral", data=2, expert=2, zero=1),
        IDLE_STAYS,
    )
)


@pytest.fixture(scope="module")
def stayed(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of ``local`` over all steps, resuming from its own checkpoints."""
    return travel((STAYS,) * len(HOPS), pool, tmp_path_factory.mktemp("stayed"))


def travel(
    cells: tuple[Cell, ...], pool: RankPool, folder: Path, forget_before: int | None = None
) -> list[float]:
    losses: list[float] = []
    source = None
    for number, cell in enumerate(cells):
        target = folder / f"{number}"
        results = pool.run(
            stretch, cell, number * EACH, source, target, number == forget_before, ranks=cell.ranks
        )
        assert all(found == results[0] for found in results), f"ranks of {cell.name} differ"
        losses += [result.loss for result in results[0]]
        source = target
    return losses


def test_local_engine_resumes_bitwise(pool: RankPool, stayed: list[float]) -> None:
    """The reference itself resumes bitwise."""
    plan = STAYS.plan(OptimizerCase.ADAM)
    engine = build_engine(plan, text_task(plan), rank=0, local_rank=0)
    engine.load(open_initial_weights(plan))
    assert [result.loss for result in train_steps(engine, plan, range(EACH * len(HOPS)))] == stayed
    engine.close()


def test_resuming_across_engines_matches_local(pool: RankPool, stayed: list[float], tmp_path: Path) -> None:
    losses = travel(HOPS, pool, tmp_path)
    differences = [abs(a - b) for a, b in zip(losses, stayed, strict=True)]
    print(f"{max(differences):.1e}")
    assert max(differences) <= TOLERANCE, [
        f"{HOPS[step // EACH].name} step {step}: {by:.1e}"
        for step, by in enumerate(differences)
        if by > TOLERANCE
    ]
    assert stayed[0] - stayed[-1] > 0.3


@pytest.mark.full
def test_resuming_with_idle_experts_matches_local(pool: RankPool, tmp_path: Path) -> None:
    right = travel((IDLE_STAYS,) * len(IDLE_HOPS), pool, tmp_path / "stayed")
    losses = travel(IDLE_HOPS, pool, tmp_path / "hopped")
    differences = [abs(a - b) for a, b in zip(losses, right, strict=True)]
    print(f"{max(differences):.1e}")
    assert max(differences) <= TOLERANCE, differences
    assert right[0] - right[-1] > 0.3
    forgetful = travel(IDLE_HOPS[:2], pool, tmp_path / "forgetful", forget_before=1)
    assert max(abs(a - b) for a, b in zip(forgetful, right, strict=False)) > 10 * TOLERANCE, (
        "the control: zeroed moments"
    )


def test_control_zeroed_moments(pool: RankPool, stayed: list[float], tmp_path: Path) -> None:
    losses = travel(HOPS[:2], pool, tmp_path, forget_before=1)
    assert max(abs(a - b) for a, b in zip(losses, stayed, strict=False)) > 10 * TOLERANCE


# -- Exports

EXPORTERS = {
    "local": lambda family: Cell(engine=EngineName.local, family=family),
    "deepspeed-zero3": lambda family: deepspeed(family, 3, data=2),
    "deepspeed-tp2": lambda family: deepspeed(family, 1, tensor=2),
    "deepspeed-pp2": lambda family: deepspeed(family, 1, pipeline=2),
    "megatron-tp2": lambda family: megatron(family, tensor=2),
    "megatron-pp2": lambda family: megatron(family, pipeline=2),
}
WITHOUT = {("deepspeed-tp2", family) for family in ("gpt2", "mixtral", "qwen3_moe")}
# Every family from both engines, and every exporter.
EXPORTS = [
    ("deepspeed-zero3", "qwen3"),
    ("megatron-tp2", "mixtral"),
    *(("deepspeed-zero3", family) for family in FAMILIES if family != "qwen3"),
    *(("megatron-tp2", family) for family in FAMILIES if family != "mixtral"),
    ("local", "qwen2"),
    ("deepspeed-tp2", "llama"),
    ("deepspeed-pp2", "gpt2"),
    ("megatron-pp2", "qwen3_moe"),
]
PROBES = (
    (5, 17),
    (11, 200),
    (20, 3),
    (30, 120),
)  # a position in the sequence, and a token whose probability is compared


def export(rank: int, ranks: int, plan: RunPlan, folder: Path) -> list[float]:
    """Train two steps, save, and return the engine's loss on held-out samples and on single tokens."""
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    train_steps(engine, plan, range(2), rank=rank)
    save(engine, plan, 2, folder, rank, ranks)
    whole = engine.eval_step(rank_samples(engine, plan, EVALUATION_STEP, rank))
    reported = [whole.loss_sum / whole.tokens]
    for position, token in PROBES:
        token_loss = engine.eval_step(
            probe(rank_samples(engine, plan, EVALUATION_STEP, rank), position, token)
        )
        reported.append(token_loss.loss_sum / token_loss.tokens)
    engine.close()
    return reported


def probe(batches: list[Any], position: int, token: int) -> list[Any]:
    """The same inputs, with ``token`` at ``position`` as the only label of each row."""
    found = []
    for batch in batches:
        labels = torch.full_like(batch["labels"], IGNORE_INDEX)
        labels[:, position] = token
        found.append({**batch, "labels": labels})
    return found


@pytest.mark.parametrize(("exporter", "family"), quick(EXPORTS, 0, unpack=True))
def test_transformers_matches_the_exporting_engine(
    exporter: str, family: str, pool: RankPool, tmp_path: Path
) -> None:
    """Log-probabilities of the exported model are within 1e-5 of the engine's."""
    from transformers import AutoModelForCausalLM

    cell = EXPORTERS[exporter](family)
    plan = cell.plan(OptimizerCase.ADAM)
    reported = pool.run(export, plan, tmp_path / "run", ranks=cell.ranks)[0]
    exported = huggingface_target.export(open_source(tmp_path / "run", plan.shape), tmp_path / "export")
    model, report = AutoModelForCausalLM.from_pretrained(
        exported, output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    tokens, labels = held_out(plan)
    with torch.no_grad():
        chances = model.eval()(input_ids=tokens).logits.float().log_softmax(-1)
    expected = [
        float(-chances[labels != IGNORE_INDEX].gather(1, labels[labels != IGNORE_INDEX][:, None]).mean())
    ]
    expected += [float(-chances[:, position, token].mean()) for position, token in PROBES]
    differences = [abs(a - b) for a, b in zip(reported, expected, strict=True)]
    assert max(differences) <= TOLERANCE, differences


@pytest.mark.parametrize(("exporter", "family"), sorted(WITHOUT))
def test_excluded_exporters_have_no_plan(exporter: str, family: str) -> None:
    with pytest.raises(PlanError):
        EXPORTERS[exporter](family).plan(OptimizerCase.ADAM)


def held_out(plan: RunPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole global batch, [GLOBAL_BATCH, LENGTH] each."""
    batches = [
        batch
        for data_rank in range(plan.batch.data_parallel)
        for batch in micro_batches(plan, EVALUATION_STEP, data_rank)
    ]
    return torch.cat([batch["input_ids"] for batch in batches]), torch.cat(
        [batch["labels"] for batch in batches]
    )
