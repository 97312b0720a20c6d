"""Arguments of Megatron-LM's scripts. Names have underscores: ``num_layers`` for ``--num-layers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.adopt.batch import micro_batch
from toolkit.adopt.types import (
    WARMUP,
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
from toolkit.config import search_path
from toolkit.config.engine_keys import MEGATRON
from toolkit.config.engine_keys_megatron import DERIVED, RUN_KEYS
from toolkit.config.synonyms import SAME, percent
from toolkit.config.vendors.installed import MEGATRON as PACKAGE
from toolkit.config.vendors.installed import load_schema
from toolkit.config.vendors.key_schema import KeySchema


def _names(text: str) -> tuple[str, ...]:
    """Argument names that are separated by spaces."""
    return tuple(text.split())


ARCHITECTURE = _names(
    "swiglu normalization position_embedding_type use_rotary_position_embeddings disable_bias_linear "
    "qk_layernorm add_qkv_bias group_query_attention no_position_embedding openai_gelu"
)
# Switches of architectures that no family has.
_FOREIGN = _names(
    "squared_relu quick_geglu multi_latent_attention apply_layernorm_1p layernorm_zero_centered_gamma "
    "use_rope_scaling hybrid_override_pattern hybrid_layer_pattern is_hybrid_model spec "
    "moe_shared_expert_intermediate_size mtp_num_layers window_size attention_output_gate "
    "apply_residual_connection_post_layernorm heterogeneous_layers_config_path relu"
)


def family(keys: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the family of these arguments; or None, and what the arguments would need for a family."""
    foreign = [f"--{name.replace('_', '-')}" for name in _FOREIGN if keys.get(name)]
    if foreign:
        return None, f"no family here has {', '.join(foreign)}"
    rope = keys.get("position_embedding_type") == "rope" or bool(keys.get("use_rotary_position_embeddings"))
    gated, bare = bool(keys.get("swiglu")), bool(keys.get("disable_bias_linear"))
    rms = str(keys.get("normalization", "LayerNorm")).lower() == "rmsnorm"
    if rope and gated and bare and rms:
        if keys.get("num_experts"):
            mixed = [
                f"--{name.replace('_', '-')}" for name in ("qk_layernorm", "add_qkv_bias") if keys.get(name)
            ]
            return (None, f"no family with experts here has {', '.join(mixed)}") if mixed else ("mixtral", "")
        return ("qwen3" if keys.get("qk_layernorm") else "qwen2" if keys.get("add_qkv_bias") else "llama"), ""
    learned = keys.get("position_embedding_type", "learned_absolute") == "learned_absolute" and not rope
    if learned and not (gated or bare or rms or keys.get("num_experts") or keys.get("qk_layernorm")):
        return "gpt2", ""
    described = (
        f"{'rotary' if rope else keys.get('position_embedding_type', 'learned')} positions, "
        f"{'SwiGLU' if gated else 'GELU'}, {'RMSNorm' if rms else 'LayerNorm'}, "
        f"{'no biases' if bare else 'biases'}{', experts' if keys.get('num_experts') else ''}"
    )
    return None, f"no family here has {described}"


def _architecture(value: Any, ctx: Context) -> Decision:
    name, missing = family(ctx.keys)
    return refused(missing) if name is None else exact(("model", name))


def _foreign(value: Any, ctx: Context) -> Decision:
    return refused(family(ctx.keys)[1]) if value else default("off here too")


def _experts(value: Any, ctx: Context) -> Decision:
    name, missing = family(ctx.keys)
    if not value:
        return default()
    return refused(missing) if name is None else exact(("model", name), ("model.num_local_experts", value))


def _dropout(value: Any, ctx: Context) -> Decision:
    both = [ctx.keys.get(name, 0.1) for name in ("attention_dropout", "hidden_dropout")]
    if both[0] != both[1]:
        return refused("attention and residuals have one rate, model.dropout, and these differ")
    return exact(("model.dropout", value))


def _samples(target: str) -> Rule:
    """Samples become steps, if the global batch divides them."""

    def rule(value: Any, ctx: Context) -> Decision:
        size = ctx.global_batch
        if not isinstance(value, int) or not size or ctx.keys.get("rampup_batch_size"):
            return refused(f"steps need a constant global batch: write {target}")
        if value % size:
            near = f"{target}={value // size} or {target}={value // size + 1}"
            return refused(f"{value} samples are not whole steps of {size}: write {near}")
        return _placed(target, value // size, ctx)

    return rule


def _placed(target: str, steps: int, ctx: Context) -> Decision:
    if target == "schedule.warmup":
        return changed(WARMUP, (target, steps)) if steps else exact((target, 0))
    if target == "schedule.decay":
        return _decay(steps, ctx)
    return exact((target, steps))


def _warmup_steps(ctx: Context) -> int | None:
    """Return steps of warm-up; None if the arguments do not determine them."""
    if isinstance(ctx.keys.get("lr_warmup_iters"), int):
        return int(ctx.keys["lr_warmup_iters"])
    samples, share = ctx.keys.get("lr_warmup_samples"), ctx.keys.get("lr_warmup_fraction")
    if isinstance(samples, int) and ctx.global_batch:
        return samples // ctx.global_batch
    span = ctx.keys.get("lr_decay_iters", ctx.keys.get("train_iters"))
    if isinstance(share, float) and isinstance(span, int):
        return int(share * span)
    return 0 if samples is None and share is None else None


def _decay(value: Any, ctx: Context) -> Decision:
    """Megatron-LM's decay ends at this step; here it is a number of steps after the warm-up."""
    warmup = _warmup_steps(ctx)
    if not isinstance(value, int) or warmup is None or value <= warmup:
        return refused("the steps of decay after warm-up are schedule.decay")
    return exact(("schedule.decay", value - warmup), note="counted after the warm-up")


def _warmup(value: Any, ctx: Context) -> Decision:
    return changed(WARMUP, ("schedule.warmup", value)) if value else exact(("schedule.warmup", 0))


def _warmup_fraction(value: Any, ctx: Context) -> Decision:
    """The share is one of the steps of the decay, not of the run."""
    steps = _warmup_steps(ctx)
    if steps is not None and ctx.keys.get("lr_decay_iters", ctx.keys.get("train_iters")) is not None:
        return changed(WARMUP, ("schedule.warmup", steps))
    return changed(f"{WARMUP}; a share of the run's steps", ("schedule.warmup", percent(str(value))))


def _ramp(value: Any, ctx: Context) -> Decision:
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(part, int) for part in value):
        return refused("a ramp has a first batch, an increment and samples")
    return exact(
        *(
            (f"train.batch_ramp.{name}", part)
            for name, part in zip(("start", "increment", "samples"), value, strict=True)
        )
    )


def _optimizer(value: Any, ctx: Context) -> Decision:
    name = {"adam": "adamw"}.get(str(value).lower(), str(value).lower())
    if name in ("adamw", "sgd") and name in search_path.options(search_path.folders(None), "optim"):
        return exact(("optim", name))
    return refused(f"Megatron-core's optimizers here are adamw and sgd, not {value}")


def _data(value: Any, ctx: Context) -> Decision:
    if isinstance(value, list):
        return refused(
            "a mixture is data=mixture with data.sources, each imported with launch/prepare.py import=FOLDER"
        )
    note = (
        f"import it first: python launch/prepare.py import={value} tokenizer.path=NAME output=data/imported"
    )
    return changed(note, ("data", "prepared"), ("data.path", "data/imported"))


def _load(value: Any, ctx: Context) -> Decision:
    if value == ctx.keys.get("save"):
        return default("the same command resumes")
    return refused(
        "a run resumes its own folder; python launch/reshard.py converts checkpoints of Megatron-core"
    )


def _precision_flag(option: str) -> Rule:
    return lambda value, ctx: exact(("precision", option)) if value else default()


def _virtual(value: Any, ctx: Context) -> Decision:
    """Layers per virtual stage -> virtual stages per pipeline rank."""
    layers, stages = ctx.keys.get("num_layers"), ctx.keys.get("pipeline_model_parallel_size", 1)
    if not all(isinstance(part, int) and part for part in (value, layers, stages)) or layers % (
        stages * value
    ):
        return refused("the layers of a stage are divisible by it")
    count = layers // (stages * value)
    return exact(("engine.megatron.virtual_pipeline_model_parallel_size", count)) if count > 1 else default()


def _sequence_parallel(value: Any, ctx: Context) -> Decision:
    if value and ctx.keys.get("tensor_model_parallel_size", 1) == 1:
        return default("one tensor rank has nothing to share")
    return (
        default("the plan turns it on whenever it fits")
        if value
        else exact(("engine.megatron.sequence_parallel", False))
    )


def _betas(value: Any, ctx: Context) -> Decision:
    return exact(("optim.betas", [ctx.keys.get("adam_beta1", 0.9), ctx.keys.get("adam_beta2", 0.999)]))


_DIRECT = _names(
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length "
    "rotary_base init_method_std moe_router_topk moe_aux_loss_coeff train_iters lr min_lr weight_decay "
    "adam_eps sgd_momentum clip_grad eval_interval eval_iters log_interval wandb_project wandb_exp_name "
    "loss_scale_window tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "expert_model_parallel_size"
)
_OTHER = {"max_position_embeddings": "model.max_position_embeddings", "seed": "train.seed"}
_TOKENIZER = "the tokenizer belongs to the data: launch/prepare.py tokenizer.path=NAME"
_STARTED = "the launcher and the plan decide it"
_LOGS = "metrics, alerts and reports are this toolkit's own"
_SAVES = "a checkpoint has everything that resuming needs, in any layout"
_READS = "samples and their order are this toolkit's own"
_ALWAYS_ON = "always enabled"
_GPT2_VOCAB = 50257
RULES: Mapping[str, Rule] = {
    **{name: same(({**SAME, **RUN_KEYS, "lr": "optim.lr"})[name]) for name in _DIRECT},
    **{name: same(target) for name, target in _OTHER.items()},
    "norm_epsilon": same("model.norm_eps"),
    "micro_batch_size": micro_batch,
    "global_batch_size": same("train.global_batch"),
    "rampup_batch_size": _ramp,
    "train_samples": _samples("train.steps"),
    "lr_warmup_iters": _warmup,
    "lr_warmup_samples": _samples("schedule.warmup"),
    "lr_warmup_fraction": _warmup_fraction,
    "lr_warmup_init": expect(0, 0.0, otherwise="warm-up starts at 0"),
    "lr_decay_iters": _decay,
    "lr_decay_samples": _samples("schedule.decay"),
    "lr_decay_style": choose(
        {
            "linear": (("schedule", "linear"),),
            "cosine": (("schedule", "cosine"),),
            "constant": (("schedule", "constant"),),
            "wsd": (("schedule", "wsd"),),
        },
        "there is no such schedule here: choose schedule=constant, linear, cosine or wsd",
    ),
    "lr_wsd_decay_iters": same("schedule.decay"),
    "lr_wsd_decay_style": expect("linear", otherwise="the decay of wsd is linear"),
    "adam_beta1": _betas,
    "adam_beta2": _betas,
    "optimizer": _optimizer,
    "bf16": _precision_flag("bf16"),
    "fp16": _precision_flag("fp16"),
    "initial_loss_scale": lambda value, ctx: (
        exact(("precision.initial_scale_power", int(value).bit_length() - 1))
        if isinstance(value, int | float) and value >= 1 and int(value).bit_count() == 1
        else refused("the first loss scale is a power of 2: precision.initial_scale_power")
    ),
    "grad_reduce_in_bf16": lambda value, ctx: changed("gradients are summed and reduced in fp32"),
    "min_loss_scale": expect(1, 1.0, otherwise="the loss scale is at least 1"),
    "hysteresis": lambda value, ctx: (
        default() if value == 1 else changed("every overflow halves the loss scale")
    ),
    "attention_dropout": _dropout,
    "hidden_dropout": _dropout,
    "num_experts": _experts,
    "moe_router_load_balancing_type": expect(
        "aux_loss", otherwise="routers are balanced by model.router_aux_loss_coef"
    ),
    "untie_embeddings_and_output_weights": lambda value, ctx: exact(("model.tie_word_embeddings", not value)),
    "rotary_percent": expect(1, 1.0, otherwise="every element of a head is rotated"),
    "vocab_size": same("model.vocab_size"),
    "padded_vocab_size": same("model.vocab_size"),
    "make_vocab_size_divisible_by": lambda value, ctx: default(
        "the plan pads the vocabulary if an axis needs it"
    ),
    "tokenizer_type": lambda value, ctx: (
        changed(_TOKENIZER, ("model.vocab_size", _GPT2_VOCAB))
        if str(value) == "GPT2BPETokenizer"
        and "vocab_size" not in ctx.keys
        and "padded_vocab_size" not in ctx.keys
        else changed(_TOKENIZER)
    ),
    **dict.fromkeys(("tokenizer_model", "vocab_file", "merge_file"), lambda value, ctx: changed(_TOKENIZER)),
    "data_path": _data,
    "train_data_path": _data,
    "split": lambda value, ctx: changed("launch/prepare.py splits: validation=0.05, for example"),
    "mock_data": lambda value, ctx: changed("data=stdlib is small real text"),
    "save": same("run.dir"),
    "load": _load,
    "save_interval": lambda value, ctx: exact(("checkpoint.every", str(value))),
    "async_save": same("checkpoint.background"),
    "finetune": reject(
        "a fine-tuning starts from weights: model=pretrained model.pretrained=FOLDER, or run.fork=RUN"
    ),
    "pretrained_checkpoint": reject(
        "a fine-tuning starts from weights: model=pretrained model.pretrained=FOLDER"
    ),
    "use_distributed_optimizer": choose({True: (("zero", "stage1"),), False: ()}, "true or false"),
    "sequence_parallel": _sequence_parallel,
    "recompute_activations": lambda value, ctx: exact(("engine.megatron.recompute_granularity", "selective")),
    "num_layers_per_virtual_pipeline_stage": _virtual,
    "num_virtual_stages_per_pipeline_rank": same("engine.megatron.virtual_pipeline_model_parallel_size"),
    "decoder_first_pipeline_num_layers": same("engine.megatron.num_layers_in_first_pipeline_stage"),
    "decoder_last_pipeline_num_layers": same("engine.megatron.num_layers_in_last_pipeline_stage"),
    "ddp_bucket_size": same("engine.megatron.bucket_size"),
    "fp8_format": same("engine.megatron.fp8"),
    "deterministic_mode": same("debug.deterministic"),
    "exit_duration_in_mins": reject("the scheduler's time limit and cluster.grace_seconds"),
    "nproc_per_node": lambda value, ctx: changed(f"start {ctx.ranks} processes with torchrun, or cluster.*"),
    "nnodes": lambda value, ctx: default() if value == 1 else exact(("cluster.nodes", value)),
    **dict.fromkeys(ARCHITECTURE, _architecture),
    **dict.fromkeys(_FOREIGN, _foreign),
    **dict.fromkeys(
        ("eod_mask_loss", "decoupled_lr", "decoupled_min_lr"),
        reject("every parameter and token counts the same"),
    ),
    **dict.fromkeys(
        ("reset_position_ids", "reset_attention_mask"),
        lambda value, ctx: exact(("data.documents", "separate")) if value else default(),
    ),
    "wandb_entity": same("monitor.entity"),
    "profile_step_start": same("monitor.profile_step"),
    **dict.fromkeys(
        ("profile", "use_pytorch_profiler"), lambda value, ctx: default("monitor.profile_step starts a trace")
    ),
}

# Arguments without a key here: why they change nothing.
_IGNORED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        _STARTED,
        _names(
            "use_mcore_models transformer_impl attention_backend use_flash_attn distributed_backend "
            "distributed_timeout_minutes local_rank lazy_mpu_init use_cpu_initialization no_initialization "
            "manual_gc manual_gc_interval empty_unused_memory_level no_bias_gelu_fusion "
            "no_bias_swiglu_fusion no_rope_fusion nccl_communicator_config_path use_torch_fsdp2 "
            "standalone_embedding_stage fp8_interval te_rng_tracker distribute_saved_activations"
        ),
    ),
    (
        _LOGS,
        _names(
            "tensorboard_dir tensorboard_log_interval tensorboard_queue_size log_throughput "
            "log_timers_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard "
            "log_params_norm log_num_zeros_in_grad log_progress timing_log_level timing_log_option "
            "log_learning_rate_to_tensorboard log_loss_scale_to_tensorboard wandb_save_dir log_straggler "
            "log_batch_size_to_tensorboard log_world_size_to_tensorboard no_one_logger profile_ranks "
            "profile_step_end logging_level record_memory_history memory_snapshot_path enable_ft_package "
            "no_log_loss_scale_to_tensorboard no_log_learnig_rate_to_tensorboard"
        ),
    ),
    (
        _SAVES,
        _names(
            "no_load_optim no_load_rng no_save_optim no_save_rng ckpt_format use_dist_ckpt "
            "ckpt_fully_parallel_load no_ckpt_fully_parallel_save ckpt_fully_parallel_save "
            "ckpt_assume_constant_structure auto_detect_ckpt_format dist_ckpt_format dist_ckpt_strictness "
            "use_checkpoint_args use_persistent_ckpt_worker non_persistent_save_interval "
            "exit_on_missing_checkpoint override_opt_param_scheduler use_checkpoint_opt_param_scheduler "
            "save_retain_interval"
        ),
    ),
    (
        _READS,
        _names(
            "num_workers data_cache_path no_mmap_bin_files dataloader_type no_data_sharding "
            "no_create_attention_mask_in_dataloader num_dataset_builder_threads tiktoken_pattern "
            "tiktoken_num_special_tokens tiktoken_special_tokens valid_data_path test_data_path"
        ),
    ),
    (
        _ALWAYS_ON,
        _names(
            "calculate_per_token_loss accumulate_allreduce_grads_in_fp32 attention_softmax_in_fp32 "
            "check_for_nan_in_loss_and_grad exit_signal_handler"
        ),
    ),
    ("the check is always enabled", ("no_check_for_nan_in_loss_and_grad",)),
)
IGNORED: Mapping[str, str] = {name: reason for reason, names in _IGNORED for name in names}
# Megatron-LM's argument -> Megatron-core's setting and, for a switch, the value that it sets.
_SWITCHES: Mapping[str, tuple[str, Any]] = {
    "no_masked_softmax_fusion": ("masked_softmax_fusion", False),
    "no_bias_dropout_fusion": ("bias_dropout_fusion", False),
    "no_gradient_accumulation_fusion": ("gradient_accumulation_fusion", False),
    "no_persist_layer_norm": ("persist_layer_norm", False),
    "no_align_param_gather": ("align_param_gather", False),
    "no_overlap_p2p_communication": ("overlap_p2p_comm", False),
    "ddp_average_in_collective": ("average_in_collective", True),
    "use_nccl_ub": ("nccl_ub", True),
    "no_fp8_wgrad": ("fp8_wgrad", False),
    "optimizer_cpu_offload": ("optimizer_cpu_offload", True),
}


def decide(name: str, value: Any, ctx: Context) -> Decision:
    """Return the decision about one argument."""
    if name in RULES:
        return RULES[name](value, ctx)
    if name in IGNORED:
        return default(IGNORED[name])
    setting, given = _SWITCHES.get(name, (name, value))
    if setting in RUN_KEYS:
        return same(RUN_KEYS[setting])(given, ctx)
    schema = _schema()
    if setting not in (schema.fields or {}):
        return refused("neither this toolkit nor Megatron-core has such a setting")
    if setting in DERIVED and given in (None, False, 0, 0.0, "none"):
        return default("off here too")
    problem = next(MEGATRON.find_problems({setting: given}, schema), None)
    if problem is None:
        return exact((f"engine.megatron.{setting}", given))
    return refused(f"{problem.rule}; {problem.remedy}")


def _schema() -> KeySchema:
    """Return the fields of Megatron-core's three dataclasses as one section."""
    parts = load_schema(PACKAGE).fields or {}
    return KeySchema(
        fields={
            name: node
            for section in reversed(parts.values())
            for name, node in (section.fields or {}).items()
        }
    )


def unset_defaults(ctx: Context) -> list[tuple[str, Any, Decision]]:
    """Return Megatron-LM's defaults that differ from this toolkit's and that no argument sets."""
    keys, name = ctx.keys, family(ctx.keys)[0]
    found: list[tuple[str, Any, Decision]] = []

    def add(argument: str, value: Any, *targets: tuple[str, Any], note: str = "") -> None:
        if argument not in keys:
            found.append((argument, value, exact(*targets, note=note)))

    if name is not None:
        found.append(("model", name, exact(("model", name), note="by its arguments")))
    heads, hidden = keys.get("num_attention_heads"), keys.get("hidden_size")
    if name not in (None, "gpt2"):
        if not keys.get("group_query_attention") and "num_query_groups" not in keys and heads:
            add("num_query_groups", heads, ("model.num_key_value_heads", heads))
        if "untie_embeddings_and_output_weights" not in keys:
            add("untie_embeddings_and_output_weights", False, ("model.tie_word_embeddings", True))
        if isinstance(hidden, int):
            width = int(4 * hidden * 2 / 3 / 64) * 64
            add("ffn_hidden_size", width, ("model.intermediate_size", width))
    for argument, value, target in (
        ("lr_decay_style", "linear", ("schedule", "linear")),
        ("weight_decay", 0.01, ("optim.weight_decay", 0.01)),
        ("seed", 1234, ("train.seed", 1234)),
    ):
        add(argument, value, target)
    if "adam_beta1" not in keys and "adam_beta2" not in keys:
        add("adam_beta2", 0.999, ("optim.betas", [0.9, 0.999]))
    if "attention_dropout" not in keys and "hidden_dropout" not in keys:
        add("hidden_dropout", 0.1, ("model.dropout", 0.1))
    return found
