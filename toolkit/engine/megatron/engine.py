"""Optimizer steps through Megatron-core's schedules.

This uses Megatron-core's model, schedules, data-parallel buffers and optimizers. Its training loop, data
loaders, schedulers and checkpoints are not used: the toolkit has its own, which are the same for every
engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from toolkit.checkpoint.scalars import LOSS_SCALER, OPTIMIZER_STEP
from toolkit.checkpoint.shard import Reader, Shard
from toolkit.data.evaluation import IGNORED
from toolkit.engine import seeding
from toolkit.engine.megatron import cpu, patches
from toolkit.engine.optimizers import has_optimizer_state, master_or_weight_key
from toolkit.engine.precision import LossScaler
from toolkit.engine.protocol import (
    EvalResult,
    MicroBatch,
    Objective,
    ReplicaSet,
    StepResult,
    StepSettings,
    rank_device,
)
from toolkit.engine.replicas import group_replicas
from toolkit.monitor.parts import BACKWARD, FORWARD, OPTIMIZER, UNRECORDED, Recorder
from toolkit.plan.types import RunPlan

Output = tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]


class MegatronEngine:
    """One rank. Every method but ``shards`` and ``scalars`` is collective."""

    def __init__(
        self,
        plan: RunPlan,
        objective: Objective,
        *,
        rank: int,
        local_rank: int,
        recorder: Recorder = UNRECORDED,
    ) -> None:
        assert plan.megatron is not None, "the plan of a megatron run has Megatron-core's settings"
        cpu.enable()
        patches.apply()
        from toolkit.engine.megatron.build import MegatronModel, initialize_process_groups
        from toolkit.engine.megatron.model import check_transformer_engine_settings

        check_transformer_engine_settings(plan)
        self._plan, self._objective, self._recorder = plan, objective, recorder
        self._at = plan.axes.coordinates(rank)
        self.device = rank_device(plan.world.device, local_rank)
        initialize_process_groups(plan)
        self._model = MegatronModel(plan)
        self._scaler = LossScaler.from_config(plan.config.precision)
        if self._scaler is not None:
            self._model.use_loss_scaler(self._scaler)

    def train_step(self, micro_batches: Sequence[MicroBatch], settings: StepSettings) -> StepResult:
        model = self._model
        with self._recorder.part(OPTIMIZER):
            model.set_learning_rate(settings.lr)
            for chunk in model.chunks:
                chunk.zero_grad_buffer()
            model.optimizer.zero_grad()
        units = int(
            self._sum(
                sum(self._objective.units(batch) for batch in micro_batches) if self._counts_units() else 0
            )
        )
        # Undo Megatron-core's mean over micro-batches and data ranks; divide by the units of the global
        # batch.
        weight = len(micro_batches) * self._plan.axes.data / max(units, 1)
        with self._recorder.schedule(), self._recorder.part(BACKWARD):  # nested parts are timed as forward
            loss_sum = self._forward_backward(micro_batches, weight, settings.step)
        balance = self._router_loss(len(micro_batches))
        with self._recorder.part(OPTIMIZER):
            scale = self._scaler.cur_scale if self._scaler else 1.0
            applied, grad_norm, _ = model.optimizer.step()
            if self._scaler:
                self._scaler.update(not applied)
        return StepResult(
            loss=self._sum(loss_sum) / max(units, 1) + balance,
            grad_norm=float(grad_norm) if applied else torch.inf,
            tokens=units,
            skipped=not applied,
            loss_scale=scale,
        )

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        for chunk in self._model.chunks:
            chunk.eval()
        try:
            with torch.no_grad(), seeding.preserve_rng_state(self.device):
                loss_sum = self._forward_backward(self._pad_rounds(micro_batches), None, 0)
        finally:
            for chunk in self._model.chunks:
                chunk.train()
        units = sum(self._objective.units(batch) for batch in micro_batches) if self._counts_units() else 0
        return EvalResult(loss_sum=self._sum(loss_sum), tokens=int(self._sum(units)))

    def shards(self) -> list[Shard]:
        self._model.wait_for_weights()
        state = self._model.state
        return [*state.weights(), *state.master_weights(), *state.moments()]

    def replica_sets(self) -> list[ReplicaSet]:
        from toolkit.engine.megatron import replicas

        self._model.wait_for_weights()
        state, rank = self._model.state, self._plan.axes.rank(self._at)
        return group_replicas(
            [
                *replicas.weights(state, self._plan.axes, rank),
                *replicas.optimizer_state(state, rank, self.device),
            ]
        )

    def scalars(self) -> dict[str, object]:
        found: dict[str, object] = {}
        if (step := self._model.optimizer_step()) is not None:
            found[OPTIMIZER_STEP] = step
        if self._scaler:
            found[LOSS_SCALER] = self._scaler.state_dict()
        return found

    @torch.no_grad()
    def load(self, reader: Reader) -> None:
        state = self._model.state
        self._model.wait_for_weights()
        continues = has_optimizer_state(reader, self._model.state_names)
        step = cast(int, reader.scalars.get(OPTIMIZER_STEP, 0))
        self._model.reset_state(step if continues else None)
        for local in state.parameters:
            local.tensor.zero_()  # for rows of the padded vocabulary
        targets = [
            replace(shard, key=master_or_weight_key(reader, shard.key.name))
            for shard in (*state.weights(), *state.master_weights())
        ]
        for master in state.masters:
            master.tensor.detach().zero_()
        reader.read(targets + state.moments())
        saved = reader.scalars.get(LOSS_SCALER)
        if self._scaler and isinstance(saved, dict):
            self._scaler.load_state_dict(saved)

    def close(self) -> None:
        from toolkit.engine.megatron.build import destroy_process_groups

        self._model.release()
        del self._model
        gc.collect()  # modules and groups reference each other in cycles
        destroy_process_groups()

    def _forward_backward(
        self, micro_batches: Sequence[MicroBatch], weight: float | None, step: int
    ) -> torch.Tensor:
        """Run forward, and backward if there is a ``weight`` of the loss.

        Returns the sum of this rank's losses, fp64; zero if another rank of the model has them.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        chunks = self._model.chunks
        number_iterators = [iter(range(len(micro_batches))) for _ in chunks]

        def forward(numbers: Iterator[int], chunk: Any) -> Output:
            with self._recorder.part(FORWARD):
                number = next(numbers)
                if weight is not None and self._model.uses_dropout:
                    self._seed_micro_batch(step, number, number_iterators.index(numbers))
                batch = self._model.slice_for_context_rank(micro_batches[number])
                labels = batch["labels"]
                losses = chunk(
                    batch["input_ids"], batch["position_ids"], batch.get("attention_mask"), labels=labels
                )

            def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                with self._recorder.part(FORWARD):
                    total = (output.float() * (labels != IGNORED)).sum()
                    return total * (weight or 0.0), total.detach().double()

            return losses, loss

        several = len(chunks) > 1
        sums = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=number_iterators if several else number_iterators[0],
            model=chunks if several else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=self._plan.config.train.sequence_length,
            micro_batch_size=len(micro_batches[0]["input_ids"]),
            forward_only=weight is None,
        )
        mine = (
            torch.stack(sums).sum() if sums and self._at.tensor == 0 else torch.zeros((), dtype=torch.float64)
        )
        return mine.to(self.device)

    def _router_loss(self, micro_batches: int) -> float:
        """The routers' load-balancing losses times their coefficient, averaged over all micro-batches.

        Megatron-core adds their gradients itself. Each rank stores the losses of its own layers and part of
        each sequence.
        """
        from megatron.core.transformer.moe import moe_utils

        assert self._plan.megatron is not None
        coefficient = float(self._plan.megatron["transformer"].get("moe_aux_loss_coeff", 0.0))
        if not coefficient:
            return 0.0
        tracked = moe_utils.get_moe_layer_wise_logging_tracker().get("load_balancing_loss")
        total = self._sum(
            tracked["values"].sum() if tracked is not None else 0.0
        )  # a stage may have no layers
        moe_utils.clear_aux_losses_tracker()
        return coefficient * total / (micro_batches * self._plan.axes.data)

    def _pad_rounds(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Pad with micro-batches without labels: the interleaved schedule needs a multiple of the stages."""
        found = list(micro_batches)
        stages = self._plan.axes.pipeline if len(self._model.chunks) > 1 else 1
        while len(found) % stages:
            found.append({**found[0], "labels": torch.full_like(found[0]["labels"], IGNORED)})
        return found

    def _seed_micro_batch(self, step: int, micro_batch: int, chunk: int) -> None:
        """Seed dropout by the position in the run.

        Tensor ranks share the random state of what they all compute, and have different states for what they
        divide; Megatron-core derives both from this seed.
        """
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        at = self._at
        seed = self._plan.config.train.seed
        model_parallel_cuda_manual_seed(
            seeding.derive_seed(seed, step, micro_batch, chunk, at.data, at.pipeline, at.context)
        )

    def _counts_units(self) -> bool:
        """Whether this rank counts units for its peers with the same micro-batches."""
        return (self._at.tensor, self._at.context, self._at.pipeline) == (0, 0, 0)

    def _sum(self, value: torch.Tensor | float) -> float:
        """Sum over all ranks."""
        total = torch.as_tensor(value, dtype=torch.float64, device=self.device).clone()
        dist.all_reduce(total)
        return float(total)
