"""The module of a plan: names, devices, and settings from the configuration."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.families import get_family
from toolkit.models.build import build_model
from toolkit.testing.tiny import FAMILIES, micro_batches, tiny_plan


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("meta", [False, True], ids=["memory", "meta"])
def test_model_has_the_canonical_parameters(family: str, meta: bool) -> None:
    plan = tiny_plan(family)
    module = build_model(plan, "cpu", meta=meta)
    found = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    assert sorted(found) == sorted((spec.name, spec.shape) for spec in plan.parameters)
    assert {parameter.is_meta for parameter in module.parameters()} == {meta}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert module.training


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_buffers_keep_the_constructors_values(family: str, device: str) -> None:
    plan = tiny_plan(family)
    assert plan.shape is not None
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**get_family(family).hugging_face_config(plan.shape))
    )
    expected = dict(theirs.named_buffers())
    found = dict(build_model(plan, device).named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        assert torch.equal(buffer, expected[name]), name


def test_tied_parameters_are_one_object() -> None:
    for meta in (False, True):
        module = build_model(tiny_plan("qwen2"), "cpu", meta=meta)
        assert module.lm_head.weight is module.model.embed_tokens.weight
    module = build_model(tiny_plan("llama"), "cpu")
    assert module.lm_head.weight is not module.model.embed_tokens.weight


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_reach_the_model(family: str) -> None:
    config = build_model(tiny_plan(family), "cpu", meta=True).config
    assert config._attn_implementation == "toolkit_sdpa"
    assert config.use_cache is False


def filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 and "bias" not in name else parameter.normal_(0, 0.1)
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_applies_in_every_family(family: str) -> None:
    tokens = micro_batches(tiny_plan(), 0)[0]["input_ids"]
    for dropout in (0.0, 0.5):
        module = filled(build_model(tiny_plan(family, model__dropout=dropout), "cpu"))
        once, again = (module(tokens).logits for _ in range(2))
        assert torch.equal(once, again) is (dropout == 0.0)
        module.eval()
        assert torch.equal(module(tokens).logits, module(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
def test_activation_checkpointing_recomputes_each_block(family: str, on: bool) -> None:
    module = filled(build_model(tiny_plan(family, train__activation_checkpointing=on), "cpu"))
    runs: list[str] = []
    block = module.get_submodule("transformer.h.1" if family == "gpt2" else "model.layers.1")
    inner = next(part for name, part in block.named_children() if "attn" in name)
    inner.register_forward_hook(lambda *_: runs.append("attention"))
    module(micro_batches(tiny_plan(), 0)[0]["input_ids"]).logits.sum().backward()
    assert len(runs) == (2 if on else 1)
