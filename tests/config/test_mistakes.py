"""Typing mistakes are reported with the key, the value, the rule and the remedy.

pytest tests/config/test_mistakes.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from toolkit.config import engine_keys
from toolkit.config.compose import compose
from toolkit.config.schema import EngineConfig, EngineName
from toolkit.errors import ConfigError, Problem

DEEP, MEGA = "+engine.deepspeed.", "+engine.megatron."
ZERO = "engine.deepspeed.zero_optimization"

# argument, key of the problem, part of the rule, part of the remedy
MISTAKES: tuple[tuple[str, str, str, str], ...] = (
    # keys
    ("model.hidden=64", "model.hidden", "model has no key hidden", "model.hidden_size"),
    ("modle.hidden_size=64", "modle.hidden_size", "no section or group modle", "model.hidden_size"),
    ("lr=1e-3", "lr", "no key, section or group lr", "optim.lr"),
    ("+train.stepz=3", "train.stepz", "train has no key stepz", "train.steps"),
    ("+train.steps=3", "train.steps", "changed without a plus", "write train.steps=3"),
    ("~train.steps", "train.steps", "cannot be deleted", "leave it out"),
    ("train.steps.x=3", "train.steps.x", "train.steps is a value", "train.steps=100"),
    ("train=5", "train", "a section, not a value", "train.steps"),
    ("hydra.run.dir=/tmp/x", "hydra.run.dir", "only for composition", "run.dir=FOLDER"),
    # groups and experiments
    ("cluster.min_nodes=0", "cluster.min_nodes", "is at least 1", "write cluster.min_nodes=1"),
    ("cluster.min_nodes=1", "cluster.min_nodes", "only jobs of Slurm", "leave out cluster.min_nodes"),
    ("zero=stage4", "zero", "stage0, stage1, stage2, stage3", "zero=stage"),
    ("zero=2", "zero", "stage0, stage1, stage2, stage3", "write zero=stage2"),
    ("engine=horovod", "engine", "deepspeed, local, megatron", "engine=local or engine=megatron"),
    ("+model=gpt2", "model", "changed without a plus", "write model=gpt2"),
    ("~model", "model", "exactly one option of the group", "model=llama"),
    ("model@other=gpt2", "model", "package of a group cannot be changed", "write model=gpt2"),
    ("exp=quickstart", "exp", "with a plus", "write +exp=quickstart"),
    ("+exp=quikstart", "exp", "the options of exp are", "write +exp=quickstart"),
    ("quickstart", "quickstart", "+exp=", "write +exp=quickstart"),
    ("data=prepared", "data.path", "requires this key", "data.path=VALUE"),
    ("optim={lr: 1}", "optim", "lion, muon, schedule_free, sgd", "optim=schedule_free or optim=sgd"),
    # arguments
    ("train.steps", "train.steps", "an argument is KEY=VALUE", "write train.steps=VALUE"),
    ("=3", "=3", "an argument is KEY=VALUE", "key before the ="),
    ("optim.betas=[0.9", "optim.betas", "are quoted", "quotes"),
    ("monitor.prompt=def f(x):", "monitor.prompt", "are quoted", "quotes"),
    ("zero=stage1 train.steps=3", "zero", "a separate argument", "without quotes"),
    ("optim.lr=1e-3,3e-3", "optim.lr", "several values need a sweep", "launch.train -m, or one value"),
    ("--multirun", "--multirun", "starts a sweep", "launch.train -m"),
    ("sweep.at_once=2", "sweep.at_once", "need -m", "-m sweep.at_once=2"),
    ("hydra/sweeper=optuna", "hydra/sweeper", "only for composition", "run.dir=FOLDER"),
    ("--cfg=job", "--cfg=job", "--config-dir=FOLDER", "launch.plan"),
    ("--config-dir=/no/such/folder", "--config-dir", "an existing folder", "exp/mine.yaml"),
    ("--config-dir", "--config-dir", "followed by a folder", "--config-dir=FOLDER"),
    # values
    ("train.steps=many", "train.steps", "a whole number", "train.steps=100"),
    ("train.steps=1.5", "train.steps", "a whole number", "train.steps=100"),
    ("train.steps=true", "train.steps", "a whole number", "train.steps=100"),
    ("train.steps=null", "train.steps", "a whole number", "train.steps=100"),
    ("train.steps=???", "train.steps", "a placeholder", "train.steps=VALUE"),
    ("train.steps=${nothing.here}", "train.steps", "nothing.here", "${train.steps}"),
    ("train.steps=${run.name}", "train.steps", "a whole number", "train.steps=100"),
    ("train.steps=0", "train.steps", "at least 1", "train.steps=1"),
    ("train.on_nonfinite=continue", "train.on_nonfinite", "now called skip", "write train.on_nonfinite=skip"),
    (
        "train.on_nonfinite=abort",
        "train.on_nonfinite",
        "one of stop, skip, rollback",
        "train.on_nonfinite=stop",
    ),
    ("train.rollback.window=0", "train.rollback.window", "at least 1", "train.rollback.window=1"),
    ("precision.name=fp8", "precision.name", "one of fp32, bf16, fp16", "precision.name=fp32"),
    ("optim.betas=[0.9,x]", "optim.betas", "a list of numbers", "optim.betas=[0.9,0.95]"),
    ("optim.betas=[0.9]", "optim.betas", "two factors", "optim.betas=[0.9,0.95]"),
    ("debug.deterministic=maybe", "debug.deterministic", "true or false", "debug.deterministic=false"),
    ("model.hidden_size=0", "model.hidden_size", "at least 1", "model.hidden_size=1"),
    ("checkpoint.every=5parsecs", "checkpoint.every", "a number of steps, a time, auto or never", "30min"),
    ("budget.usd=0", "budget.usd", "a positive number", "budget.usd=20000"),
    ("budget.gpu_hours=-1", "budget.gpu_hours", "a positive number", "budget.gpu_hours=5000"),
    ("budget.until=2027-01-31", "budget.until", "with a time zone", "budget.until=2027-01-31T18:00+01:00"),
    ("budget.until=2027-01-31T18:00", "budget.until", "with a time zone", "+01:00, with the offset"),
    ("checkpoint.url=runs/mine", "checkpoint.url", "uploaded to an object store", "s3://BUCKET/FOLDER"),
    ("checkpoint.url=https://host/mine", "checkpoint.url", "uploaded to an object store", "s3://BUCKET"),
    ("run.name=a/b", "run.name", "letters, digits", "run.name=my-run"),
    # DeepSpeed's own keys
    (
        "engine.deepspeed.dump_state=true",
        "engine.deepspeed.dump_state",
        "added with a plus",
        "write +engine.deepspeed.dump_state=true",
    ),
    ("+engine.deepspeed=3", "engine.deepspeed", "a dictionary", "engine.deepspeed={}"),
    ("~engine.deepspeed.dump_state", "engine.deepspeed.dump_state", "can be deleted", "leave it out"),
    (DEEP + "dump_stat=true", "engine.deepspeed.dump_stat", "no key dump_stat", DEEP + "dump_state"),
    (
        DEEP + "train_bach_size=8",
        "engine.deepspeed.train_bach_size",
        "no key train_bach_size",
        "train.global_batch=8",
    ),
    (
        DEEP + "zero_optimization.reduce_scater=false",
        "engine.deepspeed.zero_optimization.reduce_scater",
        "no key reduce_scater",
        DEEP + "zero_optimization.reduce_scatter",
    ),
    (
        DEEP + "zero_optimization.reduce_bucket_size=big",
        "engine.deepspeed.zero_optimization.reduce_bucket_size",
        "a whole number",
        "=1",
    ),
    (
        DEEP + "zero_optimization.reduce_bucket_size=-1",
        "engine.deepspeed.zero_optimization.reduce_bucket_size",
        "more than 0",
        "=1",
    ),
    (
        DEEP + "zero_optimization=3",
        "engine.deepspeed.zero_optimization",
        "a section with keys",
        "zero_optimization.contiguous_gradients",
    ),
    (
        DEEP + "zero_optimization.offload_optimizer.ratio=1.5",
        f"{ZERO}.offload_optimizer.ratio",
        "at most 1",
        "=0.5",
    ),
    (DEEP + "flops_profiler.enabled=3", "engine.deepspeed.flops_profiler.enabled", "true or false", "=true"),
    (DEEP + "comms_logger.prof_ops=all", "engine.deepspeed.comms_logger.prof_ops", "a list", "[a,b]"),
    (
        DEEP + "communication_data_type=fp8",
        "engine.deepspeed.communication_data_type",
        "fp32, fp16, bf16",
        "fp32",
    ),
    (DEEP + "elasticity.enabled=true", "engine.deepspeed.elasticity", "removed", "any number of ranks"),
    (DEEP + "nebula.enabled=true", "engine.deepspeed.nebula", "removed", "checkpoint.background=true"),
    (DEEP + "compression_training.x=1", "engine.deepspeed.compression_training", "removed", "leave it out"),
    (DEEP + "amp.enabled=true", "engine.deepspeed.amp", "removed", "precision=bf16"),
    (
        DEEP + "curriculum_learning.enabled=true",
        "engine.deepspeed.curriculum_learning",
        "removed",
        "leave it out",
    ),
    (
        DEEP + "progressive_layer_drop.enabled=true",
        "engine.deepspeed.progressive_layer_drop",
        "removed",
        "leave it out",
    ),
    (
        DEEP + "zero_optimization.mics_shard_size=2",
        f"{ZERO}.mics_shard_size",
        "removed",
        "zero.hpz_partition_size",
    ),
    (
        DEEP + "zero_optimization.cpu_offload=true",
        "engine.deepspeed.zero_optimization.cpu_offload",
        "the group offload",
        "offload=cpu",
    ),
    (DEEP + "train_batch_size=8", "engine.deepspeed.train_batch_size", "derives", "train.global_batch=8"),
    (
        DEEP + "train_micro_batch_size_per_gpu=2",
        "engine.deepspeed.train_micro_batch_size_per_gpu",
        "derives",
        "train.micro_batch=2",
    ),
    (
        DEEP + "gradient_accumulation_steps=2",
        "engine.deepspeed.gradient_accumulation_steps",
        "derives",
        "train.micro_batch",
    ),
    (DEEP + "gradient_clipping=0.5", "engine.deepspeed.gradient_clipping", "derives", "optim.clip=0.5"),
    (
        DEEP + "zero_optimization.stage=3",
        "engine.deepspeed.zero_optimization.stage",
        "derives",
        "zero=stage3",
    ),
    (
        DEEP + "zero_optimization.offload_param.device=cpu",
        "engine.deepspeed.zero_optimization.offload_param.device",
        "derives",
        "offload.parameters=cpu",
    ),
    (DEEP + "bf16.enabled=true", "engine.deepspeed.bf16.enabled", "derives", "precision=bf16"),
    (DEEP + "optimizer.type=Adam", "engine.deepspeed.optimizer.type", "derives", "optim=adamw"),
    (DEEP + "scheduler.type=WarmupLR", "engine.deepspeed.scheduler.type", "the loop sets", "schedule=cosine"),
    (
        DEEP + "tensor_parallel.autotp_size=2",
        "engine.deepspeed.tensor_parallel.autotp_size",
        "derives",
        "parallel.tensor=2",
    ),
    (
        DEEP + "wandb.enabled=true",
        "engine.deepspeed.wandb.enabled",
        "never log the training loss",
        "monitor.wandb",
    ),
    # Megatron-core's own keys
    (
        MEGA + "sequence_paralel=true",
        "engine.megatron.sequence_paralel",
        "no key sequence_paralel",
        MEGA + "sequence_parallel",
    ),
    (MEGA + "no_such=1", "engine.megatron.no_such", "no key no_such", "leave it out"),
    (
        MEGA + "tensor_model_paralel_size=2",
        "engine.megatron.tensor_model_paralel_size",
        "no key",
        "parallel.tensor=2",
    ),
    (
        MEGA + "sequence_parallel=3",
        "engine.megatron.sequence_parallel",
        "true or false",
        MEGA + "sequence_parallel=true",
    ),
    (
        MEGA + "recompute_granularity=some",
        "engine.megatron.recompute_granularity",
        "full, selective",
        "=full",
    ),
    (
        MEGA + "virtual_pipeline_model_parallel_size=two",
        "engine.megatron.virtual_pipeline_model_parallel_size",
        "a whole number",
        "=1",
    ),
    (
        MEGA + "tensor_model_parallel_size=2",
        "engine.megatron.tensor_model_parallel_size",
        "derives",
        "parallel.tensor=2",
    ),
    (
        MEGA + "num_query_groups=2",
        "engine.megatron.num_query_groups",
        "derives",
        "model.num_key_value_heads=2",
    ),
    (MEGA + "clip_grad=1.0", "engine.megatron.clip_grad", "derives", "optim.clip=1.0"),
    (MEGA + "bf16=true", "engine.megatron.bf16", "derives", "precision=bf16"),
    (
        MEGA + "use_distributed_optimizer=true",
        "engine.megatron.use_distributed_optimizer",
        "derives",
        "zero=stage1",
    ),
    (MEGA + "normalization=RMSNorm", "engine.megatron.normalization", "the family decides", "model.family"),
    (
        MEGA + "optimizer_cpu_offload=true",
        "engine.megatron.optimizer_cpu_offload",
        "on a GPU only",
        "engine=deepspeed",
    ),
    (
        MEGA + "use_megatron_fsdp=true",
        "engine.megatron.use_megatron_fsdp",
        "shards parameters",
        "zero=stage3",
    ),
    (MEGA + "overlap_p2p_comm=false", "engine.megatron.overlap_p2p_comm", "silently", "leave it out"),
    (
        MEGA + "use_precision_aware_optimizer=true",
        "engine.megatron.use_precision_aware_optimizer",
        "fp32 always",
        "leave it out",
    ),
)


BASE = compose([])


def problems_of(*words: str) -> list[Problem]:
    for engine, prefix in (("deepspeed", DEEP), ("megatron", MEGA)):
        if all(word.startswith(prefix) for word in words):  # skip the composition, which always succeeds
            given = OmegaConf.to_container(
                OmegaConf.from_dotlist([word.removeprefix(prefix) for word in words])
            )
            return engine_keys.problems(
                replace(BASE, engine=EngineConfig(name=EngineName(engine), **{engine: given}))
            )
    try:
        return engine_keys.problems(compose(words))
    except ConfigError as error:
        return list(error.problems)


@pytest.mark.parametrize(("typed", "key", "rule", "remedy"), MISTAKES, ids=[typed for typed, *_ in MISTAKES])
def test_mistakes_are_reported(typed: str, key: str, rule: str, remedy: str) -> None:
    (problem,) = problems_of(typed)
    assert problem.key == key
    assert typed.lstrip("+~").partition("=")[2] in problem.seen
    assert rule in problem.rule
    assert remedy in problem.remedy
    assert not any(
        "Error" in text or "\n" in text for text in (problem.seen, problem.rule, problem.remedy)
    ), "neither traceback nor class names"


def test_all_mistakes_are_reported_together() -> None:
    found = problems_of("trian.steps=3", "optim.lr=fast", "zero=stage9", "--multirun", "exp=quickstart")
    assert [problem.key for problem in found] == ["--multirun", "trian.steps", "optim.lr", "zero", "exp"]
    found = problems_of("train.steps=0", "optim.lr=-1", "model.dropout=2")
    assert {problem.key for problem in found} == {"train.steps", "optim.lr", "model.dropout"}
    found = problems_of(
        "+engine.deepspeed.train_batch_size=1", "+engine.deepspeed.amp.enabled=true", "+engine.megatron.x=1"
    )
    assert len(found) == 3


def test_keys_of_another_engine_are_refused() -> None:
    (other,) = problems_of("train.steps=3", "+engine.megatron.sequence_parallel=true")
    assert (other.key, other.remedy) == (
        "engine.megatron.sequence_parallel",
        "leave it out, or write engine=megatron",
    )
    (problem,) = problems_of("engine=local", "+engine.deepspeed.dump_state=true")
    assert problem.seen == "engine.deepspeed.dump_state=true, engine.name=local"
