"""The parameters of one rank under DeepSpeed, in canonical tensors.

- Tensor axis: rows of q, k, v, gate, up and of an untied output layer, and columns of o and down, as
  plan/deepspeed.py configures AutoTP. All other parameters are replicated.
- Pipeline axis: the stages of plan/pipeline_stages.py.
- Expert axis: some experts of each layer, a slice of the first dim of the fused tensors.
- Context axis: all parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toolkit.families import get_family
from toolkit.families.base import ModelShape, ParameterSpec
from toolkit.layout.axes import Axes
from toolkit.plan import pipeline_stages
from toolkit.plan.deepspeed import tensor_parallel_dim


def rank_parameters(
    shape: ModelShape | None, parameters: Sequence[ParameterSpec], axes: Axes
) -> list[tuple[range, tuple[ParameterSpec, ...]]]:
    """Return for each pipeline stage the indices of its blocks and the parameters with their sizes on a rank.

    Sizes that an axis does not divide are rounded up; a rule refuses such runs. Without a ``shape`` (a model
    of transformers without a family) there are no axes, and the blocks are not known.
    """
    if shape is None:
        return [(range(0), tuple(parameters))]
    if axes.pipeline == 1 or shape.num_hidden_layers < axes.pipeline:
        stages = [(range(shape.num_hidden_layers), tuple(parameters))]
    else:
        split = pipeline_stages.split_into_stages(
            parameters, axes.pipeline, set(get_family(shape.family).tied_weights(shape).values())
        )
        stages = [(stage.layers, stage.parameters) for stage in split]
    return [(blocks, tuple(_shard_of_rank(spec, axes) for spec in specs)) for blocks, specs in stages]


def is_expert_parameter(spec: ParameterSpec) -> bool:
    return ".experts." in spec.name


def _shard_of_rank(spec: ParameterSpec, axes: Axes) -> ParameterSpec:
    if axes.expert > 1 and is_expert_parameter(spec):
        return _divide_dim(spec, 0, axes.expert)
    if axes.tensor > 1 and (dim := tensor_parallel_dim(spec.name)) is not None:
        return _divide_dim(spec, dim, axes.tensor)
    return spec


def _divide_dim(spec: ParameterSpec, dim: int, ranks: int) -> ParameterSpec:
    return replace(
        spec, shape=tuple(-(-size // ranks) if at == dim else size for at, size in enumerate(spec.shape))
    )
