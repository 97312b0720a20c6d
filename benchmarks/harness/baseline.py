"""Train without the toolkit: the baseline of benchmarks/engine_step.py, which writes the spec.

torchrun --nproc_per_node 2 benchmarks/harness/baseline.py spec.json
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from turn_client import TurnClient

spec = json.loads(Path(sys.argv[-1]).read_text())
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec["model"]), attn_implementation="sdpa")
tokens = np.memmap(spec["tokens"], dtype=np.uint16, mode="r")
micro, accumulation, length = spec["micro_batch"], spec["accumulation"], spec["sequence_length"]
if spec["engine"] == "deepspeed":
    import deepspeed
    from deepspeed import ops

    ops.__dict__.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False  # skip a build of 50 s
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=spec["deepspeed"]
    )
else:
    engine = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
turns = TurnClient(spec["turns"] if rank == 0 else None)
for step in range(spec["steps"]):
    turns.before_step(step)
    started = time.perf_counter()
    for index in range(accumulation):
        first = (
            ((step * accumulation + index) * ranks + rank) * micro * length % (len(tokens) - micro * length)
        )
        window = torch.from_numpy(tokens[first : first + micro * length].astype(np.int64)).view(micro, length)
        loss = engine(input_ids=window, labels=window, use_cache=False).loss
        if spec["engine"] == "deepspeed":
            engine.backward(loss)
            engine.step()
        else:
            (loss / accumulation).backward()
    if spec["engine"] == "ddp":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    loss.item()
    turns.after_step(step, time.perf_counter() - started)
dist.barrier()
os._exit(0)  # DeepSpeed's and gloo's threads do not end by themselves
