"""A stage of a pipeline: the family's own model, with what other stages hold taken out of it.

transformers' own forward runs on every stage: it makes the causal mask and the rotary embeddings there, and passes the hidden states
through the blocks that are left. Parameters keep their names, blocks their global numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from toolkit.families import get_family
from toolkit.models.build import build_model
from toolkit.plan.stages import split
from toolkit.plan.types import RunPlan


class StageModel(nn.Module):
    """In: token ids [micro-batch, sequence] on the first stage, else hidden states [micro-batch, sequence, hidden].
    Out: logits [micro-batch, sequence, vocabulary] on the last stage, else hidden states."""

    def __init__(self, model: nn.Module, *, takes_ids: bool) -> None:
        super().__init__()
        self.model = model
        self._input = "input_ids" if takes_ids else "inputs_embeds"

    def forward(self, given: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """``position_ids`` [micro-batch, sequence] where documents are kept apart: every stage makes its mask from them."""
        output: Any = self.model(**{self._input: given}, position_ids=position_ids, use_cache=False)
        logits: torch.Tensor = output.logits
        return logits


def build_stage(plan: RunPlan, device: torch.device | str, stage: int) -> StageModel:
    """Stage ``stage`` of the plan's pipeline, in training mode: parameters on the meta device, buffers on ``device``."""
    assert plan.shape is not None, "a model of a family"
    model: Any = build_model(plan, device, meta=True)
    count = plan.axes.pipeline
    layers = split(plan.parameters, count, get_family(plan.shape.family).tied_weights(plan.shape).values())[
        stage
    ].layers
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
    return StageModel(model, takes_ids=stage == 0)


class PassThrough(nn.Module):
    """In place of what maps hidden states to hidden states, or to logits, on another stage."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


class ZeroEmbedding(nn.Module):
    """In place of an embedding of another stage, whose rows are in the hidden states already."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=ids.device)


def _split_module_names(model: Any, layers: int) -> tuple[list[str], nn.ModuleList, list[str]]:
    """What stands before the blocks, the blocks, and what stands after them. transformers' models name their parts in the order
    in which they run; parts after the blocks without parameters (rotary embeddings) are every stage's."""
    children = list(model.base_model.named_children())
    at = next(
        index
        for index, (_, part) in enumerate(children)
        if isinstance(part, nn.ModuleList) and len(part) == layers
    )
    inside = model.base_model_prefix
    before = [f"{inside}.{name}" for name, _ in children[:at]]
    after = [f"{inside}.{name}" for name, part in children[at + 1 :] if any(True for _ in part.parameters())]
    head = next(name for name, part in model.named_modules() if part is model.get_output_embeddings())
    blocks = children[at][1]
    assert isinstance(blocks, nn.ModuleList)
    return before, blocks, [*after, head]
