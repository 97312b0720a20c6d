"""One optimizer step through Megatron-core's schedules, behind the same seam as every engine.

Of Megatron-core this uses the model, the schedules, the data-parallel buffers and the optimizers. Its training loop, data
loaders, schedulers and checkpoints stay unused: those are this toolkit's own, and the same for every engine.
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
from toolkit.engine.copies import together
from toolkit.engine.megatron import cpu, patches
from toolkit.engine.precision import LossScaler
from toolkit.engine.protocol import Copies, EvalResult, MicroBatch, Objective, StepResult, StepSettings
from toolkit.engine.resume import resumes, weight_key
from toolkit.monitor.step_parts import BACKWARD, FORWARD, OPTIMIZER, UNRECORDED, Recorder
from toolkit.plan.types import Device, RunPlan

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
        from toolkit.engine.megatron import groups
        from toolkit.engine.megatron.build import Built
        from toolkit.engine.megatron.model import refuse_ignored

        refuse_ignored(plan)
        self._plan, self._objective, self._recorder = plan, objective, recorder
        self._at = plan.axes.coordinates(rank)
        self.device = (
            torch.device("cuda", local_rank) if plan.world.device is Device.CUDA else torch.device("cpu")
        )
        groups.make(plan)
        self._built = Built(plan)
        self._scaler = LossScaler.of(plan.config.precision)
        if self._scaler is not None:
            self._built.scale_by(self._scaler)

    def train_step(self, micro_batches: Sequence[MicroBatch], settings: StepSettings) -> StepResult:
        built = self._built
        with self._recorder.part(OPTIMIZER):
            built.set_rates(settings.lr)
            for chunk in built.chunks:
                chunk.zero_grad_buffer()
            built.optimizer.zero_grad()
        units = int(
            self._sum(
                sum(self._objective.units(batch) for batch in micro_batches) if self._speaks_for_data() else 0
            )
        )
        # Megatron-core divides by the micro-batches and averages over the data ranks; the loss is a sum over the global batch / units.
        weight = len(micro_batches) * self._plan.axes.data / max(units, 1)
        with self._recorder.schedule(), self._recorder.part(BACKWARD):  # less what says that it is forward
            loss_sum = self._run(micro_batches, weight, settings.step)
        balance = self._router_loss(len(micro_batches))
        with self._recorder.part(OPTIMIZER):
            scale = self._scaler.cur_scale if self._scaler else 1.0
            applied, grad_norm, _ = built.optimizer.step()
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
        for chunk in self._built.chunks:
            chunk.eval()
        try:
            with torch.no_grad(), seeding.unchanged(self.device):
                loss_sum = self._run(self._whole_rounds(micro_batches), None, 0)
        finally:
            for chunk in self._built.chunks:
                chunk.train()
        units = sum(self._objective.units(batch) for batch in micro_batches) if self._speaks_for_data() else 0
        return EvalResult(loss_sum=self._sum(loss_sum), tokens=int(self._sum(units)))

    def shards(self) -> list[Shard]:
        self._built.settle_weights()
        state = self._built.state
        return [*state.weights(), *state.master_weights(), *state.moments()]

    def copies(self) -> list[Copies]:
        from toolkit.engine.megatron import copies

        self._built.settle_weights()
        state, rank = self._built.state, self._plan.axes.rank(self._at)
        return together(
            [*copies.weights(state, self._plan.axes, rank), *copies.kept(state, rank, self.device)]
        )

    def scalars(self) -> dict[str, object]:
        found: dict[str, object] = {}
        if (step := self._built.optimizer_step()) is not None:
            found[OPTIMIZER_STEP] = step
        if self._scaler:
            found[LOSS_SCALER] = self._scaler.state()
        return found

    @torch.no_grad()
    def load(self, reader: Reader) -> None:
        state = self._built.state
        self._built.settle_weights()
        continues = resumes(reader, self._built.kept)
        step = cast(int, reader.scalars.get(OPTIMIZER_STEP, 0))
        self._built.reset_state(step if continues else None)
        for held in state.held:
            held.parameter.zero_()  # the padded vocabulary has no other source
        targets = [
            replace(shard, key=weight_key(reader, shard.key.name))
            for shard in (*state.weights(), *state.master_weights())
        ]
        for master in state.masters:
            master.tensor.detach().zero_()
        reader.read(targets + state.moments())
        saved = reader.scalars.get(LOSS_SCALER)
        if self._scaler and isinstance(saved, dict):
            self._scaler.restore(saved)

    def close(self) -> None:
        from toolkit.engine.megatron import groups

        self._built.forget()
        del self._built
        gc.collect()  # its modules refer to each other in circles, and to the groups
        groups.drop()

    # -- One pass over the micro-batches

    def _run(self, micro_batches: Sequence[MicroBatch], weight: float | None, step: int) -> torch.Tensor:
        """Forward, and with a ``weight`` of the loss backward too. The sum of this rank's losses, fp64: zero where another rank
        of the model has them."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        chunks = self._built.chunks
        places = [iter(range(len(micro_batches))) for _ in chunks]

        def forward(numbers: Iterator[int], chunk: Any) -> Output:
            with self._recorder.part(FORWARD):
                number = next(numbers)
                if weight is not None and self._built.draws:
                    self._reseed(step, number, places.index(numbers))
                batch = self._built.cut(micro_batches[number])
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
            data_iterator=places if several else places[0],
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
        """The mean over the global batch's micro-batches of the routers' load-balancing losses, times their coefficient.

        Megatron-core adds the gradients by itself and keeps the losses for its log: each rank those of its own layers, and of its own
        part of each sequence.
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

    def _whole_rounds(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The interleaved schedule takes as many micro-batches as there are stages at a time: what is missing has no labels."""
        found = list(micro_batches)
        stages = self._plan.axes.pipeline if len(self._built.chunks) > 1 else 1
        while len(found) % stages:
            found.append({**found[0], "labels": torch.full_like(found[0]["labels"], IGNORED)})
        return found

    def _reseed(self, step: int, micro_batch: int, chunk: int) -> None:
        """Random state of a function of the place in the run. Tensor ranks share the state of what they all compute, and have each
        their own of what they divide: Megatron-core derives it from this seed."""
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        at = self._at
        seed = self._plan.config.train.seed
        model_parallel_cuda_manual_seed(
            seeding.seed_of(seed, step, micro_batch, chunk, at.data, at.pipeline, at.context)
        )

    def _speaks_for_data(self) -> bool:
        """Whether this rank counts the units of its micro-batches: its tensor, context and pipeline peers have the same ones."""
        return (self._at.tensor, self._at.context, self._at.pipeline) == (0, 0, 0)

    def _sum(self, value: torch.Tensor | float) -> float:
        """Over all ranks."""
        total = torch.as_tensor(value, dtype=torch.float64, device=self.device).clone()
        dist.all_reduce(total)
        return float(total)
