"""What Hugging Face, accelerate, DeepSpeed, Megatron-LM, torchtitan and Lightning call the keys of a run.

Errors about unknown keys name the exact word to type, and ``toolkit/adopt`` maps whole files with the same
tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.config import engine_keys_deepspeed, engine_keys_megatron

# This toolkit's key -> names elsewhere with the same meaning and the same values.
_SAME: dict[str, tuple[str, ...]] = {
    "train.steps": (
        *("max_steps", "train_iters", "num_steps", "max_iters", "total_steps", "num_training_steps"),
        *("train_steps", "max_train_steps", "iterations", "total_iters"),
    ),
    "train.epochs": ("num_train_epochs", "num_epochs", "max_epochs", "n_epochs", "train_epochs"),
    "train.tokens": ("max_tokens", "train_tokens", "total_tokens", "num_tokens", "max_train_tokens"),
    "train.global_batch": (
        *("batch_size", "global_batch_size", "train_batch_size", "total_batch_size", "bs"),
        "effective_batch_size",
    ),
    "train.micro_batch": (
        *("per_device_train_batch_size", "micro_batch_size", "per_gpu_train_batch_size", "local_batch_size"),
        *("device_train_microbatch_size", "batch_size_per_gpu", "microbatch_size", "device_batch_size"),
        "train_micro_batch_size_per_gpu",
    ),
    "train.sequence_length": (
        *("seq_len", "seq_length", "max_seq_len", "max_seq_length", "max_length", "block_size"),
        *("context_length", "ctx_len", "sequence_len", "n_ctx", "max_sequence_length"),
    ),
    "train.seed": ("random_seed", "manual_seed", "rng_seed"),
    "train.activation_checkpointing": (
        *("gradient_checkpointing", "activation_checkpoint", "use_activation_checkpointing"),
        *("grad_checkpointing", "checkpoint_activations", "recompute"),
    ),
    "data.shuffle_seed": ("data_seed", "dataset_seed"),
    "data.max_samples": ("max_train_samples", "limit_train_samples", "num_samples"),
    "optim.lr": ("learning_rate", "max_lr", "peak_lr", "base_lr", "init_lr"),
    "optim.weight_decay": ("wd", "adam_weight_decay", "weight_decay_rate"),
    "optim.eps": ("adam_epsilon", "adam_eps", "epsilon"),
    "optim.clip": (
        *("max_grad_norm", "gradient_clipping", "clip_grad", "gradient_clip_val", "grad_clip", "max_norm"),
        *("grad_clip_norm", "clip_grad_norm", "gradient_clip"),
    ),
    "optim.momentum": ("sgd_momentum",),
    "schedule.warmup": (
        *("warmup_steps", "lr_warmup_steps", "lr_warmup_iters", "warmup_iters", "num_warmup_steps"),
        "warmup_num_steps",
    ),
    "schedule.min_lr": ("lr_min", "eta_min", "final_lr", "min_learning_rate"),
    "parallel.tensor": (
        *("tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel_degree", "tp", "tp_size"),
        "tp_degree",
    ),
    "parallel.pipeline": (
        *("pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel_degree", "pp"),
        *("pp_size", "pp_degree", "pipeline_stages"),
    ),
    "parallel.context": (
        *("context_parallel_size", "context_parallel_degree", "cp", "cp_size", "cp_degree"),
        "sequence_parallel_size",
    ),
    "parallel.expert": (
        *("expert_model_parallel_size", "expert_parallel_size", "expert_parallel_degree", "ep", "ep_size"),
        "ep_degree",
    ),
    "model.hidden_size": ("n_embd", "d_model", "embed_dim", "emb_dim"),
    "model.num_hidden_layers": ("num_layers", "n_layer", "n_layers", "depth", "num_blocks"),
    "model.num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "model.num_key_value_heads": ("n_kv_heads", "num_kv_heads", "num_query_groups", "n_kv_head"),
    "model.intermediate_size": ("ffn_hidden_size", "d_ff", "n_inner", "ffn_dim", "mlp_dim"),
    "model.head_dim": ("kv_channels", "d_head", "d_kv"),
    "model.max_position_embeddings": ("n_positions",),
    "model.vocab_size": ("padded_vocab_size", "n_vocab"),
    "model.dropout": ("hidden_dropout", "dropout_prob", "resid_pdrop", "hidden_dropout_prob", "p_dropout"),
    "model.rope_theta": ("rotary_base", "rope_base"),
    "model.norm_eps": ("layernorm_epsilon", "rms_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "model.initializer_range": ("init_method_std", "init_std"),
    "model.num_local_experts": ("num_experts", "num_moe_experts", "n_experts"),
    "model.num_experts_per_tok": ("moe_router_topk", "moe_top_k", "experts_per_token"),
    "model.router_aux_loss_coef": ("moe_aux_loss_coeff", "aux_loss_coef", "moe_loss_coeff"),
    "eval.every": ("eval_steps", "eval_interval", "eval_freq", "val_interval", "evaluation_steps"),
    "eval.batches": ("eval_iters", "max_eval_batches", "limit_val_batches", "eval_batches"),
    "checkpoint.every": (
        *("save_steps", "save_interval", "checkpoint_interval", "save_every", "ckpt_interval", "save_freq"),
        "checkpointing_steps",
    ),
    "checkpoint.keep_last": ("save_total_limit", "keep_last_n", "keep_latest_k", "save_top_k"),
    "monitor.every": (
        *("logging_steps", "log_interval", "log_every", "log_freq", "log_every_n_steps"),
        "steps_per_print",
    ),
    "monitor.project": ("wandb_project",),
    "run.dir": ("output_dir", "save_dir", "out_dir", "default_root_dir", "checkpoint_dir"),
    "run.name": ("run_name", "exp_name", "experiment_name", "job_name", "wandb_exp_name"),
    "resume": ("resume_from_checkpoint", "resume_from", "ckpt_path", "load_checkpoint"),
    "cluster.nodes": ("num_nodes", "nnodes", "num_machines"),
}
SAME: Mapping[str, str] = {name: key for key, names in _SAME.items() for name in names}

# Names elsewhere, and the words to type for each value; {} is any other value as typed, {%} a percentage.
_WORDS: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    (("bf16", "bfloat16", "use_bf16"), {"true": "precision=bf16", "false": "precision=fp32"}),
    (("fp16", "half", "use_fp16"), {"true": "precision=fp16", "false": "precision=fp32"}),
    (
        ("mixed_precision", "dtype", "torch_dtype", "param_dtype", "params_dtype"),
        {
            **dict.fromkeys(("no", "float32", "fp32"), "precision=fp32"),
            **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16"), "precision=bf16"),
            **dict.fromkeys(("float16", "16-mixed", "fp16"), "precision=fp16"),
        },
    ),
    (
        ("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_decay_style", "scheduler_type", "lr_schedule"),
        {
            "linear": "schedule=linear",
            **dict.fromkeys(("cosine", "cosine_with_min_lr"), "schedule=cosine"),
            **dict.fromkeys(("constant", "constant_with_warmup"), "schedule=constant"),
            **dict.fromkeys(("wsd", "warmup_stable_decay"), "schedule=wsd"),
        },
    ),
    (
        ("optimizer", "optimizer_name", "optimizer_type", "opt"),
        {
            **dict.fromkeys(
                ("adamw", "adam", "adamw_torch", "adamw_torch_fused", "fusedadam"), "optim=adamw"
            ),
            **{name: f"optim={name}" for name in ("sgd", "muon", "lion", "adafactor", "schedule_free")},
            **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "optim=adam8bit"),
        },
    ),
    (("zero_stage", "zero_optimization.stage"), {"{}": "zero=stage{}"}),
    (("fsdp", "use_fsdp"), {"false": "zero=stage0", "{}": "zero=stage3"}),
    (("ddp",), {"true": "zero=stage0"}),
    (("use_distributed_optimizer",), {"true": "zero=stage1", "false": "zero=stage0"}),
    (
        ("cpu_offload", "offload_optimizer", "offload_optimizer_device"),
        {
            **dict.fromkeys(("true", "cpu"), "zero=stage2 offload=cpu_optimizer"),
            **dict.fromkeys(("false", "none"), "offload=none"),
        },
    ),
    (
        ("offload_param", "offload_params", "offload_param_device"),
        {
            **dict.fromkeys(("true", "cpu"), "zero=stage3 offload=cpu"),
            **dict.fromkeys(("false", "none"), "offload=none"),
        },
    ),
    (("warmup_ratio", "warmup_fraction", "lr_warmup_fraction"), {"{}": "schedule.warmup={%}"}),
    (
        ("untie_embeddings_and_output_weights",),
        {"true": "model.tie_word_embeddings=false", "false": "model.tie_word_embeddings=true"},
    ),
    (
        ("model_name_or_path", "model_name", "model_id", "pretrained_model_name_or_path"),
        {"{}": "model=pretrained model.pretrained={}"},
    ),
    (("data_path", "train_data", "train_data_path", "data_dir"), {"{}": "data=prepared data.path={}"}),
    (("dataset_name", "dataset"), {"{}": "data=dataset data.dataset.path={} data.dataset.tokenizer=NAME"}),
    (
        ("tokenizer", "tokenizer_name", "tokenizer_name_or_path"),
        {"{}": "data=dataset data.dataset.path=FOLDER data.dataset.tokenizer={}"},
    ),
    (
        ("recompute_activations",),
        {
            "true": "engine=megatron +engine.megatron.recompute_granularity=selective",
            "false": "train.activation_checkpointing=none",
        },
    ),
    (
        ("sequence_parallel",),
        {"{}": "engine=megatron parallel.tensor=2 +engine.megatron.sequence_parallel={}"},
    ),
    (("deepspeed_config",), {"{}": "engine=deepspeed +engine.deepspeed={}"}),
    (
        ("report_to", "use_wandb", "log_to_wandb"),
        {
            **dict.fromkeys(("wandb", "true"), "monitor=online"),
            **dict.fromkeys(("false", "none"), "monitor=files"),
        },
    ),
    (("deterministic", "full_determinism", "deterministic_mode"), {"{}": "debug.deterministic={}"}),
    (
        ("strategy",),
        {
            **{f"deepspeed_stage_{stage}": f"zero=stage{stage}" for stage in (1, 2, 3)},
            "ddp": "zero=stage0",
            "fsdp": "zero=stage3",
        },
    ),
    (
        ("gpus", "num_gpus", "devices", "nproc_per_node", "gpus_per_node", "num_processes"),
        {"{}": "cluster.gpus_per_node={}"},
    ),
)
WORDS: Mapping[str, Mapping[str, str]] = {name: by_value for names, by_value in _WORDS for name in names}

# Name elsewhere -> (why there is no such key, what to do instead).
_ACCUMULATION = (
    "accumulation follows from the batch: train.global_batch / (train.micro_batch x data ranks)",
    "write train.global_batch=8 and train.micro_batch=1, for example: 8 micro-batches on one rank",
)
_LORA = (
    "training updates all weights; adapters need a module of your own",
    "leave it out, or wrap the model with peft: model=custom model.target=my.package.Model",
)
_BETAS = ("Adam's two rates are one key", "write optim.betas=[0.9,0.999]")
_RANKS = (
    "the number of data ranks follows from the number of processes",
    "leave it out, and start as many processes: deepspeed --num_gpus 8, or cluster.gpus_per_node=8",
)
_WORKERS = ("one thread per rank reads ahead", "leave it out; data=dataset has data.dataset.workers=2")
_COMPILE = ("torch.compile is a group", "write compile=layers, or compile=none")
_DECAY = (
    "schedule.decay counts the steps after warm-up",
    "write schedule.decay=1000, for example: lr_decay_iters - lr_warmup_iters",
)
_RAMP = (
    "a batch ramp has three keys",
    "write train.batch_ramp.start=4 train.batch_ramp.increment=4 train.batch_ramp.samples=1000",
)
ADVICE: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "gradient_accumulation", "grad_accum"),
        _ACCUMULATION,
    ),
    **dict.fromkeys(("grad_accum_steps", "accumulation_steps", "ga_steps"), _ACCUMULATION),
    **dict.fromkeys(
        ("lora", "use_lora", "lora_r", "lora_rank", "lora_alpha", "lora_dropout", "qlora", "peft"), _LORA
    ),
    **dict.fromkeys(("use_peft", "load_in_4bit", "load_in_8bit", "peft_config"), _LORA),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2", "b1", "b2"), _BETAS),
    **dict.fromkeys(
        ("data_parallel_size", "dp", "dp_size", "data_parallel_degree", "data_parallel_shard_degree"), _RANKS
    ),
    **dict.fromkeys(("world_size", "data_parallel_replicate_degree"), _RANKS),
    **dict.fromkeys(("num_workers", "dataloader_num_workers", "preprocessing_num_workers"), _WORKERS),
    **dict.fromkeys(("torch_compile", "compile_model"), _COMPILE),
    **dict.fromkeys(("lr_decay_iters", "lr_decay_steps", "decay_steps", "decay_iters"), _DECAY),
    **dict.fromkeys(("rampup_batch_size", "batch_size_rampup"), _RAMP),
}

_ENGINES = (engine_keys_deepspeed.RUN_KEYS, engine_keys_megatron.RUN_KEYS)


def find_synonym(name: str, value: str | None) -> tuple[str | None, str] | None:
    """Return what to type for the key ``name`` of another tool.

    Args:
        name: as the user typed it, perhaps with a section of this toolkit: ``optim.learning_rate``.
        value: as the user typed it; None if only the key is known.

    Returns:
        A rule, if the meaning is not obvious, and a remedy; None if no tool has such a key.
    """
    full = name.lower().replace("-", "_")
    last = full.rpartition(".")[2]
    for found in (full, last):
        if found in ADVICE:
            return ADVICE[found]
        if found in WORDS:
            return None, f"write {words_for(WORDS[found], value)}"
        target = SAME.get(found) or next((own[found] for own in _ENGINES if found in own), None)
        if target is not None:
            return None, f"write {target}" + ("" if value is None else f"={value}")
    return next((ADVICE[part] for part in full.split(".") if part in ADVICE), None)


def words_for(by_value: Mapping[str, str], value: str | None) -> str:
    """Return the words of ``by_value`` for ``value``; for an unknown value all of them, as a choice."""
    if value is not None:
        exact = by_value.get(value.strip("'\"").lower())
        if exact is not None:
            return exact
        if "{}" in by_value:
            return by_value["{}"].replace("{%}", percent(value)).replace("{}", value)
    return " or ".join(dict.fromkeys(text for text in by_value.values() if "{" not in text)) or next(
        iter(by_value.values())
    ).replace("{%}", "3%").replace("{}", "VALUE")


def percent(share: str) -> str:
    """``3%`` for ``0.03``; ``share`` itself if it is not a number."""
    from decimal import Decimal, InvalidOperation

    try:
        return f"{(Decimal(share) * 100).normalize():f}%"
    except InvalidOperation:
        return share
