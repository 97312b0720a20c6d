"""Train with Megatron-core without the toolkit: a baseline of benchmarks/engine_step.py.

    torchrun --nproc_per_node 2 benchmarks/harness/baseline_megatron.py spec.json

Megatron-core does not run on CPUs by itself, so the toolkit's CPU backend is enabled first; both sides use
torch's attention.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from turn_client import TurnClient

from toolkit.engine.megatron import cpu, patches
from toolkit.engine.megatron.attention import TorchAttention

spec = json.loads(Path(sys.argv[-1]).read_text())
dist.init_process_group("gloo")
cpu.enable()
patches.apply()
state.initialize_model_parallel(tensor_model_parallel_size=spec["tensor"], create_gloo_process_groups=False)
model_parallel_cuda_manual_seed(0)
types = {
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "activation_func": torch.nn.functional.silu,
}
config = TransformerConfig(**{**spec["megatron"]["transformer"], **types})
block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
for layer in block.layer_specs:
    layer.submodules.self_attention.submodules.core_attention = TorchAttention
ddp = DistributedDataParallelConfig(**spec["megatron"]["ddp"])
model = DistributedDataParallel(config, ddp, GPTModel(config, block, **spec["megatron"]["model"]))
settings = OptimizerConfig(**{**spec["megatron"]["optimizer"], "params_dtype": torch.float32})
optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model.no_sync
tokens = np.memmap(spec["tokens"], dtype=np.uint16, mode="r")
micro, accumulation, length = spec["micro_batch"], spec["accumulation"], spec["sequence_length"]
rank, ranks = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
position_ids = torch.arange(length).expand(micro, length)
turns = TurnClient(spec["turns"] if dist.get_rank() == 0 else None)


def forward(numbers, model):
    first = (next(numbers) * ranks + rank) * micro * length % (len(tokens) - micro * length - 1)
    window = torch.from_numpy(tokens[first : first + micro * length + 1].astype(np.int64))
    inputs, labels = window[:-1].view(micro, length), window[1:].view(micro, length)
    return model(inputs, position_ids, None, labels=labels), lambda losses: (
        losses.mean(),
        {"loss": losses.detach().mean()},
    )


run = get_forward_backward_func()
for step in range(spec["steps"]):
    turns.before_step(step)
    started = time.perf_counter()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    numbers = iter(range(step * accumulation, (step + 1) * accumulation))
    reports = run(
        forward_step_func=forward,
        data_iterator=numbers,
        model=model,
        num_microbatches=accumulation,
        seq_length=length,
        micro_batch_size=micro,
        forward_only=False,
    )
    optimizer.step()
    reports[-1]["loss"].item()
    turns.after_step(step, time.perf_counter() - started)
dist.barrier()
os._exit(0)  # gloo's threads do not end by themselves
