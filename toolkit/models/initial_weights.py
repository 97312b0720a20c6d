"""Random initial weights as a checkpoint reader.

They are a pure function of seed and parameter name, equal in every layout. A rank initializes one module at a
time and copies its shards, so no rank ever stores the whole model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from toolkit.checkpoint.shard import WEIGHT, Shard, TensorInfo, TensorKey
from toolkit.errors import CheckpointError, Problem
from toolkit.models.build import build_model
from toolkit.models.target import build_target
from toolkit.plan.types import RunPlan


class InitialWeights:
    """A ``Reader`` of fp32 weights without scalars."""

    scalars: Mapping[str, object] = {}

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan

    @cached_property
    def tensors(self) -> Mapping[TensorKey, TensorInfo]:
        if self._plan.shape is not None:
            shapes = {spec.name: spec.shape for spec in self._plan.parameters}
        else:
            shapes = {name: tuple(weight.shape) for name, weight in self._target_weights.items()}
        return {TensorKey(WEIGHT, name): TensorInfo("float32", shape) for name, shape in shapes.items()}

    @torch.no_grad()
    def read(self, shards: Sequence[Shard]) -> None:
        wanted: dict[str, list[Shard]] = {}
        for shard in shards:
            found = self.tensors.get(shard.key)
            if found is None or found.shape != shard.global_shape:
                has = "nothing of that name" if found is None else f"shape {list(found.shape)}"
                raise CheckpointError(
                    Problem(
                        "model",
                        f"{shard.key} of shape {list(shard.global_shape)}; the initial weights have {has}",
                        "the model in memory has the parameters of its description",
                        "report this: it is a defect",
                    )
                )
            wanted.setdefault(shard.key.name, []).append(shard)
        if self._plan.shape is None:
            _copy(self._target_weights, wanted)
            return
        for path, module in self._skeleton.named_modules():
            names = {name: f"{path}.{name}" if path else name for name in module._parameters}
            if any(name in wanted for name in names.values()):
                with _materialize(module):
                    self._initialize(path, module)
                    _copy(
                        {names[name]: weight for name, weight in module.named_parameters(recurse=False)},
                        wanted,
                    )

    @cached_property
    def _target_weights(self) -> dict[str, torch.Tensor]:
        """The weights of ``model.target``: the whole model is built, as only its constructor knows them."""
        module = build_target(self._plan.config.model, self._plan.config.train.seed)
        return {name: parameter.detach() for name, parameter in module.named_parameters()}

    @cached_property
    def _skeleton(self) -> Any:
        return build_model(self._plan, "cpu", meta=True)

    def _initialize(self, path: str, module: nn.Module) -> None:
        """Initialize a module as transformers does: first the module, then its parents, which may change it.

        gpt2, for example, rescales the projections into the residual stream from outside. The parents' other
        parts are on meta, so initializing them has no effect.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(self._plan.config.train.seed, path))
            self._skeleton._init_weights(module)
            while path:
                path = path.rpartition(".")[0]
                self._skeleton._init_weights(self._skeleton.get_submodule(path))


@contextmanager
def _materialize(module: nn.Module) -> Iterator[None]:
    """Give the module's own parameters memory inside the context."""
    meta = dict(module._parameters)
    for name, parameter in meta.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32))
    try:
        yield
    finally:
        module._parameters.update(meta)


def _seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=7).digest(), "big")


def _copy(weights: Mapping[str, torch.Tensor], wanted: Mapping[str, Sequence[Shard]]) -> None:
    for name, weight in weights.items():
        for shard in wanted.get(name, ()):
            index = tuple(
                slice(low, low + size) for low, size in zip(shard.box.offset, shard.box.shape, strict=True)
            )
            shard.data.copy_(weight[index])
