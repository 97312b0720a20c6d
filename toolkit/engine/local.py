"""Plain torch in one process: the reference implementation that every other engine is compared with.

A step: sum of the losses of all micro-batches / their units -> fp32 gradients -> gradient norm -> clipping ->
update of the fp32 weights -> rounding to the run's precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from toolkit.checkpoint.scalars import LOSS_SCALER
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, Shard, StateReader, TensorKey
from toolkit.config.schema import Precision
from toolkit.engine import seeding
from toolkit.engine.compile import compile_model
from toolkit.engine.forward_hashes import hash_forward
from toolkit.engine.fp8 import use_fp8_linears
from toolkit.engine.optimizers import (
    has_optimizer_state,
    master_or_weight_key,
    number_scalars,
    numbers_of,
    restore_group_numbers,
    spec_of,
    whole_state_tensors,
)
from toolkit.engine.precision import DTYPES, LossScaler
from toolkit.engine.protocol import (
    LOSS,
    EvalResult,
    MicroBatch,
    Objective,
    ReplicaSet,
    StepResult,
    StepSettings,
    count_units,
    rank_device,
)
from toolkit.engine.step_read import read_numbers
from toolkit.models.build import build_model
from toolkit.models.loss_head import fuse_loss
from toolkit.optimizers.base import StateLayout, has_evaluation_mode
from toolkit.optimizers.torch_state import create_state, state_tensors
from toolkit.plan.types import RunPlan
from toolkit.step_parts import BACKWARD, FORWARD, NULL_RECORDER, OPTIMIZER, Recorder


class LocalEngine:
    """Forward uses ``_parameters``, the optimizer updates ``_masters``; in fp32 they are the same tensors."""

    def __init__(
        self,
        plan: RunPlan,
        objective: Objective,
        *,
        rank: int = 0,
        local_rank: int = 0,
        recorder: Recorder = NULL_RECORDER,
    ) -> None:
        assert plan.axes.size == 1, f"the local engine is one process, the plan has {plan.axes.size} ranks"
        self._plan, self._objective, self._recorder = plan, objective, recorder
        self._coordinates = plan.axes.coordinates(rank)
        self.device = rank_device(plan.world.device, local_rank)
        self._module = _cast(build_model(plan, self.device), plan)
        use_fp8_linears(self._module, plan)
        compile_model(self._module, plan)
        fuse_loss(self._module, plan)
        self._parameters = {
            name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad
        }
        self._frozen = {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if not parameter.requires_grad
        }
        self._has_masters = plan.config.precision.name is not Precision.fp32
        self._masters: dict[str, torch.Tensor] = dict(self._parameters)
        if self._has_masters:
            self._masters = {name: parameter.detach().float() for name, parameter in self._parameters.items()}
        self._spec = spec_of(plan)
        self._optimizers = self._spec.build(self._masters, plan.config.optim)
        self._scaler = LossScaler.from_config(plan.config.precision)

    def train_step(self, micro_batches: Sequence[MicroBatch], settings: StepSettings) -> StepResult:
        units = sum(count_units(self._objective, batch) for batch in micro_batches)
        scale = self._scaler.cur_scale if self._scaler else 1.0
        total = self._accumulate(micro_batches, settings.step, scale / max(units, 1))
        with self._recorder.part(OPTIMIZER):
            gradients = [cast(torch.Tensor, master.grad) for master in self._masters.values()]
            for gradient in gradients:
                gradient.div_(scale)
            norm = torch.nn.utils.get_total_norm(gradients)
            # Before the update, which changes Muon's momentum. The host waits for the device only here.
            grad_norm, loss_sum = read_numbers([norm, total])
            skipped = not math.isfinite(grad_norm)
            if skipped:
                grad_norm = math.inf
            elif (updated := self._update(norm, settings.lr)) is not norm:
                grad_norm = float(updated)
            for parameter in (*self._masters.values(), *self._parameters.values()):
                parameter.grad = None
            if self._scaler:
                self._scaler.update(skipped)
        loss = loss_sum / max(units, 1)
        return StepResult(loss=loss, grad_norm=grad_norm, tokens=units, skipped=skipped, loss_scale=scale)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], step: int, weight: float) -> torch.Tensor:
        """Accumulate ``weight`` times the gradient in the masters' ``grad``; return the loss sum, fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._recorder.part(OPTIMIZER):
            for master in self._masters.values():
                # Zero rather than None: an unused parameter still decays, as it does under ZeRO.
                master.grad = torch.zeros_like(master)
        for number, batch in enumerate(micro_batches):
            seeding.seed_micro_batch(self._plan.config.train.seed, step, self._coordinates, number)
            with self._recorder.part(FORWARD):
                loss = self._objective.loss_sum(self._module, batch)
                total += loss.detach()
            with self._recorder.part(BACKWARD):
                (loss * weight).backward()
                if self._has_masters:  # summing over micro-batches in 16 bits would lose precision
                    for name, parameter in self._parameters.items():
                        if parameter.grad is not None:
                            cast(torch.Tensor, self._masters[name].grad).add_(parameter.grad)
                            parameter.grad = None
        return total

    @torch.no_grad()
    def _update(self, norm: torch.Tensor, lr: float) -> torch.Tensor:
        """Clip, step the optimizer and round the masters; return the norm before clipping."""
        masters = list(self._masters.values())
        if self._spec.transform_gradients(self._optimizers):
            norm = torch.nn.utils.get_total_norm([cast(torch.Tensor, master.grad) for master in masters])
        clip = self._plan.config.optim.clip
        if clip > 0:
            # DeepSpeed's formula; torch's clip_grad_norm_ divides by norm + 1e-6 instead.
            factor = 1.0 / ((norm + 1e-6) / clip).clamp(min=1.0)
            for master in masters:
                cast(torch.Tensor, master.grad).mul_(factor)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self._round()
        return norm

    @torch.no_grad()
    def _round(self) -> None:
        if self._has_masters:
            for name, parameter in self._parameters.items():
                parameter.copy_(self._masters[name])

    @torch.no_grad()
    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        sums: dict[str, torch.Tensor] = {}
        self._module.eval()
        try:
            with seeding.preserve_rng_state(self.device), self._evaluation_weights():
                for batch in micro_batches:
                    for name, value in self._objective.eval_sums(self._module, batch).items():
                        sums[name] = sums.get(name, 0) + value.double()
        finally:
            self._module.train()
        totals = dict(zip(sums, read_numbers(list(sums.values())), strict=True))
        units = sum(count_units(self._objective, batch) for batch in micro_batches)
        return EvalResult(totals.pop(LOSS), units, totals)

    def forward_hashes(self, micro_batch: MicroBatch) -> dict[str, int]:
        with hash_forward([self._module], self.device) as hashes:
            hashes.add(LOSS, self._objective.loss_sum(self._module, micro_batch))
        return hashes.read()

    @contextmanager
    def _evaluation_weights(self) -> Iterator[None]:
        """Use the weights that the optimizer evaluates with, in the run's precision."""
        replaced = any(map(has_evaluation_mode, self._optimizers))
        with self._spec.evaluating(self._optimizers):
            if replaced:
                self._round()
            yield
        if replaced:
            self._round()

    def shards(self) -> list[Shard]:
        shards = [
            _shard(WEIGHT, name, parameter) for name, parameter in (self._parameters | self._frozen).items()
        ]
        if self._has_masters:
            shards += [_shard(MASTER, name, master) for name, master in self._masters.items()]
        return shards + list(self._moments())

    def _moments(self) -> Iterator[Shard]:
        """Optimizer state that exists: optimizers create it in their first step."""
        names = {master: name for name, master in self._masters.items()}
        for optimizer in self._optimizers:
            for master, state in optimizer.state.items():
                for kind, tensor in state_tensors(self._states(optimizer), state):
                    yield _shard(kind, names[master], tensor)

    def replica_sets(self) -> list[ReplicaSet]:
        return []

    def scalars(self) -> dict[str, object]:
        scalars: dict[str, object] = {}
        scalars |= number_scalars(
            (
                (self._states(optimizer), optimizer.state.get(master, {}))
                for optimizer in self._optimizers
                for group in optimizer.param_groups
                for master in group["params"]
            ),
            (group for optimizer in self._optimizers for group in optimizer.param_groups),
        )
        if self._scaler:
            scalars[LOSS_SCALER] = self._scaler.state_dict()
        return scalars

    @torch.no_grad()
    def load(self, reader: StateReader) -> None:
        continues = has_optimizer_state(reader, map(self._states, self._optimizers))
        targets = [_shard(WEIGHT, name, parameter) for name, parameter in self._frozen.items()]
        for name, master in self._masters.items():
            targets.append(_shard(master_or_weight_key(reader, name).state, name, master))
        if continues:
            self._create_states(reader)
        else:
            for optimizer in self._optimizers:
                optimizer.state.clear()
        reader.read(targets + list(self._moments()))
        self._round()
        saved = reader.scalars.get(LOSS_SCALER)
        if self._scaler and isinstance(saved, dict):
            self._scaler.load_state_dict(saved)

    def _states(self, optimizer: torch.optim.Optimizer) -> StateLayout:
        return self._spec.states(self._plan.config.optim, self._spec.group_kind(optimizer.defaults))

    def _create_states(self, reader: StateReader) -> None:
        """Create the states that ``reader`` has, with its numbers; tensors are zero until they are read."""
        numbers, names = numbers_of(reader), {master: name for name, master in self._masters.items()}
        for optimizer in self._optimizers:
            states = self._states(optimizer)
            optimizer.state.clear()
            for group in optimizer.param_groups:
                for master in group["params"]:
                    whole = whole_state_tensors(reader, states, names[master])
                    optimizer.state[master] = {
                        **create_state(states, optimizer, group, master, numbers),
                        **{name: tensor.to(master.device) for name, tensor in whole.items()},
                    }
            restore_group_numbers(optimizer, states, numbers)

    def close(self) -> None:
        self._module, self._optimizers = nn.Module(), []
        self._parameters, self._masters, self._frozen = {}, {}, {}


def _shard(state: str, name: str, tensor: torch.Tensor) -> Shard:
    shape = tuple(tensor.shape)
    return Shard(TensorKey(state, name), shape, Box.whole(shape), tensor.detach())


def _cast(module: nn.Module, plan: RunPlan) -> nn.Module:
    """Cast weights to the run's precision.

    Buffers of transformers' models stay as they are, because rotary frequencies are too imprecise in 16 bits.
    ``model.target`` is converted with its buffers, since its code may combine them with its weights.
    """
    dtype = DTYPES[plan.config.precision.name]
    if plan.config.model.target is not None:
        return module.to(dtype)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return module
