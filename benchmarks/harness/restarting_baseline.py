r"""Train without the toolkit, with a checkpoint every few steps that the next start loads: the baseline of
benchmarks/campaign.py for restarts.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc_per_node 2 --max-restarts 3 --rdzv-backend c10d \
    benchmarks/harness/restarting_baseline.py spec.json
"""

import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import ops
from transformers import LlamaConfig, LlamaForCausalLM

spec = json.loads(Path(sys.argv[-1]).read_text())
ops.__dict__.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False  # skip a build of 50 s
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**spec["model"]))
micro = spec["batch"] // ranks
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=list(model.parameters()),
    config={
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": spec["stage"]},
    },
)
checkpoints, rows = Path(spec["folder"]) / "checkpoints", Path(spec["folder"]) / f"rank-{rank}.jsonl"
first = 0
if (checkpoints / "latest").exists():
    engine.load_checkpoint(str(checkpoints))
    first = engine.global_steps
for step in range(first, spec["steps"]):
    generator = torch.Generator().manual_seed(step * ranks + rank)
    tokens = torch.randint(spec["model"]["vocab_size"], (micro, spec["sequence_length"]), generator=generator)
    loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    with rows.open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "time": time.time(), "ended": step + 1}) + "\n")
    if (step + 1) % spec["save_every"] == 0:
        engine.save_checkpoint(str(checkpoints), tag=f"step-{step + 1}")
    if step + 1 >= spec["first_pause"]:
        time.sleep(spec["step_seconds"])
dist.barrier()
os._exit(0)  # DeepSpeed's and gloo's threads do not end by themselves
