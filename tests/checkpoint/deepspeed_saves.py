"""Functions of the ranks in DeepSpeed checkpoint tests: train, save with DeepSpeed, and return the
engine's state.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.checkpoint.vendors import vendor_save
from tests.engine.cases import Cell, WithoutMoments, make, steps
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTUM, WEIGHT, Box, TensorKey
from toolkit.engine.deepspeed import patches, state
from toolkit.engine.deepspeed.partitions import ParameterBox, frozen_shards, read_partitions
from toolkit.engine.protocol import Engine
from toolkit.optimizers.adamw import ADAM_STATES
from toolkit.optimizers.base import StateLayout
from toolkit.plan.types import Device, RunPlan
from toolkit.testing.parity import RunTrace, gather_tensors

State = dict[TensorKey, torch.Tensor]
STOP, MORE = 3, 6
TAG = "global_step3"


def save(
    rank: int, ranks: int, cell: Cell, folder: Path, further: int = 0
) -> tuple[State, dict[str, object], RunTrace]:
    """DeepSpeed's checkpoint after three steps, with state and scalars, and the steps that follow."""
    engine = make(cell, rank)
    steps(engine, cell, rank, 0, STOP)
    vendor_save(engine, folder)
    held, scalars = gather_tensors(engine.shards(), rank, ranks), engine.scalars()
    went_on = RunTrace(tuple(steps(engine, cell, rank, STOP, STOP + further)))
    engine.close()
    return held, scalars, went_on


def resume(rank: int, ranks: int, cell: Cell, folder: Path, forget: bool) -> RunTrace:
    """Six further steps from DeepSpeed's checkpoint."""
    reader = open_reader(folder, model=cell.plan().shape)
    engine: Engine = make(cell, rank, WithoutMoments(reader) if forget else reader)
    results = steps(engine, cell, rank, STOP, STOP + MORE)
    engine.close()
    return RunTrace(tuple(results))


def save_plain(
    rank: int,
    ranks: int,
    plan: RunPlan,
    folder: Path,
    settings: Mapping[str, Any],
    frozen: Sequence[str] = (),
    shuffled: bool = False,
) -> State:
    """Train and save with DeepSpeed as users call it: a transformers model and a DeepSpeed dictionary.

    Args:
        frozen: Parameters that are not trained.
        shuffled: The optimizer gets its parameters in another order than the model's.
    """
    deepspeed = patches.import_deepspeed(Device.CPU, rank)
    model = hugging_face(plan)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name not in frozen
    groups = groups_of(model, shuffled=shuffled)
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    if stage == 3:
        patches.reset_zero3_counters()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups, config={**BASE, **settings}, dist_init_required=False
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STOP):
        ids = torch.randint(0, plan.shape.vocab_size if plan.shape else 2, (2, 8), generator=generator)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(folder), tag=TAG)
    places: dict[torch.Tensor, ParameterBox] = {}
    for name, parameter in model.named_parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        places[parameter] = ParameterBox(name, shape, Box.whole(shape))
    if hasattr(engine.optimizer, "fp32_groups"):
        found = unfused(engine.optimizer, places)
    else:
        partitions = read_partitions(engine.optimizer, places, states_of_group, rank=rank, ranks=ranks)
        shards = state.shards(engine.optimizer, partitions) + list(
            frozen_shards(model, places, rank=rank, ranks=ranks)
        )
        found = gather_tensors(shards, rank, ranks)
    engine.destroy()
    if stage == 3:
        patches.remove_from_module_stack([model, *list(model.modules())])
        patches.release_zero3_engine(engine)
        patches.restore_linear()
    patches.release_parallel_groups()
    return found


SCHEDULED_LR = 1e-3


def scheduled(
    rank: int, ranks: int, plan: RunPlan, scheduler: str, folder: Path, begin: Path | None = None
) -> tuple[list[float], list[float]]:
    """Learning rates and losses of ``MORE`` steps after ``STOP``, in a user's program with a learning-rate
    scheduler.

    Args:
        scheduler: A name in DeepSpeed or torch.
        folder: Where the program saves after ``STOP`` steps.
        begin: Load this checkpoint instead of training the first steps.
    """
    deepspeed = patches.import_deepspeed(Device.CPU, rank)
    model, config, made = hugging_face(plan), {**BASE, "zero_optimization": {"stage": 1}}, None
    config["optimizer"] = {"type": "AdamW", "params": {"lr": SCHEDULED_LR, "eps": 1e-4, "torch_adam": True}}
    if scheduler == "WarmupDecayLR":
        config["scheduler"] = {
            "type": scheduler,
            "params": {"warmup_max_lr": SCHEDULED_LR, "warmup_num_steps": 2, "total_num_steps": 12},
        }
    else:
        arguments = {
            "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step)},
            "CosineAnnealingLR": {"T_max": 12},
        }[scheduler]
        made = lambda optimizer: getattr(torch.optim.lr_scheduler, scheduler)(optimizer, **arguments)  # noqa: E731
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups_of(model, shuffled=False),
        config=config,
        lr_scheduler=made,
        dist_init_required=False,
    )
    if begin is not None:
        assert engine.load_checkpoint(str(begin))[0] is not None
    rates, losses = [], []
    for step in range(STOP if begin is not None else 0, STOP + MORE):
        if step == STOP and begin is None:
            engine.save_checkpoint(str(folder), tag=TAG)
        generator = torch.Generator().manual_seed(rank + ranks * step)
        ids = torch.randint(0, plan.shape.vocab_size if plan.shape else 2, (2, 8), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        rates.append(engine.optimizer.param_groups[0]["lr"])
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    engine.destroy()
    patches.release_parallel_groups()
    return rates[-MORE:], losses[-MORE:]


def states_of_group(group: Mapping[str, Any]) -> StateLayout:
    """The states of a parameter group of torch's AdamW or SGD, or of DeepSpeed's Muon."""
    if "betas" in group:
        return ADAM_STATES
    return StateLayout(tensors=(MOMENTUM,) if group.get("momentum") else ())


def unfused(optimizer: Any, boxes: Mapping[torch.Tensor, ParameterBox]) -> State:
    """Return the state of a 16-bit run without ZeRO: every rank has all parameters."""
    found: State = {}
    for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            tensors = {
                WEIGHT: weight,
                MASTER: master,
                **{name: optimizer.optimizer.state[master][name] for name in (EXP_AVG, EXP_AVG_SQ)},
            }
            found.update(
                {
                    TensorKey(name, boxes[weight].name): tensor.detach().clone()
                    for name, tensor in tensors.items()
                }
            )
    return found


def fuse(path: Path) -> None:
    """DeepSpeed's format with a fused optimizer, which needs a GPU: one flat buffer per group."""
    saved = torch.load(path, weights_only=False)
    optimizer = saved["optimizer"]
    states, groups = optimizer["optimizer_state_dict"]["state"], optimizer.pop("fp32_groups")
    optimizer["fp32_groups_flat"] = [
        torch.cat([tensor.detach().flatten() for tensor in group]) for group in groups
    ]
    merged, first = {}, 0
    for number, group in enumerate(groups):
        mine = [states[place] for place in range(first, first + len(group))]
        merged[number] = {
            name: torch.cat([one[name].flatten() for one in mine]) for name in (EXP_AVG, EXP_AVG_SQ)
        }
        merged[number]["step"] = mine[0]["step"]
        first += len(group)
    optimizer["optimizer_state_dict"]["state"] = merged
    torch.save(saved, path)


def forget_shapes(path: Path) -> None:
    """Remove the shapes from a file, as ``BF16_Optimizer`` without ZeRO does not save them."""
    torch.save(torch.load(path, weights_only=False) | {"param_shapes": None}, path)


BASE: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "steps_per_print": 2**31 - 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}


def hugging_face(plan: RunPlan) -> nn.Module:
    """Return a transformers model with equal random weights on all ranks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit import families

    assert plan.shape is not None
    sizes = families.get_family(plan.shape.family).hugging_face_config(plan.shape)
    torch.manual_seed(5)
    model: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    )
    return model


def groups_of(model: nn.Module, *, shuffled: bool) -> list[dict[str, Any]]:
    """Separate groups for biases and norms, as in transformers' Trainer."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if shuffled:
        trained = trained[::-1]
    return [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]


def full_weights(rank: int, ranks: int, folder: Path) -> dict[str, torch.Tensor]:
    """Use DeepSpeed's own tool."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(StringIO()):
        found: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(folder), TAG)
    return {name: tensor.clone() for name, tensor in found.items()}


def to_universal(rank: int, ranks: int, folder: Path, target: Path) -> None:
    """Use DeepSpeed's own tool."""
    from deepspeed.checkpoint import ds_to_universal

    arguments = Namespace(
        input_folder=str(folder / TAG),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with redirect_stdout(StringIO()):
        ds_to_universal.main(arguments)


def save_autotp(rank: int, ranks: int, plan: RunPlan, folder: Path, settings: Mapping[str, Any]) -> None:
    """DeepSpeed's AutoTP over two ranks, with its automatic cut of a transformers model."""
    deepspeed = patches.import_deepspeed(Device.CPU, rank)
    model = hugging_face(plan)
    config = {**BASE, **settings, "tensor_parallel": {"autotp_size": 2}}
    groups = groups_of(model, shuffled=False)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups, config=config, dist_init_required=False
    )
    generator = torch.Generator().manual_seed(rank // 2)
    for _ in range(STOP):
        ids = torch.randint(0, plan.shape.vocab_size if plan.shape else 2, (2, 8), generator=generator)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(folder), tag=TAG)
    engine.destroy()
    patches.release_parallel_groups()
