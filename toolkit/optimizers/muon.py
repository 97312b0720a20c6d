"""Muon for matrices, AdamW for the other parameters. The arithmetic is in ``muon_update.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.config.optim import OptimConfig, OptimizerKernel
from toolkit.config.schema import EngineName, OffloadDevice, RunConfig
from toolkit.optimizers.adamw import ADAM_STATES, create_adamw, deepspeed_adamw
from toolkit.optimizers.base import MOMENTUM, OptimizerSpec, RuleViolation, StateLayout, parameter_groups

if TYPE_CHECKING:
    import torch

MATRICES = "muon"  # the kind of parameters that Muon updates; the others have the kind ""


def uses_muon(name: str, dims: int) -> bool:
    """Return whether Muon optimizes a parameter: hidden matrices, as in DeepSpeed's
    ``set_optimizer_flags``.
    """
    return dims > 1 and not any(part in name.lower() for part in ("embed", "lm_head"))


class Muon(OptimizerSpec):
    """DeepSpeed applies Muon to tensors with two or more dims and no ``embed`` or ``lm_head`` in the name.

    Its implementation gathers whole matrices, so ZeRO 1 to 3 are exact.
    """

    name = "muon"
    settings = frozenset({"betas", "eps", "momentum"})
    whole_parameter_kinds = frozenset({MATRICES})
    tested_by_deepspeed = True
    not_on_megatron = (
        "Megatron-core's Muon needs a package that is not published",
        "write engine=deepspeed, or optim=adamw",
    )

    def parameter_kind(self, name: str, dims: int) -> str:
        return MATRICES if uses_muon(name, dims) else ""

    def group_kind(self, group: Mapping[str, Any]) -> str:
        return MATRICES if group.get("use_muon") else ""

    def states(self, optim: OptimConfig, kind: str = "") -> StateLayout:
        return StateLayout(tensors=(MOMENTUM,)) if kind == MATRICES else ADAM_STATES

    def find_violations(self, config: RunConfig) -> Iterator[RuleViolation]:
        if not config.optim.momentum:
            yield RuleViolation(
                "optim.momentum optim.name",
                "Muon orthogonalises a running average of gradients, and momentum 0 disables the average",
                "write optim.momentum=0.95",
                warning=True,
            )
        if config.engine.name is not EngineName.deepspeed:
            return
        if config.optim.clip:
            yield RuleViolation(
                "optim.clip optim.name",
                "Muon runs without clipping: DeepSpeed would clip updates under ZeRO 1-3, and gradients "
                "under ZeRO 0",
                "write optim.clip=0",
            )
        zero = config.engine.deepspeed.get("zero_optimization")
        if config.zero.stage == 3 and isinstance(zero, Mapping) and zero.get("reduce_scatter"):
            yield RuleViolation(
                "engine.deepspeed.zero_optimization.reduce_scatter optim.name zero.stage",
                "DeepSpeed's Muon under ZeRO 3 reduces whole gradients",
                "leave it out",
            )
        if OffloadDevice.nvme in (config.offload.optimizer, config.offload.parameters):
            yield RuleViolation(
                "optim.name offload.optimizer",
                "Muon's momentum cannot be offloaded to NVMe",
                "write offload=cpu, or optim=adamw",
            )
        if config.parallel.pipeline > 1:
            yield RuleViolation(
                "optim.name parallel.pipeline",
                "DeepSpeed sums norms over the stages by parameter group, and Muon's groups differ between "
                "stages",
                "write optim=adamw, or parallel.pipeline=1",
            )
        if config.parallel.tensor > 1:
            yield RuleViolation(
                "optim.name parallel.tensor",
                "Muon orthogonalises whole matrices, and a tensor rank has only parts",
                "write optim=adamw, or parallel.tensor=1",
            )

    def deepspeed(self, optim: OptimConfig, kernel: OptimizerKernel) -> dict[str, Any]:
        # torch_adam: AdamW for parameters that are not matrices; DeepSpeed would compile its own, even on a
        # CPU.
        params = {**deepspeed_adamw(optim), "momentum": optim.momentum, "torch_adam": True}
        return {"type": "Muon", "params": params}

    def deepspeed_zero(self, stage: int) -> dict[str, Any]:
        return {"reduce_scatter": False} if stage == 3 else {}  # DeepSpeed refuses to start otherwise

    def build(
        self, parameters: Mapping[str, torch.Tensor], optim: OptimConfig
    ) -> list[torch.optim.Optimizer]:
        from toolkit.optimizers.muon_update import MuonOptimizer

        rest = dict(parameters)
        matrices = [rest.pop(name) for name in parameters if uses_muon(name, parameters[name].dim())]
        found: list[torch.optim.Optimizer] = []
        if matrices:
            groups = parameter_groups(matrices, optim.weight_decay)
            found.append(MuonOptimizer(groups, lr=optim.lr, momentum=optim.momentum))
        if rest:
            found.append(create_adamw(parameter_groups(rest.values(), optim.weight_decay), optim))
        return found

    def transform_gradients(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        from toolkit.optimizers.muon_update import MuonOptimizer

        for optimizer in optimizers:
            if isinstance(optimizer, MuonOptimizer):
                optimizer.transform_gradients()
        return True
