"""Functions of the ranks in test_dcp.py: a transformers model under plain torch, saved as PyTorch
documents it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.deepspeed_saves import hugging_face
from toolkit.checkpoint.shard import WEIGHT, TensorKey
from toolkit.plan.types import RunPlan

STOP = 3
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6}
DECAY = 0.1

State = dict[TensorKey, torch.Tensor]


def save(rank: int, ranks: int, plan: RunPlan, folder: Path, sharded: bool, flat: bool, under: str) -> State:
    """``dcp.save`` of ``get_state_dict`` after three steps of AdamW. Returns the whole state.

    Args:
        sharded: Use FSDP 2.
        flat: ``flatten_optimizer_state_dict``.
        under: Name of the model in the saved dict.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = hugging_face(plan)
    if sharded:
        fully_shard(model)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, **SETTINGS)
    generator = torch.Generator().manual_seed(rank if sharded else 0)
    for _ in range(STOP):
        assert plan.shape is not None
        ids = torch.randint(0, plan.shape.vocab_size, (2, 8), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    of_model, of_optimizer = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    checkpoint.save({under: of_model, "optim": of_optimizer, "epoch": 2}, checkpoint_id=str(folder))

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    found = {TensorKey(WEIGHT, name): whole(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {
            TensorKey(kind, name): whole(optimizer.state[parameter][kind])
            for kind in ("exp_avg", "exp_avg_sq")
        }
    return found
