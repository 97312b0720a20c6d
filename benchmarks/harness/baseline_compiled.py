"""Train with plain torch as fast as possible on one GPU: compile, flash attention, bf16 autocast, fused
AdamW.

    python benchmarks/harness/baseline_compiled.py spec.json

The baseline of benchmarks/gpu.py, which writes the spec. It writes the seconds of each step and the peak of
the allocator to ``spec["result"]``. ``spec["device"]`` is ``cpu`` only in a smoke test.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

spec = json.loads(Path(sys.argv[-1]).read_text())
device = torch.device(spec["device"])
torch.manual_seed(0)
torch.set_float32_matmul_precision("high")
with device:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**spec["model"]), attn_implementation="sdpa", dtype=torch.float32
    )
optimizer = torch.optim.AdamW(
    model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
)
tokens = np.memmap(spec["tokens"], dtype=np.uint16, mode="r")
micro, accumulation, length = spec["micro_batch"], spec["accumulation"], spec["sequence_length"]


@torch.compile(disable=device.type == "cpu")
def loss_of(window: torch.Tensor) -> torch.Tensor:
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


seconds = []
for step in range(spec["steps"]):
    started = time.perf_counter()
    for index in range(accumulation):
        first = (step * accumulation + index) * micro * length % (len(tokens) - micro * (length + 1))
        window = torch.from_numpy(tokens[first : first + micro * (length + 1)].astype(np.int64))
        loss = loss_of(window.view(micro, length + 1).to(device))
        (loss / accumulation).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
    seconds.append(time.perf_counter() - started)
peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
Path(spec["result"]).write_text(json.dumps({"step_seconds": seconds, "peak_bytes": peak}))
