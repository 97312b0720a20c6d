"""Tables of DeepSpeed's keys that the plan derives, and of replacements for removed keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.config.schema import OptimizerName, RunConfig

# DeepSpeed's key -> the run's own key with the same meaning and values.
OWN = {
    "train_batch_size": "train.global_batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_clipping": "optim.clip",
    "fp16.initial_scale_power": "precision.initial_scale_power",
    "fp16.loss_scale_window": "precision.scale_window",
    "zero_optimization.offload_optimizer.device": "offload.optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "offload.nvme_path",
    "zero_optimization.offload_param.device": "offload.parameters",
    "zero_optimization.offload_param.nvme_path": "offload.nvme_path",
    "tensor_parallel.autotp_size": "parallel.tensor",
    "sequence_parallel_size": "parallel.context",
    "expert_parallel.autoep_size": "parallel.expert",
    "pipeline.stages": "parallel.pipeline",
    "wandb.project": "monitor.project",
}

# Reasons and remedies of DERIVED below.
_PRECISION = (
    "the plan derives it from precision.name",
    "write precision=fp32, precision=bf16 or precision=fp16",
)
_MASTER = (
    "master weights and moments are fp32 always, so that a checkpoint resumes in every layout",
    "leave it out",
)
_OFFLOAD = (
    "the plan derives it from the group offload",
    "write offload=none, offload=cpu_optimizer, offload=cpu or offload=nvme",
)
_MONITOR = (
    "DeepSpeed's monitors never log the training loss, and only on rank 0",
    "leave it out: metrics.jsonl and monitor.wandb have everything",
)
_CHECKPOINT = (
    "checkpoints are this toolkit's own, which any layout resumes",
    "write checkpoint.* keys instead",
)
_DATA = ("samples and their order are this toolkit's own", "write data.* keys instead")
_SCALER = (
    "the loss scale is dynamic, and its rules are the same in every engine",
    "write precision.initial_scale_power or precision.scale_window",
)
_KERNEL = ("the plan derives it from optim.name and optim.kernel", "write optim.name or optim.kernel")
_WHOLE_MODULES = (
    "DeepSpeed then gathers whole modules, and its step fails on CPUs; it was not measured on GPUs",
    "leave it out",
)
_DIVISION = ("gradients are divided once, by the units of the global batch", "leave it out")

# DeepSpeed key or section -> (why it is not set here, remedy)
DERIVED = {
    "gradient_accumulation_steps": (
        "the plan derives it: global batch / (micro-batch x data ranks)",
        "write train.global_batch and train.micro_batch",
    ),
    "optimizer": (
        "the plan derives it from optim.*",
        "write optim=adamw, optim=sgd or optim=muon, and optim.lr and so on",
    ),
    "scheduler": (
        "the learning rate is a function of the samples consumed, which the loop sets",
        "write schedule.name and optim.lr",
    ),
    "zero_optimization.stage": (
        "the plan derives it from zero.stage",
        "write zero=stage0, zero=stage1, zero=stage2 or zero=stage3",
    ),
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_param": _OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOAD,
    "zero_optimization.offload_optimizer.pin_memory": (
        "the plan pins memory if there is a GPU",
        "leave it out",
    ),
    "zero_optimization.offload_param.pin_memory": ("the plan pins memory if there is a GPU", "leave it out"),
    "zero_optimization.round_robin_gradients": (
        "round-robin partitions lose which parameter a saved state belongs to",
        "leave it out",
    ),
    "zero_optimization.stage3_module_granularity_threshold": _WHOLE_MODULES,
    "zero_optimization.module_granularity_threshold": _WHOLE_MODULES,
    "zero_allow_untested_optimizer": _KERNEL,
    "zero_force_ds_cpu_optimizer": _KERNEL,
    "bf16.enabled": _PRECISION,
    "bfloat16": _PRECISION,
    "fp16.enabled": _PRECISION,
    "data_types.param_dtype": _PRECISION,
    "torch_autocast": (
        "autocast would change the precision that the plan assumes",
        "write precision=bf16 or precision=fp16",
    ),
    "fp16.loss_scale": _SCALER,
    "fp16.hysteresis": _SCALER,
    "fp16.min_loss_scale": _SCALER,
    "fp16.fp16_master_weights_and_grads": _MASTER,
    "bf16.bf16_master_weights_and_grads": _MASTER,
    "bf16.bf16_optimizer_states": _MASTER,
    "expert_parallel": ("the plan derives the expert axis", "write parallel.expert instead"),
    "pipeline": ("the plan derives the pipeline", "write parallel.pipeline instead"),
    "tensor_parallel": ("the plan derives the tensor axis", "write parallel.tensor instead"),
    "use_data_before_expert_parallelism": ("expert ranks are adjacent in every engine", "leave it out"),
    "tensorboard": _MONITOR,
    "wandb": _MONITOR,
    "csv_monitor": _MONITOR,
    "comet": _MONITOR,
    "steps_per_print": ("progress and metrics are this toolkit's own", "write monitor.every"),
    "checkpoint": _CHECKPOINT,
    "datastates_ckpt": _CHECKPOINT,
    "dataloader_drop_last": _DATA,
    "data_efficiency": _DATA,
    "managed_gradient_accumulation": ("the engine decides when a step ends", "leave it out"),
    "gradient_allreduce_op": _DIVISION,
    "prescale_gradients": _DIVISION,
    "gradient_predivide_factor": _DIVISION,
    "autotuning": (
        "DeepSpeed's autotuner restarts the run with other settings",
        "compare settings with launch/plan.py",
    ),
}

# DeepSpeed checks the values of these keys in functions, which the schema does not show.
DTYPE_KEYS = (
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "data_types.grad_accum_dtype",
    "data_types.buffer_dtype",
)

# Removed key -> remedy. A removed key without an entry has no replacement.
INSTEAD = {
    "elasticity": "leave it out: a checkpoint resumes with any number of ranks",
    "nebula": "write checkpoint.background=true",
    "amp": "write precision=bf16 or precision=fp16",
    "zero_optimization.mics_shard_size": "write "
    "+engine.deepspeed.zero_optimization.zero_hpz_partition_size=N",
}


def muon_problems(config: RunConfig) -> Iterator[tuple[str, Any, str, str]]:
    """Yield (key, value, rule, remedy) of keys that do not work with Muon."""
    zero = config.engine.deepspeed.get("zero_optimization")
    if (
        config.optim.name is OptimizerName.muon
        and config.zero.stage == 3
        and isinstance(zero, Mapping)
        and zero.get("reduce_scatter")
    ):
        yield (
            "zero_optimization.reduce_scatter",
            zero["reduce_scatter"],
            "DeepSpeed's Muon under ZeRO 3 reduces whole gradients (optim.name=muon, zero.stage=3)",
            "leave it out",
        )
