"""Parameter groups, the optimizers of the local engine, and which optimizer state a checkpoint must have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTUM, WEIGHT, Reader, TensorKey
from toolkit.config.schema import OptimConfig, OptimizerName
from toolkit.engine.muon import Muon
from toolkit.errors import CheckpointError, Problem
from toolkit.families.base import uses_muon, uses_weight_decay


def parameter_groups(module: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Parameter groups of a module's trainable parameters; a tied parameter occurs once."""
    return _groups((parameter for parameter in module.parameters() if parameter.requires_grad), optim)


def torch_optimizers(
    parameters: Mapping[str, torch.Tensor], optim: OptimConfig
) -> list[torch.optim.Optimizer]:
    """The optimizers of the local engine: one, or with Muon one for matrices and one for other parameters.

    Args:
        parameters: the fp32 tensors to update, by canonical name.
    """
    if optim.name is OptimizerName.sgd:
        return [torch.optim.SGD(_groups(parameters.values(), optim), lr=optim.lr, momentum=optim.momentum)]
    rest = dict(parameters)
    optimizers: list[torch.optim.Optimizer] = []
    if optim.name is OptimizerName.muon:
        matrices = [rest.pop(name) for name in parameters if uses_muon(name, parameters[name].dim())]
        if matrices:
            optimizers.append(Muon(_groups(matrices, optim), lr=optim.lr, momentum=optim.momentum))
    if rest:
        first, second = optim.betas
        optimizers.append(
            torch.optim.AdamW(
                _groups(rest.values(), optim), lr=optim.lr, betas=(first, second), eps=optim.eps
            )
        )
    return optimizers


def optimizer_state_names(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of an optimizer's states of parameter shape, which exist after its first step.

    Args:
        settings: defaults of a torch optimizer, or of one of its parameter groups.
    """
    if settings.get("use_muon"):
        return (MOMENTUM,)
    if "betas" in settings:
        return (EXP_AVG, EXP_AVG_SQ)
    return (MOMENTUM,) if settings.get("momentum") else ()


def _groups(parameters: Iterable[torch.Tensor], optim: OptimConfig) -> list[dict[str, Any]]:
    """A group with weight decay, then one without; empty groups are left out."""
    decaying: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for parameter in parameters:
        (decaying if uses_weight_decay(parameter.dim()) else rest).append(parameter)
    groups = ({"params": decaying, "weight_decay": optim.weight_decay}, {"params": rest, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def has_optimizer_state(reader: Reader, names: Iterable[str]) -> bool:
    """Whether ``reader`` has optimizer state, as opposed to weights only.

    Args:
        names: the states that this run's optimizer has.

    Raises:
        CheckpointError: the state belongs to another optimizer.
    """
    saved, expected = {key.state for key in reader.tensors} - {WEIGHT, MASTER}, set(names)
    if saved and saved != expected:
        raise CheckpointError(
            Problem(
                key="optim.name",
                seen=f"the checkpoint has optimizer state {sorted(saved)}, "
                f"this run's optimizer keeps {sorted(expected) or 'none'}",
                rule="a run resumes with the optimizer that it was saved with",
                remedy="resume with the same optim settings, or start from the weights alone: "
                "model.pretrained=EXPORTED_FOLDER",
            )
        )
    return bool(saved)


def master_or_weight_key(reader: Reader, name: str) -> TensorKey:
    """The key of the fp32 weight ``name``: the master if it was saved, since the weight may be rounded."""
    master = TensorKey(MASTER, name)
    return master if master in reader.tensors else TensorKey(WEIGHT, name)
