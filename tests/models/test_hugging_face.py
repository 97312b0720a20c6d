"""Models of transformers without a family: parameters, weights, buffers, folders, and errors.

pytest tests/models/test_hugging_face.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.checkpoint.formats.huggingface.target import export
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import WEIGHT, Box, Shard, StateReader, TensorKey
from toolkit.checkpoint.source import open_source
from toolkit.config.data import DocumentMasking
from toolkit.config.model import HuggingFaceConfig, ModelConfig
from toolkit.config.schema import EngineName, Precision
from toolkit.engine.build import open_initial_weights
from toolkit.engine.local import LocalEngine
from toolkit.errors import InputError, PlanError, UserError
from toolkit.models.build import build_model
from toolkit.models.hugging_face import describe_export
from toolkit.models.initial_weights import InitialWeights
from toolkit.plan import pretrained
from toolkit.plan.hugging_face import describe
from toolkit.plan.types import RunPlan
from toolkit.testing import parity
from toolkit.testing.tiny import LENGTH, VOCABULARY, tiny_config, tiny_plan
from toolkit.train.task import text_task

IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
PHI3: dict[str, Any] = {
    **IDS,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
DEEPSEEK: dict[str, Any] = {
    **PHI3,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def hf(model_type: str | None = "phi3", architecture: str = "AutoModelForCausalLM", **config: Any) -> Any:
    return HuggingFaceConfig(architecture=architecture, model_type=model_type, config=config)


def plan_of(model: HuggingFaceConfig, **changes: Any) -> RunPlan:
    return tiny_plan(None, model__hf=model, **changes)


def read(reader: StateReader, plan: RunPlan) -> dict[str, torch.Tensor]:
    weights = {spec.name: torch.empty(spec.shape) for spec in plan.parameters}
    reader.read(
        [
            Shard(TensorKey(WEIGHT, name), tuple(value.shape), Box.whole(tuple(value.shape)), value)
            for name, value in weights.items()
        ]
    )
    return weights


def resolved(folder: Path, **config: Any) -> RunPlan:
    """The plan of ``model=pretrained model.pretrained=folder``, with changed fields."""
    settings = tiny_config(None, model__pretrained=str(folder))
    settings.model.hf.config = config
    resolved = pretrained.resolve(settings)
    assert pretrained.resolve(resolved) == resolved
    return tiny_plan(None, model__pretrained=str(folder), model__hf=resolved.model.hf)


def saved_by_transformers(folder: Path, model_type: str, architecture: str, **config: Any) -> Any:
    import transformers
    from transformers import AutoConfig

    torch.manual_seed(1)
    module = getattr(transformers, architecture)(AutoConfig.for_model(model_type, **config)).float()
    module.save_pretrained(folder)
    return module


def exported(plan: RunPlan, folder: Path, steps: int = 2) -> tuple[Path, dict[str, torch.Tensor]]:
    """Train ``steps`` steps on the local engine and export the weights."""
    engine = LocalEngine(plan, text_task(plan))
    engine.load(open_initial_weights(plan))
    parity.train_steps(engine, plan, range(steps))
    store = CheckpointStore(folder / "checkpoints")
    store.save(
        steps, engine.shards(), engine.scalars(), namespace="transformers/x", rank=0, ranks=1, attempt=1
    ).wait()
    content, buffers = describe_export(plan)
    path = export(open_source(folder / "checkpoints"), folder / "export", config=content, buffers=buffers)
    return path, parity.gather_weights(engine, plan, 0)


def test_plan_counts_the_parameters_that_transformers_creates() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    plan = plan_of(hf(**PHI3))
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi3", **PHI3))
    assert [(spec.name, spec.shape) for spec in plan.parameters] == [
        (name, tuple(parameter.shape)) for name, parameter in module.named_parameters()
    ]
    assert "lm_head.weight" not in {spec.name for spec in plan.parameters}, "it is tied to the embedding"
    assert [spec.layer for spec in plan.parameters if ".layers.1." in spec.name] == [1] * 6
    assert plan.memory is not None
    assert plan.memory.activations is None
    assert plan.memory.states == 16 * sum(spec.numel for spec in plan.parameters)


def test_initial_weights_are_those_of_the_constructor_under_the_seed() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    plan = plan_of(hf(**PHI3))
    torch.manual_seed(123)
    state = torch.get_rng_state()
    weights = read(InitialWeights(plan), plan)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(plan.config.train.seed)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi3", **PHI3))
    assert all(torch.equal(weights[name], value) for name, value in module.named_parameters())
    other = read(InitialWeights(plan_of(hf(**PHI3), train__seed=9)), plan)
    assert not torch.equal(
        weights["model.layers.0.mlp.down_proj.weight"], other["model.layers.0.mlp.down_proj.weight"]
    )


def test_rotary_frequencies_stay_in_fp32() -> None:
    plan = plan_of(hf(**PHI3), precision__name=Precision.bf16)
    engine = LocalEngine(plan, text_task(plan))
    assert {parameter.dtype for parameter in engine._parameters.values()} == {torch.bfloat16}
    assert engine._module.get_buffer("model.rotary_emb.inv_freq").dtype == torch.float32


def test_export_opens_in_transformers_and_trains_on(tmp_path: Path) -> None:
    """The weights of a folder with matching names are read without building the model."""
    from transformers import AutoModelForCausalLM, Phi3ForCausalLM

    folder, weights = exported(plan_of(hf(**PHI3)), tmp_path)
    module = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(module, Phi3ForCausalLM)
    assert module.config.max_position_embeddings == LENGTH
    assert all(torch.equal(weights[name], value) for name, value in module.named_parameters())
    plan = resolved(folder)
    assert plan.config.model.hf.architecture == "Phi3ForCausalLM"
    reader = open_initial_weights(plan)
    assert not isinstance(reader, InitialWeights)
    again = read(reader, plan)
    assert all(torch.equal(weights[name], value) for name, value in again.items())


def test_buffers_of_the_state_dict_are_loaded_and_exported(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    module = saved_by_transformers(tmp_path / "hub", "deepseek_v3", "DeepseekV3ForCausalLM", **DEEPSEEK)
    module.get_buffer(BIAS).copy_(torch.tensor([1.0, -2.0, 3.0, 0.5]))
    module.save_pretrained(tmp_path / "hub")
    plan = resolved(tmp_path / "hub")
    assert torch.equal(build_model(plan, "cpu").get_buffer(BIAS), module.get_buffer(BIAS))
    assert not torch.equal(
        build_model(plan_of(hf("deepseek_v3", **DEEPSEEK)), "cpu").get_buffer(BIAS), module.get_buffer(BIAS)
    )
    folder, weights = exported(plan, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again.get_buffer(BIAS), module.get_buffer(BIAS))
    assert all(torch.equal(weights[name], value) for name, value in again.named_parameters())
    assert torch.equal(build_model(resolved(folder), "cpu").get_buffer(BIAS), module.get_buffer(BIAS))


def test_transformers_loads_weights_under_other_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A base model lacks the prefix and the head, which starts with random weights of the seed."""
    sizes = {name: PHI3[name] for name in PHI3 if name not in ("num_key_value_heads", "tie_word_embeddings")}
    base = saved_by_transformers(tmp_path, "bert", "BertModel", **sizes)
    plan = resolved_as(tmp_path, "AutoModelForMaskedLM")
    weights = read(open_initial_weights(plan), plan)
    assert torch.equal(
        weights["bert.embeddings.word_embeddings.weight"],
        base.get_parameter("embeddings.word_embeddings.weight"),
    )
    head = "cls.predictions.transform.dense.weight"
    assert head in caplog.text
    assert weights[head].std() > 0.01
    again = read(open_initial_weights(plan), plan)
    assert torch.equal(weights[head], again[head])


def resolved_as(folder: Path, architecture: str) -> RunPlan:
    settings = tiny_config(None, model__pretrained=str(folder), model__hf=hf(None, architecture))
    return tiny_plan(
        None,
        model__pretrained=str(folder),
        model__hf=pretrained.resolve(settings).model.hf,
        task__target="toolkit.tasks.MaskedLanguageModelTask",
    )


def test_fields_of_a_pretrained_model_can_be_replaced(tmp_path: Path) -> None:
    saved_by_transformers(tmp_path, "phi3", "Phi3ForCausalLM", **PHI3)
    plan = resolved(tmp_path, attention_dropout=0.25)
    assert plan.config.model.hf.config["attention_dropout"] == 0.25
    assert plan.config.model.hf.config["hidden_size"] == 32
    with pytest.raises(PlanError, match=r"attention_dropuot=0.1\n.*\n.*attention_dropout=VALUE"):
        resolved(tmp_path, attention_dropuot=0.1)


def test_a_family_can_be_trained_without_its_description(tmp_path: Path) -> None:
    """A variant that a family does not support, such as other rotary embeddings."""
    sizes = {**PHI3, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    saved_by_transformers(tmp_path, "llama", "LlamaForCausalLM", **sizes)
    with pytest.raises(InputError, match="rope_type") as caught:
        resolved(tmp_path)
    assert "model=huggingface" in caught.value.problems[0].remedy
    plan = resolved_as(tmp_path, "AutoModelForCausalLM")
    assert plan.shape is None
    assert read(open_initial_weights(plan), plan)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    module = saved_by_transformers(tmp_path, "phi3", "Phi3ForCausalLM", **PHI3)
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    plan = resolved(tmp_path)
    with pytest.raises(UserError, match="safetensors"):
        read(open_initial_weights(plan), plan)


def test_code_of_a_folder_never_runs(tmp_path: Path) -> None:
    module = saved_by_transformers(tmp_path, "phi3", "Phi3ForCausalLM", **PHI3)
    del module
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.Config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert build_model(resolved(tmp_path), "cpu")
    config["model_type"] = "unknown"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="code that comes with a model is never run"):
        resolved(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 10**6}, {"vocab_size": 2**40}, {"inner": {"num_heads": 5000}}]
)
def test_sizes_out_of_bounds_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], **PHI3, **change})
    )
    with pytest.raises(InputError, match="out of bounds"):
        resolved(tmp_path)


def test_data_with_more_tokens_than_the_embedding_is_refused() -> None:
    with pytest.raises(PlanError, match=r"write \+model\.hf\.config\.vocab_size=257") as caught:
        plan_of(hf(**{**PHI3, "vocab_size": 256}))
    assert caught.value.problems[0].seen == "model.hf.config.vocab_size=256, data.vocab_size=257"
    with pytest.raises(PlanError, match=r"train\.sequence_length=16"):
        plan_of(hf(**{**PHI3, "max_position_embeddings": 16}))
    assert plan_of(hf(**PHI3)).vocab_size == VOCABULARY


def test_keys_of_other_models_are_refused() -> None:
    for changes, shows in (
        ({"model__family": "llama"}, "a model has one source"),
        ({"model__target": "my.Model"}, "a model has one source"),
        ({"engine__name": EngineName.megatron}, "Megatron-core builds the families"),
        ({"data__documents": DocumentMasking.separate}, "only the families' models are known to separate"),
        ({"parallel__tensor": 2, "ranks": 2}, "only the families' models can be split"),
    ):
        with pytest.raises(PlanError, match=shows):
            plan_of(hf(**PHI3), **changes)


def test_sizes_of_a_family_are_named_in_a_warning() -> None:
    (warning,) = plan_of(hf(**PHI3), model__hidden_size=64).warnings
    assert "write +model.hf.config.hidden_size=64" in str(warning)


MISTAKES: dict[str, tuple[HuggingFaceConfig, str, str]] = {
    "no configuration": (hf(None), "model.hf.model_type", "model.pretrained=FOLDER"),
    "an unknown type": (hf("phi33"), "model.hf.model_type", "write model.hf.model_type=phi3"),
    "an unknown class": (
        hf("phi3", "AutoModelForCausalML"),
        "model.hf.architecture",
        "write model.hf.architecture=AutoModelForCausalLM",
    ),
    "no model class": (hf("phi3", "AutoTokenizer"), "model.hf.architecture", "model.hf.architecture"),
    "a wrong value": (hf("phi3", hidden_size="x"), "model.hf.config", "hidden_size"),
    "no such combination": (hf("phi3", "AutoModelForMaskedLM"), "model.hf.config", "Unrecognized"),
    "quantized": (
        hf("phi3", quantization_config={"bits": 4}),
        "model.hf.config.quantization_config",
        "quantized from",
    ),
}


@pytest.mark.parametrize(("model", "key", "shows"), MISTAKES.values(), ids=list(MISTAKES))
def test_errors_report_cause_and_remedy(model: HuggingFaceConfig, key: str, shows: str) -> None:
    with pytest.raises(PlanError) as caught:
        describe(ModelConfig(hf=model))
    assert caught.value.problems[0].key == key
    assert shows in str(caught.value)
