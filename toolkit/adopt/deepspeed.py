"""DeepSpeed's JSON. Keys that the plan derives become keys of this toolkit; DeepSpeed gets the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    reject,
    same,
)
from toolkit.config import search_path
from toolkit.config.engine_keys import AUTO, DEEPSPEED
from toolkit.config.engine_keys_deepspeed import DERIVED, NO_EFFECT, RUN_KEYS
from toolkit.config.vendors.installed import DEEPSPEED as PACKAGE
from toolkit.config.vendors.installed import load_schema

OFFLOADED = ("optimizer", "param")  # in the names of DeepSpeed's keys
DECAY = "one-dimensional tensors (norms, biases) never decay; DeepSpeed decays every parameter of a group"


def _optimizer(value: Any, ctx: Context) -> Decision:
    name = {"adam": "adamw", "fusedadam": "adamw"}.get(str(value).lower(), str(value).lower())
    if name == "custom" or name not in search_path.options(search_path.folders(None), "optim"):
        return refused(f"there is no optimizer {value} here: choose one of the group optim")
    return exact(("optim", name))


def _weight_decay(value: Any, ctx: Context) -> Decision:
    return changed(DECAY, ("optim.weight_decay", value)) if value else exact(("optim.weight_decay", value))


def _warmup(value: Any, ctx: Context) -> Decision:
    log = str(ctx.keys.get("scheduler.params.warmup_type", "log")).lower() == "log"
    return changed(WARMUP + ("; it is linear, not logarithmic" if log else ""), ("schedule.warmup", value))


def _peak(value: Any, ctx: Context) -> Decision:
    return exact(("optim.lr", value), note="the scheduler replaces the optimizer's rate")


def _lr(value: Any, ctx: Context) -> Decision:
    peak = ctx.keys.get("scheduler.params.warmup_max_lr")
    if peak not in (None, AUTO, value):
        return default(f"the scheduler's warmup_max_lr={peak} replaces it")
    return exact(("optim.lr", value))


def _cosine_minimum(value: Any, ctx: Context) -> Decision:
    peak = ctx.keys.get("optimizer.params.lr")
    if not isinstance(peak, int | float) or not isinstance(value, int | float):
        return refused("a share of a learning rate that this file does not have")
    return exact(("schedule.min_lr", float(f"{value * peak:.6g}")))


def offload(value: Any, optimizer: Any, parameters: Any) -> Decision:
    """Return the decision about one of two devices, which together are an option of the group offload."""
    pair = tuple(str(device or "none").lower() for device in (optimizer, parameters))
    if str(value or "none").lower() == "none":
        return default()
    options: dict[tuple[str, ...], str] = {
        ("cpu", "none"): "cpu_optimizer",
        ("cpu", "cpu"): "cpu",
        ("nvme", "nvme"): "nvme",
    }
    if pair in options:
        return exact(("offload", options[pair]))
    return exact(("offload.optimizer", pair[0]), ("offload.parameters", pair[1]))


def _offload(value: Any, ctx: Context) -> Decision:
    return offload(value, *(ctx.keys.get(f"zero_optimization.offload_{part}.device") for part in OFFLOADED))


def _nvme_path(value: Any, ctx: Context) -> Decision:
    devices = [ctx.keys.get(f"zero_optimization.offload_{part}.device") for part in OFFLOADED]
    return (
        exact(("offload.nvme_path", value)) if "nvme" in devices and value else default("used with nvme only")
    )


def _every(value: Any, ctx: Context) -> Decision:
    if Format.TRAINER in ctx.formats:
        return default("logging_steps decides")
    return exact(("monitor.every", value)) if isinstance(value, int) and value > 0 else default()


PINNED = expect(True, otherwise="the plan pins memory if there is a GPU")
HYSTERESIS = "every overflow halves the loss scale, as in torch's GradScaler"
RULES: Mapping[str, Rule] = {
    "train_batch_size": same("train.global_batch"),
    "train_micro_batch_size_per_gpu": micro_batch,
    "gradient_accumulation_steps": accumulation,
    "gradient_clipping": same("optim.clip"),
    "steps_per_print": _every,
    "optimizer.type": _optimizer,
    "optimizer.params.lr": _lr,
    "optimizer.params.betas": same("optim.betas"),
    "optimizer.params.eps": same("optim.eps"),
    "optimizer.params.weight_decay": _weight_decay,
    "optimizer.params.momentum": same("optim.momentum"),
    "optimizer.params.torch_adam": lambda value, ctx: default("optim.kernel decides"),
    "optimizer.params.fused": lambda value, ctx: default("optim.kernel decides"),
    "optimizer.params.adam_w_mode": expect(True, otherwise="decay is decoupled (AdamW)"),
    "optimizer.params.bias_correction": expect(True, otherwise="Adam corrects the bias of its averages"),
    "optimizer.params.amsgrad": expect(False, otherwise="there is no AMSGrad here"),
    "optimizer.legacy_fusion": expect(False, otherwise="it belongs to LAMB"),
    "scheduler.type": choose(
        {
            "warmuplr": (("schedule", "constant"),),
            "warmupdecaylr": (("schedule", "linear"),),
            "warmupcosinelr": (("schedule", "cosine"),),
        },
        "there is no such schedule here: choose schedule=constant, linear, cosine or wsd",
    ),
    "scheduler.params.warmup_num_steps": _warmup,
    "scheduler.params.warmup_min_lr": expect(0, 0.0, otherwise="warm-up starts at 0"),
    "scheduler.params.warmup_min_ratio": expect(0, 0.0, otherwise="warm-up starts at 0"),
    "scheduler.params.warmup_max_lr": _peak,
    "scheduler.params.warmup_type": lambda value, ctx: (
        default() if value == "linear" else changed("warm-up is linear")
    ),
    "scheduler.params.total_num_steps": same("train.steps"),
    "scheduler.params.cos_min_ratio": _cosine_minimum,
    "zero_optimization.stage": lambda value, ctx: (
        exact(("zero", f"stage{value}")) if value in (0, 1, 2, 3) else refused("ZeRO has stages 0 to 3")
    ),
    "zero_optimization.offload_optimizer.device": _offload,
    "zero_optimization.offload_param.device": _offload,
    "zero_optimization.offload_optimizer.nvme_path": _nvme_path,
    "zero_optimization.offload_param.nvme_path": _nvme_path,
    "zero_optimization.offload_optimizer.pin_memory": PINNED,
    "zero_optimization.offload_param.pin_memory": PINNED,
    "zero_optimization.cpu_offload": choose(
        {True: (("offload", "cpu_optimizer"),), False: ()}, "true or false"
    ),
    "zero_optimization.cpu_offload_params": choose({True: (("offload", "cpu"),), False: ()}, "true or false"),
    "zero_optimization.cpu_offload_use_pin_memory": PINNED,
    "zero_allow_untested_optimizer": lambda value, ctx: default("the plan sets it if the optimizer needs it"),
    "zero_force_ds_cpu_optimizer": lambda value, ctx: default(
        "optim.kernel=cpu chooses DeepSpeed's CPU Adam"
    ),
    "bf16.enabled": choose({True: (("precision", "bf16"),), False: ()}, "true or false"),
    "bfloat16.enabled": choose({True: (("precision", "bf16"),), False: ()}, "true or false"),
    "fp16.enabled": choose({True: (("precision", "fp16"),), False: ()}, "true or false"),
    "fp16.loss_scale": expect(0, otherwise="the loss scale is dynamic in every engine"),
    "fp16.hysteresis": lambda value, ctx: default() if value == 1 else changed(HYSTERESIS),
    "fp16.consecutive_hysteresis": lambda value, ctx: default() if not value else changed(HYSTERESIS),
    "fp16.min_loss_scale": expect(1, otherwise="the loss scale is at least 1"),
    "wandb.enabled": choose({True: (("monitor", "online"),), False: ()}, "true or false"),
    "wandb.team": same("monitor.entity"),
    "wandb.group": same("monitor.group"),
    "tensorboard.enabled": expect(
        False, otherwise="metrics are in metrics.jsonl; TensorBoard is a sink of its own"
    ),
    "communication_data_type": lambda value, ctx: (
        default() if value is None else _passed("communication_data_type", value)
    ),
    "pipeline.activation_checkpoint_interval": choose(
        {0: (), 1: (("train.activation_checkpointing", "full"),)}, "each block is recomputed, or none"
    ),
    "checkpoint.load_universal": reject("a checkpoint resumes in any layout without conversion"),
}


def decide(name: str, value: Any, ctx: Context) -> Decision:
    """Return the decision about one key of DeepSpeed's JSON."""
    if value == AUTO:
        return default("auto: the plan decides, or the key of another file")
    if name in RULES:
        return RULES[name](value, ctx)
    if name in RUN_KEYS:
        return same(RUN_KEYS[name])(value, ctx)
    inert = next((entry for entry in _sections(name) if entry in NO_EFFECT), None)
    if inert is not None and not name.endswith((".enabled", ".deepcompile")):
        return default(NO_EFFECT[inert][0])
    if _is_derived(name) and value in (None, False, 0, {}, [], "none", "None"):
        return default("off here too")
    return _passed(name, value)


def _passed(name: str, value: Any) -> Decision:
    """Pass the key to DeepSpeed, if DeepSpeed has it and the plan does not derive it."""
    tree = value
    for part in reversed(name.split(".")):
        tree = {part: tree}
    problem = next(DEEPSPEED.find_problems(tree, load_schema(PACKAGE)), None)
    if problem is None:
        plain = int(value) if isinstance(value, float) and value.is_integer() and abs(value) > 1e3 else value
        return exact((f"engine.deepspeed.{name}", plain))
    new = problem.remedy.removeprefix("write +").partition("=")[0]
    if new.startswith("engine.deepspeed.") and "deprecated" in problem.rule:
        return changed("DeepSpeed has renamed it", (new, value))
    return refused(f"{problem.rule}; {problem.remedy}")


def _is_derived(name: str) -> bool:
    return any(entry in DERIVED for entry in _sections(name))


def _sections(name: str) -> list[str]:
    """``a.b.c`` -> ``a``, ``a.b``, ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def unset_defaults(keys: Mapping[str, Any]) -> list[tuple[str, Any, Decision]]:
    """Return DeepSpeed's defaults that differ from this toolkit's and that no key sets.

    Without weight_decay torch's AdamW decays by 0.01, and DeepSpeed's own Adam not at all.
    """
    adam = str(keys.get("optimizer.type", "adamw")).lower() in ("adam", "adamw")
    torch_decays = (
        adam and keys.get("optimizer.params.torch_adam") and keys.get("optimizer.params.adam_w_mode", True)
    )
    decay = 0.01 if torch_decays else 0.0
    found: list[tuple[str, Any, Decision]] = [
        ("scheduler.type", None, exact(("schedule", "constant"))),
        ("optimizer.params.lr", 1e-3, exact(("optim.lr", 1e-3))),
        (
            "optimizer.params.weight_decay",
            decay,
            _weight_decay(decay, Context(keys=keys, formats=frozenset())),
        ),
    ]
    if adam:
        found.append(("optimizer.params.betas", [0.9, 0.999], exact(("optim.betas", [0.9, 0.999]))))
    return [row for row in found if keys.get(row[0], AUTO) == AUTO]
