"""``TrainingArguments`` of Hugging Face's Trainer as JSON, with the arguments of its example scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.adopt import deepspeed
from toolkit.adopt.batch import accumulation, micro_batch
from toolkit.adopt.types import (
    WARMUP,
    Context,
    Decision,
    Format,
    Rule,
    changed,
    choose,
    default,
    exact,
    expect,
    refused,
    same,
)
from toolkit.config import search_path
from toolkit.config.synonyms import ADVICE, SAME, percent

UNUSED = "another key turns it off"


def _steps(value: Any, ctx: Context) -> Decision:
    return (
        exact(("train.steps", value))
        if isinstance(value, int) and value > 0
        else default("train.epochs decides")
    )


def _epochs(value: Any, ctx: Context) -> Decision:
    if _number(ctx.keys.get("max_steps")) > 0:
        return default("max_steps decides")
    return changed(
        "an incomplete last batch is filled from the next epoch, and not dropped", ("train.epochs", value)
    )


def _warmup(value: Any, ctx: Context) -> Decision:
    """Return a number of steps; below 1 a share of the run, as in transformers 5."""
    number = _number(value)
    if not number:
        return default() if not _number(ctx.keys.get("warmup_ratio")) else default("warmup_ratio decides")
    return changed(WARMUP, ("schedule.warmup", percent(str(value)) if number < 1 else math.ceil(number)))


def _warmup_ratio(value: Any, ctx: Context) -> Decision:
    if not _number(value) or _number(ctx.keys.get("warmup_steps")):
        return default() if not _number(value) else default("warmup_steps decides")
    return changed(WARMUP, ("schedule.warmup", percent(str(value))))


_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adam8bit"),
    "adafactor": "adafactor",
    "lion_32bit": "lion",
    "schedule_free_adamw": "schedule_free",
    "sgd": "sgd",
}


def _optimizer(value: Any, ctx: Context) -> Decision:
    option = _OPTIMIZERS.get(str(value).rpartition(".")[2].lower())
    if option is None or option not in search_path.options(search_path.folders(None), "optim"):
        return refused(f"there is no optimizer {value} here: choose one of the group optim")
    return exact(("optim", option))


def _best(value: Any, ctx: Context) -> Decision:
    """The Trainer's eval_loss is the loss of the set named validation."""
    if not value:
        return default()
    metric = str(ctx.keys.get("metric_for_best_model") or "loss").removeprefix("eval_")
    note = "the best checkpoint is kept as checkpoints/best; the run ends with its last weights"
    return changed(note, ("checkpoint.keep_best.metric", f"validation/{metric}"))


def _best_mode(value: Any, ctx: Context) -> Decision:
    if value is None or not ctx.keys.get("load_best_model_at_end"):
        return default("used with load_best_model_at_end")
    return exact(("checkpoint.keep_best.mode", "max" if value else "min"))


def _schedule(value: Any, ctx: Context) -> Decision:
    option = {
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
        "constant": "constant",
        "constant_with_warmup": "constant",
    }.get(str(value).lower().rpartition(".")[2])
    if option is None:
        return refused("there is no such schedule here: choose schedule=constant, linear, cosine or wsd")
    return exact(("schedule", option))


def _schedule_options(value: Any, ctx: Context) -> Decision:
    if not value:
        return default()
    if isinstance(value, Mapping) and set(value) == {"min_lr"}:
        return exact(("schedule.min_lr", value["min_lr"]))
    if isinstance(value, Mapping) and set(value) == {"min_lr_rate"}:
        peak = _number(ctx.keys.get("learning_rate", 5e-5))
        return exact(("schedule.min_lr", float(f"{peak * value['min_lr_rate']:.6g}")))
    return refused("schedule.min_lr, schedule.warmup and schedule.decay are the options of a schedule")


def _every(target: str, strategy: str, otherwise: str) -> Rule:
    """Return an interval in steps that a strategy of steps uses."""

    def rule(value: Any, ctx: Context) -> Decision:
        chosen = str(ctx.keys.get(strategy, "steps")).lower()
        if chosen != "steps" or value is None:
            return default(UNUSED if value is not None else "")
        if not isinstance(value, int | float) or value <= 0:
            return refused("an interval is a positive number of steps")
        if value < 1:
            if ctx.steps is None:
                return refused(f"a share of the steps, which no file names: write {target}")
            value = math.ceil(value * ctx.steps)
        plain: Any = str(int(value)) if target == "checkpoint.every" else int(value)
        return exact((target, plain)) if not otherwise else changed(otherwise, (target, plain))

    return rule


def _save_strategy(value: Any, ctx: Context) -> Decision:
    if str(value).lower() == "no":
        return exact(("checkpoint.every", "never"), ("checkpoint.at_end", False))
    if str(value).lower() == "steps":
        return default("save_steps decides")
    return refused(
        "checkpoints are saved every so many steps or minutes: write checkpoint.every=500 or 30min"
    )


def _eval_strategy(value: Any, ctx: Context) -> Decision:
    if str(value).lower() == "no":
        return default()
    if str(value).lower() == "steps":
        if ctx.keys.get("eval_steps") is None:
            return exact(("eval.every", int(_number(ctx.keys.get("logging_steps", 500)) or 500)))
        return default("eval_steps decides")
    return refused("evaluations run every so many steps: write eval.every=500")


def _report_to(value: Any, ctx: Context) -> Decision:
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    if names in (["none"], []):
        return exact(("monitor", "files"))
    if names == ["wandb"]:
        return exact(("monitor", "online"))
    if "wandb" in names or "all" in names:
        return changed("W&B only; other services are sinks of your own", ("monitor", "online"))
    return refused(
        "metrics.jsonl and W&B (monitor=online) have every metric; other services are sinks of your own"
    )


def _resume(value: Any, ctx: Context) -> Decision:
    if value in (None, False, True):
        return default("the same command resumes")
    return refused(
        "a checkpoint of the Trainer is not read; weights are: model=pretrained model.pretrained=FOLDER"
    )


def _deepspeed(value: Any, ctx: Context) -> Decision:
    if value is None:
        return default()
    if Format.DEEPSPEED in ctx.formats:
        return exact(("engine", "deepspeed"), note="adopted with this file")
    return refused("name that file on the same command line")


def _dataset(value: Any, ctx: Context) -> Decision:
    if value is None:
        return default()
    tokenizer = ctx.keys.get("tokenizer_name") or ctx.keys.get("model_name_or_path")
    if tokenizer is None:
        return refused("data=dataset needs a tokenizer too: data.dataset.path and data.dataset.tokenizer")
    return exact(("data", "dataset"), ("data.dataset.path", value), ("data.dataset.tokenizer", tokenizer))


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


_DIRECT = (
    *("learning_rate", "adam_epsilon", "max_grad_norm", "data_seed", "run_name", "save_total_limit"),
    *("gradient_checkpointing", "max_train_samples"),
)
_HUB = "weights are exported with checkpoint.export=true; upload them with huggingface-cli"
_LOADER = "one thread per rank reads samples, in an order that is a function of the step"
_DDP = "DeepSpeed reduces gradients; its keys are +engine.deepspeed.*"
_LOGS = "progress and logs are this toolkit's own"
_COMPUTE = "kernels are those of the engine"
_TASK = "the task defines samples, loss and metrics"
RULES: Mapping[str, Rule] = {
    **{name: same(SAME[name]) for name in _DIRECT},
    "per_device_train_batch_size": micro_batch,
    "per_gpu_train_batch_size": lambda value, ctx: default() if value is None else micro_batch(value, ctx),
    "gradient_accumulation_steps": accumulation,
    "max_steps": _steps,
    "num_train_epochs": _epochs,
    "weight_decay": same("optim.weight_decay"),
    "adam_beta1": lambda value, ctx: exact(("optim.betas", [value, ctx.keys.get("adam_beta2", 0.999)])),
    "adam_beta2": lambda value, ctx: exact(("optim.betas", [ctx.keys.get("adam_beta1", 0.9), value])),
    "lr_scheduler_type": _schedule,
    "lr_scheduler_kwargs": _schedule_options,
    "warmup_steps": _warmup,
    "warmup_ratio": _warmup_ratio,
    "optim": _optimizer,
    "adafactor": choose({True: (("optim", "adafactor"),), False: ()}, "true or false"),
    "seed": same(
        "train.seed", "other weights and another order: the number is the same, the generator is not"
    ),
    "activation_checkpointing": lambda value, ctx: same("train.activation_checkpointing")(value, ctx),
    "bf16": choose({True: (("precision", "bf16"),), False: (), None: ()}, "true or false"),
    "fp16": choose({True: (("precision", "fp16"),), False: (), None: ()}, "true or false"),
    "torch_compile": choose({True: (("compile", "layers"),), False: (), None: ()}, "true or false"),
    "full_determinism": choose({True: (("debug", "deterministic"),), False: ()}, "true or false"),
    "output_dir": lambda value, ctx: default() if value is None else exact(("run.dir", value)),
    "logging_strategy": choose({"steps": (), "no": ()}, "metrics.jsonl has every step"),
    "logging_steps": _every(
        "monitor.every", "logging_strategy", "rows on the console; metrics.jsonl has every step"
    ),
    "eval_strategy": _eval_strategy,
    "evaluation_strategy": _eval_strategy,
    "eval_steps": lambda value, ctx: _every(
        "eval.every", "eval_strategy" if "eval_strategy" in ctx.keys else "evaluation_strategy", ""
    )(value, ctx),
    "save_strategy": _save_strategy,
    "save_steps": _every("checkpoint.every", "save_strategy", ""),
    "report_to": _report_to,
    "project": same("monitor.project"),
    "resume_from_checkpoint": _resume,
    "deepspeed": _deepspeed,
    "dataset_name": _dataset,
    "dataset_config_name": lambda value, ctx: (
        default() if value is None else exact(("data.dataset.name", value))
    ),
    "model_name_or_path": lambda value, ctx: (
        default() if value is None else exact(("model", "pretrained"), ("model.pretrained", value))
    ),
    "block_size": same(SAME["block_size"]),
    "max_seq_length": same(SAME["max_seq_length"]),
    "tokenizer_name": lambda value, ctx: (
        default("used with dataset_name")
        if value is None or ctx.keys.get("dataset_name")
        else refused("the tokenizer belongs to the data: launch/prepare.py tokenizer.path=NAME")
    ),
    "do_train": expect(True, False, None, otherwise="true or false"),
    "do_eval": lambda value, ctx: default("eval.every decides"),
    "do_predict": expect(False, None, otherwise="launch/generate.py continues a text"),
    # No name of a person's: the number of ranks is the launcher's.
    "local_rank": lambda value, ctx: default("the launcher sets it"),
    "dataloader_drop_last": lambda value, ctx: default("the order is endless: no batch is incomplete"),
    "group_by_length": expect(False, otherwise="every sequence has train.sequence_length tokens"),
    "train_sampling_strategy": expect("random", otherwise="samples are shuffled"),
    "average_tokens_across_devices": expect(
        True, otherwise="the loss is the mean over all tokens of the global batch, in every layout"
    ),
    "prediction_loss_only": lambda value, ctx: default("evaluations compute the loss"),
    "per_device_eval_batch_size": lambda value, ctx: default("evaluations use the batch of training"),
    "per_gpu_eval_batch_size": lambda value, ctx: default("evaluations use the batch of training"),
    "ddp_timeout": lambda value, ctx: default("monitor.hang_seconds"),
    "logging_nan_inf_filter": lambda value, ctx: default("train.on_nonfinite decides"),
    "skip_memory_metrics": lambda value, ctx: default("memory is always measured"),
    "ignore_data_skip": expect(False, otherwise="a run resumes at the sample at which it stopped"),
    "fsdp": lambda value, ctx: (
        default()
        if value in (None, "", [], False)
        else changed(
            "DeepSpeed's ZeRO shards instead of torch's FSDP",
            ("zero", "stage2" if "grad_op" in str(value) else "stage3"),
        )
    ),
    **dict.fromkeys(
        ("fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"),
        lambda value, ctx: default("ZeRO needs no wrapping"),
    ),
    "load_best_model_at_end": _best,
    "metric_for_best_model": lambda value, ctx: (
        default("used with load_best_model_at_end")
        if value is None or not ctx.keys.get("load_best_model_at_end")
        else _best(True, ctx)
    ),
    "greater_is_better": _best_mode,
}

# Fields without a key here: the values that change nothing, and the reason to refuse others.
_WITHOUT: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        _HUB,
        (
            *(
                "push_to_hub",
                "hub_token",
                "hub_private_repo",
                "hub_model_id",
                "hub_strategy",
                "hub_always_push",
            ),
            *("hub_revision", "push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token"),
            *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        ),
    ),
    (
        _LOADER,
        (
            *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
            *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
            *("remove_unused_columns", "length_column_name", "accelerator_config", "dispatch_batches"),
            *("split_batches", "preprocessing_num_workers", "overwrite_cache", "streaming"),
        ),
    ),
    (
        _DDP,
        (
            *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
            *("ddp_backend", "sharded_ddp", "parallelism_config", "use_cpu", "no_cuda", "use_mps_device"),
            *("xpu_backend", "tpu_num_cores", "tpu_metrics_debug", "mp_parameters", "save_on_each_node"),
            *("log_on_each_node", "debug", "_n_gpu"),
        ),
    ),
    (
        _LOGS,
        (
            *("logging_dir", "logging_first_step", "log_level", "log_level_replica", "disable_tqdm"),
            *("include_num_input_tokens_seen", "include_tokens_per_second", "overwrite_output_dir"),
            *("save_safetensors", "save_only_model", "enable_jit_checkpoint", "auto_find_batch_size"),
            *("restore_callback_states_from_checkpoint", "past_index", "ray_scope", "eval_delay"),
        ),
    ),
    (
        _COMPUTE,
        (
            *("tf32", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel"),
            *("liger_kernel_config", "use_cache", "torch_empty_cache_steps", "torchdynamo", "jit_mode_eval"),
            *("use_ipex", "bf16_full_eval", "fp16_full_eval", "fp16_backend", "fp16_opt_level"),
            *("half_precision_backend", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
            *("optim_args", "optim_target_modules", "torch_dtype", "low_cpu_mem_usage", "trust_remote_code"),
        ),
    ),
    (
        _TASK,
        (
            *("label_names", "label_smoothing_factor", "neftune_noise_alpha", "include_for_metrics"),
            *("include_inputs_for_metrics", "batch_eval_metrics", "eval_accumulation_steps", "eval_on_start"),
            *("eval_do_concat_batches", "eval_use_gather_object", "use_legacy_prediction_loop"),
            *(
                "train_file",
                "validation_file",
                "validation_split_percentage",
                "max_eval_samples",
                "text_column",
            ),
            *("config_name", "model_type", "use_fast_tokenizer", "model_revision", "token", "cache_dir"),
        ),
    ),
)
# Values that do the same as this toolkit does, besides those that turn a field off.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "dataloader_pin_memory": (True,),
    "dataloader_in_order": (True,),
    "remove_unused_columns": (True,),
    "length_column_name": ("length",),
    "log_on_each_node": (True,),
    "log_level": ("passive", "info", "warning"),
    "log_level_replica": ("warning", "passive"),
    "save_safetensors": (True,),
    "hub_strategy": ("every_save",),
    "eval_do_concat_batches": (True,),
    "fp16_opt_level": ("o1",),
    "fp16_backend": ("auto",),
    "half_precision_backend": ("auto",),
    "ray_scope": ("last",),
    "past_index": (-1,),
    "disable_tqdm": (True,),
    "overwrite_output_dir": (True,),
    "use_fast_tokenizer": (True,),
    "model_revision": ("main",),
    "_n_gpu": (1,),
    "dataloader_num_workers": tuple(range(1, 129)),
    "preprocessing_num_workers": tuple(range(1, 129)),
    "tf32": (True,),
    "torch_dtype": ("auto",),
    "logging_first_step": (True,),
    "gradient_checkpointing_kwargs": ("{'use_reentrant': false}", "{'use_reentrant': False}"),
}
REASONS: Mapping[str, str] = {name: reason for reason, names in _WITHOUT for name in names}


def decide(name: str, value: Any, ctx: Context) -> Decision:
    """Return the decision about one field."""
    if name.startswith("deepspeed."):
        inner = {key.removeprefix("deepspeed."): given for key, given in ctx.keys.items()}
        return deepspeed.decide(name.removeprefix("deepspeed."), value, replace(ctx, keys=inner))
    if name in RULES:
        return RULES[name](value, ctx)
    if name not in REASONS:
        if name in SAME:
            return same(SAME[name])(value, ctx)
        if name in ADVICE:
            return refused("; ".join(ADVICE[name]))
        return refused("unknown field of TrainingArguments")
    plain = value.lower() if isinstance(value, str) else value
    if plain in (None, False, "", "no", "none", [], {}, 0) or plain in _HARMLESS.get(name, ()):
        return default(REASONS[name])
    if isinstance(value, dict) and str(value) in _HARMLESS.get(name, ()):
        return default(REASONS[name])
    return default(REASONS[name]) if name in ("logging_dir", "cache_dir") else refused(REASONS[name])


# The Trainer's defaults that differ from this toolkit's, for files that leave them out.
DEFAULTS: Mapping[str, Any] = {
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3.0,
    "seed": 42,
}
