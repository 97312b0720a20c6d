"""The pipeline module and layers that DeepSpeed runs.

Import it after ``patches.import_deepspeed``, which sets the device.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import nn

from toolkit.engine.compile import compile_model
from toolkit.engine.fp8 import use_fp8_linears
from toolkit.engine.precision import DTYPES
from toolkit.engine.protocol import MicroBatch, Objective
from toolkit.families import get_family
from toolkit.layout.axes import Axis
from toolkit.models.build import replace_parameters
from toolkit.models.loss_head import loss_arguments
from toolkit.models.stage import StageModel, build_stage
from toolkit.plan.types import RunPlan
from toolkit.step_parts import BACKWARD, FORWARD, OPTIMIZER, TRANSFER, Recorder


class StageLayer(nn.Module):
    """The single layer that DeepSpeed sees of a stage, with uninitialized weights in the run's precision.

    A stage is one layer, so that transformers' own forward computes masks and rotary embeddings once for all
    blocks of the stage and checkpoints activations by block, and weights keep their canonical names.

    Attributes:
        micro_batches: those of a step, consumed in order. Stages exchange hidden states only, and take
            positions and, for a fused loss, labels from here; all pipeline ranks have the same micro-batches.
    """

    micro_batches: Iterator[MicroBatch]

    def __init__(self, plan: RunPlan, device: torch.device, stage: int) -> None:
        super().__init__()
        self.stage: StageModel = build_stage(plan, device, stage)
        dtype = DTYPES[plan.config.precision.name]
        replace_parameters(
            self.stage, lambda parameter: torch.empty(parameter.shape, dtype=dtype, device=device)
        )
        use_fp8_linears(self.stage, plan)
        compile_model(self.stage, plan)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        batch = next(self.micro_batches)
        loss = loss_arguments(self.stage.model, batch)
        hidden: torch.Tensor = self.stage(given, batch.get("position_ids"), **loss)
        return hidden


class LastStageLoss:
    """The loss on the last stage. ``weight`` converts a micro-batch's sum to its part of DeepSpeed's mean."""

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self._objective, self._device = objective, device
        self.begin(1.0)

    def begin(self, weight: torch.Tensor | float) -> None:
        """Reset the sum before the first micro-batch of a step."""
        self._weight = weight
        self.sum = torch.zeros((), dtype=torch.float64, device=self._device)

    def __call__(self, output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        loss = self._objective.loss_sum(_PrecomputedOutput(output), batch)
        self.sum += loss.detach()
        return loss * self._weight


class _PrecomputedOutput(nn.Module):
    """A model whose output is already computed."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.has_fused_loss = output.dim() == 0
        self._output = SimpleNamespace(logits=output, loss=output)

    def forward(self, **_: Any) -> SimpleNamespace:
        return self._output


class StagePipelineModule(PipelineModule):
    """``names``: the canonical name of each parameter of this rank's stage."""

    def __init__(self, plan: RunPlan, device: torch.device, loss: LastStageLoss) -> None:
        assert plan.shape is not None, "pipelines are of families"
        count = plan.axes.pipeline
        specs = [LayerSpec(StageLayer, plan, device, stage) for stage in range(count)]
        with redirect_stdout(io.StringIO()):  # DeepSpeed prints topology and layers
            super().__init__(
                layers=specs,
                topology=PipeDataParallelTopology(num_pp=count, num_dp=plan.axes.data),
                loss_fn=loss,
                partition_method="uniform",
            )
        self.layer: StageLayer = self.forward_funcs[0]
        tied = get_family(plan.shape.family).tied_weights(plan.shape)
        self.names: Mapping[torch.Tensor, str] = {
            parameter: tied.get(name, name) for name, parameter in self.layer.stage.model.named_parameters()
        }
        self._tied = self._tie(plan, set(tied.values()))

    def _tie(self, plan: RunPlan, tied: set[str]) -> list[tuple[torch.Tensor, dist.ProcessGroup]]:
        """Tie a weight of the first and the last stage; DeepSpeed ties whole layers only.

        Its gradients are summed over both stages, and its norm is counted on the first stage only.
        """
        if not tied:
            return []
        groups = [dist.new_group([ranks[0], ranks[-1]]) for ranks in plan.axes.groups(Axis.PIPELINE)]
        if self.stage_id not in (0, self.num_stages - 1):
            return []
        group = groups[self._grid.get_data_parallel_id()]
        shared = [parameter for parameter, name in self.names.items() if name in tied]
        for parameter in shared:
            parameter.ds_pipe_replicated = self.stage_id > 0  # type: ignore[attr-defined]
        return [(parameter, group) for parameter in shared]

    def get_tied_weights_and_groups(self) -> list[tuple[torch.Tensor, dist.ProcessGroup]]:
        return self._tied


# The part of a step that each pipeline instruction belongs to; communication is timed by ``collectives.py``.
PARTS = {
    schedule.LoadMicroBatch: TRANSFER,
    schedule.RecvActivation: FORWARD,
    schedule.ForwardPass: FORWARD,
    schedule.SendActivation: FORWARD,
    schedule.RecvGrad: BACKWARD,
    schedule.BackwardPass: BACKWARD,
    schedule.SendGrad: BACKWARD,
    schedule.ReduceTiedGrads: BACKWARD,
    schedule.ReduceGrads: BACKWARD,
    schedule.OptimizerStep: OPTIMIZER,
}


def time_instructions(engine: Any, recorder: Recorder) -> None:
    """Attribute the time of each instruction that ``engine`` executes to a part of the step."""
    engine._INSTRUCTION_MAP = {
        kind: _timed(execute, recorder, PARTS[kind]) if kind in PARTS else execute
        for kind, execute in engine._INSTRUCTION_MAP.items()
    }


def _timed(execute: Callable[..., None], recorder: Recorder, part: str) -> Callable[..., None]:
    @wraps(execute)
    def timed(engine: Any, **arguments: Any) -> None:
        with recorder.part(part):
            execute(engine, **arguments)

    return timed
