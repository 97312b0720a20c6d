"""A pipeline stage: the family's own model, without the modules of other stages.

Every stage runs transformers' own forward: it computes the causal mask and rotary embeddings and passes the
hidden states through the remaining blocks. Parameters keep their names, and blocks their global numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from toolkit.families import get_family
from toolkit.models.build import build_model
from toolkit.models.loss_head import fuse_loss
from toolkit.plan.pipeline_stages import split_into_stages
from toolkit.plan.types import RunPlan


class StageModel(nn.Module):
    """The part of a model that one pipeline stage runs.

    Input: token ids [micro-batch, sequence] on the first stage, otherwise hidden states [micro-batch,
    sequence, hidden]. Output: logits [micro-batch, sequence, vocabulary] on the last stage, or the sum of the
    losses if they are fused; otherwise hidden states.
    """

    def __init__(self, model: nn.Module, *, takes_ids: bool) -> None:
        super().__init__()
        self.model = model
        self._input = "input_ids" if takes_ids else "inputs_embeds"

    def forward(
        self, inputs: torch.Tensor, position_ids: torch.Tensor | None = None, **loss: torch.Tensor
    ) -> torch.Tensor:
        """Pass ``position_ids`` [micro-batch, sequence] to every stage if the batch has documents.

        Args:
            loss: :func:`loss_arguments` of the last stage's model.
        """
        output: Any = self.model(**{self._input: inputs}, position_ids=position_ids, use_cache=False, **loss)
        result: torch.Tensor = output.loss if loss else output.logits
        return result


def build_stage(plan: RunPlan, device: torch.device | str, stage: int) -> StageModel:
    """Build a stage of the plan's pipeline in training mode: parameters on meta, buffers on ``device``."""
    assert plan.shape is not None, "a model of a family"
    model: Any = build_model(plan, device, meta=True)
    count = plan.axes.pipeline
    layers = split_into_stages(
        plan.parameters, count, get_family(plan.shape.family).tied_weights(plan.shape).values()
    )[stage].layers
    before, blocks, after = _split_module_names(model, plan.shape.num_hidden_layers)
    for number in range(len(blocks)):
        if number not in layers:
            blocks[number] = PassThrough()
    if stage > 0:
        for name in before:
            part = model.get_submodule(name)
            model.set_submodule(name, ZeroEmbedding() if isinstance(part, nn.Embedding) else PassThrough())
    if stage < count - 1:
        for name in after:
            model.set_submodule(name, PassThrough())
    else:
        fuse_loss(model, plan)
    return StageModel(model, takes_ids=stage == 0)


class PassThrough(nn.Module):
    """Replaces a module of another stage that maps hidden states to hidden states or logits."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


class ZeroEmbedding(nn.Module):
    """Replaces an embedding of another stage, which is already part of the hidden states."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=ids.device)


def _split_module_names(model: Any, layers: int) -> tuple[list[str], nn.ModuleList, list[str]]:
    """Return the names of modules before the blocks, the blocks, and the names of modules after them.

    transformers names modules in the order in which they run. Modules without parameters after the blocks
    (rotary embeddings) belong to every stage.
    """
    children = list(model.base_model.named_children())
    blocks_index = next(
        index
        for index, (_, part) in enumerate(children)
        if isinstance(part, nn.ModuleList) and len(part) == layers
    )
    prefix = model.base_model_prefix
    before = [f"{prefix}.{name}" for name, _ in children[:blocks_index]]
    after = [
        f"{prefix}.{name}"
        for name, part in children[blocks_index + 1 :]
        if any(True for _ in part.parameters())
    ]
    head = next(name for name, part in model.named_modules() if part is model.get_output_embeddings())
    blocks = children[blocks_index][1]
    assert isinstance(blocks, nn.ModuleList)
    return before, blocks, [*after, head]
