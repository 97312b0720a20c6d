"""Formulas against traces of the families' modules, and plans of models without a family.

pytest tests/train/test_trace.py
pytest tests/train/test_trace.py -m full
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch import plan as plan_command
from toolkit.config.compose import compose
from toolkit.config.kernels import LossKernel
from toolkit.config.schema import Precision, RunConfig
from toolkit.engine.protocol import CountedBatch
from toolkit.errors import ExitCode
from toolkit.families import FAMILIES, get_family
from toolkit.models.build import build_model
from toolkit.plan import activations, make_plan
from toolkit.plan.flops import flops_per_step
from toolkit.plan.formula_check import CheckedFormulas, whole_model
from toolkit.plan.trace import ModuleTrace, NotTraced
from toolkit.plan.types import Device, RunPlan, World
from toolkit.testing.tiny import tiny_config, tiny_plan
from toolkit.train.task import text_task
from toolkit.train.trace import trace_model

LENGTH = 2048
GPU = World(ranks=1, ranks_per_node=1, device=Device.CUDA, has_compiler=True)


def published(family: str, mode: str, layers: int = 5) -> RunPlan:
    """The plan of a family's first published sizes with fewer blocks, in bf16 on a GPU without a name."""
    config: RunConfig = tiny_config(
        family, train__activation_checkpointing=mode, precision__name=Precision.bf16
    )
    sizes = next(iter(get_family(family).published.values()))
    config.model = replace(sizes, num_hidden_layers=layers)
    length = min(LENGTH, sizes.max_position_embeddings or LENGTH)
    config.train = replace(config.train, sequence_length=length, loss_kernel=LossKernel.plain)
    return whole_model(make_plan(config, GPU))


def differences(plan: RunPlan) -> dict[str, float]:
    return {check.name: check.difference for check in CheckedFormulas(plan, trace_model(plan)).checks()}


# Each family and each mode; those with experts in each mode.
QUICK = (("llama", "none"), ("mixtral", "selective"))
FULL = (
    *(("gpt2", "full"), ("llama", "2"), ("qwen2", "2"), ("qwen3", "selective"), ("gpt2", "selective")),
    *(("qwen3_moe", "none"), ("qwen3_moe", "full"), ("mixtral", "2")),
)


def test_each_family_is_compared_with_its_trace() -> None:
    assert {family for family, _ in (*QUICK, *FULL)} == set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "mode"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)]
)
def test_formulas_agree_with_the_trace(family: str, mode: str) -> None:
    found = differences(published(family, mode))
    assert len(found) == 4
    for name, difference in found.items():
        assert abs(difference) < (0.03 if "bytes" in name else 1e-9), f"{name}: {difference:+.2%}"


def test_a_wrong_formula_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed-forward without one of its four tensors."""
    right = activations.feed_forward_bytes
    monkeypatch.setattr(
        activations, "feed_forward_bytes", lambda *given, **named: right(*given, **named) * 3 // 4
    )
    assert differences(published("llama", "none"))["activations at the peak, bytes"] < -0.03


# -- models without a family

OWN_MODEL = """
import torch
from torch import nn


class Dense(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(264, width), nn.Linear(width, 4 * width)
        self.head = nn.Linear(4 * width, 264)

    def forward(self, input_ids, labels):
        logits = self.head(torch.relu(self.inner(self.embedding(input_ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ReadsLabels(Dense):
    def forward(self, input_ids, labels):
        return super().forward(input_ids, labels) if labels.sum() > 0 else None


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {"input_ids": torch.full((12,), number), "labels": torch.zeros(12, dtype=torch.int64)}
"""
WIDTH = 32


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_trace_model.py").write_text(OWN_MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_trace_model", raising=False)


def own_plan(name: str = "Dense", **changes: Any) -> RunPlan:
    return tiny_plan(None, model__target=f"own_trace_model.{name}", **changes)


@pytest.mark.usefixtures("own_model")
def test_a_model_of_ones_own_has_memory_and_flops() -> None:
    plan = own_plan()
    trace = trace_model(plan)
    assert isinstance(trace, ModuleTrace)
    tokens, products = 2 * 32, 4 * WIDTH * WIDTH + 4 * WIDTH * 264
    planned = make_plan(plan.config, plan.world, trace)
    memory = planned.memory
    assert memory is not None
    assert memory.parameters == 4 * (264 * WIDTH + 4 * WIDTH * WIDTH + 4 * WIDTH + 4 * WIDTH * 264 + 264)
    # The embedding's output, that of relu, the log-softmax and three scalars of the loss; the batch.
    assert memory.activations == pytest.approx(tokens * (4 * (WIDTH + 4 * WIDTH + 264) + 16), abs=64)
    assert memory.activations + memory.temporaries == trace.peak_bytes
    assert flops_per_step(planned) == trace.model_flops * 4  # micro-batches of a step
    # The embedding's rows get a gradient without a product, and its output through one.
    assert trace.model_flops == 6 * tokens * products
    assert planned.identity == plan.identity


@pytest.mark.usefixtures("own_model")
def test_the_reason_is_given_if_a_model_cannot_be_traced() -> None:
    plan = own_plan("ReadsLabels")
    trace = trace_model(plan)
    assert isinstance(trace, NotTraced)
    assert "own_trace_model.py:" in trace.reason
    assert make_plan(plan.config, plan.world, trace).memory is None


@pytest.mark.usefixtures("own_model")
def test_samples_of_a_dataset_are_read_on_demand() -> None:
    plan = own_plan(data__name="custom", data__target="own_trace_model.Pairs")
    unread = trace_model(plan)
    assert isinstance(unread, NotTraced)
    assert "--trace" in unread.reason
    read = trace_model(plan, read_data=True)
    assert isinstance(read, ModuleTrace)
    assert read.model_flops == 6 * 2 * 12 * (4 * WIDTH * WIDTH + 4 * WIDTH * 264)


@pytest.mark.usefixtures("own_model")
def test_a_smaller_micro_batch_needs_a_proportional_part() -> None:
    """A remedy with another micro-batch is judged by the trace of the run's own."""
    plan = own_plan()
    trace = trace_model(plan)
    half = replace(plan.config, train=replace(plan.config.train, micro_batch=1))
    memory = make_plan(half, plan.world, trace).memory
    assert memory is not None
    assert memory.activations == trace.saved_bytes // 2


HUGGING_FACE = [
    "model=huggingface",
    "model.hf.model_type=phi3",
    *(
        f"+model.hf.config.{name}={value}"
        for name, value in {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 4096,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        }.items()
    ),
    "train.sequence_length=64",
]


def test_a_model_of_transformers_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """The saved bytes are those of the same run with real tensors."""
    assert (
        plan_command.main(["--json", *HUGGING_FACE, "engine=local", "cluster.cpu_ranks=1"]) == ExitCode.DONE
    )
    shown = json.loads(capsys.readouterr().out)
    measured = saved_by_autograd()
    assert shown["memory"]["activations"] == pytest.approx(measured, rel=0.01)
    assert shown["flops_per_step"] == shown["flops"]["model_per_token"] * 8 * 64
    assert shown["trace"]["parameters"] == shown["parameters"]


def saved_by_autograd() -> int:
    """Bytes of distinct storages that autograd saves for a real micro-batch, with the batch."""
    config = compose([*HUGGING_FACE, "engine=local", "cluster.cpu_ranks=1"])
    plan = make_plan(config, World(ranks=1, ranks_per_node=1, device=Device.CPU))
    module, task = build_model(plan, "cpu"), text_task(plan)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    batch = task.collate(np.zeros((plan.batch.micro_batch, 65), dtype=np.int64))
    storages = {tensor.data_ptr(): tensor.nbytes for tensor in batch.values()}

    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.append(storage)
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        task.loss_sum(module, CountedBatch(batch, 1))
    return sum(storages.values())


def test_the_trace_of_a_family_is_compared_with_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", "+exp=quickstart", "cluster.cpu_ranks=1", "engine=local"]
    assert plan_command.main(["--json", *words]) == ExitCode.DONE
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["trace"]["checks"]}
    assert checks["parameters"]["difference"] == checks["model FLOPs"]["difference"] == 0
    assert plan_command.main(words) == ExitCode.DONE
    assert "difference" in capsys.readouterr().out
