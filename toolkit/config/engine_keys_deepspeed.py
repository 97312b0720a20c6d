"""Tables of DeepSpeed's keys that the plan derives, and of replacements for removed keys."""

from __future__ import annotations

from toolkit.commands import command_line

# DeepSpeed's key -> the run's own key with the same meaning and values.
RUN_KEYS = {
    "train_batch_size": "train.global_batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_clipping": "optim.clip",
    "fp16.initial_scale_power": "precision.initial_scale_power",
    "fp16.loss_scale_window": "precision.scale_window",
    "zero_optimization.zero_hpz_partition_size": "zero.hpz_partition_size",
    "zero_optimization.zero_quantized_weights": "zero.quantized_weights",
    "zero_optimization.zero_quantized_gradients": "zero.quantized_gradients",
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
    "write offload=none, offload=cpu_optimizer, offload=cpu or offload=nvme offload.nvme_path=FOLDER",
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

_COMPILE = (
    "DeepSpeed reads it in engine.compile(), for its own compiler backend, which this toolkit does not use",
    "write compile.mode=layers, which compiles each layer with torch's own compiler",
)
_CLIENT_CHECKPOINTING = (
    "only deepspeed.checkpointing.configure reads it, for models that call DeepSpeed's own checkpointing",
    "write train.activation_checkpointing=full",
)
_OWN_CHECKPOINTS = ("it is for DeepSpeed's own checkpoints, which this toolkit does not use", "leave it out")
_ZERO_INIT = (
    "it changes modules that are constructed inside zero.Init, and models are not constructed there",
    "leave it out",
)
_NOT_READ = ("DeepSpeed does not use it", "leave it out")

# Keys that DeepSpeed accepts and that have no effect in what this toolkit runs: (why, remedy)
NO_EFFECT = {
    "compile": _COMPILE,
    "activation_checkpointing": _CLIENT_CHECKPOINTING,
    "hybrid_engine": (
        "it generates text between training steps, which this toolkit does not",
        "leave it out",
    ),
    "weight_quantization": _ZERO_INIT,
    "zero_optimization.override_module_apply": _ZERO_INIT,
    "zero_optimization.elastic_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.load_from_fp32_weights": _OWN_CHECKPOINTS,
    "zero_optimization.pipeline_loading_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.gather_16bit_weights_on_model_save": _OWN_CHECKPOINTS,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _OWN_CHECKPOINTS,
    "zero_optimization.allgather_partitions": _NOT_READ,
    "zero_optimization.legacy_stage1": ("DeepSpeed has removed it", "leave it out"),
    "disable_allgather": _NOT_READ,
    "vocabulary_size": _NOT_READ,
    "fp16.consecutive_hysteresis": _SCALER,
    "timers": (
        "DeepSpeed's timers print every steps_per_print steps, and that is never",
        "leave it out: metrics.jsonl has the throughput of every step",
    ),
}

# DeepSpeed key or section -> (why it is not set here, remedy)
DERIVED = {
    **NO_EFFECT,
    "gradient_accumulation_steps": (
        "the plan derives it: global batch / (micro-batch x data ranks)",
        "write train.global_batch=8 and train.micro_batch=1, for example",
    ),
    "optimizer": (
        "the plan derives it from optim.*",
        "write optim=adamw or another option of the group optim, and optim.lr and so on",
    ),
    "scheduler": (
        "the learning rate is a function of the samples consumed, which the loop sets",
        "write schedule=constant, schedule=linear, schedule=cosine or schedule=wsd, and optim.lr",
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
        f"compare settings with {command_line('plan')}",
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
REPLACEMENTS = {
    "elasticity": "leave it out: a checkpoint resumes with any number of ranks",
    "nebula": "write checkpoint.background=true",
    "amp": "write precision=bf16 or precision=fp16",
    "zero_optimization.mics_shard_size": "write zero.hpz_partition_size=N, which keeps the weights in groups "
    "of ranks",
}
