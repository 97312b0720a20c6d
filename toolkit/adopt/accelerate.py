"""The YAML of ``accelerate config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.adopt.batch import accumulation
from toolkit.adopt.deepspeed import OFFLOADED, offload
from toolkit.adopt.types import (
    Context,
    Decision,
    Rule,
    changed,
    choose,
    default,
    exact,
    expect,
    refused,
    reject,
    same,
)

STARTED = "the launcher decides it: deepspeed, torchrun, or cluster=slurm"
_PREFIXES = ("deepspeed_config.", "fsdp_config.", "megatron_lm_config.")


def _offload(value: Any, ctx: Context) -> Decision:
    return offload(value, *(ctx.keys.get(f"deepspeed_config.offload_{part}_device") for part in OFFLOADED))


def _machines(value: Any, ctx: Context) -> Decision:
    return default() if value == 1 else exact(("cluster.nodes", value))


def _processes(value: Any, ctx: Context) -> Decision:
    return changed(f"start {value} processes with the launcher: deepspeed --num_gpus, torchrun, or cluster.*")


def _sharding(value: Any, ctx: Context) -> Decision:
    by_value = {
        "full_shard": "stage3",
        "1": "stage3",
        "hybrid_shard": "stage3",
        "4": "stage3",
        "shard_grad_op": "stage2",
        "2": "stage2",
        "hybrid_shard_zero2": "stage2",
        "5": "stage2",
        "no_shard": "stage0",
        "3": "stage0",
    }
    stage = by_value.get(str(value).lower())
    if stage is None:
        return refused("there is no such sharding strategy")
    return changed("DeepSpeed's ZeRO shards instead of torch's FSDP", ("zero", stage))


def _reshard(value: Any, ctx: Context) -> Decision:
    if isinstance(value, str) and value.lower() not in ("true", "false"):
        return _sharding(value, ctx)
    full = value is True or str(value).lower() == "true"
    return changed(
        "DeepSpeed's ZeRO shards instead of torch's FSDP", ("zero", "stage3" if full else "stage2")
    )


_PRECISION: dict[Any, tuple[tuple[str, Any], ...]] = {
    "no": (),
    False: (),
    "bf16": (("precision", "bf16"),),
    "fp16": (("precision", "fp16"),),
}
RULES: Mapping[str, Rule] = {
    "compute_environment": expect(
        "local_machine", otherwise="clusters are cluster=slurm and cluster=kubernetes"
    ),
    "distributed_type": choose(
        {
            "no": (),
            "multi_gpu": (),
            "multi_cpu": (),
            "deepspeed": (("engine", "deepspeed"),),
            "fsdp": (("engine", "deepspeed"),),
            "megatron_lm": (("engine", "megatron"),),
        },
        "there is no such kind of machine here",
    ),
    "mixed_precision": choose(_PRECISION, "the precisions are fp32, bf16 and fp16"),
    "downcast_bf16": expect("no", False, otherwise="it is for TPUs"),
    "num_machines": _machines,
    "num_processes": _processes,
    **dict.fromkeys(
        (
            *(
                "machine_rank",
                "main_process_ip",
                "main_process_port",
                "rdzv_backend",
                "same_network",
                "gpu_ids",
            ),
            *("main_training_function", "use_cpu", "enable_cpu_affinity", "rdzv_conf", "monitor_interval"),
            *("deepspeed_config.deepspeed_multinode_launcher", "deepspeed_config.deepspeed_hostfile"),
            *("deepspeed_config.deepspeed_exclusion_filter", "deepspeed_config.deepspeed_inclusion_filter"),
            *("mpirun_config", "ipex_config", "num_cpu_threads_per_process", "command_file", "commands"),
        ),
        lambda value, ctx: default(STARTED),
    ),
    **dict.fromkeys(
        ("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone", "tpu_commands", "tpu_vm"),
        lambda value, ctx: default() if not value else refused("there are no TPUs here"),
    ),
    "debug": expect(False, otherwise="reports of hanging collectives are always on: monitor.hang_seconds"),
    "dynamo_config": lambda value, ctx: default() if not value else refused("compile=layers is the key"),
    **dict.fromkeys(
        ("dynamo_backend", "dynamo_config.dynamo_backend"),
        choose(
            {"no": (), "no_op": (), "inductor": (("compile", "layers"),)},
            "torch.compile has the backend inductor",
        ),
    ),
    "gradient_accumulation_steps": accumulation,
    "gradient_clipping": same("optim.clip"),
    "fp8_config": reject("precision=fp8 has one recipe: a scale for each row"),
    "deepspeed_config.gradient_accumulation_steps": accumulation,
    "deepspeed_config.gradient_clipping": same("optim.clip"),
    "deepspeed_config.offload_optimizer_device": _offload,
    "deepspeed_config.offload_param_device": _offload,
    "deepspeed_config.offload_optimizer_nvme_path": same("offload.nvme_path"),
    "deepspeed_config.offload_param_nvme_path": same("offload.nvme_path"),
    "deepspeed_config.zero_stage": lambda value, ctx: exact(("zero", f"stage{value}")),
    "deepspeed_config.zero3_init_flag": lambda value, ctx: default(
        "weights are never built whole under ZeRO 3"
    ),
    "deepspeed_config.zero3_save_16bit_model": lambda value, ctx: (
        exact(("checkpoint.export", True)) if value else default()
    ),
    "deepspeed_config.deepspeed_moe_layer_cls_names": reject("the model family defines the expert layers"),
    "deepspeed_config.deepspeed_config_file": lambda value, ctx: (
        exact(note="adopted with this file")
        if len(ctx.formats) > 1
        else refused("name that file on the same command line")
    ),
    "fsdp_config.fsdp_sharding_strategy": _sharding,
    "fsdp_config.fsdp_reshard_after_forward": _reshard,
    "fsdp_config.fsdp_version": lambda value, ctx: default("DeepSpeed's ZeRO shards"),
    "fsdp_config.fsdp_offload_params": choose({True: (("offload", "cpu"),), False: ()}, "true or false"),
    "fsdp_config.fsdp_activation_checkpointing": same("train.activation_checkpointing"),
    **dict.fromkeys(
        (
            *("fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_transformer_layer_cls_to_wrap"),
            *("fsdp_config.fsdp_min_num_params", "fsdp_config.fsdp_backward_prefetch"),
            *("fsdp_config.fsdp_forward_prefetch", "fsdp_config.fsdp_use_orig_params"),
            *("fsdp_config.fsdp_sync_module_states", "fsdp_config.fsdp_cpu_ram_efficient_loading"),
            "fsdp_config.fsdp_backward_prefetch_policy",
        ),
        lambda value, ctx: default(
            "ZeRO needs no wrapping; its prefetching is +engine.deepspeed.zero_optimization.*"
        ),
    ),
    "fsdp_config.fsdp_state_dict_type": lambda value, ctx: changed(
        "checkpoints have no layout and resume in any"
    ),
    "megatron_lm_config.megatron_lm_tp_degree": same("parallel.tensor"),
    "megatron_lm_config.megatron_lm_pp_degree": same("parallel.pipeline"),
    "megatron_lm_config.megatron_lm_num_micro_batches": reject(
        "it follows from train.global_batch and train.micro_batch"
    ),
    "megatron_lm_config.megatron_lm_gradient_clipping": same("optim.clip"),
    "megatron_lm_config.megatron_lm_sequence_parallelism": lambda value, ctx: (
        default("the plan turns it on whenever it fits")
        if value
        else exact(("engine.megatron.sequence_parallel", False))
    ),
    "megatron_lm_config.megatron_lm_recompute_activations": lambda value, ctx: (
        exact(("engine.megatron.recompute_granularity", "selective")) if value else default()
    ),
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": choose(
        {True: (("zero", "stage1"),), False: ()}, "true or false"
    ),
}


def decide(name: str, value: Any, ctx: Context) -> Decision:
    """Return the decision about one key of accelerate's YAML."""
    if name in RULES:
        return RULES[name](value, ctx)
    if value is None or value == {}:
        return default("not set")
    section = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    top = name.partition(".")[0]
    if top in RULES and not section:
        return RULES[top](value, ctx)
    return refused("unknown accelerate key")
