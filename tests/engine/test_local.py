"""The local engine compared with a plain training loop, and with itself after a resume."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.checkpoint.shard import EXP_AVG, MASTER, WEIGHT, Box, Shard, TensorKey
from toolkit.config.schema import Precision
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.local import LocalEngine
from toolkit.engine.protocol import MicroBatch, StepResult, StepSettings
from toolkit.errors import CheckpointError
from toolkit.families import get_family
from toolkit.plan.types import RunPlan
from toolkit.testing import parity
from toolkit.testing.memory_reader import MemoryReader
from toolkit.testing.tiny import FAMILIES, micro_batches, tiny_plan
from toolkit.train.task import NextTokenTask, text_task

SGD: dict[str, Any] = {"optim__name": "sgd", "optim__clip": 0.0, "optim__lr": 0.05}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def started(plan: RunPlan) -> LocalEngine:
    engine = LocalEngine(plan, text_task(plan))
    engine.load(open_initial_weights(plan))
    return engine


def steps(engine: LocalEngine, plan: RunPlan, first: int, last: int) -> list[StepResult]:
    return parity.train_steps(engine, plan, range(first, last))


def rate(plan: RunPlan, step: int) -> float:
    return plan.config.optim.lr * (1 + step % 3) / 2


def plain_loop(plan: RunPlan, count: int) -> tuple[list[float], list[float], nn.Module]:
    """A plain loop: one batch per step, torch's own optimizer and clipping.

    Returns losses, gradient norms and the model.
    """
    shape, optim = plan.shape, plan.config.optim
    assert shape is not None
    config = AutoConfig.for_model(**get_family(shape.family).hugging_face_config(shape))
    model = AutoModelForCausalLM.from_config(config).train()
    weights = {spec.name: torch.empty(spec.shape) for spec in plan.parameters}
    open_initial_weights(plan).read(
        [
            Shard(TensorKey(WEIGHT, name), tuple(value.shape), Box.whole(value.shape), value)
            for name, value in weights.items()
        ]
    )
    model.load_state_dict(weights, strict=False)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if optim.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    else:
        optimizer = torch.optim.AdamW(
            groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps
        )
    losses, norms = [], []
    for step in range(count):
        batches = micro_batches(plan, step)
        tokens, labels = (torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels"))
        loss = functional.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), optim.clip or float("inf"))))
        for group in optimizer.param_groups:
            group["lr"] = rate(plan, step)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [*((family, {}) for family in FAMILIES), ("gpt2", SGD), ("llama", SGD | {"optim__momentum": 0.9})],
    ids=[*FAMILIES, "sgd", "momentum"],
)
def test_matches_a_plain_training_loop(family: str, optimizer: dict[str, Any]) -> None:
    plan = tiny_plan(family, **optimizer)
    losses, norms, model = plain_loop(plan, 12)
    engine = started(plan)
    results = [
        engine.train_step(micro_batches(plan, step), StepSettings(step, rate(plan, step)))
        for step in range(12)
    ]
    assert [result.loss for result in results] == pytest.approx(losses, abs=2e-6)
    assert [result.grad_norm for result in results] == pytest.approx(norms, abs=2e-5)
    theirs, moved = dict(model.named_parameters()), 0.0
    start = MemoryReader.from_engine(started(plan)).state
    for name, ours in engine._parameters.items():
        torch.testing.assert_close(ours, theirs[name], atol=2e-5, rtol=0)
        moved = max(moved, float((ours.detach() - start[TensorKey(WEIGHT, name)]).abs().max()))
    assert moved > 5e-3, "a run that learns nothing proves nothing"


def test_clipping_uses_the_global_norm() -> None:
    """With a small bound every step of SGD has length lr x bound."""
    plan = tiny_plan(**SGD | {"optim__clip": 0.01, "optim__weight_decay": 0.0})
    engine = started(plan)
    before = MemoryReader.from_engine(engine).state
    result = steps(engine, plan, 0, 1)[0]
    assert result.grad_norm > 0.1, "reported before clipping"
    moved = (
        sum(
            float((value - before[key]).square().sum())
            for key, value in MemoryReader.from_engine(engine).state.items()
        )
        ** 0.5
    )
    assert moved == pytest.approx(0.05 * 0.01, rel=1e-3)


def test_accumulation_does_not_change_the_step() -> None:
    """Micro-batches have different numbers of tokens, so averaging their means would show."""
    traces = [parity.run_trace(tiny_plan(**SGD, train__micro_batch=size), steps=8) for size in (1, 2, 8)]
    for trace in traces[1:]:
        assert trace.distance(traces[0]).times(parity.Distance(2e-6, 2e-5, 2e-6)) <= 1


def test_fully_masked_micro_batch_has_no_effect() -> None:
    plan = tiny_plan(**SGD)
    batches = micro_batches(plan, 0)
    masked = {"input_ids": batches[0]["input_ids"], "labels": torch.full_like(batches[0]["labels"], -100)}
    with_it, without = started(plan), started(plan)
    a = with_it.train_step([batches[0], masked, batches[1]], StepSettings(0, 0.1))
    b = without.train_step(batches[:2], StepSettings(0, 0.1))
    assert (a.loss, a.tokens) == (b.loss, b.tokens)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-6)
    nothing = started(plan).train_step([masked], StepSettings(0, 0.1))
    assert (nothing.loss, nothing.grad_norm, nothing.tokens) == (0.0, 0.0, 0)


def test_control_doubled_gradients() -> None:
    plan = tiny_plan(**SGD)
    parity.check_control(
        parity.run_trace(plan, task=parity.DoubledGradients(), steps=5), parity.run_trace(plan, steps=5)
    )


def test_vectors_do_not_decay() -> None:
    """With every label masked, gradients are zero and only decay changes weights."""
    plan = tiny_plan("gpt2", optim__weight_decay=0.5, optim__lr=0.1)
    engine = started(plan)
    with torch.no_grad():
        for parameter in engine._parameters.values():
            parameter.fill_(1.0)
    batch = micro_batches(plan, 0)[0]
    engine.train_step([{**batch, "labels": torch.full_like(batch["labels"], -100)}], StepSettings(0, 0.1))
    for name, parameter in engine._parameters.items():
        expected = 1.0 - 0.1 * 0.5 if parameter.dim() > 1 else 1.0
        assert parameter.detach().eq(expected).all(), name


def test_bf16_keeps_masters() -> None:
    plan, full = tiny_plan(precision__name=Precision.bf16), tiny_plan()
    engine = started(plan)
    results = steps(engine, plan, 0, 20)
    reference = steps(started(full), full, 0, 20)
    assert [result.loss for result in results] == pytest.approx(
        [result.loss for result in reference], abs=5e-3
    )
    state = MemoryReader.from_engine(engine).state
    masters = {key.name: value for key, value in state.items() if key.state == MASTER}
    assert len(masters) == len(plan.parameters)
    for name, master in masters.items():
        assert (master.dtype, state[TensorKey(WEIGHT, name)].dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(master.bfloat16(), state[TensorKey(WEIGHT, name)])
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values()), (
        "masters have more digits"
    )
    # lr 1e-3 is below half a unit in the last place of a bf16 weight near 1: without masters norms would
    # never move.
    assert any(
        not torch.equal(masters[name], torch.ones_like(masters[name]))
        for name in masters
        if name.endswith("layernorm.weight")
    )


def test_fp16_skips_overflowing_steps() -> None:
    plan = tiny_plan(
        precision__name=Precision.fp16, precision__initial_scale_power=24, precision__scale_window=3
    )
    engine = started(plan)
    before = MemoryReader.from_engine(engine).state
    first = steps(engine, plan, 0, 1)[0]
    assert first.skipped
    assert first.loss_scale == 2.0**24
    assert first.loss == pytest.approx(5.59, abs=0.01), "the loss is known although the step is not taken"
    after = MemoryReader.from_engine(engine)
    assert after.state.keys() == before.keys(), "no moments were made"
    assert all(torch.equal(after.state[key], before[key]) for key in before)
    assert "optimizer_step" not in after.scalars
    results = steps(engine, plan, 1, 16)
    taken = [result for result in results if not result.skipped]
    assert len(taken) > 5
    assert engine.scalars()["optimizer_step"] == len(taken)
    changes = {after.loss_scale / before.loss_scale for before, after in pairwise(results)}
    assert changes == {0.5, 1.0, 2.0}, "it halves at overflows and grows after calm"
    assert results[-1].loss < first.loss


def test_fp16_overflow_at_the_smallest_scale_is_nonfinite() -> None:
    plan = tiny_plan(precision__name=Precision.fp16, precision__initial_scale_power=1)
    engine = started(plan)
    next(iter(engine._parameters.values())).register_hook(lambda gradient: gradient * torch.inf)
    at_two, at_one, again = steps(engine, plan, 0, 3)
    assert [result.loss_scale for result in (at_two, at_one, again)] == [2.0, 1.0, 1.0]
    assert [result.skipped for result in (at_two, at_one, again)] == [True, True, True]
    assert [result.nonfinite for result in (at_two, at_one, again)] == [False, True, True]


RESUMES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": SGD | {"optim__momentum": 0.9},
    "muon": {"optim__name": "muon", "optim__momentum": 0.95, "optim__clip": 0.0},
    "bf16": {"precision__name": Precision.bf16},
    "fp16": {
        "precision__name": Precision.fp16,
        "precision__initial_scale_power": 24,
        "precision__scale_window": 2,
    },
}


@pytest.mark.parametrize("changes", RESUMES.values(), ids=list(RESUMES))
def test_resume_with_dropout_is_bitwise(changes: dict[str, Any]) -> None:
    plan = tiny_plan("gpt2" if "optim__name" not in changes else "llama", model__dropout=0.1, **changes)
    straight = started(plan)
    whole = steps(straight, plan, 0, 8)
    stopped = started(plan)
    steps(stopped, plan, 0, 4)
    saved = MemoryReader.from_engine(stopped)
    torch.manual_seed(12345)
    resumed = LocalEngine(plan, text_task(plan))
    resumed.load(saved)
    assert steps(resumed, plan, 4, 8) == whole[4:]
    left, right = MemoryReader.from_engine(straight), MemoryReader.from_engine(resumed)
    assert left.scalars == right.scalars
    assert left.state.keys() == right.state.keys()
    assert all(torch.equal(left.state[key], right.state[key]) for key in left.state)


def test_control_zeroed_moments() -> None:
    """The control of every resume test."""
    plan = tiny_plan()
    engine = started(plan)
    steps(engine, plan, 0, 6)
    saved = MemoryReader.from_engine(engine)
    expected = [result.loss for result in steps(engine, plan, 6, 12)]
    moments = {key: torch.zeros_like(value) for key, value in saved.state.items() if key.state == EXP_AVG}
    engine.load(MemoryReader({**saved.state, **moments}, saved.scalars))
    assert (
        max(
            abs(result.loss - loss) for result, loss in zip(steps(engine, plan, 6, 12), expected, strict=True)
        )
        > 1e-4
    )


def test_loading_weights_only_resets_the_optimizer() -> None:
    """A source without optimizer state also resets the engine's state."""
    plan = tiny_plan()
    engine = started(plan)
    first = steps(engine, plan, 0, 3)
    engine.load(open_initial_weights(plan))
    assert "optimizer_step" not in engine.scalars()
    assert steps(engine, plan, 0, 3) == first


def test_resume_between_precisions_uses_masters() -> None:
    """fp32 resumes a bf16 run from its masters, and bf16 an fp32 run from its weights."""
    half, full = tiny_plan(precision__name=Precision.bf16), tiny_plan()
    source = started(half)
    steps(source, half, 0, 3)
    saved = MemoryReader.from_engine(source)
    engine = started(full)
    engine.load(saved)
    back = MemoryReader.from_engine(engine).state
    assert all(
        torch.equal(back[TensorKey(WEIGHT, key.name)], value)
        for key, value in saved.state.items()
        if key.state == MASTER
    )
    assert engine.scalars() == saved.scalars
    source.load(MemoryReader.from_engine(engine))
    assert all(
        torch.equal(value, saved.state[key]) for key, value in MemoryReader.from_engine(source).state.items()
    )


def test_state_of_another_optimizer_is_refused() -> None:
    plan, other = tiny_plan(), tiny_plan(**SGD | {"optim__momentum": 0.9})
    engine = started(plan)
    steps(engine, plan, 0, 1)
    with pytest.raises(CheckpointError, match=r"exp_avg.*momentum_buffer"):
        started(other).load(MemoryReader.from_engine(engine))


def test_a_missing_weight_is_refused() -> None:
    plan = tiny_plan()
    saved = MemoryReader.from_engine(started(plan))
    lacking = {key: value for key, value in saved.state.items() if key.name != "model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        started(plan).load(MemoryReader(lacking, {}))


class Drawing(NextTokenTask):
    """An objective that draws random numbers, in evaluation too."""

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        torch.rand(3)
        return super().loss_sum(model, batch)


def test_evaluation_does_not_change_training() -> None:
    plan = tiny_plan("gpt2", model__dropout=0.5)
    plain, engine = LocalEngine(plan, Drawing()), LocalEngine(plan, Drawing())
    plain.load(open_initial_weights(plan))
    engine.load(open_initial_weights(plan))
    for step in range(3):
        state = torch.get_rng_state()
        seen = engine.eval_step(micro_batches(plan, 100))
        assert torch.equal(torch.get_rng_state(), state)
        assert all(parameter.grad is None for parameter in engine._parameters.values())
        assert seen == engine.eval_step(micro_batches(plan, 100))
        assert steps(engine, plan, step, step + 1) == steps(plain, plan, step, step + 1)


def test_evaluation_disables_dropout() -> None:
    dropping, plain = (started(tiny_plan("gpt2", model__dropout=dropout)) for dropout in (0.5, 0.0))
    batches = micro_batches(tiny_plan(), 0)
    found = dropping.eval_step(batches)
    assert found == plain.eval_step(batches)
    trained = plain.train_step(batches, StepSettings(0, 0.0))
    assert (found.loss_sum / found.tokens, found.tokens) == (pytest.approx(trained.loss), trained.tokens)


def test_dropout_depends_on_seed_step_and_micro_batch() -> None:
    losses = set()
    for seed in (3, 4):
        plan = tiny_plan("gpt2", model__dropout=0.3)
        engine = started(plan)
        plan.config.train.seed = seed
        batch = micro_batches(plan, 0)[0]
        losses |= {
            engine.train_step(batches, StepSettings(step, 0.0)).loss
            for step in (0, 1)
            for batches in ([batch], [batch, batch])
        }
    assert len(losses) == 8


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(264, 16)
        self.table.weight.requires_grad_(False)
        self.head = nn.Linear(16, 264)
        self.unused = nn.Linear(2, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.table(input_ids)).flatten(0, 1), labels.flatten())


def test_frozen_and_unused_parameters() -> None:
    plan = tiny_plan(None, model__target=f"{__name__}.HalfFrozen", optim__weight_decay=0.1)
    engine = started(plan)
    before = MemoryReader.from_engine(engine).state
    results = steps(engine, plan, 0, 20)
    assert results[-1].loss < results[0].loss - 0.02
    after = MemoryReader.from_engine(engine)
    frozen = TensorKey(WEIGHT, "table.weight")
    assert torch.equal(after.state[frozen], before[frozen])
    assert TensorKey(EXP_AVG, "table.weight") not in after.state
    unused = TensorKey(WEIGHT, "unused.weight")
    torch.testing.assert_close(after.state[unused], before[unused] * (1 - 1e-3 * 0.1) ** 20)
    again = LocalEngine(plan, text_task(plan))
    again.load(after)
    assert torch.equal(MemoryReader.from_engine(again).state[frozen], before[frozen])


def test_training_starts_from_pretrained_weights(tmp_path: Any) -> None:
    plan = tiny_plan("mixtral")
    assert plan.shape is not None
    torch.manual_seed(99)
    config = AutoConfig.for_model(**get_family("mixtral").hugging_face_config(plan.shape))
    theirs = AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path)
    plan.config.model.pretrained = str(tmp_path)
    engine = started(plan)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(engine._parameters[name], parameter), name


def test_build_engine_returns_the_local_engine() -> None:
    plan = tiny_plan()
    assert isinstance(build_engine(plan, NextTokenTask(), rank=0, local_rank=0), LocalEngine)
    with pytest.raises(AssertionError, match="one process"):
        LocalEngine(replace(plan, axes=replace(plan.axes, data=2)), NextTokenTask())


class CountingText(NextTokenTask):
    def units(self, batch: MicroBatch) -> int:
        return 10 * super().units(batch)


def test_loss_is_divided_by_units() -> None:
    plan = tiny_plan(**SGD)
    engine, other = started(plan), LocalEngine(plan, CountingText())
    other.load(open_initial_weights(plan))
    a, b = (each.train_step(micro_batches(plan, 0), StepSettings(0, 0.1)) for each in (engine, other))
    assert (a.loss, a.grad_norm, 10 * a.tokens) == pytest.approx((10 * b.loss, 10 * b.grad_norm, b.tokens))
