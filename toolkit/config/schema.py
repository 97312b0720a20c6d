"""Every key a run can be described with; those of data, cluster and monitor are in files beside. The string
under a field is its documentation; ``--help`` shows it.

Dataclasses have ``slots``, so that an unknown key is an error, and are not frozen, so that OmegaConf can
override them. ``__post_init__`` checks one value at a time; whatever involves two keys is a rule in
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
    """Where a kind of state lives between its uses."""

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


# In this form because a class statement cannot have a member called "continue".
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
    """A name for people; part of the default run directory."""
    dir: str | None = None
    """Where everything of this run goes. Null: runs/<run.name>-<8 hex digits of the run's identity>."""
    fork: str | None = None
    """A checkpoint or run directory of another run: start a new run from its state and record the parent. The
    fork goes on at the step and at the sample at which its parent stopped, whatever its own global batch is.
    """

    def __post_init__(self) -> None:
        ok = bool(self.name) and all(c.isalnum() or c in "._-" for c in self.name)
        check(
            ok,
            "run.name",
            self.name,
            "a run's name is made of letters, digits, '.', '_' and '-'",
            "write run.name=my-run",
        )


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    family: str | None = None
    """The architecture: one of those that files of this group show (model=llama). Null with model.target or
    model.pretrained.
    """
    target: str | None = None
    """A dotted path to any torch.nn.Module whose forward(input_ids, labels) returns a mean loss:
    my.package.Model.
    """
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of model.target, each given as +model.arguments.NAME=VALUE."""
    pretrained: str | None = None
    """A folder or hub id in Hugging Face's format: its configuration and weights are the start. Use
    model=pretrained.
    """
    hidden_size: int | None = None
    """Width of the residual stream."""
    intermediate_size: int | None = None
    """Width of the feed-forward layer (of one expert, where there are experts). Null: 4 x hidden_size in
    gpt2.
    """
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
    """The longest sequence; a table of that size in gpt2, a promise elsewhere."""
    tie_word_embeddings: bool | None = None
    """The output layer shares the embedding's weights."""
    num_local_experts: int | None = None
    """Experts a layer, in a family that has them: mixtral."""
    num_experts_per_tok: int | None = None
    """Experts that each token visits, in a family that has them."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a family with experts: that of Switch Transformers, averaged over
    the layers, on every engine. It is computed a micro-batch at a time, so losses depend on train.micro_batch
    where it is not 0.
    """
    rope_theta: float | None = None
    """Base of the rotary position embedding."""
    norm_eps: float | None = None
    """Epsilon of the norms."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""
    dropout: float = 0.0
    """Probability, in [0, 1), for embeddings, attention and residuals where the family has them."""

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
        # Far above every model that was published. What planning costs grows with these, and the sizes may
        # come from a file of others.
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
            "a probability lies in [0, 1)",
            "write model.dropout=0.1",
        )


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    name: EngineName = EngineName.deepspeed
    """local (plain torch, one process), deepspeed or megatron."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's own keys, each given as +engine.deepspeed.a.b=v; what the plan derives is refused here."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Megatron-core's own settings, each given as +engine.megatron.x=v; what the plan derives is refused
    here.
    """


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    tensor: int = 1
    """Ranks that share each matrix. Stays within a node."""
    pipeline: int = 1
    """Stages that the layers are cut into."""
    context: int = 1
    """Ranks that share each sequence."""
    expert: int = 1
    """Ranks that the experts are spread over; regroups data ranks."""

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
    """Where optimizer states live: none (on the device), cpu or nvme."""
    parameters: OffloadDevice = OffloadDevice.none
    """Where parameters live between uses (ZeRO-3 only): none, cpu or nvme."""
    nvme_path: str | None = None
    """A folder on a local NVMe disk, for the places that say nvme."""


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    name: Precision = Precision.fp32
    """Precision of weights in forward and backward; master weights and moments are fp32 always."""
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
    """The global batch grows by this many sequences at a time, up to train.global_batch."""
    samples: int | None = None
    """Consumed samples over which it grows to train.global_batch."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    steps: int = 100
    """Optimizer steps of the whole run; a longer run continues a shorter one."""
    global_batch: int = 8
    """Sequences that one optimizer step sees, over all ranks."""
    micro_batch: int | None = None
    """Sequences that one rank passes through the model at once. Null: global_batch / data ranks, without
    accumulation.
    """
    sequence_length: int = 128
    """Tokens of one sequence."""
    seed: int = 0
    """Seed of initial weights and dropout."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass: less memory, about a third more compute."""
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    """If a loss, gradient norm or weight is infinite or NaN: stop (the run fails with exit code 65) or
    continue. Every engine skips a step whose gradient norm is not finite, and weights that are not finite are
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
    """Evaluate after each this many steps, and at the end; 0: never."""
    batches: int = 8
    """Global batches of an evaluation, always the same ones."""
    sets: list[str] = field(default_factory=lambda: ["validation"])
    """Names of the splits of the data folder to evaluate on."""

    def __post_init__(self) -> None:
        at_least("eval", 0, every=self.every)
        at_least("eval", 1, batches=self.batches)


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    name: OptimizerName = OptimizerName.adamw
    """adamw, sgd or muon (matrices by Muon, the rest by AdamW)."""
    kernel: OptimizerKernel = OptimizerKernel.auto
    """auto, torch, cpu (DeepSpeed's vectorised CPU Adam) or fused (one CUDA kernel)."""
    lr: float = 3e-4
    """Peak learning rate, at the batch that lr_scaling refers to."""
    weight_decay: float = 0.1
    """Never applied to one-dimensional tensors. AdamW and Muon shrink weights apart from the gradient
    (decoupled, by lr x weight_decay); SGD adds weight_decay x weight to the gradient, so that it enters the
    momentum. On every engine, after clipping.
    """
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Adam's averaging factors of gradient and squared gradient."""
    eps: float = 1e-8
    """Adam's epsilon."""
    momentum: float = 0.0
    """Momentum of sgd and muon."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    lr_scaling: LrScaling = LrScaling.none
    """How lr grows with the global batch: none, linear or sqrt of global_batch / lr_reference_batch."""
    lr_reference_batch: int | None = None
    """The global batch at which lr holds, for lr_scaling."""

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
    """Steps of decay: after warm-up for linear and cosine (null: to the end of the run), the last ones for
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
    """Cadence, in steps (500) or wall time (30min, 2h); 'never' saves at the end only."""
    keep_last: int = 2
    """How many of the newest checkpoints stay."""
    keep_every: int = 0
    """Besides these, every checkpoint at a multiple of this many steps stays; 0: none."""
    background: bool = False
    """Copy the state to host memory and write while training goes on."""
    at_end: bool = True
    """Save after the last step."""
    export: bool = False
    """After the last step, also write the weights as a Hugging Face folder: <run.dir>/export."""

    def __post_init__(self) -> None:
        at_least("checkpoint", 1, keep_last=self.keep_last)
        at_least("checkpoint", 0, keep_every=self.keep_every)
        parse_cadence(self.every)


@dataclass(frozen=True, slots=True)
class Cadence:
    """Exactly one is set, or neither: never."""

    steps: int | None = None
    seconds: float | None = None


def parse_cadence(text: str) -> Cadence:
    """``500`` -> steps; ``90s``, ``30min``, ``2h`` -> seconds; ``never``. Raises ConfigError."""
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
    """CPU threads a rank for tensor arithmetic. Null: cores / ranks of the machine."""
    deterministic: bool = False
    """Ask torch for deterministic kernels."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run. Identity (samples and losses): model, data, optim, schedule, train without train.steps. The
    rest is carriage.
    """

    run: RunSection = field(default_factory=RunSection)
    resume: str = "auto"
    """auto: continue from the newest checkpoint of the run directory, if any, and stop with an error if its
    files disagree on which that is; never: refuse to pass over a checkpoint that could be continued, else
    train from the beginning; or the path of a checkpoint.
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
