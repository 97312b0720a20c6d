"""Choose the implementation of each hot operation of a run, and state why.

The plan shows the choice and every run logs it at its start, so that a slow fallback is never silent.
"""

from __future__ import annotations

from toolkit.config.kernels import CompileBackend, CompileMode, LossKernel
from toolkit.config.optim import OptimizerKernel
from toolkit.config.schema import EngineName, Precision, RunConfig
from toolkit.families.base import ModelShape
from toolkit.optimizers import get_optimizer
from toolkit.plan.attention import choose_attention
from toolkit.plan.deepspeed import optimizer_kernel
from toolkit.plan.rules_compile import compile_obstacles, lacking
from toolkit.plan.transformer_engine import TESTED, has_transformer_engine
from toolkit.plan.types import Device, KernelChoice, Kernels, World

# Names of choices that engines compare with.
TRANSFORMER_ENGINE = "transformer-engine"
PLAIN, FUSED = "plain", "fused"
CHUNK_BYTES = 2**30
# Of a token and a row of the vocabulary, in 16 bits: logits, fp32 log-softmax, its gradient.
BYTES_OF_LOGITS = 10
LOSS_FUSION = "cross_entropy_loss_fusion"


def choose_kernels(
    config: RunConfig, world: World, shape: ModelShape | None, tokens: int | None = None
) -> Kernels:
    """Choose the implementations of a run.

    Args:
        shape: of a family's model.
        tokens: of a micro-batch on a rank; None if they are not known.
    """
    layers = _layers(config, world)
    return Kernels(
        layers=layers,
        attention=choose_attention(
            config, world, shape, transformer_engine=layers.name == TRANSFORMER_ENGINE
        ),
        loss=_loss(config, world.device, shape, tokens),
        compile=_compile(config, world),
        optimizer=_optimizer(config, world),
    )


def _layers(config: RunConfig, world: World) -> KernelChoice:
    if config.engine.name is not EngineName.megatron:
        if config.model.source_key == "model.target":
            return KernelChoice("model.target", "your own module")
        return KernelChoice("transformers", "the model's own module")
    if has_transformer_engine(world):
        version = f"version {world.transformer_engine} is in Megatron-core's range {TESTED}"
        return KernelChoice(TRANSFORMER_ENGINE, version)
    if world.device is Device.CPU:
        why = "Transformer Engine needs a GPU"
    elif world.transformer_engine is None:
        why = "Transformer Engine is not installed"
    else:
        why = f"Transformer Engine {world.transformer_engine} is not in Megatron-core's range {TESTED}"
    return KernelChoice("megatron-core", f"its own layers: {why}")


def _loss(config: RunConfig, device: Device, shape: ModelShape | None, tokens: int | None) -> KernelChoice:
    """The fused loss adds the chunks' gradients of the output layer's weight in fp32.

    For so few tokens that their logits, log-softmax and its gradient need less, the plain loss does.
    """
    kernel, whole = config.train.loss_kernel, "logits of the whole micro-batch in fp32"
    if (key := megatron_logits_key(config)) is not None:
        settings = config.engine.megatron
        fused = settings.get("cross_entropy_fusion_impl", "native") if key == LOSS_FUSION else None
        return KernelChoice(
            f"megatron-core {fused}" if fused else PLAIN, f"engine.megatron.{key}=true; {whole}"
        )
    if kernel is LossKernel.plain:
        return KernelChoice(PLAIN, f"train.loss_kernel=plain; {whole}")
    if kernel is LossKernel.auto:
        if device is Device.CPU:
            return KernelChoice(PLAIN, "the run is on CPUs")
        if config.precision.name is Precision.fp16:
            return KernelChoice(PLAIN, f"fp16 needs the loss scale before gradients are rounded; {whole}")
        if config.model.source_key != "model.family":
            return KernelChoice(PLAIN, f"{config.model.source_key} may do more than multiply; {whole}")
        if shape is not None and tokens is not None and tokens * BYTES_OF_LOGITS < 4 * shape.hidden_size:
            return KernelChoice(
                PLAIN, f"logits of {tokens} tokens need less than an fp32 gradient of the output layer"
            )
    return KernelChoice(FUSED, f"train.loss_kernel={kernel.value}; logits of one chunk of tokens at a time")


def megatron_logits_key(config: RunConfig) -> str | None:
    """Return the setting of Megatron-core with which its output layer must compute logits; None if there is
    none.
    """
    if config.engine.name is not EngineName.megatron:
        return None
    settings = (LOSS_FUSION, "defer_embedding_wgrad_compute")
    return next((key for key in settings if config.engine.megatron.get(key)), None)


def loss_chunk(config: RunConfig, vocabulary: int) -> int:
    """Return tokens of a chunk of the fused loss.

    By default as many as have CHUNK_BYTES of fp32 logits, because every chunk reads and writes the gradient
    of the weight, which takes as long as multiplying some hundred tokens. Tensor ranks have a part of the
    ``vocabulary``, and the same chunks.
    """
    return config.train.loss_chunk or max(1, CHUNK_BYTES // (4 * vocabulary))


def fused_loss_chunk(config: RunConfig, kernels: Kernels, vocabulary: int) -> int | None:
    """Return :func:`loss_chunk`, or None if the loss is not fused."""
    return loss_chunk(config, vocabulary) if kernels.loss.name == FUSED else None


def loss_backend(config: RunConfig, world: World) -> str | None:
    """Return the backend of torch.compile that fuses the elementwise operations of the fused loss; None: none
    does.

    Megatron-core compiles its own fused operations on GPUs, whatever ``compile.mode`` is.
    """
    if config.engine.name is EngineName.megatron:
        fuses = world.device is Device.CUDA and not lacking(world)
        return CompileBackend.inductor.value if fuses else None
    compiles = _compile(config, world).name != CompileMode.none.value
    return config.compile.backend.value if compiles else None


def _compile(config: RunConfig, world: World) -> KernelChoice:
    mode = config.compile.mode
    if mode is not CompileMode.auto:
        return KernelChoice(mode.value, f"compile.mode={mode.value}")
    none, layers = CompileMode.none.value, CompileMode.layers
    if world.device is Device.CPU:
        return KernelChoice(none, "the run is on CPUs")
    if config.model.source_key != "model.family":
        return KernelChoice(
            none, "compile=layers compiles models other than the families', if they have no graph breaks"
        )
    for obstacle in compile_obstacles(config, world, layers):
        return KernelChoice(none, obstacle.rule)
    return KernelChoice(layers.value, "one graph serves all layers and fuses their elementwise operations")


def _optimizer(config: RunConfig, world: World) -> KernelChoice:
    if config.engine.name is EngineName.deepspeed:
        return KernelChoice(
            optimizer_kernel(config, world).value, f"optim.kernel={config.optim.kernel.value}"
        )
    if config.engine.name is EngineName.megatron and world.device is Device.CUDA:
        if world.transformer_engine is not None:
            # Whatever its version is: megatron/core/optimizer/__init__.py imports it if it can.
            return KernelChoice(
                TRANSFORMER_ENGINE, "Megatron-core uses its fused optimizer if it is installed"
            )
        if OptimizerKernel.fused in get_optimizer(config.optim.name).kernels:
            return KernelChoice(
                OptimizerKernel.fused.value, "torch's, since Transformer Engine is not installed"
            )
    return KernelChoice("torch", f"the optimizer of engine={config.engine.name.value}")
