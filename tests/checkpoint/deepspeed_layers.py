"""A user's own pipeline for test_deepspeed_users.py: transformers blocks as layers of ``PipelineModule``,
optionally with tensor ranks.

The expected parameters are written out here independently of the reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.checkpoint.deepspeed_saves import BASE, STOP, TAG, State, groups_of, states_of_group
from toolkit import families
from toolkit.checkpoint.shard import Box
from toolkit.engine.deepspeed import patches, state
from toolkit.engine.deepspeed.partitions import ParameterBox, read_partitions
from toolkit.families.base import ModelShape
from toolkit.plan.types import Device, RunPlan
from toolkit.testing.parity import gather_tensors

TENSOR_DIMS = {
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "gate_proj": 0,
    "up_proj": 0,
    "o_proj": 1,
    "down_proj": 1,
}


class Block(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        self.layer = LlamaDecoderLayer(config, number)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        places = torch.arange(hidden.shape[1])[None]
        out = self.layer(
            hidden, attention_mask=None, position_ids=places, position_embeddings=self.rotary(hidden, places)
        )
        found: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return found


def head(embedding: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, embedding.weight)


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def save_layers(
    rank: int, ranks: int, plan: RunPlan, folder: Path, settings: Mapping[str, Any], tensor: int = 1
) -> State:
    """Three steps of a pipeline of two stages, DeepSpeed's own checkpoint, and its expected tensors."""
    deepspeed = patches.import_deepspeed(Device.CPU, rank)
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    shape = plan.shape
    assert shape is not None
    torch.manual_seed(5)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=tensor, num_dp=ranks // 2 // tensor)
    with redirect_stdout(StringIO()):
        net = PipelineModule(
            layers=list(layers_of(shape)), loss_fn=loss, topology=topology, partition_method="uniform"
        )
    if tensor > 1:
        cut(net)
    config = {**BASE, **settings}
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=groups_of(net, shuffled=False), config=config, dist_init_required=False
    )
    patches.disable_timers(engine)
    generator = torch.Generator().manual_seed(rank // tensor)
    for _ in range(STOP):
        ids = torch.randint(0, shape.vocab_size, (2, 8), generator=generator)
        engine.train_batch(iter([(ids, ids)]))
    engine.save_checkpoint(str(folder), tag=TAG)
    grid = net._grid
    places = {
        parameter: place_of(name, parameter, shape, grid.get_slice_parallel_rank(), tensor)
        for name, parameter in net.named_parameters()
    }
    partitions = read_partitions(
        engine.optimizer,
        places,
        states_of_group,
        rank=grid.get_data_parallel_rank(),
        ranks=grid.get_data_parallel_world_size(),
    )
    repeated = {
        places[parameter].name for parameter in places if getattr(parameter, "ds_pipe_replicated", False)
    }
    shards = [shard for shard in state.shards(engine.optimizer, partitions) if shard.key.name not in repeated]
    found = gather_tensors(shards, rank, ranks)
    engine.destroy()
    patches.drop_last_step(engine)
    patches.drop_pipeline_grid()
    patches.release_parallel_groups()
    return found


def layers_of(shape: ModelShape) -> Iterator[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    sizes = families.get_family(shape.family).hugging_face_config(shape)
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes, attn_implementation="eager")
    table = (shape.vocab_size, shape.hidden_size)
    tied = shape.tie_word_embeddings
    yield TiedLayerSpec("embed", nn.Embedding, *table) if tied else LayerSpec(nn.Embedding, *table)
    for number in range(shape.num_hidden_layers):
        yield LayerSpec(Block, config, number)
    yield LayerSpec(LlamaRMSNorm, shape.hidden_size)
    if tied:
        yield TiedLayerSpec("embed", nn.Embedding, *table, forward_fn=head)
    else:
        yield LayerSpec(nn.Linear, *table[::-1], bias=False)


def cut(net: Any) -> None:
    """DeepSpeed's own tensor-parallel layers in the blocks."""
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode

    set_autotp_mode(training=True)
    group = net._grid.get_slice_parallel_group()
    for owner in list(net.modules()):
        for name, child in list(owner.named_children()):
            if name in TENSOR_DIMS:
                setattr(
                    owner,
                    name,
                    (LinearAllreduce if TENSOR_DIMS[name] else LinearLayer)(child, group, name=name),
                )


def place_of(name: str, parameter: torch.Tensor, shape: ModelShape, rank: int, ranks: int) -> ParameterBox:
    """Return expected names: layer 0 is the embedding, then blocks, the norm, the output layer."""
    local = tuple(parameter.shape)
    if name.startswith("tied_modules.embed."):
        canonical = "model.embed_tokens.weight"
    else:
        number, rest = name.split(".", 1)
        layer = int(number) - 1
        outside = {-1: "model.embed_tokens.weight", shape.num_hidden_layers: "model.norm.weight"}
        inside = f"model.layers.{layer}.{rest.removeprefix('layer.')}"
        canonical = inside if 0 <= layer < shape.num_hidden_layers else outside.get(layer, "lm_head.weight")
    linear = canonical.split(".")[-2]
    place = ParameterBox(canonical, local, Box.whole(local), rank, ranks)
    if ranks == 1 or linear not in TENSOR_DIMS:
        return place
    dim = TENSOR_DIMS[linear]
    whole = tuple(size * ranks if at == dim else size for at, size in enumerate(local))
    offset = tuple(size * rank if at == dim else 0 for at, size in enumerate(local))
    return replace(place, shape=whole, box=Box(offset, local), replica=0, replicas=1)
