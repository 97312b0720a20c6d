"""Model FLOPs and hardware FLOPs of a run, for MFU and HFU.

Model FLOPs are the FLOPs of the forward pass (``Family.forward_flops``) and twice as many for the backward
pass, which computes the gradients of each matrix and of its input. Recomputation does not count. Model FLOP/s
utilisation (MFU) is based on them. The definition is PaLM's, with the full attention matrix (Chowdhery et
al., 2204.02311, section 4.1 and appendix B).

Hardware FLOPs also count recomputation (Korthikanti et al., 2205.05198, section 5). HFU is based on them.
Both ignore what happens inside a kernel: flash attention repeats one of six products in the backward pass,
and skips the masked half of a causal attention matrix.
"""

from __future__ import annotations

from toolkit.config.schema import EngineName, Precision, RunConfig
from toolkit.families import get_family
from toolkit.families.base import ForwardFlops, ModelShape
from toolkit.plan.devices import find_gpu
from toolkit.plan.megatron import virtual_stages
from toolkit.plan.pipeline_stages import stage_chunks, stage_layers
from toolkit.plan.recomputation import recomputation_keys
from toolkit.plan.trace import ModuleTrace
from toolkit.plan.types import Device, RunPlan

FORWARD_AND_BACKWARD = 3


def model_flops(plan: RunPlan) -> float | None:
    """Return the FLOPs of training on one unit.

    None for a model without a family, unless the user's task knows them or the model was traced.
    """
    if plan.shape is None or plan.config.task.target is not None:
        return plan.flops_per_unit or _per_unit(plan, "model_flops")
    return FORWARD_AND_BACKWARD * _forward(plan, plan.shape).total


def hardware_flops(plan: RunPlan) -> float | None:
    """Compute :func:`model_flops` with recomputation."""
    if plan.shape is None or plan.config.task.target is not None:
        return plan.flops_per_unit or _per_unit(plan, "hardware_flops")
    forward = _forward(plan, plan.shape)
    return FORWARD_AND_BACKWARD * forward.total + recomputed_flops(plan.config, plan.shape, forward)


def flops_per_step(plan: RunPlan) -> float | None:
    """Model FLOPs of one optimizer step after the ramp, over all ranks; None if they are not known."""
    flops = model_flops(plan)
    return None if flops is None or plan.task_unit is not None else flops * plan.units_per_step


def recomputed_flops(config: RunConfig, shape: ModelShape, forward: ForwardFlops) -> float:
    """Return the FLOPs per token that the backward pass spends on recomputing activations."""
    if config.engine.name is EngineName.megatron:
        return _recomputed_by_megatron(config, shape, forward)
    return _recomputed_by_torch(config, shape, forward)


def peak_flops(plan: RunPlan) -> float | None:
    """Peak dense FLOP/s of one rank's GPU in the run's precision; None if utilisation is not reported."""
    gpu = find_gpu(plan.world.gpu)
    return gpu.peak_flops if gpu is not None and why_no_utilisation(plan) is None else None


def why_no_utilisation(plan: RunPlan) -> str | None:
    """Return why utilisation is not reported; None if it is."""
    if model_flops(plan) is None and plan.config.task.target is not None:
        return "the task does not define flops_per_unit"
    if model_flops(plan) is None:
        return f"the FLOPs of a model without a family ({plan.config.model.source_key}) are not known"
    if plan.world.device is not Device.CUDA:
        return "it runs on CPUs"
    if find_gpu(plan.world.gpu) is None:
        return "the GPU is not in toolkit/plan/devices.py (cluster.gpu=NAME selects one of its GPUs)"
    if plan.config.precision.name is Precision.fp32:
        return "the peak of a GPU is that of its 16-bit matrix units, which precision=fp32 does not use"
    return None


def _per_unit(plan: RunPlan, name: str) -> float | None:
    """Return the trace's ``model_flops`` or ``hardware_flops`` of one unit; None without a trace."""
    if not isinstance(plan.trace, ModuleTrace):
        return None
    flops: float = getattr(plan.trace, name)
    return flops / (plan.trace.micro_batch * plan.units_per_sample)


def _forward(plan: RunPlan, shape: ModelShape) -> ForwardFlops:
    return get_family(shape.family).forward_flops(shape, plan.config.train.sequence_length)


def _recomputed_by_torch(config: RunConfig, shape: ModelShape, forward: ForwardFlops) -> float:
    """Return the FLOPs that ``torch.utils.checkpoint`` recomputes: none in selective mode, which stores
    matrix products.

    Recomputation stops once all saved tensors exist again, which is before the last matrix product of a
    block. That product is computed too with experts, whose outputs are weighted, with dropout, and under ZeRO
    3, where DeepSpeed's linear layer saves its inputs after the product.
    """
    traits = get_family(shape.family).traits
    whole_block = (
        traits.experts
        or (traits.hidden_dropout and shape.dropout > 0)
        or (traits.linear_layers and config.zero.stage == 3)
    )
    per_block = (forward.blocks if whole_block else forward.blocks - forward.down) / shape.num_hidden_layers
    return per_block * config.train.recomputation.count(range(shape.num_hidden_layers))


def _recomputed_by_megatron(config: RunConfig, shape: ModelShape, forward: ForwardFlops) -> float:
    """Return the FLOPs of the blocks, or submodules of all blocks, that Megatron-core is configured to
    recompute.
    """
    keys = recomputation_keys(config, shape)
    granularity = keys.get("recompute_granularity")
    if granularity == "full":
        if keys.get("recompute_method") != "block":
            return forward.blocks
        layers = stage_layers(shape, config.parallel.pipeline, config.engine.megatron)
        chunks = [blocks for stage in stage_chunks(layers, virtual_stages(config)) for blocks in stage]
        again = sum(min(len(blocks), int(keys["recompute_num_layers"])) for blocks in chunks)
        return forward.blocks * again / shape.num_hidden_layers
    if granularity != "selective":
        return 0.0
    modules = keys.get("recompute_modules") or ["core_attn"]
    feed_forward = "moe" if get_family(shape.family).traits.experts else "mlp"
    return (forward.scores if "core_attn" in modules else 0.0) + (
        forward.up + forward.down if feed_forward in modules else 0.0
    )
