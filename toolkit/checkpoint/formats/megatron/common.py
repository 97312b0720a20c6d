"""``common.pt`` of Megatron-core's checkpoints: everything except tensors of the model and of the optimizer.

``optimizer`` is the optimizer's ``state_dict`` without its tensors. Its structure depends on the kind of
optimizer, and a run with expert parallelism has two optimizers, {0: dense, 1: experts}:

    fp32           {state: {common_step}, param_groups}
    16 bits        {optimizer: {state: {common_step}, param_groups}}
    distributed    {optimizer: {param_groups: [{step, ...}]}, param_state_sharding_type}

No key has two meanings, so one mapping with all keys serves every kind. A loader finds a group by
``wd_mult``, ``lr_mult``, ``is_expert_parallel`` and ``is_decoupled_lr``, and replaces the run's group
including Adam's settings.

Sources, in megatron/core: ``optimizer/optimizer.py``, ``optimizer/distrib_optimizer.py``,
``optimizer/__init__.py`` (``_get_param_groups``), ``optimizer/grad_scaler.py``,
``optimizer_param_scheduler.py``. Imports no torch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.formats import torch_zip
from toolkit.checkpoint.formats.stored_tensor import Storage, StoredTensor
from toolkit.checkpoint.formats.unpickle import ForeignObject
from toolkit.checkpoint.scalars import CONSUMED, LOSS_SCALER, OPTIM, OPTIM_SETTINGS, OPTIMIZER_STEP
from toolkit.checkpoint.target import TargetFile

COMMON = "common.pt"
RESHARDABLE = "fully_reshardable"
_SAMPLES = "consumed_train_samples"  # also among Megatron-LM's arguments
_KNOWN = {"iteration", "checkpoint_version", "optimizer", "content_metadata", "args", _SAMPLES}


# ---- reading


@dataclass(frozen=True, slots=True)
class CommonState:
    """The content of ``common.pt``.

    Attributes:
        step: Completed optimizer steps; None for a release.
        args: Megatron-LM's arguments; may be empty.
        sharding: How the distributed optimizer's state is sharded; None without one.
        scalars: What training resumes from, except the step.
        omitted: Keys that are not carried over.
    """

    step: int | None
    args: Mapping[str, Any]
    sharding: str | None
    scalars: Mapping[str, object]
    omitted: tuple[str, ...]


def load_common(folder: Path) -> CommonState:
    """Load what is stored once for all ranks. Raises DamagedFile if the file is missing or unreadable, or its
    steps disagree.
    """
    found = torch_zip.load(folder, COMMON)
    if not isinstance(found, dict):
        raise DamagedFile(COMMON, f"{folder / COMMON} is {type(found).__name__}", f"{COMMON} is a mapping")
    args = found.get("args")
    arguments = args.fields if isinstance(args, ForeignObject) else {}
    parts = _parts(found.get("optimizer"))
    sharding = [part["param_state_sharding_type"] for part in parts if "param_state_sharding_type" in part]
    sharding += (
        [content]
        if (content := (found.get("content_metadata") or {}).get("distrib_optim_sharding_type"))
        else []
    )
    iteration = found.get("iteration")
    samples = found.get(_SAMPLES, arguments.get(_SAMPLES))
    scalars: dict[str, object] = {CONSUMED: samples} if isinstance(samples, int) else {}
    return CommonState(
        step=iteration if isinstance(iteration, int) else None,
        args=arguments,
        sharding=sharding[0] if sharding else None,
        scalars=scalars | _optimizer_scalars(folder, parts),
        omitted=tuple(str(key) for key in found if key not in _KNOWN),
    )


def _parts(optimizer: Any) -> list[Mapping[Any, Any]]:
    """Return one mapping per optimizer."""
    if not isinstance(optimizer, dict):
        return []
    numbered = [optimizer[key] for key in sorted(key for key in optimizer if isinstance(key, int))]
    return [part for part in numbered or [optimizer] if isinstance(part, dict)]


def _optimizer_scalars(folder: Path, parts: Sequence[Mapping[Any, Any]]) -> dict[str, object]:
    mappings = [
        mapping for part in parts for mapping in (part, part.get("optimizer")) if isinstance(mapping, dict)
    ]
    groups = [group for mapping in mappings for group in mapping.get("param_groups", ())]
    recorded = [
        mapping["state"]["common_step"] for mapping in mappings if "common_step" in mapping.get("state", {})
    ]
    recorded += [group["step"] for group in groups if group.get("step") is not None]
    steps = sorted({int(torch_zip.read_number(folder, step)) for step in recorded})
    if len(steps) > 1:
        raise DamagedFile(
            COMMON,
            f"{folder / COMMON} has the optimizer's parameters at steps {', '.join(map(str, steps))}",
            "all parameters have taken the same steps",
        )
    found: dict[str, object] = {OPTIMIZER_STEP: steps[0]} if steps else {}
    decaying = next(
        (
            group
            for group in groups
            if group.get("wd_mult", 1.0) and all(name in group for name in OPTIM_SETTINGS)
        ),
        None,
    )
    if decaying is not None:
        found[OPTIM] = {
            "lr": float(decaying["lr"]),
            "betas": [float(beta) for beta in decaying["betas"]],
            "eps": float(decaying["eps"]),
            "weight_decay": float(decaying["weight_decay"]),
        }
    scaler = next((part["grad_scaler"] for part in parts if "scale" in (part.get("grad_scaler") or {})), None)
    if scaler is not None and "growth_tracker" in scaler:
        # Megatron-core counts steps since the last overflow or growth; ours since an overflow just before the
        # first step.
        found[LOSS_SCALER] = {
            "cur_scale": torch_zip.read_number(folder, scaler["scale"]),
            "cur_iter": int(scaler["growth_tracker"]),
            "last_overflow_iter": -1,
            "cur_hysteresis": 1,
        }
    return found


# ---- writing


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState:
    """The optimizer's part. ``settings`` has lr, betas, eps and weight_decay; ``scaler`` is as in
    ``scalars.LOSS_SCALER``.
    """

    step: int
    settings: Mapping[str, Any]
    scaler: Mapping[str, Any] | None = None


@dataclass(slots=True)
class _Numbers:
    """Tensors of one number, with known bytes."""

    storages: list[Storage] = field(default_factory=list)

    def tensor(self, value: float, shape: tuple[int, ...] = ()) -> StoredTensor:
        self.storages.append(Storage(str(len(self.storages)), "float32", 1, content=struct.pack("<f", value)))
        return StoredTensor.whole(self.storages[-1], shape)


def lay_out_common(
    name: str,
    *,
    step: int | None,
    consumed_samples: int | None,
    adam: AdamState | None,
    separate_experts: bool,
) -> TargetFile:
    """Lay out ``common.pt``.

    Args:
        name: Path of the file.
        step: Completed steps; None for the weights of a release.
        consumed_samples: Samples consumed so far, if known.
        adam: The optimizer's part; None writes weights only.
        separate_experts: Experts have their own optimizer, as in runs with expert parallelism.
    """
    numbers = _Numbers()
    value: dict[str, Any] = {"checkpoint_version": 3.0}
    if step is not None:
        value["iteration"] = step
    if consumed_samples is not None:
        value[_SAMPLES] = consumed_samples
    if adam is not None:
        dense = _part(adam, [_group(adam, decays, expert=False) for decays in (True, False)], numbers)
        value["optimizer"] = (
            {0: dense, 1: _part(adam, [_group(adam, True, expert=True)], numbers)}
            if separate_experts
            else dense
        )
    value["content_metadata"] = {
        "distrib_optim_sharding_type": RESHARDABLE,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    return torch_zip.lay_out(name, value, numbers.storages).file


def _part(adam: AdamState, groups: list[dict[str, Any]], numbers: _Numbers) -> dict[str, Any]:
    def state() -> dict[str, Any]:
        return {"common_step": numbers.tensor(adam.step)}

    part = {
        "state": state(),
        "param_groups": groups,
        "optimizer": {"state": state(), "param_groups": [dict(group) for group in groups]},
        "param_state_sharding_type": RESHARDABLE,
    }
    if adam.scaler is not None:
        # Restart the growth counter: its meaning depends on the growth interval of the previous run.
        part["grad_scaler"] = {
            "scale": numbers.tensor(adam.scaler["cur_scale"], (1,)),
            "growth_tracker": 0,
            "hysteresis_tracker": 1,
        }
    return part


def _group(adam: AdamState, decays: bool, *, expert: bool) -> dict[str, Any]:
    """Return a group with the keys of torch's, Apex's and Transformer Engine's Adam. The run's schedule
    sets ``max_lr`` and ``min_lr``.
    """
    first, second = adam.settings["betas"]
    return {
        "wd_mult": 1.0 if decays else 0.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "is_expert_parallel": expert,
        "default_config": True,
        "lr": adam.settings["lr"],
        "betas": (first, second),
        "eps": adam.settings["eps"],
        "weight_decay": adam.settings["weight_decay"] if decays else 0.0,
        "step": adam.step,
        "bias_correction": True,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }
