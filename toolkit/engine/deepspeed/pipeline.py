"""DeepSpeed's pipeline, ZeRO 0 and 1: the blocks of a family's model spread over ranks, micro-batches one behind the other (1F1B).

Pipeline peers get the same micro-batches. The first stage uses their tokens and the last one their labels; all count their units, so
that no rank needs to be told by what the loss is divided, and take the positions in documents that are kept apart.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from toolkit.checkpoint.shard import Box, Reader, Shard
from toolkit.engine import seeding
from toolkit.engine.copies import together
from toolkit.engine.deepspeed import compat, copies, state
from toolkit.engine.deepspeed import load as moving
from toolkit.engine.deepspeed import pipeline_compat as mends
from toolkit.engine.optimizers import parameter_groups
from toolkit.engine.protocol import Copies, EvalResult, MicroBatch, Objective, StepResult, StepSettings
from toolkit.monitor.step_parts import UNRECORDED, Recorder
from toolkit.plan.types import Device, RunPlan


class DeepSpeedPipelineEngine:
    """One rank of a pipeline. Every method but ``shards``, ``scalars`` and ``close`` is collective."""

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
        self._at = plan.axes.coordinates(rank)
        self.device = (
            torch.device("cuda", local_rank) if plan.world.device is Device.CUDA else torch.device("cpu")
        )
        deepspeed = compat.load(plan.world.device, local_rank)
        from toolkit.engine.deepspeed import pipeline_parts as parts
        from toolkit.engine.deepspeed.pipeline_module import LastLoss, Pipeline

        self._loss = LastLoss(objective, self.device)
        self._module = Pipeline(plan, self.device, self._loss)
        groups = parameter_groups(self._module, plan.config.optim)
        settings = copy.deepcopy(dict(plan.deepspeed))  # DeepSpeed writes into what it is given
        self._ds, *_ = deepspeed.initialize(
            model=self._module, model_parameters=groups, config=settings, dist_init_required=False
        )
        self._places = {
            parameter: state.Place(name, tuple(parameter.shape), Box.whole(tuple(parameter.shape)))
            for parameter, name in self._module.names.items()
        }
        compat.divide_loss_scale(self._ds.optimizer, plan.axes.data)
        self._settle_loss_scale = compat.grow_loss_scale_after_step(self._ds.optimizer)
        self._norm = (
            mends.norm_of_all_stages(self._ds)
            if plan.config.zero.stage == 0
            else self._ds.get_global_grad_norm
        )
        mends.keep_no_times(self._ds)
        parts.tell(self._ds, recorder)
        self._module.layer.register_forward_pre_hook(self._reseed)
        self._step = self._micro_batch = 0
        self._shape: torch.Size | None = None  # of the tokens that went through last
        self._module.train()

    def train_step(self, micro_batches: Sequence[MicroBatch], settings: StepSettings) -> StepResult:
        self._expect(micro_batches)
        if len(micro_batches) != self._ds.micro_batches:  # a batch ramp
            mends.set_accumulation(self._ds, len(micro_batches))
        for group in self._ds.optimizer.param_groups:
            group["lr"] = settings.lr
        units = int(self._sum_over_data(sum(self._objective.units(batch) for batch in micro_batches)))
        # DeepSpeed averages over micro-batches and data ranks; the loss is a sum over the global batch / its units.
        self._loss.begin(len(micro_batches) * self._plan.axes.data / max(units, 1))
        self._step, self._micro_batch = settings.step, 0
        loss_scale = compat.loss_scale(self._ds.optimizer, self._plan.axes.data)
        with self._recorder.schedule():
            self._ds.train_batch((batch["input_ids"], batch) for batch in micro_batches)
        self._settle_loss_scale()
        skipped = not self._ds.was_step_applied()
        return StepResult(
            loss=self._sum(self._loss.sum) / max(units, 1),
            grad_norm=math.inf if skipped else float(self._norm()),
            tokens=units,
            skipped=skipped,
            loss_scale=loss_scale,
        )

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        self._expect(micro_batches)
        self._loss.begin(1.0)
        samples = ((batch["input_ids"], batch) for batch in micro_batches)
        try:
            with seeding.unchanged(self.device):
                self._ds.eval_batch(
                    samples, reduce_output=None, bcast_loss=False, num_micro_batches=len(micro_batches)
                )
        finally:
            self._module.train()
        units = self._sum_over_data(sum(self._objective.units(batch) for batch in micro_batches))
        return EvalResult(loss_sum=self._sum(self._loss.sum), tokens=int(units))

    def shards(self) -> list[Shard]:
        """A tied weight and its moments come from the first stage, which holds the same as the last."""
        repeated = {
            self._places[parameter].name
            for parameter in self._places
            if getattr(parameter, "ds_pipe_replicated", False)
        }
        return [
            shard
            for shard in moving.shards(self._ds.optimizer, self._partitions())
            if shard.key.name not in repeated
        ]

    def copies(self) -> list[Copies]:
        axes, rank = self._plan.axes, self._plan.axes.rank(self._at)
        tied = [parameter for parameter, _ in self._module.get_tied_weights_and_groups()]
        found = list(copies.weights(self._places, axes, rank, tied))
        if self._plan.config.zero.stage == 0:
            found += copies.state(
                self._ds.optimizer, self._partitions(), axes, rank, stage=0, device=self.device
            )
        return together(found)

    def scalars(self) -> dict[str, object]:
        return moving.scalars(self._ds.optimizer, self._partitions(), self._plan.axes.data)

    def load(self, reader: Reader) -> None:
        partitions = self._partitions()
        moving.load(self._ds.optimizer, partitions, reader, self._plan.axes.data)
        moving.publish(self._ds.optimizer, partitions)

    def close(self) -> None:
        self._ds.destroy()
        mends.forget_step(self._ds)
        mends.forget_grid()
        compat.forget_axes()
        self._places = {}
        del self._ds, self._module, self._norm

    def _partitions(self) -> list[state.Partition]:
        return state.partitions(
            self._ds.optimizer, self._places, rank=self._at.data, ranks=self._plan.axes.data
        )

    def _expect(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Before a step. Stages tell each other the shape of activations once, and keep buffers of it."""
        shape, *others = {batch["input_ids"].shape for batch in micro_batches}
        assert not others, f"micro-batches of one step have one shape, not {[shape, *others]}"
        if shape != self._shape:
            self._ds.reset_activation_shape()
            self._shape = shape
        self._module.layer.positions = iter([batch.get("position_ids") for batch in micro_batches])

    def _reseed(self, layer: nn.Module, _: object) -> None:
        """Before each micro-batch of training. Its backward, which runs among forwards of others, draws nothing: recomputed
        blocks get the random state that they had."""
        if layer.training:
            seeding.reseed(self._plan.config.train.seed, self._step, self._at, self._micro_batch)
            self._micro_batch += 1

    def _sum(self, value: torch.Tensor) -> float:
        """Over all ranks: of losses, which are zero everywhere but on last stages."""
        total = value.clone()
        dist.all_reduce(total)
        return float(total)

    def _sum_over_data(self, value: int) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self._ds.grid.get_data_parallel_group())
        return float(total)
