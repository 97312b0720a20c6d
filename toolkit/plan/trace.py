"""The result of tracing a model's own module: memory and FLOPs of one micro-batch on one rank.

A trace runs the forward and the backward pass without computing values (``toolkit/models/trace.py``). It is
the only source of these figures for a model without a family, and a check of the formulas for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from toolkit.families.base import ParameterSpec


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """The work of all calls of one operator in one pass, from which their time is predicted.

    Attributes:
        flops: that kernels compute: those of attention without the pairs that a causal kernel skips, and in
            the backward pass with the scores that it computes again.
        moved_bytes: bytes that they read and write, each tensor once.
        calls: without those that only view a tensor.
    """

    flops: float
    moved_bytes: float
    calls: float

    def plus(self, other: OperatorWork, factor: float) -> OperatorWork:
        """``self + factor x other``."""
        return OperatorWork(
            self.flops + factor * other.flops,
            self.moved_bytes + factor * other.moved_bytes,
            self.calls + factor * other.calls,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTrace:
    """Bytes, FLOPs and operators of the forward and backward pass of one micro-batch.

    Attributes:
        micro_batch: samples of the micro-batch.
        parameters: as ``named_parameters`` lists them: tied parameters once, under their first name.
        saved_bytes: tensors that exist between the forward and the backward pass, including the micro-batch,
            without parameters and buffers.
        peak_bytes: the most bytes that exist at any time, without parameters and buffers. The gradient of a
            parameter exists until it is complete and an engine adds it to its own buffers.
        forward_flops, backward_flops: FLOPs by operator, such as ``aten::mm``. The backward pass includes
            what it recomputes. Attention counts all pairs of tokens, and nothing that a fused kernel repeats.
        forward_work, backward_work: by operator, without those that only view tensors.
        recomputed_flops: of activations that the backward pass computes again.
        operators: the number of operators, which is the number of kernels to launch in eager mode, or more.
        traced_blocks: the numbers of blocks that were traced if the figures are extrapolated from them, and
            the number of blocks of the model last; None if the whole model was traced.
    """

    micro_batch: int
    parameters: tuple[ParameterSpec, ...]
    saved_bytes: int
    peak_bytes: int
    forward_flops: Mapping[str, float]
    backward_flops: Mapping[str, float]
    forward_work: Mapping[str, OperatorWork]
    backward_work: Mapping[str, OperatorWork]
    recomputed_flops: float
    operators: int
    traced_blocks: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.parameters)

    @property
    def hardware_flops(self) -> float:
        """FLOPs of both passes, with recomputation."""
        return sum(self.forward_flops.values()) + sum(self.backward_flops.values())

    @property
    def model_flops(self) -> float:
        """FLOPs of both passes, without recomputation: what plan/flops.py calls model FLOPs."""
        return self.hardware_flops - self.recomputed_flops

    def to_json(self) -> dict[str, Any]:
        """Return the attributes, with the number of parameters instead of their list."""
        return {**asdict(replace(self, parameters=())), "parameters": self.numel}


@dataclass(frozen=True, slots=True)
class NotTraced:
    """Why a model could not be traced, as half a sentence that follows "because"."""

    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
