"""The schema of a run.

The sections data, cluster and monitor are in their own modules. The string below a field is its help text.

Dataclasses have ``slots``, so that an unknown key is an error, and are not frozen, so that OmegaConf can
override them. ``__post_init__`` checks single values. Checks of several keys are rules in
``toolkit/plan/rules.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from toolkit.config.checks import at_least, at_most, check
from toolkit.config.cluster import ClusterConfig
from toolkit.config.data import DataConfig
from toolkit.config.monitor import MonitorConfig
from toolkit.errors import ConfigError, Problem


class EngineName(Enum):
    local = "local"
    deepspeed = "deepspeed"
    megatron = "megatron"


class OffloadDevice(Enum):
    """Where a kind of state is stored between its uses."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class OptimizerName(Enum):
    adamw = "adamw"
    sgd = "sgd"
    muon = "muon"


class OptimizerKernel(Enum):
    auto = "auto"
    torch = "torch"
    cpu = "cpu"
    fused = "fused"


# A class statement cannot have a member called "continue".
OnNonfinite = Enum("OnNonfinite", {"stop": "stop", "continue": "continue"})


class LrScaling(Enum):
    none = "none"
    linear = "linear"
    sqrt = "sqrt"


class ScheduleName(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


@dataclass(kw_only=True, slots=True)
class RunSection:
    name: str = "run"
    """Name of the run; part of the default run directory."""
    dir: str | None = None
    """Folder for all files of the run. Null: runs/<run.name>-<8 hex digits of the run's identity>."""
    fork: str | None = None
    """A checkpoint or run directory of another run: start a new run from its state and record the parent. The
    fork continues at the step and the sample at which its parent stopped, also with another global batch.
    """

    def __post_init__(self) -> None:
        ok = bool(self.name) and all(c.isalnum() or c in "._-" for c in self.name)
        check(
            ok,
            "run.name",
            self.name,
            "a run's name has only letters, digits, '.', '_' and '-'",
            "write run.name=my-run",
        )


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    family: str | None = None
    """The architecture, as in the options of this group (model=llama). Null with model.target or
    model.pretrained.
    """
    target: str | None = None
    """Dotted path to a torch.nn.Module whose forward(input_ids, labels) returns a mean loss:
    my.package.Model.
    """
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of model.target, each given as +model.arguments.NAME=VALUE."""
    pretrained: str | None = None
    """A folder or hub id in Hugging Face's format with the configuration and initial weights. Use
    model=pretrained.
    """
    hidden_size: int | None = None
    """Width of the residual stream."""
    intermediate_size: int | None = None
    """Width of the feed-forward layer, or of one expert. Null: 4 x hidden_size in gpt2."""
    num_hidden_layers: int | None = None
    """Number of transformer blocks."""
    num_attention_heads: int | None = None
    """Query heads; divides hidden_size unless head_dim is given."""
    num_key_value_heads: int | None = None
    """Key and value heads (grouped-query attention); divides num_attention_heads. Null: as many as query
    heads.
    """
    head_dim: int | None = None
    """Width of one head. Null: hidden_size / num_attention_heads."""
    vocab_size: int | None = None
    """Rows of the embedding; at least the tokenizer's size."""
    max_position_embeddings: int | None = None
    """Maximum sequence length; the size of the position embedding in gpt2."""
    tie_word_embeddings: bool | None = None
    """The output layer shares the embedding's weights."""
    num_local_experts: int | None = None
    """Experts per layer, in families with experts (mixtral)."""
    num_experts_per_tok: int | None = None
    """Experts per token, in families with experts."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of families with experts: that of Switch Transformers, averaged over
    the layers, in every engine. It is computed per micro-batch, so losses depend on train.micro_batch if it
    is not 0.
    """
    rope_theta: float | None = None
    """Base of the rotary position embedding."""
    norm_eps: float | None = None
    """Epsilon of the norms."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""
    dropout: float = 0.0
    """Dropout probability in [0, 1) of embeddings, attention and residuals, as far as the family has them."""

    def __post_init__(self) -> None:
        at_least(
            "model",
            1,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            head_dim=self.head_dim,
        )
        at_least(
            "model", 1, num_hidden_layers=self.num_hidden_layers, num_attention_heads=self.num_attention_heads
        )
        at_least("model", 1, num_key_value_heads=self.num_key_value_heads, vocab_size=self.vocab_size)
        at_least("model", 1, max_position_embeddings=self.max_position_embeddings)
        at_least(
            "model", 1, num_local_experts=self.num_local_experts, num_experts_per_tok=self.num_experts_per_tok
        )
        # Far above every published model. The cost of planning grows with these sizes, which may come from
        # untrusted files.
        at_most(
            "model",
            4096,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
        )
        at_most(
            "model",
            4096,
            num_key_value_heads=self.num_key_value_heads,
            num_local_experts=self.num_local_experts,
        )
        at_most("model", 2**20, hidden_size=self.hidden_size, head_dim=self.head_dim)
        at_most("model", 2**24, intermediate_size=self.intermediate_size)
        at_most(
            "model", 2**31, vocab_size=self.vocab_size, max_position_embeddings=self.max_position_embeddings
        )
        layers, experts = self.num_hidden_layers or 1, self.num_local_experts or 1
        check(
            layers * experts <= 2**18,
            "model.num_local_experts",
            f"{experts} model.num_hidden_layers={layers}",
            "all layers together have at most 262144 experts",
            "write fewer layers or experts",
        )
        check(
            0 <= self.dropout < 1,
            "model.dropout",
            self.dropout,
            "a probability is in [0, 1)",
            "write model.dropout=0.1",
        )


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    name: EngineName = EngineName.deepspeed
    """local (plain torch, one process), deepspeed or megatron."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's own keys, given as +engine.deepspeed.a.b=v. Keys that the plan derives are refused."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Megatron-core's own settings, given as +engine.megatron.x=v. Settings that the plan derives are
    refused.
    """


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    tensor: int = 1
    """Tensor-parallel ranks, which share each matrix, within a node."""
    pipeline: int = 1
    """Pipeline stages, among which the layers are divided."""
    context: int = 1
    """Context-parallel ranks, which share each sequence."""
    expert: int = 1
    """Expert-parallel ranks, among which the experts are divided; regroups data ranks."""

    def __post_init__(self) -> None:
        at_least(
            "parallel",
            1,
            tensor=self.tensor,
            pipeline=self.pipeline,
            context=self.context,
            expert=self.expert,
        )


@dataclass(kw_only=True, slots=True)
class ZeroConfig:
    stage: int = 0
    """0 plain data parallel; 1 shards optimizer states, 2 gradients too, 3 parameters too."""

    def __post_init__(self) -> None:
        check(
            self.stage in (0, 1, 2, 3),
            "zero.stage",
            self.stage,
            "ZeRO has stages 0 to 3",
            "write zero=stage0 ... zero=stage3",
        )


@dataclass(kw_only=True, slots=True)
class OffloadConfig:
    optimizer: OffloadDevice = OffloadDevice.none
    """Where optimizer states are stored: none (on the device), cpu or nvme."""
    parameters: OffloadDevice = OffloadDevice.none
    """Where parameters are stored between uses (ZeRO 3 only): none, cpu or nvme."""
    nvme_path: str | None = None
    """A folder on a local NVMe disk, for offload to nvme."""


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    name: Precision = Precision.fp32
    """Precision of weights in forward and backward; master weights and moments are always fp32."""
    initial_scale_power: int = 16
    """fp16: the loss scale starts at 2 to this power."""
    scale_window: int = 1000
    """fp16: the loss scale doubles after this many steps without overflow."""

    def __post_init__(self) -> None:
        at_least("precision", 0, initial_scale_power=self.initial_scale_power)
        at_least("precision", 1, scale_window=self.scale_window)


@dataclass(kw_only=True, slots=True)
class BatchRampConfig:
    start: int | None = None
    """Sequences in the first global batch. Null: no ramp."""
    increment: int | None = None
    """Sequences by which the global batch grows at a time, up to train.global_batch."""
    samples: int | None = None
    """Consumed samples after which the batch has reached train.global_batch."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    steps: int = 100
    """Optimizer steps of the run. A larger number continues a finished run."""
    global_batch: int = 8
    """Sequences of one optimizer step, over all ranks."""
    micro_batch: int | None = None
    """Sequences of one forward pass of a rank. Null: global_batch / data ranks, without gradient
    accumulation.
    """
    sequence_length: int = 128
    """Tokens per sequence."""
    seed: int = 0
    """Seed of initial weights and dropout."""
    activation_checkpointing: bool = False
    """Recompute the activations of each block in the backward pass: less memory, about a third more compute.
    """
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    """What to do if a loss, gradient norm or weight is infinite or NaN: stop (the run fails with exit code
    65) or continue. Every engine skips steps with a non-finite gradient norm, and non-finite weights are
    never saved.
    """
    batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)

    def __post_init__(self) -> None:
        at_least("train", 1, steps=self.steps, global_batch=self.global_batch, micro_batch=self.micro_batch)
        at_least("train", 1, sequence_length=self.sequence_length)
        at_least("train", 0, seed=self.seed)


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    every: int = 0
    """Steps between two evaluations, which also run at the end; 0: never."""
    batches: int = 8
    """Global batches of an evaluation, always the same."""
    sets: list[str] = field(default_factory=lambda: ["validation"])
    """Splits of the data folder to evaluate on."""

    def __post_init__(self) -> None:
        at_least("eval", 0, every=self.every)
        at_least("eval", 1, batches=self.batches)


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    name: OptimizerName = OptimizerName.adamw
    """adamw, sgd or muon (Muon for matrices, AdamW for the other parameters)."""
    kernel: OptimizerKernel = OptimizerKernel.auto
    """auto, torch, cpu (DeepSpeed's vectorised CPU Adam) or fused (one CUDA kernel)."""
    lr: float = 3e-4
    """Peak learning rate, at the batch size lr_reference_batch if lr_scaling is set."""
    weight_decay: float = 0.1
    """Weight decay, never applied to one-dimensional tensors. It is decoupled in AdamW and Muon (weights
    shrink by lr x weight_decay); SGD adds weight_decay x weight to the gradient, before momentum. In every
    engine, after clipping.
    """
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Adam's decay rates of the averages of the gradient and the squared gradient."""
    eps: float = 1e-8
    """Adam's epsilon."""
    momentum: float = 0.0
    """Momentum of sgd and muon."""
    clip: float = 1.0
    """Maximum global gradient norm; 0: no clipping."""
    lr_scaling: LrScaling = LrScaling.none
    """How lr scales with the global batch: none, linear or sqrt of global_batch / lr_reference_batch."""
    lr_reference_batch: int | None = None
    """The global batch for which lr was chosen, for lr_scaling."""

    def __post_init__(self) -> None:
        at_least(
            "optim",
            0,
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            clip=self.clip,
            momentum=self.momentum,
        )
        ok = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(
            ok, "optim.betas", self.betas, "Adam takes two factors in [0, 1)", "write optim.betas=[0.9,0.95]"
        )


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    name: ScheduleName = ScheduleName.cosine
    """constant, linear, cosine, or wsd (warm-up, stable, decay)."""
    warmup: int = 0
    """Steps of linear warm-up from 0."""
    decay: int | None = None
    """Steps of decay: after warm-up for linear and cosine (null: to the end of the run), the last steps for
    wsd.
    """
    min_lr: float = 0.0
    """The learning rate after decay."""

    def __post_init__(self) -> None:
        at_least("schedule", 0, warmup=self.warmup, min_lr=self.min_lr)
        at_least("schedule", 1, decay=self.decay)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every: str = "500"
    """Interval in steps (500) or wall time (30min, 2h); 'never' saves only at the end."""
    keep_last: int = 2
    """Number of newest checkpoints to keep."""
    keep_every: int = 0
    """Also keep every checkpoint at a multiple of this many steps; 0: none."""
    background: bool = False
    """Copy the state to host memory and write it while training continues."""
    at_end: bool = True
    """Save after the last step."""
    export: bool = False
    """After the last step, also export the weights in Hugging Face's format to <run.dir>/export."""

    def __post_init__(self) -> None:
        at_least("checkpoint", 1, keep_last=self.keep_last)
        at_least("checkpoint", 0, keep_every=self.keep_every)
        parse_cadence(self.every)


@dataclass(frozen=True, slots=True)
class Cadence:
    """An interval between checkpoints: at most one is set, and neither means never."""

    steps: int | None = None
    seconds: float | None = None


def parse_cadence(text: str) -> Cadence:
    """Parse ``500`` (steps), ``90s``, ``30min``, ``2h`` (seconds) or ``never``. Raises ConfigError."""
    text = str(text).strip()
    if text == "never":
        return Cadence()
    if text.isdigit() and int(text) > 0:
        return Cadence(steps=int(text))
    for unit, seconds in (("min", 60), ("h", 3600), ("s", 1)):
        number = text.removesuffix(unit)
        if number != text and number.isdigit() and int(number) > 0:
            return Cadence(seconds=int(number) * seconds)
    raise ConfigError(
        Problem(
            "checkpoint.every",
            f"checkpoint.every={text}",
            "a cadence is a number of steps or a time",
            "write checkpoint.every=500, checkpoint.every=30min or checkpoint.every=never",
        )
    )


@dataclass(kw_only=True, slots=True)
class DebugConfig:
    threads: int | None = None
    """CPU threads of a rank for tensor operations. Null: cores / ranks of the machine."""
    deterministic: bool = False
    """Use torch's deterministic kernels."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run. config/identity.py lists the keys that determine samples and losses; the others decide how it
    is executed.
    """

    run: RunSection = field(default_factory=RunSection)
    resume: str = "auto"
    """auto: resume from the newest checkpoint of the run directory, if any, and stop with an error if its
    files disagree on which that is; never: train from the beginning, and refuse if there is a checkpoint to
    resume; or the path of a checkpoint.
    """
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
