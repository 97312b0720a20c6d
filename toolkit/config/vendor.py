"""The engines' own keys, given as ``+engine.deepspeed.a.b=v``: refused where they are unknown, removed, of the wrong type, or derived.

DeepSpeed ignores unknown top-level keys silently, so every key is checked against the schema of the installed version, which
``vendors/`` reads from its source. A key that the plan derives is refused by naming the run's own key: one thing is said in one place.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from toolkit.config.keys import flatten
from toolkit.config.schema import EngineName, OptimizerName, RunConfig
from toolkit.config.vendors.cache import deepspeed_schema
from toolkit.config.vendors.node import Node
from toolkit.errors import Problem

ROOT = "engine.deepspeed"

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

# DeepSpeed's key or section -> (why it is not given here, what to do).
_PRECISION = ("the plan derives it from precision.name", "write precision=fp32, precision=bf16 or precision=fp16")
_MASTER = ("master weights and moments are fp32 always, so that a checkpoint resumes in every layout", "leave it out")
_OFFLOAD = ("the plan derives it from the group offload", "write offload=none, offload=cpu_optimizer, offload=cpu or offload=nvme")
_MONITOR = ("DeepSpeed's monitors never log the training loss, and only on rank 0",
            "leave it out: metrics.jsonl and monitor.wandb have everything")
_CHECKPOINT = ("checkpoints are this toolkit's own, which any layout resumes", "write checkpoint.* keys instead")
_DATA = ("samples and their order are this toolkit's own", "write data.* keys instead")
_SCALER = ("the loss scale is dynamic, and its rules are the same in every engine",
           "write precision.initial_scale_power or precision.scale_window")
_KERNEL = ("the plan derives it from optim.name and optim.kernel", "write optim.name or optim.kernel")
_DIVISION = ("gradients are divided once, by the units of the global batch", "leave it out")

DERIVED = {
    "gradient_accumulation_steps": ("the plan derives it: global batch / (micro-batch x data ranks)",
                                    "write train.global_batch and train.micro_batch"),
    "optimizer": ("the plan derives it from optim.*", "write optim=adamw, optim=sgd or optim=muon, and optim.lr and so on"),
    "scheduler": ("the learning rate is a function of the samples consumed, which the loop sets", "write schedule.name and optim.lr"),
    "zero_optimization.stage": ("the plan derives it from zero.stage", "write zero=stage0, zero=stage1, zero=stage2 or zero=stage3"),
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_param": _OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOAD,
    "zero_optimization.offload_optimizer.pin_memory": ("the plan pins memory where there is a GPU", "leave it out"),
    "zero_optimization.offload_param.pin_memory": ("the plan pins memory where there is a GPU", "leave it out"),
    "zero_optimization.round_robin_gradients": ("round-robin partitions scramble which parameter a saved state belongs to", "leave it out"),
    "zero_allow_untested_optimizer": _KERNEL,
    "zero_force_ds_cpu_optimizer": _KERNEL,
    "bf16.enabled": _PRECISION,
    "bfloat16": _PRECISION,
    "fp16.enabled": _PRECISION,
    "data_types.param_dtype": _PRECISION,
    "torch_autocast": ("autocast changes the precision behind the plan's back", "write precision=bf16 or precision=fp16"),
    "fp16.loss_scale": _SCALER,
    "fp16.hysteresis": _SCALER,
    "fp16.min_loss_scale": _SCALER,
    "fp16.fp16_master_weights_and_grads": _MASTER,
    "bf16.bf16_master_weights_and_grads": _MASTER,
    "bf16.bf16_optimizer_states": _MASTER,
    "expert_parallel": ("the expert axis is the plan's", "write parallel.expert instead"),
    "pipeline": ("the pipeline is the plan's", "write parallel.pipeline instead"),
    "tensor_parallel.tensor_parallel": ("the tensor axis is the plan's", "write parallel.tensor instead"),
    "tensor_parallel.tp": ("the tensor axis is the plan's", "write parallel.tensor instead"),
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
    "autotuning": ("DeepSpeed's autotuner restarts the run with other settings", "compare settings with launch/plan.py"),
}

# Their values are checked by DeepSpeed's functions, which the schema does not see.
DTYPE_KEYS = ("communication_data_type", "seq_parallel_communication_data_type", "data_types.grad_accum_dtype", "data_types.buffer_dtype")
DTYPES = ("fp32", "fp16", "bf16")

# A removed key -> what does its work now; without an entry, nothing does.
INSTEAD = {
    "elasticity": "leave it out: a checkpoint resumes with any number of ranks",
    "nebula": "write checkpoint.background=true",
    "amp": "write precision=bf16 or precision=fp16",
    "zero_optimization.mics_shard_size": "write +engine.deepspeed.zero_optimization.zero_hpz_partition_size=N",
}


def deepspeed_problems(config: RunConfig) -> list[Problem]:
    """Every problem of ``engine.deepspeed.*`` and ``engine.megatron.*``, in the order in which the keys stand."""
    problems = _not_selected(config)
    given = config.engine.deepspeed
    if not given or config.engine.name is not EngineName.deepspeed:
        return problems
    schema = deepspeed_schema()
    if schema is None:
        name = next(iter(flatten(given)))
        return [*problems, Problem(f"{ROOT}.{name}", f"{ROOT}.{name}={_show(flatten(given)[name])}",
                                   "DeepSpeed's keys are checked against the installed DeepSpeed, and there is none",
                                   "install it: pip install deepspeed")]
    return [*problems, *_check(given, schema, ""), *_muon(config)]


def usable(config: RunConfig) -> RunConfig:
    """``config`` without the sections of DeepSpeed's keys that have problems: what remains can be planned, and its problems told too."""
    wrong = {problem.key.removeprefix(f"{ROOT}.").split(".")[0] for problem in deepspeed_problems(config)}
    if not wrong:
        return config
    kept = {part: value for part, value in config.engine.deepspeed.items() if part not in wrong}
    return replace(config, engine=replace(config.engine, deepspeed=kept))


def _not_selected(config: RunConfig) -> list[Problem]:
    problems = []
    for engine, given in ((EngineName.deepspeed, config.engine.deepspeed), (EngineName.megatron, config.engine.megatron)):
        if engine is config.engine.name:
            continue
        for name, value in flatten(given).items() if given else ():
            key = f"engine.{engine.value}.{name}"
            problems.append(Problem(key, f"{key}={_show(value)}, engine.name={config.engine.name.value}",
                                    "keys of an engine that does not run have no effect", f"leave it out, or write engine={engine.value}"))
    return problems


def _check(given: Mapping[Any, Any], schema: Node, above: str) -> Iterator[Problem]:
    for part, value in given.items():
        name = f"{above}{part}"
        node = (schema.fields or {}).get(str(part))
        if isinstance(value, Mapping) and (name in OWN or name in DERIVED):
            for leaf, inner in flatten(value, name + ".").items():
                yield _derived(leaf, name, inner)
        elif name in OWN or name in DERIVED:
            yield _derived(name, name, value)
        elif node is None:
            if not schema.open:
                yield _unknown(name, value, schema, above)
        elif node.removed is not None:
            yield _problem(name, value, f"DeepSpeed has it no longer: {_first_sentence(node.removed)}", INSTEAD.get(name, "leave it out"))
        elif node.deprecated is not None or node.internal:
            why = "DeepSpeed sets it itself" if node.internal else f"DeepSpeed calls it deprecated and reads {node.deprecated}"
            yield _problem(name, value, why, "leave it out" if node.internal else f"write +{ROOT}.{above}{node.deprecated}={_show(value)}")
        elif name in DTYPE_KEYS and value not in (*DTYPES, None):
            yield _problem(name, value, f"{name} is one of {', '.join(DTYPES)}", f"write +{ROOT}.{name}=fp32")
        elif node.fields is not None and isinstance(value, Mapping):
            yield from _check(value, node, name + ".")
        elif (rule := node.wrong(value)) is not None:
            below = f": {', '.join(list(node.fields)[:3])}, ..." if node.fields else ""
            yield _problem(name, value, f"{name} is {rule}{below}", f"write +{ROOT}.{name}{node.example()}")


def _derived(name: str, entry: str, value: Any) -> Problem:
    """``name`` is what was written; ``entry`` the row of ``OWN`` or ``DERIVED`` that covers it."""
    own = OWN.get(name) or OWN.get(entry)
    if own is not None:
        return _problem(name, value, f"the plan derives it from {own}", f"write {own}={_show(value)}")
    if name == "zero_optimization.stage" and value in (0, 1, 2, 3):
        return _problem(name, value, DERIVED[name][0], f"write zero=stage{value}")
    return _problem(name, value, *DERIVED.get(name, DERIVED[entry]))


def _unknown(name: str, value: Any, schema: Node, above: str) -> Problem:
    known = [key for key, node in (schema.fields or {}).items() if node.removed is None]
    part = name.removeprefix(above)
    near = next(iter(difflib.get_close_matches(part, known, 1, 0.6)), None)
    where = f"DeepSpeed's {above.rstrip('.')} has" if above else "DeepSpeed has"
    meant = f"{above}{near}"
    if near is None:
        remedy = f"leave it out; there are {', '.join(known[:5])}, ..."
    elif meant in OWN:
        remedy = f"write {OWN[meant]}={_show(value)}"
    else:
        remedy = DERIVED[meant][1] if meant in DERIVED else f"did you mean +{ROOT}.{meant}?"
    return _problem(name, value, f"{where} no key {part}, and would not do what it says", remedy)


def _muon(config: RunConfig) -> Iterator[Problem]:
    zero = config.engine.deepspeed.get("zero_optimization")
    if config.optim.name is OptimizerName.muon and config.zero.stage == 3 and isinstance(zero, Mapping) and zero.get("reduce_scatter"):
        yield _problem("zero_optimization.reduce_scatter", zero["reduce_scatter"],
                       "DeepSpeed's Muon under ZeRO 3 reduces whole gradients (optim.name=muon, zero.stage=3)", "leave it out")


def _problem(name: str, value: Any, rule: str, remedy: str) -> Problem:
    """Of a section, what was typed: its values, not the section."""
    seen = "; ".join(f"{ROOT}.{leaf}={_show(inner)}" for leaf, inner in flatten(value, name + ".").items())
    return Problem(f"{ROOT}.{name}", seen, rule, remedy)


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].strip().rstrip(".")
