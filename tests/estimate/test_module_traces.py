"""Advice for models without a family: a few traces are enough for all layouts.

pytest tests/estimate/test_module_traces.py
pytest tests/estimate/test_module_traces.py -m full
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from launch import plan as command
from tests.estimate.test_search import brute_force, profile_of
from tests.plan.cases import h100s, run_config
from toolkit.config.compose import compose
from toolkit.config.model import ModelConfig
from toolkit.config.schema import EngineName, OffloadDevice, Precision, RunConfig
from toolkit.errors import ExitCode, PlanError
from toolkit.estimate.advice import advise, layout_overrides
from toolkit.estimate.goal import Goal
from toolkit.estimate.layouts import Layout, SearchSpace
from toolkit.estimate.module_traces import ModuleTraces, _figures
from toolkit.estimate.search import Evaluator, find_best
from toolkit.estimate.step import estimate_step
from toolkit.plan import make_plan
from toolkit.plan.trace import ModuleTrace, NotTraced
from toolkit.plan.types import RunPlan, World
from toolkit.train.trace import trace_model

OWN_MODEL = """
import torch
from torch import nn


class Dense(nn.Module):
    def __init__(self, width: int = 1024, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 512)

    def forward(self, input_ids, labels):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())


class Contrastive(Dense):
    def forward(self, input_ids, labels):
        first = self.embedding(input_ids[:, 0])
        distances = (first[:, None] - first).square().mean()
        return distances + super().forward(input_ids[:, :1], labels[:, :1])


class ReadsValues(Dense):
    def forward(self, input_ids, labels):
        return super().forward(input_ids, labels) * (2 if input_ids.sum() > 3 else 1)


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {"input_ids": torch.full((12,), number), "labels": torch.zeros(12, dtype=torch.int64)}
"""


@pytest.fixture(autouse=True)
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_advised_model.py").write_text(OWN_MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_advised_model", raising=False)


def own_config(name: str = "Dense", **changes: object) -> RunConfig:
    return run_config(
        model=ModelConfig(target=f"own_advised_model.{name}"),
        **{"precision__name": Precision.bf16, "train__sequence_length": 128, **changes},
    )


def traces_of(config: RunConfig, world: World, most: int | None = None) -> ModuleTraces:
    return ModuleTraces(config, world, trace_model, most=most or config.train.global_batch)


# -- micro-batches that are not traced


def test_two_micro_batches_give_the_trace_of_a_third() -> None:
    """The third, between and above those of the line, is traced to compare."""
    line = traces_of(own_config(), h100s(1), most=16)
    for size in (6, 24):
        found, traced = line.get("none", size), trace_model(line._plan_alone("none", size))
        assert isinstance(traced, ModuleTrace)
        assert _figures(found) == pytest.approx(_figures(traced), rel=1e-9)
        assert found.peak_bytes == pytest.approx(traced.peak_bytes, rel=0.02)
        assert found.peak_bytes >= traced.peak_bytes or size > 16
    assert line.traced == (("none", 2), ("none", 4), ("none", 16))


def test_a_model_that_compares_all_samples_is_traced_with_every_micro_batch() -> None:
    line = traces_of(own_config("Contrastive"), h100s(1), most=32)
    found = line.get("none", 16)
    assert found == trace_model(line._plan_alone("none", 16))
    assert ("none", 16) in line.traced


# -- the search


def own_space(memory_gb: float = 1.63, **changes: object) -> SearchSpace:
    """A run on two GPUs with so little memory that a part of the layouts fit."""
    world = replace(h100s(2, 2), device_memory_bytes=int(memory_gb * 1e9))
    config = own_config(train__global_batch=256, **changes)
    return SearchSpace(config=config, world=world, shape=None)


def found_cost(evaluator: Evaluator) -> float:
    best = find_best(evaluator, Goal()).best
    return best[0].seconds if best else inf


def test_search_agrees_with_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: wrong bounds of memory or time exclude the best layout."""
    space = own_space()
    traces = traces_of(space.config, space.world)

    def evaluator() -> Evaluator:
        return Evaluator(space, profile_of(space), traces)

    every = evaluator()
    expected = brute_force(every, Goal())
    results = [every.evaluate(layout) for layout in every.layouts]
    assert {result.fits for result in results} == {True, False}
    assert found_cost(evaluator()) == expected < inf
    assert len(traces.traced) == 4  # of eight micro-batches: 1, and three of the line

    best = min(results, key=lambda result: result.seconds).layout
    least_bytes, least_seconds = Evaluator.least_bytes, Evaluator.least_seconds

    def wrong_seconds(self: Evaluator, layout: Layout, *, divided: bool) -> float:
        seconds = least_seconds(self, layout, divided=divided)
        return 100 * seconds if layout.micro_batch == best.micro_batch else seconds

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "least_bytes", lambda *args, **kwargs: 10 * least_bytes(*args, **kwargs))
        assert found_cost(evaluator()) != expected
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "least_seconds", wrong_seconds)
        assert found_cost(evaluator()) != expected


def test_layouts_of_an_own_module_are_local_and_zero_without_recomputation() -> None:
    layouts = list(replace(own_space(), world=h100s(1)).layouts())
    assert {layout.engine for layout in layouts} == {EngineName.local, EngineName.deepspeed}
    assert {layout.recomputation for layout in layouts} == {"none"}
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert {layout.offload[0] for layout in layouts} == {OffloadDevice.none, OffloadDevice.cpu}


# -- the command

ON_GPUS = (
    "model=custom",
    "train.sequence_length=64",
    "train.global_batch=64",
    "precision=bf16",
    "cluster.gpus_per_node=2",
    "cluster.gpu=h100",
)


def typed(name: str, *words: str) -> list[str]:
    return [f"model.target=own_advised_model.{name}", *ON_GPUS, *words]


@pytest.mark.full
def test_command_writes_an_experiment_that_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "conf"
    (folder / "exp").mkdir(parents=True)
    own = f"--config-dir={folder}"
    assert command.main([own, "advise=true", "out=advised", "--json", *typed("Dense")]) == ExitCode.DONE
    shown = json.loads(capsys.readouterr().out)
    written = compose([own, "+exp=advised"])
    assert written == compose([own, *typed("Dense"), *shown["best"][0]["overrides"]])
    assert command.main([own, "+exp=advised", "--json"]) == ExitCode.DONE
    planned = json.loads(capsys.readouterr().out)
    first = shown["best"][0]
    assert planned["step_seconds"]["seconds"] == pytest.approx(first["step_seconds"], rel=1e-9)
    assert planned["memory"]["device_total"] == first["device_total"]
    assert first["step_seconds_high"] / first["step_seconds_low"] > 2  # wider than a family's
    assert shown["alternatives"]
    reasons = (" x the time", "refused: zero.stage=0")
    assert all(any(text in other["reason"] for text in reasons) for other in shown["alternatives"])


def test_a_model_that_reads_values_is_refused_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["advise=true", *typed("ReadsValues")]) == ExitCode.USER
    shown = capsys.readouterr().err
    assert "own_advised_model.py:" in shown
    assert "change the code at that line" in shown


@pytest.mark.full
def test_samples_are_read_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise=true", *typed("Dense", "data=custom", "data.target=own_advised_model.Pairs")]
    assert command.main(words) == ExitCode.USER
    assert "add --trace" in capsys.readouterr().err
    assert command.main([*words, "--trace"]) == ExitCode.DONE
    assert "the fastest layouts on h100" in capsys.readouterr().out


@pytest.mark.full
def test_scaling_of_an_own_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scaling=1,2", f"out={tmp_path / 'scaling'}", "zero=stage2", "--json", *typed("Dense")]
    assert command.main(words) == ExitCode.DONE
    points = json.loads(capsys.readouterr().out)["curves"]["strong"]["points"]
    assert [point["ranks"] for point in points] == [1, 2]
    assert command.main(["scaling=1,2", *typed("ReadsValues")]) == ExitCode.USER
    assert "own_advised_model.py:" in capsys.readouterr().err


@pytest.mark.full
def test_a_task_of_a_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster.gpus_per_node=2", "cluster.gpu=h100", "task.target=toolkit.NextTokenTask"]
    for argument in ("advise=true", "scaling=1,2"):
        assert command.main([argument, *words]) == ExitCode.USER
        assert "leave task.target out" in capsys.readouterr().err


# -- models of transformers

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
RUN = ("train.sequence_length=2048", "precision=bf16", "train.global_batch=64", "data.vocab_size=32000")
OF_TRANSFORMERS = (
    "model=huggingface",
    "model.hf.model_type=llama",
    *(f"+model.hf.config.{name}={value}" for name, value in SIZES.items()),
    *RUN,
)


@pytest.mark.full
@pytest.mark.parametrize("micro_batch", [2, 8])
@pytest.mark.parametrize("recomputation", ["none", "full"])
def test_traced_step_agrees_with_that_of_the_family(micro_batch: int, recomputation: str) -> None:
    """The same model, from the operators of its trace and from the layers of the family."""
    words = [
        f"train.micro_batch={micro_batch}",
        f"train.activation_checkpointing={recomputation}",
        "zero=stage2",
    ]
    world = h100s(4)
    own = compose([*OF_TRANSFORMERS, *words])
    family = [f"model.{name}={value}" for name, value in SIZES.items()]
    config = compose(["model=llama", *family, *RUN, *words, "compile=none", "train.loss_kernel=plain"])
    profile = profile_of(SearchSpace(config=config, world=world, shape=None))
    traced = estimate_step(traces_of(own, world).plan(own, world), profile)
    expected = estimate_step(make_plan(config, world), profile)
    assert traced is not None
    assert expected is not None
    assert traced.seconds == pytest.approx(expected.seconds, rel=0.25)
    assert traced.low < expected.seconds < traced.high


@pytest.mark.full
def test_recomputation_is_traced_only_where_layouts_do_not_fit_without() -> None:
    config = compose([*OF_TRANSFORMERS, "train.micro_batch=null"])
    traced: list[tuple[str, int]] = []

    def trace(plan: RunPlan) -> ModuleTrace | NotTraced:
        train = plan.config.train
        traced.append((train.activation_checkpointing, plan.batch.micro_batch))
        return trace_model(plan)

    large = advise(config, h100s(8), fixed=frozenset(), trace=trace)
    assert {recomputation for recomputation, _ in traced} == {"none"}
    assert layout_overrides(large.best[0], config)
    small = advise(config, replace(h100s(8), device_memory_bytes=12 * 10**9), fixed=frozenset(), trace=trace)
    assert {recomputation for recomputation, _ in traced} == {"none", "selective", "full"}
    assert small.best[0].layout.recomputation != "none"


@pytest.mark.full
def test_a_model_that_cannot_recompute_has_layouts_without() -> None:
    """Its class in transformers refuses gradient checkpointing."""
    config = compose([*OF_TRANSFORMERS, "train.micro_batch=null"])

    def trace(plan: RunPlan) -> ModuleTrace | NotTraced:
        if plan.config.train.activation_checkpointing != "none":
            return NotTraced("it cannot")
        return trace_model(plan)

    world = replace(h100s(8), device_memory_bytes=12 * 10**9)
    advice = advise(config, world, fixed=frozenset(), trace=trace)
    assert all(advised.layout.recomputation == "none" for advised in advice.best)
    again = replace(config, train=replace(config.train, activation_checkpointing="full"))
    with pytest.raises(PlanError, match="it cannot"):
        advise(again, world, fixed=frozenset({"train.activation_checkpointing"}), trace=trace)
