"""Rules of ``engine=megatron``: what Megatron-core 0.16 can carry out, and what it would do wrong, or not at all, without saying so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.config.schema import OptimizerKernel, OptimizerName
from toolkit.config.vendor import show
from toolkit.config.vendor_megatron import GPU_ONLY, TRANSFORMER_ENGINE
from toolkit.config.vendors.cache import MEGATRON
from toolkit.errors import Problem
from toolkit.plan.case import Case, Rule, refuse, warn
from toolkit.plan.types import Device

ROOT = "engine.megatron"
STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
VIRTUAL, GROUP = "virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage"
# Submodules of the families' blocks that can be recomputed; the others that Megatron-core knows are of other architectures.
RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe")


def is_installed(case: Case) -> Iterator[Problem]:
    if case.megatron and MEGATRON.folder() is None:
        yield refuse(case.config, "engine.name", "engine=megatron needs Megatron-core, and there is none",
                     "install it: pip install 'megatron-core==0.16.*'")


def stage_three(case: Case) -> Iterator[Problem]:
    if case.megatron and case.config.zero.stage == 3:
        yield refuse(case.config, "zero.stage engine.name",
                     "Megatron-core's distributed optimizer shards optimizer states; parameters it cuts by tensor and pipeline",
                     "write zero=stage2, or engine=deepspeed")


def optimizer_is_megatrons(case: Case) -> Iterator[Problem]:
    if not case.megatron:
        return
    if case.config.optim.name is OptimizerName.muon:
        yield refuse(case.config, "optim.name engine.name", "Megatron-core's Muon needs a package that is not published",
                     "write engine=deepspeed, or optim=adamw")
    elif case.config.optim.kernel not in (OptimizerKernel.auto, OptimizerKernel.torch):
        yield refuse(case.config, "optim.kernel engine.name",
                     "Megatron-core takes Transformer Engine's or Apex's fused optimizer where one is installed, else torch's",
                     "write optim.kernel=auto")


def model_is_a_familys(case: Case) -> Iterator[Problem]:
    if case.megatron and case.config.model.target is not None:
        yield refuse(case.config, "model.target engine.name", "Megatron-core builds the families' models itself, from its own layers",
                     "write engine=deepspeed")


# -- the user's own settings


def settings_fit_the_device(case: Case) -> Iterator[Problem]:
    if not case.megatron:
        return
    for name, value in case.config.engine.megatron.items():
        if name in GPU_ONLY and case.world.device is Device.CPU:
            yield _own(case, name, "on CPU ranks it fails or has no effect: its kernels and streams are the GPU's", "leave it out on CPUs")
        elif name in TRANSFORMER_ENGINE and case.world.device is Device.CPU:
            yield _own(case, name, "it is done by Transformer Engine's layers, which need a GPU; other layers ignore it silently",
                       "leave it out on CPUs")
        elif name == "moe_token_dispatcher_type" and value == "flex" and case.world.device is Device.CPU:
            yield _own(case, name, "the flex dispatcher runs on GPUs only", f"write +{ROOT}.{name}=alltoall")


def sequence_parallel(case: Case) -> Iterator[Problem]:
    """Where it is not written, the plan takes it wherever it fits."""
    if not case.megatron:
        return
    config, name = case.config, "sequence_parallel"
    tensor, context = config.parallel.tensor, config.parallel.context
    length, wanted = config.train.sequence_length // context, config.engine.megatron.get(name)
    if wanted and tensor == 1:
        yield _own(case, name, "sequence parallelism spreads norms and dropout over the tensor ranks, and there is one",
                   "write parallel.tensor=2, or leave it out")
    elif wanted and length % tensor:
        yield _own(case, name, f"the {length} tokens of a context rank are divisible by parallel.tensor={tensor}",
                   f"write train.sequence_length={_next(length, tensor) * context}, or leave it out")
    elif tensor > 1 and case.has_experts and wanted is False:
        yield _own(case, name, "experts and a tensor axis train with sequence parallelism: else each tensor rank routes all tokens again",
                   "leave it out")
    elif tensor > 1 and case.has_experts and length % tensor:
        yield refuse(config, "train.sequence_length parallel.tensor",
                     f"experts and a tensor axis train with sequence parallelism, so the {length} tokens of a context rank divide by it",
                     f"write train.sequence_length={_next(length, tensor) * context}, or parallel.tensor=1")


def recomputation(case: Case) -> Iterator[Problem]:
    if not case.megatron:
        return
    given = case.config.engine.megatron
    names = [name for name in given if name.startswith("recompute_")]
    if case.config.train.activation_checkpointing:
        for name in names:
            yield _own(case, name, "train.activation_checkpointing=true recomputes each block whole",
                       "leave it out, or write train.activation_checkpointing=false")
        return
    granularity = given.get("recompute_granularity")
    if names and granularity is None:
        yield _own(case, names[0], "it says how to recompute, and recompute_granularity whether",
                   f"write +{ROOT}.recompute_granularity=full")
    elif granularity == "full":
        for name, example in (("recompute_method", "uniform"), ("recompute_num_layers", "1")):
            if given.get(name) is None:
                yield _own(case, "recompute_granularity", f"full recomputation needs {name}", f"write +{ROOT}.{name}={example}")
    elif granularity == "selective":
        for name in ("recompute_method", "recompute_num_layers"):
            if given.get(name) is not None:
                yield _own(case, name, "selective recomputation takes all layers", "leave it out")
    modules = given.get("recompute_modules") or []
    wrong = [str(module) for module in modules if module not in RECOMPUTED] if isinstance(modules, list) else []
    if wrong:
        yield _own(case, "recompute_modules", f"what can be recomputed is {', '.join(RECOMPUTED)}",
                   f"write +{ROOT}.recompute_modules=[core_attn]")
    if "mlp" in modules and case.traits is not None and case.traits.biases:
        yield _own(case, "recompute_modules",
                   "recomputing the mlp never ends in a family whose linear layers have biases: Megatron-core takes the bias, which is "
                   "handed on beside the product, for something to recompute",
                   "leave mlp out, or recompute blocks: train.activation_checkpointing=true")


def overlaps(case: Case) -> Iterator[Problem]:
    """On GPUs the plan overlaps what can; here what is written is held against that."""
    if not case.megatron:
        return
    given, gpu, sharded = case.config.engine.megatron, case.world.device is Device.CUDA, case.config.zero.stage > 0
    reduces, gathers = given.get("overlap_grad_reduce", gpu), given.get("overlap_param_gather", gpu and sharded)
    if given.get("overlap_param_gather") and not sharded:
        yield _own(case, "overlap_param_gather", "parameters are gathered by the distributed optimizer only", "write zero=stage1")
    elif gathers and not reduces:
        name = "overlap_param_gather" if "overlap_param_gather" in given else "overlap_grad_reduce"
        yield _own(case, name, "a gather that overlaps waits for reductions that overlap too",
                   f"write +{ROOT}.overlap_grad_reduce=true, or +{ROOT}.overlap_param_gather=false")
    elif given.get("align_param_gather") and not gathers:
        yield _own(case, "align_param_gather", "it aligns gathers that overlap", f"write +{ROOT}.overlap_param_gather=true")
    elif given.get("bucket_size") is not None and not reduces:
        yield _own(case, "bucket_size", "gradients go in buckets where their reduction overlaps",
                   f"write +{ROOT}.overlap_grad_reduce=true, or leave it out")


# -- stages


def stages_of_their_own(case: Case) -> Iterator[Problem]:
    """``num_layers_in_{first,last}_pipeline_stage``: what is left divides over the stages between."""
    given = {name: case.config.engine.megatron.get(name) for name in STAGES} if case.megatron else {}
    written = {name: value for name, value in given.items() if isinstance(value, int)}
    stages, shape = case.config.parallel.pipeline, case.shape
    if not written or shape is None:
        return
    first = next(iter(written))
    if stages == 1:
        yield _own(case, first, "it sizes a stage of a pipeline, and there is none", "write parallel.pipeline=2, or leave it out")
        return
    between, left = stages - len(written), shape.num_hidden_layers - sum(written.values())
    if min(written.values()) < 1 or left < between or (between == 0 and left) or (between and left % between):
        even = f"model.num_hidden_layers={shape.num_hidden_layers} less {sum(written.values())} leaves {left} for {between} stages"
        yield _own(case, first, f"each stage has at least one layer, and those between equally many: {even}",
                   f"write +{ROOT}.{first}={_fitting(shape.num_hidden_layers, stages, written, first)}")


def virtual_stages(case: Case) -> Iterator[Problem]:
    if not case.megatron:
        return
    config, given, shape = case.config, case.config.engine.megatron, case.shape
    chunks, stages = given.get(VIRTUAL), config.parallel.pipeline
    if not isinstance(chunks, int) or isinstance(chunks, bool):
        if given.get(GROUP) is not None:
            yield _own(case, GROUP, "it groups the micro-batches of virtual stages, and there are none", f"write +{ROOT}.{VIRTUAL}=2")
        return
    if chunks < 2:
        yield _own(case, VIRTUAL, "a rank holds at least two virtual stages, or one plain stage", "leave it out")
        return
    if stages == 1:
        yield _own(case, VIRTUAL, "virtual stages interleave those of a pipeline, and there is none",
                   "write parallel.pipeline=2, or leave it out")
        return
    if shape is not None:
        uneven = [given[name] for name in STAGES if isinstance(given.get(name), int)]
        layers = shape.num_hidden_layers
        if any(size % chunks for size in uneven) or (not uneven and layers % (stages * chunks)):
            yield _own(case, VIRTUAL, f"model.num_hidden_layers={layers} is divisible by parallel.pipeline x virtual stages = "
                       f"{stages * chunks}, and a stage of its own size by {chunks}",
                       f"write model.num_hidden_layers={_next(layers, stages * chunks)}, or leave it out" if case.sizes_are_free else
                       "leave it out")
    if case.batch is None:
        return
    group = given.get(GROUP)
    for accumulation in sorted({stage.size // (case.batch.micro_batch * case.batch.data_parallel) for stage in case.batch.stages}):
        size = group if isinstance(group, int) else stages
        left = accumulation % size if size else 0
        if not stages <= size <= accumulation or 0 < left < stages:
            whole = _next(accumulation, stages) * case.batch.micro_batch * case.batch.data_parallel
            yield _own(case, VIRTUAL, f"interleaved stages take micro-batches {stages} at a time (parallel.pipeline), and a step has "
                       f"{accumulation}", f"write train.global_batch={whole}, a smaller train.micro_batch, or leave it out")
            return


def pipeline_is_filled(case: Case) -> Iterator[Problem]:
    """The bubble of 1F1B: (p - 1) / (v m) of the time (Narayanan et al., 2104.04473, section 2.2)."""
    stages, batch = case.config.parallel.pipeline, case.batch
    if stages == 1 or batch is None or case.world.device is Device.CPU:
        return
    micro_batches = batch.global_batch // (batch.micro_batch * batch.data_parallel)
    if micro_batches < stages:
        yield warn(case.config, "train.micro_batch parallel.pipeline",
                   f"a step has {micro_batches} micro-batches for {stages} stages, which wait for each other most of the time",
                   "write a smaller train.micro_batch, or a larger train.global_batch")


def _own(case: Case, name: str, rule: str, remedy: str) -> Problem:
    value: Any = case.config.engine.megatron[name]
    return Problem(f"{ROOT}.{name}", f"{ROOT}.{name}={show(value)}", rule, remedy)


def _next(value: int, multiple: int) -> int:
    return max(1, -(-value // multiple)) * multiple


def _fitting(layers: int, stages: int, written: dict[str, int], name: str) -> int:
    """The nearest size of the stage ``name`` that leaves a whole number of layers for the stages between."""
    others = sum(size for other, size in written.items() if other != name)
    between = stages - len(written)
    fits = [size for size in range(1, layers) if (left := layers - others - size) >= between and not (left % between if between else left)]
    return min(fits, key=lambda size: abs(size - written[name]), default=1)


RULES: tuple[Rule, ...] = (
    is_installed, stage_three, optimizer_is_megatrons, model_is_a_familys, settings_fit_the_device, sequence_parallel, recomputation,
    overlaps, stages_of_their_own, virtual_stages, pipeline_is_filled,
)
