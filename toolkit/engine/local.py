"""Plain torch in one process: the reference implementation that every other engine is compared with.

A step: sum of the losses of all micro-batches / their units -> fp32 gradients -> gradient norm -> clipping ->
update of the fp32 weights -> rounding to the run's precision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn

from toolkit.checkpoint.scalars import LOSS_SCALER, OPTIMIZER_STEP
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, Reader, Shard, TensorKey
from toolkit.config.schema import Precision
from toolkit.engine import seeding
from toolkit.engine.muon import Muon
from toolkit.engine.optimizers import (
    has_optimizer_state,
    master_or_weight_key,
    optimizer_state_names,
    torch_optimizers,
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
    rank_device,
)
from toolkit.models.build import build_model
from toolkit.monitor.parts import BACKWARD, FORWARD, OPTIMIZER, UNRECORDED, Recorder
from toolkit.plan.types import RunPlan


class LocalEngine:
    """Forward uses ``_parameters``, the optimizer updates ``_masters``; in fp32 they are the same tensors."""

    def __init__(
        self,
        plan: RunPlan,
        objective: Objective,
        *,
        rank: int = 0,
        local_rank: int = 0,
        recorder: Recorder = UNRECORDED,
    ) -> None:
        assert plan.axes.size == 1, f"the local engine is one process, the plan has {plan.axes.size} ranks"
        self._plan, self._objective, self._recorder = plan, objective, recorder
        self._at = plan.axes.coordinates(rank)
        self.device = rank_device(plan.world.device, local_rank)
        self._module = _cast(build_model(plan, self.device), plan)
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
        self._optimizers = torch_optimizers(self._masters, plan.config.optim)
        self._scaler = LossScaler.from_config(plan.config.precision)

    def train_step(self, micro_batches: Sequence[MicroBatch], settings: StepSettings) -> StepResult:
        units = sum(self._objective.units(batch) for batch in micro_batches)
        scale = self._scaler.cur_scale if self._scaler else 1.0
        loss_sum = self._accumulate(micro_batches, settings.step, scale / max(units, 1))
        with self._recorder.part(OPTIMIZER):
            gradients = [cast(torch.Tensor, master.grad) for master in self._masters.values()]
            for gradient in gradients:
                gradient.div_(scale)
            norm = torch.nn.utils.get_total_norm(gradients)
            skipped = not bool(norm.isfinite())  # checked before the update, which changes Muon's momentum
            grad_norm = torch.inf if skipped else float(self._update(norm, settings.lr))
            for parameter in (*self._masters.values(), *self._parameters.values()):
                parameter.grad = None
            if self._scaler:
                self._scaler.update(skipped)
        loss = float(loss_sum) / max(units, 1)
        return StepResult(loss=loss, grad_norm=grad_norm, tokens=units, skipped=skipped, loss_scale=scale)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], step: int, weight: float) -> torch.Tensor:
        """Accumulate ``weight`` times the gradient in the masters' ``grad``; return the loss sum, fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._recorder.part(OPTIMIZER):
            for master in self._masters.values():
                # Zero rather than None: an unused parameter still decays, as it does under ZeRO.
                master.grad = torch.zeros_like(master)
        for number, batch in enumerate(micro_batches):
            seeding.seed_micro_batch(self._plan.config.train.seed, step, self._at, number)
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
        if any(isinstance(optimizer, Muon) for optimizer in self._optimizers):
            for optimizer in self._optimizers:
                if isinstance(optimizer, Muon):
                    optimizer.prepare()
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
        sums: defaultdict[str, float] = defaultdict(float)
        self._module.eval()
        try:
            with seeding.preserve_rng_state(self.device):
                for batch in micro_batches:
                    for name, value in self._objective.eval_sums(self._module, batch).items():
                        sums[name] += float(value)
        finally:
            self._module.train()
        return EvalResult(
            sums.pop(LOSS), sum(self._objective.units(batch) for batch in micro_batches), dict(sums)
        )

    def shards(self) -> list[Shard]:
        found = [
            _shard(WEIGHT, name, parameter) for name, parameter in (self._parameters | self._frozen).items()
        ]
        if self._has_masters:
            found += [_shard(MASTER, name, master) for name, master in self._masters.items()]
        return found + list(self._moments())

    def _moments(self) -> Iterator[Shard]:
        """Optimizer state that exists: optimizers create it in their first step."""
        names = {master: name for name, master in self._masters.items()}
        for optimizer in self._optimizers:
            for master, state in optimizer.state.items():
                for kind in optimizer_state_names(optimizer.defaults):
                    if state.get(kind) is not None:
                        yield _shard(kind, names[master], state[kind])

    def replica_sets(self) -> list[ReplicaSet]:
        return []

    def scalars(self) -> dict[str, object]:
        found: dict[str, object] = {}
        steps = {
            int(state["step"])
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            if "step" in state
        }
        assert len(steps) <= 1, f"one optimizer, several step counts: {steps}"
        if steps:
            found[OPTIMIZER_STEP] = steps.pop()
        if self._scaler:
            found[LOSS_SCALER] = self._scaler.state_dict()
        return found

    @torch.no_grad()
    def load(self, reader: Reader) -> None:
        continues = has_optimizer_state(
            reader,
            (kind for optimizer in self._optimizers for kind in optimizer_state_names(optimizer.defaults)),
        )
        targets = [_shard(WEIGHT, name, parameter) for name, parameter in self._frozen.items()]
        for name, master in self._masters.items():
            targets.append(_shard(master_or_weight_key(reader, name).state, name, master))
        step = cast(int, reader.scalars.get(OPTIMIZER_STEP, 0))
        for optimizer in self._optimizers:
            optimizer.state.clear()
            if continues:
                for group in optimizer.param_groups:
                    for master in group["params"]:
                        for kind in optimizer_state_names(optimizer.defaults):
                            optimizer.state[master][kind] = torch.zeros_like(master, requires_grad=False)
                        if isinstance(optimizer, torch.optim.AdamW):
                            optimizer.state[master]["step"] = torch.tensor(float(step))
        reader.read(targets + list(self._moments()))
        self._round()
        saved = reader.scalars.get(LOSS_SCALER)
        if self._scaler and isinstance(saved, dict):
            self._scaler.load_state_dict(saved)

    def close(self) -> None:
        self._module, self._optimizers = nn.Module(), []
        self._parameters, self._masters, self._frozen = {}, {}, {}


def _shard(state: str, name: str, tensor: torch.Tensor) -> Shard:
    shape = tuple(tensor.shape)
    return Shard(TensorKey(state, name), shape, Box.whole(shape), tensor.detach())


def _cast(module: nn.Module, plan: RunPlan) -> nn.Module:
    """Cast weights to the run's precision.

    A family's buffers stay in fp32, because rotary frequencies are too imprecise in 16 bits. ``model.target``
    is converted with its buffers, since its code may combine them with its weights.
    """
    dtype = DTYPES[plan.config.precision.name]
    if plan.shape is None:
        return module.to(dtype)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module
