"""ZeRO 0-3 through DeepSpeed, with a tensor, a context or an expert axis, behind the same seam as ``local``.

Of DeepSpeed this uses partitioning, collectives, offload and the optimizer kernels. Its launcher, data loader, schedulers,
monitors and checkpoints stay unused: those are this toolkit's own, and the same for every engine.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from toolkit.checkpoint.shard import Reader, Shard
from toolkit.config.schema import OptimizerName
from toolkit.config.schema import Place as Where
from toolkit.engine import seeding
from toolkit.engine.copies import together
from toolkit.engine.deepspeed import compat, copies, gradients, state
from toolkit.engine.deepspeed import context_parallel as context
from toolkit.engine.deepspeed import load as moving
from toolkit.engine.deepspeed.build import build
from toolkit.engine.protocol import LOSS, Copies, EvalResult, MicroBatch, Objective, StepResult, StepSettings
from toolkit.monitor.step_parts import BACKWARD, FORWARD, OPTIMIZER, UNRECORDED, Recorder
from toolkit.plan.types import Device, RunPlan


class DeepSpeedEngine:
    """One rank of a ZeRO run. Every method but ``shards``, ``scalars`` and ``close`` is collective.

    ZeRO's ranks are those that compute different parts of the loss: data and context ranks. Tensor ranks compute the same loss.
    """

    def __init__(
        self,
        plan: RunPlan,
        objective: Objective,
        *,
        rank: int,
        local_rank: int,
        recorder: Recorder = UNRECORDED,
    ) -> None:
        assert plan.deepspeed is not None, "the plan of a deepspeed run has DeepSpeed's dictionary"
        self._plan, self._objective, self._recorder = plan, objective, recorder
        self._stage = plan.config.zero.stage
        self._rank, self._ranks = rank // plan.axes.tensor, plan.axes.size // plan.axes.tensor  # among ZeRO's
        self._coordinates = plan.axes.coordinates(rank)
        self.device = (
            torch.device("cuda", local_rank) if plan.world.device is Device.CUDA else torch.device("cpu")
        )
        deepspeed = compat.load(plan.world.device, local_rank)
        settings = copy.deepcopy(dict(plan.deepspeed))  # DeepSpeed writes into what it is given
        built = build(deepspeed, plan, settings, self.device, rank=rank)
        module, self._places = built.module, built.places
        self._ds, *_ = deepspeed.initialize(
            model=module, model_parameters=built.groups, config=settings, dist_init_required=False
        )
        # Models of families/ use every parameter in every micro-batch; of any other model nothing is known.
        self._reach = plan.shape is None and self._stage in (1, 2)
        self._begin_backward = (
            gradients.in_order(self._ds.optimizer) if self._reach and self._stage == 2 else lambda: None
        )
        self._accumulation = int(self._ds.gradient_accumulation_steps())
        if self._stage == 0:
            self._ds.clip_fp32_gradients = lambda: None  # _clip_stage0 has done it
            compat.make_skippable(self._ds.optimizer)
        compat.divide_loss_scale(self._ds.optimizer, self._ranks)
        self._settle_loss_scale = compat.grow_loss_scale_after_step(self._ds.optimizer)
        self._parts = list(module.modules())[1:]
        module.train()

    def train_step(self, micro_batches: Sequence[MicroBatch], settings: StepSettings) -> StepResult:
        self._accumulate(len(micro_batches))
        for group in self._ds.optimizer.param_groups:
            group["lr"] = settings.lr
        micro_batches = self._mine(micro_batches)
        units = int(self._sum_over_ranks(sum(self._objective.units(batch) for batch in micro_batches)))
        # DeepSpeed averages gradients over ZeRO's ranks; the loss is a sum over the global batch / its units.
        weight = self._ranks / max(units, 1)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._recorder.part(OPTIMIZER):
            gradients.forget(self._ds.optimizer)
        for number, batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            seeding.reseed(self._plan.config.train.seed, settings.step, self._coordinates, number)
            # Told, not counted: DeepSpeed's own counter runs over all steps and is out of phase once a batch ramp has
            # changed the accumulation.
            self._ds.set_gradient_accumulation_boundary(last)
            with self._recorder.part(FORWARD):
                loss = self._objective.loss_sum(self._ds, batch)
                loss_sum += loss.detach()
            with self._recorder.part(BACKWARD):
                if self._reach:
                    loss = gradients.reach(loss, self._ds.module)
                self._begin_backward()
                with gradients.kept_of_earlier(self._ds.optimizer, last):
                    self._ds.backward(loss * weight, scale_wrt_gas=False)
        with self._recorder.part(OPTIMIZER):
            grad_norm = self._clip_stage0() if self._stage == 0 else None
            if grad_norm is not None:
                self._ds.optimizer.overflow = not (
                    math.isfinite(grad_norm) and self._muon_gradients_are_finite()
                )
            loss_scale = self._loss_scale()
            if grad_norm is not None and self._plan.config.optim.name is OptimizerName.muon:
                with compat.muon_update_norms() as updates:
                    self._ds.step()
                grad_norm = math.hypot(grad_norm, *map(float, updates))
            else:
                self._ds.step()
            self._settle_loss_scale()
            if self._stage == 3:
                compat.unwind(self._parts)
        skipped = not self._ds.was_step_applied()
        grad_norm = float(self._ds.get_global_grad_norm()) if grad_norm is None else grad_norm
        return StepResult(
            loss=self._sum_over_ranks(loss_sum) / max(units, 1),
            grad_norm=math.inf if skipped else grad_norm,
            tokens=units,
            skipped=skipped,
            loss_scale=loss_scale,
        )

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        sums: dict[str, torch.Tensor] = {}
        units = 0
        # The module rather than DeepSpeed's engine: a forward of the engine counts as the start of a micro-step.
        module = self._ds.module
        module.eval()
        try:
            with torch.no_grad(), seeding.unchanged(self.device):
                for batch in self._mine(micro_batches):
                    for name, value in self._objective.eval_sums(module, batch).items():
                        sums[name] = sums.get(name, 0) + value.double()
                    units += self._objective.units(batch)
        finally:
            module.train()
            if self._stage == 3:
                moving.release(self._ds.optimizer)
                moving.regather(self._ds.optimizer)
        whole = {name: self._sum_over_ranks(value) for name, value in sums.items()}
        return EvalResult(whole.pop(LOSS), int(self._sum_over_ranks(units)), whole)

    def shards(self) -> list[Shard]:
        return moving.shards(self._ds.optimizer, self._partitions()) + self._frozen()

    def copies(self) -> list[Copies]:
        axes, rank = self._plan.axes, self._plan.axes.rank(self._coordinates)
        found = list(copies.weights(self._places, axes, rank)) if self._stage < 3 else []
        if (self._stage == 0 or axes.tensor > 1) and self._plan.config.offload.optimizer is not Where.nvme:
            found += copies.state(
                self._ds.optimizer, self._partitions(), axes, rank, stage=self._stage, device=self.device
            )
        return together(found)

    def scalars(self) -> dict[str, object]:
        return moving.scalars(self._ds.optimizer, self._partitions(), self._ranks)

    def load(self, reader: Reader) -> None:
        if self._stage == 3:
            moving.release(self._ds.optimizer)
        partitions = self._partitions()
        moving.load(self._ds.optimizer, partitions, reader, self._ranks)
        if frozen := self._frozen():
            reader.read(frozen)
        if self._stage == 3:
            compat.forget_secondary_partitions(self._ds.module)
        moving.publish(self._ds.optimizer, partitions)

    def close(self) -> None:
        module = self._ds.module
        self._ds.destroy()
        compat.unwind([module, *self._parts])
        if self._stage == 3:
            compat.empty(self._ds)
        compat.restore_linear()
        compat.forget_axes()
        del self._ds, self._places

    def _mine(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Of each sequence, this rank's piece."""
        ranks = self._plan.axes.context
        if ranks == 1:
            return micro_batches
        return [context.piece(batch, ranks=ranks, index=self._coordinates.context) for batch in micro_batches]

    def _partitions(self) -> list[state.Partition]:
        return state.partitions(self._ds.optimizer, self._places, rank=self._rank, ranks=self._ranks)

    def _frozen(self) -> list[Shard]:
        return list(state.frozen(self._ds.module, self._places, rank=self._rank, ranks=self._ranks))

    def _accumulate(self, micro_batches: int) -> None:
        """Take a new accumulation, in a batch ramp."""
        if micro_batches == self._accumulation:
            return
        self._accumulation = micro_batches
        self._ds.set_train_batch_size(
            self._plan.batch.micro_batch * self._ds.dp_world_size * micro_batches
        )  # as DeepSpeed counts
        if hasattr(self._ds.optimizer, "gradient_accumulation_steps"):
            self._ds.optimizer.gradient_accumulation_steps = micro_batches  # a copy that DeepSpeed forgets

    def _muon_gradients_are_finite(self) -> bool:
        """Without ZeRO. Muon's matrices count in the reported norm with their updates, which exist only after the step."""
        gradients = [
            parameter.grad
            for parameter in self._places
            if parameter.grad is not None and getattr(parameter, "use_muon", False)
        ]
        return not gradients or bool(torch.nn.utils.get_total_norm(gradients).isfinite())

    def _clip_stage0(self) -> float:
        """Clip, and return the norm before. Without ZeRO DeepSpeed keeps to itself the norm that it clips by: it would be taken twice.

        The gradients are reduced by now and equal on all of ZeRO's ranks. Muon's matrices do not count here: their updates do.
        """
        gradients = [
            parameter.grad
            for parameter, place in self._places.items()
            if parameter.grad is not None and place.replica == 0 and not getattr(parameter, "use_muon", False)
        ]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._plan.axes.tensor > 1:
            squares = norm.double().square()  # of what no other tensor rank counts
            dist.all_reduce(squares)
            norm = (squares / self._ranks).sqrt()
        if self._ds.gradient_clipping() > 0:
            torch.nn.utils.clip_grads_with_norm_(self._places, self._ds.gradient_clipping(), norm)
        return float(norm)

    def _loss_scale(self) -> float:
        """The run's. It is 1 in fp32 and bf16."""
        return compat.loss_scale(self._ds.optimizer, self._ranks)

    def _sum_over_ranks(self, value: torch.Tensor | float) -> float:
        """Over ZeRO's ranks: tensor ranks have equal values."""
        total = torch.as_tensor(value, dtype=torch.float64, device=self.device).clone()
        dist.all_reduce(total)
        return float(total) / self._plan.axes.tensor
