"""Which parameters decay, which go to Muon, and the optimizers of the local engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTUM, WEIGHT, Reader, TensorKey
from toolkit.config.schema import OptimConfig, OptimizerName
from toolkit.engine.muon import Muon
from toolkit.errors import CheckpointError, Problem


def decays(parameter: torch.Tensor) -> bool:
    """Weight decay applies to matrices only: never to one-dimensional tensors."""
    return parameter.dim() > 1


def uses_muon(name: str, parameter: torch.Tensor) -> bool:
    """Muon is for hidden matrices. The rule is DeepSpeed's ``set_optimizer_flags``, so that both engines agree."""
    return parameter.dim() > 1 and not any(word in name.lower() for word in ("embed", "lm_head"))


def parameter_groups(module: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Trainable parameters as torch's optimizers and DeepSpeed take them; a tied parameter once."""
    return _groups((parameter for parameter in module.parameters() if parameter.requires_grad), optim)


def torch_optimizers(
    parameters: Mapping[str, torch.Tensor], optim: OptimConfig
) -> list[torch.optim.Optimizer]:
    """What the local engine steps: one optimizer, or under muon one for matrices and one for the rest.

    ``parameters`` are the trainable ones by canonical name: the tensors that are updated, in fp32.
    """
    if optim.name is OptimizerName.sgd:
        return [torch.optim.SGD(_groups(parameters.values(), optim), lr=optim.lr, momentum=optim.momentum)]
    rest = dict(parameters)
    optimizers: list[torch.optim.Optimizer] = []
    if optim.name is OptimizerName.muon:
        matrices = [rest.pop(name) for name in parameters if uses_muon(name, parameters[name])]
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


def optimizer_state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """States of parameter shape that the optimizer keeps once it has stepped, by the names that it gives them."""
    if isinstance(optimizer, torch.optim.AdamW):
        return (EXP_AVG, EXP_AVG_SQ)
    return (MOMENTUM,) if isinstance(optimizer, Muon) or optimizer.defaults["momentum"] else ()


def _groups(parameters: Iterable[torch.Tensor], optim: OptimConfig) -> list[dict[str, Any]]:
    """Those that decay come first."""
    decaying: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for parameter in parameters:
        (decaying if decays(parameter) else rest).append(parameter)
    groups = ({"params": decaying, "weight_decay": optim.weight_decay}, {"params": rest, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def has_optimizer_state(reader: Reader, kept: Iterable[str]) -> bool:
    """Whether ``reader`` has optimizer state, which then must be the states ``kept`` by this run's optimizer.

    Raises:
        CheckpointError: it is another optimizer's.
    """
    saved, kept = {key.state for key in reader.tensors} - {WEIGHT, MASTER}, set(kept)
    if saved and saved != kept:
        raise CheckpointError(
            Problem(
                key="optim.name",
                seen=f"the checkpoint has optimizer state {sorted(saved)}, this run's optimizer keeps {sorted(kept) or 'none'}",
                rule="a run resumes with the optimizer that it was saved with",
                remedy="resume with the same optim settings, or start from the weights alone: model.pretrained=EXPORTED_FOLDER",
            )
        )
    return bool(saved)


def master_or_weight_key(reader: Reader, name: str) -> TensorKey:
    """Where the fp32 weight of ``name`` comes from: a saved weight may have been rounded from its master."""
    master = TensorKey(MASTER, name)
    return master if master in reader.tensors else TensorKey(WEIGHT, name)
