"""The activation formula against what autograd saves for transformers' modules on the CPU.

pytest tests/plan/test_activations.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.families import FAMILIES, PUBLISHED, get_family
from toolkit.families.base import ModelShape
from toolkit.plan.activations import activation_bytes, layer_bytes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BATCH, LENGTH = 2, 64
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "vocab_size": 97,
    "num_hidden_layers": 1,
}


def small(family: str, layers: int = 1) -> ModelShape:
    model = replace(
        next(iter(get_family(family).published.values())),
        **(SIZES | {"num_hidden_layers": layers}),
        tie_word_embeddings=None,
    )
    if family != "gpt2":
        model = replace(
            model,
            intermediate_size=160,
            num_key_value_heads=2,
            head_dim=get_family(family).tiny.get("head_dim"),
        )
    return get_family(family).resolve_shape(model)


def saved_bytes(family: str, layers: int, dtype: torch.dtype, separate: bool = False) -> int:
    """Bytes of distinct storages that autograd saves in a forward pass, without weights."""
    shape = small(family, layers)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**get_family(family).hugging_face_config(shape))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(0, 97, (BATCH, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        positions = (torch.arange(LENGTH) % 20).expand_as(ids) if separate else None
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert logits.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


CASES = [
    pytest.param(family, dtype, separate, marks=() if separate == (dtype == "bfloat16") else pytest.mark.full)
    for family in sorted(FAMILIES)
    for dtype in ("float32", "bfloat16")
    for separate in (False, True)
]


@pytest.mark.parametrize(("family", "dtype", "separate"), CASES)
def test_layer_bytes_equal_saved_tensors(family: str, dtype: str, separate: bool) -> None:
    """The difference between two depths is one layer, whatever the ends of the model save."""
    kind = getattr(torch, dtype)
    measured = (
        (saved_bytes(family, 3, kind, separate) - saved_bytes(family, 1, kind, separate))
        / 2
        / (BATCH * LENGTH)
    )
    predicted = layer_bytes(small(family), 4 if dtype == "float32" else 2, seen=LENGTH if separate else 0)
    assert predicted == pytest.approx(
        measured, rel=0.02 if family == "mixtral" else 0.003
    )  # the routing of tokens is random


def test_checkpointing_saves_one_block_and_the_inputs_of_the_others() -> None:
    shape = get_family("llama").resolve_shape(PUBLISHED["llama-3-8b"])
    sizes = {"micro_batch": 1, "sequence_length": 4096, "element": 2}
    whole = activation_bytes(shape, checkpointing=False, **sizes)
    kept = activation_bytes(shape, checkpointing=True, **sizes)
    saved = 4096 * (31 * layer_bytes(shape, 2) - 32 * 2 * shape.hidden_size)
    assert whole - kept == saved
    assert kept < whole / 4


def test_gpt_layer_equals_the_published_formula() -> None:
    """sbh(34 + 5as/h) less the matrices (5as/h) and the dropout masks (1 after attention, 1 after the
    feed-forward); transformers' gelu keeps three more tensors of width 4h than theirs (24h bytes), and the
    fused attention one number a row and head, the norms two numbers a token each.
    """
    shape = get_family("gpt2").resolve_shape(PUBLISHED["gpt2"])
    assert layer_bytes(shape, 2) == shape.hidden_size * (34 - 2 + 24) + 4 * shape.num_attention_heads + 16
