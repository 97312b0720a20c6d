"""ZeRO 0 to 3 through DeepSpeed, with tensor, context or expert parallelism.

This uses DeepSpeed's partitioning, collectives, offload and optimizer kernels. Its launcher, data loader,
schedulers, monitors and checkpoints are not used: the toolkit has its own, which are the same for every
engine.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from toolkit.checkpoint.shard import Shard, StateReader
from toolkit.engine import seeding
from toolkit.engine.compile import compile_model, gather_whole_layers
from toolkit.engine.deepspeed import context_parallel, host_reads, patches, replicas, state, unused_parameters
from toolkit.engine.deepspeed.build import build_deepspeed_model
from toolkit.engine.deepspeed.partitions import ZeroPartition, frozen_shards, group_states, read_partitions
from toolkit.engine.forward_hashes import hash_forward
from toolkit.engine.fp8 import use_fp8_linears
from toolkit.engine.optimizers import client_optimizer, spec_of
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
from toolkit.step_parts import BACKWARD, FORWARD, NULL_RECORDER, OPTIMIZER, Recorder


class DeepSpeedEngine:
    """One rank of a ZeRO run. Every method but ``shards``, ``scalars`` and ``close`` is collective.

    ZeRO partitions over the ranks that compute different parts of the loss: data and context ranks. Tensor
    ranks compute the same loss.
    """

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
        self._rank, self._ranks = rank // plan.axes.tensor, plan.axes.size // plan.axes.tensor  # of ZeRO
        self._coordinates = plan.axes.coordinates(rank)
        self.device = rank_device(plan.world.device, local_rank)
        deepspeed = patches.import_deepspeed(plan.world.device, local_rank)
        settings = copy.deepcopy(dict(plan.deepspeed))  # DeepSpeed modifies its configuration
        zero = settings["zero_optimization"]
        self._stage = zero["stage"]
        self._optimizer_on_nvme = zero.get("offload_optimizer", {}).get("device") == "nvme"
        self._muon = settings.get("optimizer", {}).get("type") == "Muon"
        self._spec = spec_of(plan)
        built = build_deepspeed_model(deepspeed, plan, settings, self.device, rank=rank)
        module, self._boxes = built.module, built.boxes
        if self._stage == 3:
            gather_whole_layers(module, plan)
        use_fp8_linears(module, plan)
        compile_model(module, plan)
        self._ds, *_ = deepspeed.initialize(
            model=module,
            optimizer=client_optimizer(plan),
            model_parameters=built.groups,
            config=settings,
            dist_init_required=False,
        )
        # Models of families/ use every parameter in every micro-batch; other models and tasks may not.
        users = plan.shape is None or plan.config.task.target is not None
        self._may_skip_parameters = users and self._stage in (1, 2)
        self._begin_backward = (
            unused_parameters.reduce_in_fixed_order(self._ds.optimizer)
            if self._may_skip_parameters and self._stage == 2
            else lambda: None
        )
        self._accumulation = int(self._ds.gradient_accumulation_steps())
        if self._stage == 0:
            self._ds.clip_fp32_gradients = lambda: None  # _clip_stage0 clips
            patches.allow_skipping_steps(self._ds.optimizer)
        patches.divide_loss_scale(self._ds.optimizer, self._ranks)
        self._grow_loss_scale = patches.defer_loss_scale_growth(self._ds.optimizer)
        self._read = StepRead()
        host_reads.read_norm_once(self._ds.optimizer, self._read, self._stage)
        host_reads.order_streams_on_device(self._ds.optimizer)
        self._submodules = list(module.modules())[1:]
        module.train()

    def train_step(self, micro_batches: Sequence[MicroBatch], settings: StepSettings) -> StepResult:
        self._set_accumulation(len(micro_batches))
        for group in self._ds.optimizer.param_groups:
            group["lr"] = settings.lr
        total_units = self._sum_units(micro_batches)
        micro_batches = self._slice_sequences(micro_batches)
        # Undo DeepSpeed's mean over ZeRO's ranks; divide by the units of the global batch.
        weight = loss_weight(self._ranks, total_units)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._recorder.part(OPTIMIZER):
            unused_parameters.zero_gradient_buffers(self._ds.optimizer)
        for number, batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            seeding.seed_micro_batch(self._plan.config.train.seed, settings.step, self._coordinates, number)
            # Set explicitly, because DeepSpeed's counter runs over all steps and is out of phase after a
            # batch ramp.
            self._ds.set_gradient_accumulation_boundary(last)
            if self._stage > 0:
                # DeepSpeed's forward does this too, but a task may call parts of the model instead. Without
                # it ZeRO 3 loses the gradients of all micro-batches but the last.
                self._ds.optimizer.clear_backward_seen_flag()
            with self._recorder.part(FORWARD):
                loss = self._objective.loss_sum(self._ds, batch)
                loss_sum += loss.detach()
            with self._recorder.part(BACKWARD):
                if self._may_skip_parameters:
                    loss = unused_parameters.connect_all_parameters(loss, self._ds.module)
                self._begin_backward()
                with unused_parameters.keep_earlier_gradients(self._ds.optimizer, last):
                    self._ds.backward(loss * weight, scale_wrt_gas=False)
        with self._recorder.part(OPTIMIZER):
            self._read.begin(lambda: [self._sum_over_ranks(loss_sum), total_units])
            grad_norm = self._clip_stage0() if self._stage == 0 else None
            loss_scale = self._loss_scale()
            if grad_norm is not None and self._muon:
                with patches.capture_muon_update_norms() as updates:
                    self._ds.step()
                grad_norm = math.hypot(grad_norm, *read_numbers(updates))
            else:
                self._ds.step()
            self._grow_loss_scale()
            if self._stage == 3:
                patches.remove_from_module_stack(self._submodules)
        skipped = not self._ds.was_step_applied()
        grad_norm = float(self._ds.get_global_grad_norm()) if grad_norm is None else grad_norm
        loss_total, units = self._read.values()
        return StepResult(
            loss=loss_total / max(units, 1),
            grad_norm=math.inf if skipped else grad_norm,
            tokens=int(units),
            skipped=skipped,
            loss_scale=loss_scale,
        )

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        sums: dict[str, torch.Tensor] = {}
        units = self._sum_units(micro_batches)
        # Not DeepSpeed's engine, whose forward counts as the start of a micro-step.
        module = self._ds.module
        module.eval()
        try:
            with (
                torch.no_grad(),
                seeding.preserve_rng_state(self.device),
                self._spec.evaluating([self._ds.optimizer] if self._stage == 0 else []),
            ):
                for batch in self._slice_sequences(micro_batches):
                    for name, value in self._objective.eval_sums(module, batch).items():
                        sums[name] = sums.get(name, 0) + value.double()
        finally:
            module.train()
            self._release_gathered_parameters()
        tokens, *numbers = read_numbers([units, *map(self._sum_over_ranks, sums.values())])
        whole = dict(zip(sums, numbers, strict=True))
        return EvalResult(whole.pop(LOSS), int(tokens), whole)

    def forward_hashes(self, micro_batch: MicroBatch) -> dict[str, int]:
        module = self._ds.module
        (batch,) = self._slice_sequences([micro_batch])
        try:
            with hash_forward([module], self.device) as hashes:
                hashes.add(LOSS, self._objective.loss_sum(module, batch))
        finally:
            self._release_gathered_parameters()
        return hashes.read()

    def _release_gathered_parameters(self) -> None:
        """Release what a forward pass without a backward pass left gathered."""
        if self._stage == 3:
            state.partition_parameters(self._ds.optimizer)
            state.gather_persistent_parameters(self._ds.optimizer)

    def shards(self) -> list[Shard]:
        return state.shards(self._ds.optimizer, self._partitions()) + self._frozen()

    def replica_sets(self) -> list[ReplicaSet]:
        axes, rank = self._plan.axes, self._plan.axes.rank(self._coordinates)
        replicated = list(replicas.weights(self._boxes, axes, rank)) if self._stage < 3 else []
        if (self._stage == 0 or axes.tensor > 1) and not self._optimizer_on_nvme:
            replicated += replicas.optimizer_state(
                self._ds.optimizer, self._partitions(), axes, rank, stage=self._stage, device=self.device
            )
        return group_replicas(replicated)

    def scalars(self) -> dict[str, object]:
        return state.scalars(self._ds.optimizer, self._partitions(), self._ranks)

    def load(self, reader: StateReader) -> None:
        if self._stage == 3:
            state.partition_parameters(self._ds.optimizer)
        partitions = self._partitions()
        state.load(self._ds.optimizer, partitions, reader, self._ranks)
        if frozen := self._frozen():
            reader.read(frozen)
        if self._stage == 3:
            patches.drop_secondary_partitions(self._ds.module)
        state.update_weights(self._ds.optimizer, partitions)

    def close(self) -> None:
        module = self._ds.module
        self._ds.destroy()
        patches.remove_from_module_stack([module, *self._submodules])
        if self._stage == 3:
            patches.release_zero3_engine(self._ds)
        patches.restore_linear()
        patches.release_parallel_groups()
        del self._ds, self._boxes

    def _slice_sequences(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """This rank's slice of each sequence."""
        ranks = self._plan.axes.context
        if ranks == 1:
            return micro_batches
        return [
            context_parallel.slice_sequence(batch, ranks=ranks, index=self._coordinates.context)
            for batch in micro_batches
        ]

    def _partitions(self) -> list[ZeroPartition]:
        return read_partitions(
            self._ds.optimizer,
            self._boxes,
            partial(group_states, self._spec, self._plan.config.optim),
            rank=self._rank,
            ranks=self._ranks,
        )

    def _frozen(self) -> list[Shard]:
        return list(frozen_shards(self._ds.module, self._boxes, rank=self._rank, ranks=self._ranks))

    def _set_accumulation(self, micro_batches: int) -> None:
        """Change the number of micro-batches per step, in a batch ramp."""
        if micro_batches == self._accumulation:
            return
        self._accumulation = micro_batches
        patches.set_gradient_accumulation(self._ds, micro_batches)

    def _clip_stage0(self) -> float:
        """Clip and return the norm before clipping, which DeepSpeed does not expose without ZeRO.

        The gradients are already reduced and equal on all of ZeRO's ranks. Muon's matrices are left out of
        the norm, because their updates count, but their gradients have to be finite, too.
        """
        muon = [
            parameter.grad
            for parameter in self._boxes
            if parameter.grad is not None and getattr(parameter, "use_muon", False)
        ]
        gradients = [
            parameter.grad
            for parameter, parameter_box in self._boxes.items()
            if parameter.grad is not None
            and parameter_box.replica == 0
            and not getattr(parameter, "use_muon", False)
        ]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._plan.axes.tensor > 1:
            squares = norm.double().square()  # replica 0 only, so no parameter is counted twice
            dist.all_reduce(squares)
            norm = (squares / self._ranks).sqrt()
        if self._ds.gradient_clipping() > 0:
            torch.nn.utils.clip_grads_with_norm_(self._boxes, self._ds.gradient_clipping(), norm)
        checked = [torch.nn.utils.get_total_norm(muon)] if muon else []
        grad_norm, *others = self._read.norms(norm, *checked)
        self._ds.optimizer.overflow = not all(map(math.isfinite, (grad_norm, *others)))
        return grad_norm

    def _loss_scale(self) -> float:
        """Return the run's loss scale; 1 in fp32 and bf16."""
        return patches.run_loss_scale(self._ds.optimizer, self._ranks)

    def _sum_units(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Sum the units of whole micro-batches over ranks with different ones: an fp64 scalar."""
        counts = self._coordinates.context == 0
        units = sum(count_units(self._objective, batch) for batch in micro_batches) if counts else 0
        return self._sum_over_ranks(torch.full((), float(units), dtype=torch.float64, device=self.device))

    def _sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over ZeRO's ranks: tensor ranks have equal values."""
        total = value.clone()
        dist.all_reduce(total)
        return total / self._plan.axes.tensor
