"""What only GPUs have of memory: copies to pinned memory on a stream of their own. Nothing here has run yet:
no GPU was at hand.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.gpu.runs import sized, text
from tests.gpu.test_compile import with_keys
from toolkit.checkpoint.online.writing import HostSnapshot, WriteItem
from toolkit.checkpoint.shard import WEIGHT, Box, TensorKey
from toolkit.cluster.world.process_environment import set_cuda_defaults
from toolkit.config.schema import EngineName, OffloadDevice
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import train_steps
from toolkit.train.task import text_task

pytestmark = pytest.mark.gpu
FULL = {"train__activation_checkpointing": "full"}


def losses_and_peak(rank: int, ranks: int, plan: RunPlan) -> tuple[list[float], int]:
    """Losses of three steps and the peak of the allocator after the first, in bytes."""
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    results = train_steps(engine, plan, range(1), rank=rank, batches=text)
    torch.cuda.reset_peak_memory_stats()
    results += train_steps(engine, plan, range(1, 3), rank=rank, batches=text)
    peak = torch.cuda.max_memory_allocated()
    engine.close()
    return [each.loss for each in results], peak


@pytest.mark.parametrize("engine", [EngineName.local, EngineName.deepspeed, EngineName.megatron])
def test_offloaded_inputs_change_no_loss_and_lower_the_peak(engine: EngineName, gpu: RankPool) -> None:
    kept = gpu.run(losses_and_peak, with_keys(sized(engine, 0), **FULL), timeout=300)[0]
    plan = with_keys(sized(engine, 0), **FULL, offload__activations=OffloadDevice.cpu)
    offloaded = gpu.run(losses_and_peak, plan, timeout=300)[0]
    assert offloaded[0] == kept[0]
    assert offloaded[1] < kept[1]


def copied(rank: int, ranks: int) -> tuple[bool, bool]:
    """Whether the copy of a state equals it, and is in pinned memory of its own size."""
    data = torch.randn(3, 1_000_003, device="cuda")
    snapshot = HostSnapshot()
    (item,) = snapshot.take(
        [WriteItem(TensorKey(WEIGHT, "w"), (3, 1_000_003), Box.whole((3, 1_000_003)), data)]
    )
    buffer = snapshot._buffer
    return torch.equal(item.data, data.cpu()), buffer.is_pinned() and buffer.numel() < data.nbytes + 64


def test_saves_copy_to_a_pinned_buffer_without_rounding(gpu: RankPool) -> None:
    assert gpu.run(copied)[0] == (True, True)


def test_torch_reads_the_allocator_setting_that_ranks_get() -> None:
    program = (
        "import torch; torch.ones(1, device='cuda'); print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    )
    environ = dict(os.environ)
    environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    set_cuda_defaults(environ, sized(EngineName.local, 0))
    found = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "True"
