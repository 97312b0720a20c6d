"""Tables of Megatron-core's settings, ``+engine.megatron.KEY=v``: which may be set, and why others may not.

A key is a field of TransformerConfig, DistributedDataParallelConfig or OptimizerConfig of megatron-core 0.16.
Every field is in exactly one of the tables below. A test compares the tables with the dataclasses, so that
fields of a later version cannot be missed. No setting of an engine may change what is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.config.keys import flatten
from toolkit.config.schema import RunConfig
from toolkit.config.vendors.installed import megatron_schema
from toolkit.config.vendors.key_schema import KeySchema


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# May be set; rules_megatron.py checks whether the values fit the run.
TUNABLE = frozenset(
    _names(
        """
        sequence_parallel virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage deallocate_pipeline_outputs
        recompute_granularity recompute_method recompute_num_layers recompute_modules
        moe_token_dispatcher_type clone_scatter_output_in_embedding bucket_size overlap_grad_reduce
        overlap_param_gather align_param_gather bias_activation_fusion bias_dropout_fusion
        gradient_accumulation_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl
        """
    )
)

# May be set if there is a GPU.
GPU_ONLY = frozenset(
    _names(
        """
        batch_p2p_sync defer_embedding_wgrad_compute wgrad_deferral_limit
        disable_bf16_reduced_precision_matmul pad_buckets_for_high_nccl_busbw nccl_ub
        disable_symmetric_registration
        """
    )
)

# May be set if Transformer Engine is installed, which needs a GPU. Megatron-core's local layers ignore these
# silently.
TRANSFORMER_ENGINE = frozenset(
    _names(
        """
        cp_comm_type cpu_offloading cpu_offloading_num_layers cpu_offloading_activations
        cpu_offloading_weights cpu_offloading_double_buffering fine_grained_activation_offloading
        offload_modules min_offloaded_tensor_size apply_rope_fusion fused_single_qkv_rope
        moe_permute_fusion moe_grouped_gemm moe_router_fusion moe_flex_dispatcher_backend
        moe_deepep_num_sms moe_hybridep_num_sms use_te_activation_func symmetric_ar_type fp8
        fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
        fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 activation_func_fp8_input_store
        disable_parameter_transpose_cache moe_router_padding_for_quantization fp4 fp4_recipe
        """
    )
)

# Megatron-core's key -> the run's own key with the same meaning and values.
RUN_KEYS = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "num_layers": "model.num_hidden_layers",
    "hidden_size": "model.hidden_size",
    "num_attention_heads": "model.num_attention_heads",
    "num_query_groups": "model.num_key_value_heads",
    "ffn_hidden_size": "model.intermediate_size",
    "moe_ffn_hidden_size": "model.intermediate_size",
    "kv_channels": "model.head_dim",
    "hidden_dropout": "model.dropout",
    "attention_dropout": "model.dropout",
    "layernorm_epsilon": "model.norm_eps",
    "init_method_std": "model.initializer_range",
    "num_moe_experts": "model.num_local_experts",
    "moe_router_topk": "model.num_experts_per_tok",
    "moe_aux_loss_coeff": "model.router_aux_loss_coef",
    "deterministic_mode": "debug.deterministic",
    "lr": "optim.lr",
    "min_lr": "schedule.min_lr",
    "weight_decay": "optim.weight_decay",
    "adam_eps": "optim.eps",
    "sgd_momentum": "optim.momentum",
    "clip_grad": "optim.clip",
    "loss_scale_window": "precision.scale_window",
}

_FAMILY = (
    "the family decides it: with another value this engine would train a different model from the other "
    "engines",
    "choose the architecture by model.family",
)
_PRECISION = (
    "the plan derives it from precision.name",
    "write precision=fp32, precision=bf16 or precision=fp16",
)
_STATES = (
    "master weights and moments are fp32 always, so that a checkpoint resumes in every layout",
    "leave it out",
)
_SCALER = (
    "the loss scale is dynamic, and its rules are the same in every engine",
    "write precision.initial_scale_power or precision.scale_window",
)
_OFFLOAD = (
    "Megatron-core offloads its optimizer on a GPU only, into an optimizer whose states this toolkit does "
    "not save",
    "write engine=deepspeed zero=stage2 offload=cpu_optimizer",
)
_ZERO = (
    "the plan derives it from zero.stage",
    "write zero=stage1 (the distributed optimizer) or zero=stage0",
)
_FSDP = (
    "Megatron-core's FSDP shards parameters, which zero.stage=3 does under DeepSpeed",
    "write engine=deepspeed zero=stage3",
)
_RATE = (
    "the learning rate is a function of the samples consumed, the same for every parameter",
    "write optim.lr and schedule.name",
)
_MUON = ("only DeepSpeed has Muon", "write engine=deepspeed optim=muon")
_WEIGHTS = (
    "initial weights are a function of train.seed and a parameter's name, the same in every engine",
    "write train.seed",
)
_INTERNAL = ("the engine sets it itself", "leave it out")
_UNUSED = ("it has no effect in what this toolkit runs", "leave it out")
_IGNORED = ("Megatron-core ignores it or has deprecated it", "leave it out")
_INFERENCE = ("it is for inference, and this run trains", "leave it out")
_GRADIENTS = (
    "gradients are summed and reduced in fp32 and divided once, by the units of the global batch",
    "leave it out",
)
_FINITE = (
    "metrics have the gradient norm of every step, and under fp16 a step that is not finite is skipped",
    "leave it out",
)
_STAGES = (
    "the plan counts the layers of each stage",
    "write +engine.megatron.num_layers_in_first_pipeline_stage or ...num_layers_in_last_pipeline_stage",
)
_MESSAGES = (
    "the plan derives it: with interleaved stages a wrong order of messages silently gives wrong results",
    "leave it out",
)
_LENGTHS = ("every sequence has train.sequence_length tokens", "write train.sequence_length")
_QUANTISED = (
    "weights have the precision of the run, so that a checkpoint resumes in every layout",
    "leave it out",
)
_EXPERTS = (
    "its kernels are of a package that Transformer Engine replaces, and store all experts of a rank in one "
    "transposed tensor",
    "write +engine.megatron.moe_grouped_gemm=true, which uses Transformer Engine",
)
_USER_BUFFERS = (
    "Megatron-LM's training loop allocates the buffers for it (transformer_engine.initialize_ub), and "
    "Megatron-core alone does not",
    "leave it out",
)
_GRAPHS = (
    "Megatron-LM's training loop captures CUDA graphs and their random states, and Megatron-core alone does "
    "not",
    "leave it out",
)
_GROUPS_ARGUMENT = (
    "it is for the process groups of Megatron-LM's training loop, and has no effect on those of this toolkit",
    "leave it out",
)
_LOCAL_KERNELS = (
    "only norms and attention of Megatron-core itself read it, which torch's or Transformer Engine's replace",
    "leave it out",
)
_BATCH_INVARIANT = (
    "Megatron-LM's training loop installs the kernels for it, and Megatron-core alone does not",
    "write debug.deterministic=true",
)
_SCHEDULE = ("it needs a different kind of forward step", "leave it out")
_MONITOR = ("metrics are this toolkit's own: metrics.jsonl and monitor.wandb", "leave it out")

# (why a field is not set here, remedy) and the fields
_GROUPS: tuple[tuple[tuple[str, str], str], ...] = (
    (
        _FAMILY,
        """
        mtp_num_layers mtp_loss_scaling_factor softmax_scale softmax_type fp32_residual_connection
        apply_residual_connection_post_layernorm layernorm_zero_centered_gamma add_bias_linear add_qkv_bias
        gated_linear_unit activation_func glu_linear_offset activation_func_clamp_value rotary_interleaved
        window_size window_attn_skip_freq normalization qk_layernorm qk_l2_norm qk_clip qk_clip_alpha
        qk_clip_threshold attention_output_gate multi_latent_attention no_rope_freq
        experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim
        linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
        apply_query_key_layer_scaling attention_softmax_in_fp32 use_fused_weighted_squared_relu
        moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap moe_layer_freq
        moe_router_load_balancing_type moe_router_topk_limited_devices moe_router_num_groups
        moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
        moe_router_score_function moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_router_force_load_balancing moe_z_loss_coeff moe_input_jitter_eps moe_token_dropping
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy
        moe_apply_probs_on_input moe_latent_size moe_enable_routing_replay mrope_section is_hybrid_model
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
        heterogeneous_block_specs
        """,
    ),
    (_PRECISION, "fp16 bf16 params_dtype enable_autocast autocast_dtype pipeline_dtype"),
    (
        _STATES,
        """
        use_precision_aware_optimizer store_param_remainders main_grads_dtype main_params_dtype
        exp_avg_dtype exp_avg_sq_dtype
        """,
    ),
    (_SCALER, "loss_scale initial_loss_scale min_loss_scale hysteresis"),
    (
        _OFFLOAD,
        """
        optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params
        """,
    ),
    (_ZERO, "use_distributed_optimizer num_distributed_optimizer_instances"),
    (
        _FSDP,
        """
        use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy suggested_communication_unit_size
        preserve_fp32_weights keep_fp8_transpose_cache fsdp_double_buffer outer_dp_sharding_strategy
        fsdp_manual_registration init_model_with_meta_device gradient_reduce_div_fusion
        """,
    ),
    (_RATE, "decoupled_lr decoupled_min_lr apply_wd_to_qk_layernorm decoupled_weight_decay"),
    (
        _MUON,
        """
        muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec
        muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
        """,
    ),
    (
        _WEIGHTS,
        """
        perform_initialization use_cpu_initialization init_method output_layer_init_method
        embedding_init_method embedding_init_method_std
        """,
    ),
    (
        _INTERNAL,
        """
        timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
        mtp_standalone _cpu_offloading_context test_mode transformer_impl attention_backend quant_recipe
        calculate_per_token_loss hetereogenous_dist_checkpoint distribute_saved_activations
        """,
    ),
    (
        _UNUSED,
        """
        barrier_with_L1_time config_logger_dir use_kitchen use_kitchen_attention kitchen_attention_backend
        use_ring_exchange_p2p overlap_param_gather_with_optimizer_step
        """,
    ),
    (
        _IGNORED,
        """
        moe_extended_tp async_tensor_model_parallel_allreduce tp_comm_split_ag tp_comm_atomic_ag
        tp_comm_split_rs tp_comm_atomic_rs fp8_interval enable_cuda_graph external_cuda_graph
        moe_router_padding_for_fp8 moe_layer_recompute moe_enable_deepep
        """,
    ),
    (
        _INFERENCE,
        """
        flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers
        inference_fuse_tp_communication mlp_chunks_for_prefill
        """,
    ),
    (_GRADIENTS, "grad_reduce_in_fp32 reduce_scatter_with_fp32_accumulation average_in_collective"),
    (_FINITE, "check_for_nan_in_grad check_for_large_grads"),
    (
        _STAGES,
        """
        pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split
        """,
    ),
    (_MESSAGES, "overlap_p2p_comm batch_p2p_comm overlap_p2p_comm_warmup_flush"),
    (_LENGTHS, "max_seqlen_per_dp_cp_rank hybrid_context_parallel variable_seq_lengths"),
    (
        _QUANTISED,
        """
        fp8_param fp4_param fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag fp8_quantizer_factory
        fp4_quantizer_factory
        """,
    ),
    (_EXPERTS, "moe_use_legacy_grouped_gemm"),
    (
        _SCHEDULE,
        """
        num_microbatches_with_partial_activation_checkpoints overlap_moe_expert_parallel_comm
        delay_wgrad_compute ep_overlap_early_attn_memory_release
        """,
    ),
    (
        _USER_BUFFERS,
        """
        tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag
        tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_overlap_disable_qkv
        tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
        """,
    ),
    (
        _GRAPHS,
        """
        cuda_graph_impl cuda_graph_scope cuda_graph_use_single_mempool
        cuda_graph_retain_backward_graph cuda_graph_warmup_steps use_te_rng_tracker
        """,
    ),
    (_GROUPS_ARGUMENT, "pipeline_model_parallel_comm_backend hierarchical_context_parallel_sizes"),
    (_LOCAL_KERNELS, "masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm"),
    (_BATCH_INVARIANT, "batch_invariant_mode"),
    (_MONITOR, "moe_per_layer_logging log_num_zeros_in_grad log_max_attention_logit"),
)

DERIVED: dict[str, tuple[str, str]] = {
    "optimizer": ("the plan derives it from optim.name", "write optim=adamw or optim=sgd"),
    "adam_beta1": ("the plan derives it from optim.betas", "write optim.betas=[0.9,0.95]"),
    "adam_beta2": ("the plan derives it from optim.betas", "write optim.betas=[0.9,0.95]"),
    "expert_tensor_parallel_size": (
        "experts are split along the tensor axis like every matrix",
        "write parallel.tensor",
    ),
    **{name: answer for answer, names in _GROUPS for name in _names(names)},
}


def sections() -> dict[str, Mapping[str, KeySchema]] | None:
    """Return fields of the dataclasses transformer, ddp and optimizer; None if Megatron-core is not
    installed.
    """
    schema = megatron_schema()
    if schema is None:
        return None
    assert schema.fields is not None
    return {name: section.fields or {} for name, section in schema.fields.items()}


def flat_schema() -> KeySchema | None:
    """Return the fields of all three dataclasses as one section, as the user writes them."""
    schemas = sections()
    return (
        None
        if schemas is None
        else KeySchema(
            fields={name: node for section in reversed(schemas.values()) for name, node in section.items()}
        )
    )


def megatron_keys(config: RunConfig) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the user's settings for TransformerConfig, DistributedDataParallelConfig and OptimizerConfig.

    A name that several dataclasses have goes to each. ``config`` has passed
    ``engine_keys.drop_wrong_keys``.
    """
    given = config.engine.megatron
    if not given:
        return {}, {}, {}
    schemas = sections()
    assert schemas is not None, "drop_wrong_keys leaves no keys if Megatron-core is not installed"
    unknown = [name for name in flatten(given) if not any(name in fields for fields in schemas.values())]
    assert not unknown, f"drop_wrong_keys leaves no unknown keys: {unknown}"
    transformer, ddp, optimizer = (
        {name: value for name, value in given.items() if name in fields} for fields in schemas.values()
    )
    return transformer, ddp, optimizer
