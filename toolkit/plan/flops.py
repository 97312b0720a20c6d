"""What a run computes, and what of it counts.

Model FLOPs are what the model needs: the forward pass of ``Family.forward_flops``, and twice as much for the backward pass, which makes the
gradients of a matrix and of what it is multiplied with. What an engine computes again, or in vain, does not count. They are what model
FLOP/s utilisation (MFU) is of; the name, the factor 3 and the attention matrix counted whole are PaLM's (Chowdhery et al., 2204.02311,
section 4.1 and appendix B).

Hardware FLOPs add what the plan has computed again (Korthikanti et al., 2205.05198, section 5); of them is HFU. What a kernel does inside
itself is left out of both: flash attention multiplies queries and keys once more in the backward pass (seven products where six count) and
skips what a causal mask hides (almost half of each).
"""

from __future__ import annotations

from toolkit.config.schema import EngineName, Precision, RunConfig
from toolkit.families import get_family
from toolkit.families.base import ForwardFlops, ModelShape
from toolkit.plan.devices import find
from toolkit.plan.megatron import virtual_stages
from toolkit.plan.memory_megatron import stage_chunks, stage_layers
from toolkit.plan.types import Device, RunPlan

FORWARD_AND_BACKWARD = 3


def model_flops(plan: RunPlan) -> float | None:
    """Of training on one token; None for ``model.target``, whose inside is not known."""
    return None if plan.shape is None else FORWARD_AND_BACKWARD * _forward(plan, plan.shape).total


def hardware_flops(plan: RunPlan) -> float | None:
    """As :func:`model_flops`, with what is computed again."""
    if plan.shape is None:
        return None
    forward = _forward(plan, plan.shape)
    return FORWARD_AND_BACKWARD * forward.total + recomputed(plan.config, plan.shape, forward)


def flops_per_step(plan: RunPlan) -> float | None:
    """Model FLOPs of one optimizer step after the ramp, over all ranks; None for ``model.target``."""
    flops = model_flops(plan)
    return None if flops is None else flops * plan.units_per_step


def recomputed(config: RunConfig, shape: ModelShape, forward: ForwardFlops) -> float:
    """FLOPs per token that the backward pass spends on what the forward pass has computed before."""
    if config.engine.name is EngineName.megatron:
        return _recomputed_by_megatron(config, shape, forward)
    return _recomputed_by_torch(config, shape, forward) if config.train.activation_checkpointing else 0.0


def peak_flops(plan: RunPlan) -> float | None:
    """FLOP/s that one rank's GPU could do at most in the run's precision, without sparsity, for a utilisation; None: there is none."""
    gpu = find(plan.world.gpu)
    return gpu.peak_flops if gpu is not None and without_utilisation(plan) is None else None


def without_utilisation(plan: RunPlan) -> str | None:
    """Why there is no utilisation; None where there is one."""
    if plan.shape is None:
        return "what a model.target computes is not known"
    if plan.world.device is not Device.CUDA:
        return "it runs on CPUs"
    if find(plan.world.gpu) is None:
        return "the GPU is none that toolkit/plan/devices.py knows (cluster.gpu=NAME says which of them is meant)"
    if plan.config.precision.name is Precision.fp32:
        return "the peaks of GPUs are those of their 16-bit matrix units, which precision=fp32 does not use"
    return None


def _forward(plan: RunPlan, shape: ModelShape) -> ForwardFlops:
    return get_family(shape.family).forward_flops(shape, plan.config.train.sequence_length)


def _recomputed_by_torch(config: RunConfig, shape: ModelShape, forward: ForwardFlops) -> float:
    """``torch.utils.checkpoint`` of each block. It ends as soon as all that the backward pass needs is there again, and that is before
    the last matrix: only its inputs are kept. Its product is needed, or made all the same, with experts, whose outputs are weighted; with
    dropout; and under ZeRO 3, where DeepSpeed's own linear layer notes its inputs after it has multiplied them."""
    traits = get_family(shape.family).traits
    whole = (
        traits.experts
        or (traits.hidden_dropout and shape.dropout > 0)
        or (traits.linear and config.zero.stage == 3)
    )
    return forward.blocks if whole else forward.blocks - forward.down


def _recomputed_by_megatron(config: RunConfig, shape: ModelShape, forward: ForwardFlops) -> float:
    """Megatron-core computes again, whole, what it was told to: blocks, or modules of all blocks."""
    given = config.engine.megatron
    granularity = "full" if config.train.activation_checkpointing else given.get("recompute_granularity")
    if granularity == "full":
        if given.get("recompute_method") != "block":
            return forward.blocks
        chunks = [
            blocks
            for stage in stage_chunks(
                stage_layers(shape, config.parallel.pipeline, given), virtual_stages(config)
            )
            for blocks in stage
        ]
        again = sum(min(len(blocks), int(given["recompute_num_layers"])) for blocks in chunks)
        return forward.blocks * again / shape.num_hidden_layers
    if granularity != "selective":
        return 0.0
    modules = given.get("recompute_modules") or ["core_attn"]
    feed_forward = "moe" if get_family(shape.family).traits.experts else "mlp"
    return (forward.scores if "core_attn" in modules else 0.0) + (
        forward.up + forward.down if feed_forward in modules else 0.0
    )
