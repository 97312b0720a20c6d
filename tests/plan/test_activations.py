"""The activation formula against what autograd saves for transformers' modules on the CPU.

pytest tests/plan/test_activations.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.config.recomputation import parse_recomputation
from toolkit.families import FAMILIES, PUBLISHED, get_family
from toolkit.families.base import ModelShape
from toolkit.plan.activations import BlockLayout, StageActivations, layer_bytes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BATCH, LENGTH = 2, 64
BF16 = BlockLayout(element=2)
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
    predicted = layer_bytes(
        small(family),
        BlockLayout(element=4 if dtype == "float32" else 2, mask_keys=LENGTH if separate else 0),
    )
    assert predicted == pytest.approx(
        measured, rel=0.02 if get_family(family).traits.experts else 0.003
    )  # the routing of tokens is random


VIEWS = [["alias"], ["detach"], ["permute"], ["reshape"], ["view"]]  # operators that return the same storage


def compiled_bytes(family: str) -> float:
    """Bytes per token that a compiled block of ``family`` in bf16 saves, without weights and rotations."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    shape = small(family, 2)
    config = transformers.AutoConfig.for_model(**get_family(family).hugging_face_config(shape))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model = model.to(torch.bfloat16)
    saved: list[int] = []

    def forward(graph: torch.fx.GraphModule, _: object) -> object:
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        weights = {tuple(parameter.shape) for parameter in model.parameters()}
        bases = {}
        for node in output.args[0][1:]:  # the first is the block's result
            value = getattr(node, "meta", {}).get("val")
            is_of_tokens = isinstance(value, torch.Tensor) and value.numel() % (BATCH * LENGTH) == 0
            is_weight = node.op == "placeholder" and tuple(value.shape) in weights
            if is_of_tokens and not is_weight and value.shape[0] != 1:  # 1: rotations
                base = node
                while str(base.target).split(".")[1:2] in VIEWS:
                    base = base.args[0]
                bases[base.name] = value.numel() * value.element_size()
        saved.append(sum(bases.values()))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    for layer in model.transformer.h if family == "gpt2" else model.model.layers:
        layer.compile(backend=backend)
    model(input_ids=torch.randint(0, 97, (BATCH, LENGTH)), use_cache=False)
    assert saved
    return saved[0] / (BATCH * LENGTH)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_compiled_blocks_save_what_the_partitioner_keeps(family: str) -> None:
    """Control: without torch.compile the same block saves at least a quarter more."""
    predicted = layer_bytes(small(family), BlockLayout(element=2, compiled=True))
    assert predicted == pytest.approx(compiled_bytes(family), rel=0.03)
    assert layer_bytes(small(family), BF16) > 1.25 * predicted


def test_checkpointing_saves_the_inputs_of_all_blocks() -> None:
    """The peak is in the loss, which needs more than the last block, or in the last block."""
    shape = get_family("llama").resolve_shape(PUBLISHED["llama-3-8b"])
    whole = StageActivations(shape=shape, layout=BF16, tokens=4096, blocks=range(32))
    again = replace(whole, recomputation=parse_recomputation("full"))
    layer, boundary = layer_bytes(shape, BF16), 2 * shape.hidden_size
    assert whole.peak - again.peak == 4096 * 32 * (layer - boundary)
    assert 4096 * layer < whole.output
    assert replace(again, head=False).peak == 4096 * (32 * boundary + layer)
    assert again.peak < whole.peak / 4


def test_gpt_layer_equals_the_published_formula() -> None:
    """sbh(34 + 5as/h) less the matrices (5as/h) and the dropout masks (1 after attention, 1 after the
    feed-forward); transformers' gelu keeps three more tensors of width 4h than theirs (24h bytes), and the
    fused attention one number a row and head, the norms two numbers a token each.
    """
    shape = get_family("gpt2").resolve_shape(PUBLISHED["gpt2"])
    assert layer_bytes(shape, BF16) == shape.hidden_size * (34 - 2 + 24) + 4 * shape.num_attention_heads + 16
