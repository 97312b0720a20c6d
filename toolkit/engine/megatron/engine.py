"""Optimizer steps through Megatron-core's schedules.

This uses Megatron-core's model, schedules, data-parallel buffers and optimizers. Its training loop, data
loaders, schedulers and checkpoints are not used: the toolkit has its own, which are the same for every
engine.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from toolkit.checkpoint.scalars import LOSS_SCALER, OPTIMIZER_STEP
from toolkit.checkpoint.shard import Shard, StateReader
from toolkit.data.evaluation import IGNORE_INDEX
from toolkit.engine import seeding
from toolkit.engine.forward_hashes import hash_forward
from toolkit.engine.megatron import cpu, patches
from toolkit.engine.optimizers import has_optimizer_state, master_or_weight_key
from toolkit.engine.precision import LossScaler
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
from toolkit.errors import PlanError, Problem
from toolkit.plan.kernels import TRANSFORMER_ENGINE
from toolkit.plan.megatron import needs_single_cuda_queue
from toolkit.plan.transformer_engine import install_command
from toolkit.plan.types import Device, RunPlan
from toolkit.step_parts import BACKWARD, FORWARD, NULL_RECORDER, OPTIMIZER, Recorder

Output = tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]


def import_megatron(device: Device) -> None:
    """Import and patch Megatron-core for ``device``, without a process group."""
    with patches.without_wandb():
        if device is Device.CPU:
            cpu.enable()
        patches.apply()
        import toolkit.engine.megatron.build  # noqa: F401


class MegatronEngine:
    """One rank. Every method but ``shards`` and ``scalars`` is collective."""

    def __init__(
        self,
        plan: RunPlan,
        objective: Objective,
        *,
        rank: int,
        local_rank: int,
        recorder: Recorder = NULL_RECORDER,
    ) -> None:
        assert plan.megatron is not None, "the plan of a megatron run has Megatron-core's settings"
        check_transformer_engine(plan)
        import_megatron(plan.world.device)
        if not needs_single_cuda_queue(plan.config, plan.world):
            warnings.filterwarnings(
                "ignore", r"When using .* it is recommended to set the environment variable CUDA_DEVICE_MAX"
            )
        from toolkit.engine.megatron.build import MegatronModel, initialize_process_groups

        self._plan, self._objective, self._recorder = plan, objective, recorder
        self._coordinates = plan.axes.coordinates(rank)
        self.device = rank_device(plan.world.device, local_rank)
        initialize_process_groups(plan)
        self._read = StepRead()
        self._model = MegatronModel(plan, self._read, self.device)
        self._router_coefficient = float(plan.megatron["transformer"].get("moe_aux_loss_coeff", 0.0))
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
        total_units = self._sum_units(micro_batches)
        # Undo Megatron-core's mean over micro-batches and data ranks; divide by the units of the global
        # batch.
        weight = loss_weight(len(micro_batches) * self._plan.axes.data, total_units)
        with self._recorder.schedule(), self._recorder.part(BACKWARD):  # nested parts are timed as forward
            loss_sum = self._forward_backward(micro_batches, weight, settings.step)
        router_loss = self._take_router_loss()
        self._read.begin(
            lambda: [
                self._sum(loss_sum),
                total_units,
                *(self._sum(value) for value in (router_loss,) if value is not None),
            ]
        )
        with self._recorder.part(OPTIMIZER):
            scale = self._scaler.cur_scale if self._scaler else 1.0
            applied, grad_norm, _ = model.optimizer.step()
            if self._scaler:
                self._scaler.update(not applied)
        loss, units, *router = self._read.values()
        balance = sum(router) * self._router_coefficient / (len(micro_batches) * self._plan.axes.data)
        return StepResult(
            loss=loss / max(units, 1) + balance,
            grad_norm=float(grad_norm) if applied else torch.inf,
            tokens=int(units),
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
        loss, units = read_numbers([self._sum(loss_sum), self._sum_units(micro_batches)])
        return EvalResult(loss_sum=loss, tokens=int(units))

    def forward_hashes(self, micro_batch: MicroBatch) -> dict[str, int]:
        with hash_forward(self._model.chunks, self.device) as hashes:
            hashes.add(LOSS, self._forward_backward(self._pad_rounds([micro_batch]), None, 0))
        return hashes.read()

    def shards(self) -> list[Shard]:
        self._model.wait_for_weights()
        state = self._model.state
        return [*state.weights(), *state.master_weights(), *state.moments()]

    def replica_sets(self) -> list[ReplicaSet]:
        from toolkit.engine.megatron import replicas

        self._model.wait_for_weights()
        state, rank = self._model.state, self._plan.axes.rank(self._coordinates)
        return group_replicas(
            [
                *replicas.weights(state, self._plan.axes, rank),
                *replicas.optimizer_state(state, rank, self.device),
            ]
        )

    def scalars(self) -> dict[str, object]:
        scalars: dict[str, object] = {}
        if (step := self._model.optimizer_step()) is not None:
            scalars[OPTIMIZER_STEP] = step
        if self._scaler:
            scalars[LOSS_SCALER] = self._scaler.state_dict()
        return scalars

    @torch.no_grad()
    def load(self, reader: StateReader) -> None:
        state = self._model.state
        self._model.wait_for_weights()
        continues = has_optimizer_state(reader, [state.states])
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
        self, micro_batches: Sequence[MicroBatch], weight: torch.Tensor | None, step: int
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
                    batch["input_ids"],
                    batch["position_ids"],
                    batch.get("attention_mask"),
                    labels=labels,
                    loss_mask=batch.get("loss_weights"),
                    packed_seq_params=batch.get("packed_seq_params"),
                )

            def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                with self._recorder.part(FORWARD):
                    total = output.float()
                    if total.dim():  # the losses of all tokens rather than a fused loss
                        total = total * (labels != IGNORE_INDEX)
                        if "loss_weights" in batch:
                            total = total * batch["loss_weights"]
                        total = total.sum()
                    return total * (0.0 if weight is None else weight), total.detach().double()

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
        return (
            torch.stack(sums).sum()
            if sums and self._coordinates.tensor == 0
            else torch.zeros((), dtype=torch.float64, device=self.device)
        )

    def _take_router_loss(self) -> torch.Tensor | None:
        """The sum of the routers' load-balancing losses of this rank since the last call: an fp64 scalar.

        None for a model without them. Megatron-core adds their gradients itself. Each rank stores the losses
        of its own layers and part of each sequence.
        """
        from megatron.core.transformer.moe import moe_utils

        if not self._router_coefficient:
            return None
        tracked = moe_utils.get_moe_layer_wise_logging_tracker().get("load_balancing_loss")
        total = torch.zeros((), dtype=torch.float64, device=self.device)  # a stage may have no layers
        if tracked is not None:
            total += tracked["values"].sum()
        moe_utils.clear_aux_losses_tracker()
        return total

    def _pad_rounds(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Pad with micro-batches without labels: the interleaved schedule needs a multiple of the stages."""
        padded = list(micro_batches)
        stages = self._plan.axes.pipeline if len(self._model.chunks) > 1 else 1
        while len(padded) % stages:
            padded.append({**padded[0], "labels": torch.full_like(padded[0]["labels"], IGNORE_INDEX)})
        return padded

    def _seed_micro_batch(self, step: int, micro_batch: int, chunk: int) -> None:
        """Seed dropout by the position in the run.

        Tensor ranks share the random state of what they all compute, and have different states for what they
        divide; Megatron-core derives both from this seed.
        """
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        at = self._coordinates
        seed = self._plan.config.train.seed
        model_parallel_cuda_manual_seed(
            seeding.derive_seed(seed, step, micro_batch, chunk, at.data, at.pipeline, at.context)
        )

    def _counts_units(self) -> bool:
        """Whether this rank counts units for its peers with the same micro-batches."""
        return (self._coordinates.tensor, self._coordinates.context, self._coordinates.pipeline) == (0, 0, 0)

    def _sum_units(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Sum units over data ranks: an fp64 scalar."""
        counts = self._counts_units()
        units = sum(count_units(self._objective, batch) for batch in micro_batches) if counts else 0
        return self._sum(torch.full((), float(units), dtype=torch.float64, device=self.device))

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks."""
        total = value.clone()
        dist.all_reduce(total)
        return total


def check_transformer_engine(plan: RunPlan) -> None:
    """Import Transformer Engine if the plan uses it. Call this before importing Megatron-core.

    Megatron-core takes its other layers silently if the import fails.

    Raises:
        PlanError: it is installed and cannot be imported.
    """
    if plan.kernels.layers.name != TRANSFORMER_ENGINE:
        return
    try:
        # The names that megatron/core/extensions/transformer_engine.py imports.
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast  # noqa: F401
    except (ImportError, OSError, AssertionError) as error:
        raise PlanError(
            Problem(
                "engine.name",
                f"Transformer Engine {plan.world.transformer_engine} cannot be imported: {error}",
                "its extension was compiled for the installed torch and CUDA",
                f"install it again: {install_command(plan.world.torch_cuda)}, or remove it: "
                "pip uninstall transformer-engine",
            )
        ) from error
