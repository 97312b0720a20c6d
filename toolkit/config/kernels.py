"""Keys that choose between implementations of the same computation. The string below a field is its
help text.

None of them changes samples or losses beyond rounding, so they are not part of a run's identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CompileMode(Enum):
    auto = "auto"
    none = "none"
    layers = "layers"
    full = "full"


class CompileBackend(Enum):
    inductor = "inductor"
    aot_eager = "aot_eager"


class AttentionKernel(Enum):
    auto = "auto"
    sdpa = "sdpa"
    flash = "flash"
    flex = "flex"
    eager = "eager"


class LossKernel(Enum):
    auto = "auto"
    plain = "plain"
    fused = "fused"


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    mode: CompileMode = CompileMode.auto
    """What torch.compile compiles: none, each decoder layer (layers: one graph serves all of them), or the
    whole model (full). auto: layers on GPUs if the run supports it, otherwise none.
    """
    backend: CompileBackend = CompileBackend.inductor
    """inductor generates kernels: Triton on GPUs, C++ on CPUs. aot_eager traces the same graphs and runs them
    with torch's own kernels, to test or debug without a compiler.
    """
