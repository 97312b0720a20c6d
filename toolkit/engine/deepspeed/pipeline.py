"""DeepSpeed's 1F1B pipeline under ZeRO 0 and 1, for models of families.

All pipeline ranks get the same micro-batches. The first stage uses their tokens and the last stage their
labels; every stage counts their units, so that all know the loss denominator, and uses document positions if
there are any.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from toolkit.checkpoint.shard import Box, Shard, StateReader
from toolkit.engine import seeding
from toolkit.engine.deepspeed import host_reads, patches, replicas, state
from toolkit.engine.deepspeed.partitions import ParameterBox, ZeroPartition, group_states, read_partitions
from toolkit.engine.forward_hashes import hash_forward
from toolkit.engine.optimizers import client_optimizer, module_groups, spec_of
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
from toolkit.engine.replicas import group_replicas
from toolkit.engine.step_read import StepRead, loss_weight, read_numbers
from toolkit.plan.types import RunPlan
from toolkit.step_parts import NULL_RECORDER, Recorder


class DeepSpeedPipelineEngine:
    """One pipeline rank. Every method but ``shards``, ``scalars`` and ``close`` is collective."""

    def __init__(
        self,
        plan: RunPlan,
        objective: Objective,
        *,
        rank: int,
        local_rank: int,
        recorder: Recorder = NULL_RECORDER,
    ) -> None:
        assert plan.deepspeed is not None, "the plan of a deepspeed run has DeepSpeed's dictionary"
        self._plan, self._objective, self._recorder = plan, objective, recorder
        self._coordinates = plan.axes.coordinates(rank)
        self.device = rank_device(plan.world.device, local_rank)
        deepspeed = patches.import_deepspeed(plan.world.device, local_rank)
        from toolkit.engine.deepspeed.pipeline_module import (
            LastStageLoss,
            StagePipelineModule,
            time_instructions,
        )

        self._loss = LastStageLoss(objective, self.device)
        self._module = StagePipelineModule(plan, self.device, self._loss)
        groups = module_groups(self._module, plan.config.optim)
        settings = copy.deepcopy(dict(plan.deepspeed))  # DeepSpeed modifies its configuration
        self._stage = settings["zero_optimization"]["stage"]
        self._ds, *_ = deepspeed.initialize(
            model=self._module,
            optimizer=client_optimizer(plan),
            model_parameters=groups,
            config=settings,
            dist_init_required=False,
        )
        self._boxes = {
            parameter: ParameterBox(name, tuple(parameter.shape), Box.whole(tuple(parameter.shape)))
            for parameter, name in self._module.names.items()
        }
        patches.divide_loss_scale(self._ds.optimizer, plan.axes.data)
        self._grow_loss_scale = patches.defer_loss_scale_growth(self._ds.optimizer)
        self._read = StepRead()
        host_reads.read_norm_once(self._ds.optimizer, self._read, self._stage)
        self._norm = (
            patches.clip_by_pipeline_norm(self._ds, self._read)
            if self._stage == 0
            else self._ds.get_global_grad_norm
        )
        patches.disable_timers(self._ds)
        host_reads.skip_pipeline_loss(self._ds)
        time_instructions(self._ds, recorder)
        self._module.layer.register_forward_pre_hook(self._seed_micro_batch)
        self._step = self._micro_batch = 0
        self._shape: torch.Size | None = None  # of the last micro-batch
        self._module.train()

    def train_step(self, micro_batches: Sequence[MicroBatch], settings: StepSettings) -> StepResult:
        self._prepare_shapes(micro_batches)
        if len(micro_batches) != self._ds.micro_batches:  # a batch ramp
            patches.set_gradient_accumulation(self._ds, len(micro_batches))
        for group in self._ds.optimizer.param_groups:
            group["lr"] = settings.lr
        total_units = self._sum_units(micro_batches)
        # Undo DeepSpeed's mean over micro-batches and data ranks; divide by the units of the global batch.
        self._loss.begin(loss_weight(len(micro_batches) * self._plan.axes.data, total_units))
        self._read.begin(lambda: [self._sum(self._loss.sum), total_units])
        self._step, self._micro_batch = settings.step, 0
        loss_scale = patches.run_loss_scale(self._ds.optimizer, self._plan.axes.data)
        with self._recorder.schedule():
            self._ds.train_batch((batch["input_ids"], batch) for batch in micro_batches)
        self._grow_loss_scale()
        skipped = not self._ds.was_step_applied()
        loss, units = self._read.values()
        return StepResult(
            loss=loss / max(units, 1),
            grad_norm=math.inf if skipped else float(self._norm()),
            tokens=int(units),
            skipped=skipped,
            loss_scale=loss_scale,
        )

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        try:
            with seeding.preserve_rng_state(self.device):
                self._evaluate(micro_batches)
        finally:
            self._module.train()
        loss, units = read_numbers([self._sum(self._loss.sum), self._sum_units(micro_batches)])
        return EvalResult(loss_sum=loss, tokens=int(units))

    def forward_hashes(self, micro_batch: MicroBatch) -> dict[str, int]:
        with hash_forward([self._module], self.device) as hashes:
            self._evaluate([micro_batch])
            hashes.add(LOSS, self._loss.sum)
        return hashes.read()

    def _evaluate(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add the losses of the micro-batches to ``_loss.sum``, on the last stage."""
        self._prepare_shapes(micro_batches)
        self._loss.begin(1.0)
        samples = ((batch["input_ids"], batch) for batch in micro_batches)
        self._ds.eval_batch(
            samples, reduce_output=None, bcast_loss=False, num_micro_batches=len(micro_batches)
        )

    def shards(self) -> list[Shard]:
        """A tied weight and its moments are saved by the first stage; the last stage stores equal copies."""
        repeated = {
            self._boxes[parameter].name
            for parameter in self._boxes
            if getattr(parameter, "ds_pipe_replicated", False)
        }
        return [
            shard
            for shard in state.shards(self._ds.optimizer, self._partitions())
            if shard.key.name not in repeated
        ]

    def replica_sets(self) -> list[ReplicaSet]:
        axes, rank = self._plan.axes, self._plan.axes.rank(self._coordinates)
        tied = [parameter for parameter, _ in self._module.get_tied_weights_and_groups()]
        replicated = list(replicas.weights(self._boxes, axes, rank, tied))
        if self._stage == 0:
            replicated += replicas.optimizer_state(
                self._ds.optimizer, self._partitions(), axes, rank, stage=0, device=self.device
            )
        return group_replicas(replicated)

    def scalars(self) -> dict[str, object]:
        return state.scalars(self._ds.optimizer, self._partitions(), self._plan.axes.data)

    def load(self, reader: StateReader) -> None:
        partitions = self._partitions()
        state.load(self._ds.optimizer, partitions, reader, self._plan.axes.data)
        state.update_weights(self._ds.optimizer, partitions)

    def close(self) -> None:
        self._ds.destroy()
        patches.drop_last_step(self._ds)
        patches.drop_pipeline_grid()
        patches.release_parallel_groups()
        self._boxes = {}
        del self._ds, self._module, self._norm

    def _partitions(self) -> list[ZeroPartition]:
        return read_partitions(
            self._ds.optimizer,
            self._boxes,
            partial(group_states, spec_of(self._plan), self._plan.config.optim),
            rank=self._coordinates.data,
            ranks=self._plan.axes.data,
        )

    def _prepare_shapes(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set the micro-batches of a step, and reset the activation shapes that stages exchange only once."""
        shape, *others = {batch["input_ids"].shape for batch in micro_batches}
        assert not others, f"micro-batches of one step have one shape, not {[shape, *others]}"
        if shape != self._shape:
            self._ds.reset_activation_shape()
            self._shape = shape
        self._module.layer.micro_batches = iter(micro_batches)

    def _seed_micro_batch(self, layer: nn.Module, _: object) -> None:
        """Seed each training micro-batch before its forward.

        Its backward runs between forwards of other micro-batches but draws nothing: recomputed blocks restore
        their state.
        """
        if layer.training:
            seeding.seed_micro_batch(
                self._plan.config.train.seed, self._step, self._coordinates, self._micro_batch
            )
            self._micro_batch += 1

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum losses over all ranks; they are zero on all but the last stages."""
        total = value.clone()
        dist.all_reduce(total)
        return total

    def _sum_units(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Sum units over data ranks: an fp64 scalar."""
        units = sum(count_units(self._objective, batch) for batch in micro_batches)
        total = torch.full((), float(units), dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self._ds.grid.get_data_parallel_group())
        return total
