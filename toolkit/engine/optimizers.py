"""Parameter groups of a module, and the optimizer state of a checkpoint that an engine loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from toolkit.checkpoint.scalars import OPTIMIZER_NUMBERS, OPTIMIZER_STEP
from toolkit.checkpoint.shard import MASTER, WEIGHT, StateReader, TensorKey
from toolkit.config.optim import OptimConfig
from toolkit.errors import CheckpointError, ConfigError, Problem
from toolkit.optimizers import get_optimizer
from toolkit.optimizers.base import STEP, OptimizerSpec, StateLayout, parameter_groups
from toolkit.optimizers.torch_state import Number, read_numbers, restore_number
from toolkit.plan.types import RunPlan


def module_groups(module: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Parameter groups of a module's trainable parameters; a tied parameter occurs once."""
    trainable = (parameter for parameter in module.parameters() if parameter.requires_grad)
    return parameter_groups(trainable, optim.weight_decay)


def client_optimizer(plan: RunPlan) -> Any:
    """Return what ``deepspeed.initialize`` gets as ``optimizer``: None if DeepSpeed has the optimizer itself,
    else a function that creates it from parameter groups.

    Raises:
        ConfigError: ``optim.target`` would compute another update on the parts of parameters that a rank has.
    """
    assert plan.deepspeed is not None
    if "optimizer" in plan.deepspeed:
        return None
    config = plan.config
    if config.optim.target is not None:
        from toolkit.optimizers.trial_steps import run_trial_steps

        behaviour = run_trial_steps(config.optim)
        for key, value, cut, reason in (
            ("zero.stage", config.zero.stage, config.zero.stage in (1, 2), behaviour.not_flat),
            ("zero.stage", 3, config.zero.stage == 3, behaviour.not_stage3),
            ("parallel.tensor", config.parallel.tensor, config.parallel.tensor > 1, behaviour.not_flat),
        ):
            if cut and reason is not None:
                raise ConfigError(
                    Problem(
                        "optim.target",
                        f"optim.target={config.optim.target}, {key}={value}: {reason}",
                        "ranks have flat ranges of parameters, so the update of an element depends on the "
                        "history of this element alone",
                        "write zero=stage0 parallel.tensor=1, engine=local, or optim=adamw",
                    )
                )
    spec = get_optimizer(config.optim.name)
    return lambda groups: spec.create(list(groups), config.optim)


def has_optimizer_state(reader: StateReader, states: Iterable[StateLayout]) -> bool:
    """Return whether ``reader`` has optimizer state, as opposed to weights only.

    Args:
        states: of each kind of parameters of this run's optimizer.

    Raises:
        CheckpointError: the state belongs to another optimizer.
    """
    layouts = list(states)
    saved = {key.state for key in reader.tensors} - {WEIGHT, MASTER}
    required = {name for layout in layouts for name in layout.tensors}
    possible = required | {name for layout in layouts for name in layout.whole}
    numbers = {name for layout in layouts for name in (*layout.numbers, *layout.group_numbers)}
    if (saved - possible) or (saved and required - saved) or (numbers_of(reader).keys() - numbers - {STEP}):
        raise CheckpointError(
            Problem(
                key="optim.name",
                seen=f"the checkpoint has optimizer state {sorted(saved)}, "
                f"this run's optimizer keeps {sorted(possible) or 'none'}",
                rule="a run resumes with the optimizer that it was saved with",
                remedy="resume with the same optim settings, or start from the weights alone: "
                "model.pretrained=EXPORTED_FOLDER",
            )
        )
    return bool(saved) or (not required and bool(numbers & numbers_of(reader).keys()))


def numbers_of(reader: StateReader) -> dict[str, Number]:
    """Return the optimizer's numbers that a checkpoint has."""
    found: dict[str, Number] = {}
    step, others = reader.scalars.get(OPTIMIZER_STEP), reader.scalars.get(OPTIMIZER_NUMBERS)
    if isinstance(step, int):
        found[STEP] = step
    if isinstance(others, Mapping):
        found |= others
    return found


def number_scalars(
    parameters: Iterable[tuple[StateLayout, Mapping[str, Any]]], groups: Iterable[Mapping[str, Any]]
) -> dict[str, object]:
    """Return the scalars of a checkpoint for the optimizer's numbers.

    The step count of the user's own class may have another meaning than that of Adam.

    Raises:
        CheckpointError: as ``read_numbers``.
    """
    pairs = list(parameters)
    others = read_numbers(pairs, groups)
    found: dict[str, object] = {}
    if STEP in others and all(states.examples is None for states, _ in pairs):
        found[OPTIMIZER_STEP] = int(others.pop(STEP))
    return found | ({OPTIMIZER_NUMBERS: others} if others else {})


def restore_group_numbers(
    optimizer: torch.optim.Optimizer, states: StateLayout, numbers: Mapping[str, Number]
) -> None:
    for group in optimizer.param_groups:
        for name in states.group_numbers:
            if name in numbers:
                at = group["params"][0] if group["params"] else torch.empty(0)
                group[name] = restore_number(optimizer, group, at, numbers[name], group[name])


def whole_state_tensors(reader: StateReader, states: StateLayout, name: str) -> dict[str, torch.Tensor]:
    """Uninitialized tensors for the states of parameter ``name`` that have another shape than it."""
    return {
        state: torch.empty(info.shape, dtype=getattr(torch, info.dtype))
        for state in states.whole
        if (info := reader.tensors.get(TensorKey(state, name))) is not None
    }


def spec_of(plan: RunPlan) -> OptimizerSpec:
    return get_optimizer(plan.config.optim.name)


def master_or_weight_key(reader: StateReader, name: str) -> TensorKey:
    """Return the key of the fp32 weight ``name``: the master if it was saved, since the weight may be
    rounded.
    """
    master = TensorKey(MASTER, name)
    return master if master in reader.tensors else TensorKey(WEIGHT, name)
