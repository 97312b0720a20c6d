"""An adopted DeepSpeed JSON trains as DeepSpeed does with the JSON itself.

pytest tests/adopt/test_parity.py -m "full or not full"
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adopt.cases import CORPUS
from toolkit.adopt.check import compose_text
from toolkit.adopt.decide import adopt
from toolkit.adopt.experiment import write_experiment
from toolkit.adopt.read import read_source
from toolkit.engine.deepspeed import patches
from toolkit.engine.protocol import MicroBatch
from toolkit.models.build import build_model
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.testing.dist import run_ranks
from toolkit.testing.parity import TOLERANCE, run_trace
from toolkit.testing.tiny import VOCABULARY, micro_batches, tiny_config

RANKS, STEPS = 2, 12
NAMES = ("parity_zero1_sgd", "parity_zero2_adamw", "parity_zero3_adam")


def unmasked(plan: RunPlan, step: int, data_rank: int = 0) -> list[MicroBatch]:
    """Micro-batches with equal numbers of labels, so that DeepSpeed's mean of means is the mean of all."""
    batches = micro_batches(plan, step, data_rank)
    for batch in batches:
        batch["labels"] = torch.where(batch["labels"] < 0, torch.ones_like(batch["labels"]), batch["labels"])
    return batches


def adopted_plan(file: Path) -> RunPlan:
    """The plan of the adopted experiment on two CPU ranks, with a tiny llama."""
    adoption = adopt([read_source(file)], ranks=RANKS)
    config = compose_text(write_experiment(adoption, "adopted", [file.name]))
    tiny = tiny_config("llama")
    train = replace(config.train, steps=STEPS, sequence_length=tiny.train.sequence_length)
    return make_plan(
        replace(config, model=tiny.model, data=tiny.data, train=train),
        World(ranks=RANKS, ranks_per_node=RANKS, device=Device.CPU, has_compiler=True),
    )


def toolkit_run(rank: int, ranks: int, plan: RunPlan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the weights before the first step, which rank 0 returns."""
    first = run_trace(plan, rank=rank, steps=0, batches=unmasked)
    return run_trace(plan, rank=rank, steps=STEPS, batches=unmasked).losses, first.weights


def deepspeed_run(
    rank: int, ranks: int, plan: RunPlan, written: dict[str, Any], weights: dict[str, torch.Tensor]
) -> list[float]:
    """Losses of a plain loop around ``deepspeed.initialize`` with the JSON. ``plan`` gives the samples."""
    import torch.distributed as dist

    deepspeed = patches.import_deepspeed(Device.CPU, rank)  # does not compile DeepSpeed's collectives
    model = build_model(plan, "cpu")
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=written, dist_init_required=False
    )
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        batches = unmasked(plan, step, rank)
        assert len(batches) == engine.gradient_accumulation_steps()
        for batch in batches:
            logits = engine(input_ids=batch["input_ids"]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
            total += loss.detach() / len(batches)
            engine.backward(loss)
            engine.step()
        dist.all_reduce(total)
        losses.append(float(total) / ranks)
    return losses


def largest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if index else []) for index, name in enumerate(NAMES)],
)
def test_adopted_runs_have_deepspeeds_losses(name: str) -> None:
    file = CORPUS / f"{name}.json"
    plan, written = adopted_plan(file), json.loads(file.read_text())
    assert VOCABULARY > 256, "the replaced labels are tokens"
    losses, weights = run_ranks(toolkit_run, RANKS, plan, timeout=300.0)[0]
    theirs = run_ranks(deepspeed_run, RANKS, plan, written, weights, timeout=300.0)[0]
    wrong = copy.deepcopy(written)
    wrong["optimizer"]["params"]["lr"] *= 0.99
    control = run_ranks(deepspeed_run, RANKS, plan, wrong, weights, timeout=300.0)[0]
    assert theirs[0] - theirs[-1] > 0.1, "the run learns"
    assert largest(losses, theirs) <= TOLERANCE.loss
    assert largest(losses, control) > 10 * TOLERANCE.loss, "a JSON with another key gives other losses"
