"""Transfer state from one engine to another in memory, without checkpoint files."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch

from toolkit.checkpoint.shard import Shard, TensorInfo, TensorKey
from toolkit.engine.protocol import Engine
from toolkit.errors import CheckpointError, Problem


class MemoryReader:
    """A ``Reader`` of whole tensors in memory."""

    def __init__(self, state: Mapping[TensorKey, torch.Tensor], scalars: Mapping[str, object]) -> None:
        self._state, self.scalars = dict(state), copy.deepcopy(dict(scalars))

    @staticmethod
    def from_engine(engine: Engine) -> MemoryReader:
        """Copy the state of an engine with one rank."""
        return MemoryReader(
            {shard.key: shard.data.detach().clone() for shard in engine.shards()}, engine.scalars()
        )

    @property
    def state(self) -> Mapping[TensorKey, torch.Tensor]:
        return self._state

    @property
    def tensors(self) -> Mapping[TensorKey, TensorInfo]:
        return {
            key: TensorInfo(str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for key, value in self._state.items()
        }

    @torch.no_grad()
    def read(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            whole = self._state.get(shard.key)
            if whole is None or tuple(whole.shape) != shard.global_shape:
                raise CheckpointError(
                    Problem(
                        str(shard.key),
                        f"{shard.key} of shape {shard.global_shape}",
                        "only saved tensors can be read",
                        "save it first",
                    )
                )
            index = tuple(
                slice(low, low + size) for low, size in zip(shard.box.offset, shard.box.shape, strict=True)
            )
            shard.data.copy_(whole[index])
