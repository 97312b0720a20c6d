"""The schema of a run.

The larger sections are in their own modules. The string below a field is its help text.

Dataclasses have ``slots``, so that an unknown key is an error, and are not frozen, so that OmegaConf can
override them. ``__post_init__`` checks single values. Checks of several keys are rules in
``toolkit/plan/rules.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from toolkit.config.budget import BudgetConfig
from toolkit.config.checkpoint import CheckpointConfig, MetricMode
from toolkit.config.checks import at_least, check
from toolkit.config.cluster import ClusterConfig
from toolkit.config.data import DataConfig
from toolkit.config.kernels import CompileConfig, LossKernel
from toolkit.config.model import ModelConfig
from toolkit.config.monitor import MonitorConfig
from toolkit.config.numbers import parse_count
from toolkit.config.optim import OptimConfig, ScheduleConfig
from toolkit.config.recomputation import Recomputation, normalize, parse_recomputation


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


class OnNonfinite(Enum):
    """What follows a step whose loss, gradient norm or weights are infinite or NaN."""

    stop = "stop"
    skip = "skip"
    rollback = "rollback"


class OnSpike(Enum):
    """What follows a step whose loss is far above those before it."""

    ignore = "ignore"
    rollback = "rollback"


@dataclass(kw_only=True, slots=True)
class RunSection:
    name: str = "run"
    """Name of the run; part of the default run directory."""
    dir: str | None = None
    """Folder for all files of the run. Null: runs/<run.name>-<8 hex digits of the run's identity>."""
    fork: str | None = None
    """A checkpoint, run directory or URL (s3://...) of another run: start a new run from its state and record
    the parent. The fork continues at the step and the sample at which its parent stopped, also with another
    global batch.
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
class TaskConfig:
    target: str | None = None
    """Dotted path to a class derived from toolkit.Task, which collates samples and computes the loss:
    my.package.Regression. Null: the task of the model and the data.
    """
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of task.target, each given as +task.arguments.NAME=VALUE."""


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    name: EngineName = EngineName.deepspeed
    """local (plain torch, one process), deepspeed or megatron."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's own keys, given as +engine.deepspeed.a.b=v, or all keys of a DeepSpeed JSON as
    +engine.deepspeed=FILE.json. Keys that the plan derives are refused; those of a file may agree with the
    run.
    """
    deepspeed_file: str | None = None
    """The file that +engine.deepspeed=FILE.json named, as a record; its keys are in engine.deepspeed."""
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
    hpz_partition_size: int = 1
    """ZeRO++ hpZ: groups of this many ranks, usually a node, keep a second copy of the weights, from which
    backward gathers; 1: none."""
    quantized_weights: bool = False
    """ZeRO++ qwZ: send weights as 8-bit integers when they are gathered (ZeRO 3 on GPUs, in 16 bits)."""
    quantized_gradients: bool = False
    """ZeRO++ qgZ: send gradients as 4-bit integers when they are reduced (ZeRO 3 on several nodes of GPUs, in
    fp16)."""

    def __post_init__(self) -> None:
        check(
            self.stage in (0, 1, 2, 3),
            "zero.stage",
            self.stage,
            "ZeRO has stages 0 to 3",
            "write zero=stage0 ... zero=stage3",
        )
        check(
            self.hpz_partition_size >= 1,
            "zero.hpz_partition_size",
            self.hpz_partition_size,
            "it is a number of ranks",
            "write zero.hpz_partition_size=8, the ranks of a node",
        )


@dataclass(kw_only=True, slots=True)
class OffloadConfig:
    optimizer: OffloadDevice = OffloadDevice.none
    """Where optimizer states are stored: none (on the device), cpu or nvme."""
    parameters: OffloadDevice = OffloadDevice.none
    """Where parameters are stored between uses (ZeRO 3 only): none, cpu or nvme."""
    activations: OffloadDevice = OffloadDevice.none
    """Where the inputs of recomputed blocks are stored until the backward pass: none (on the device) or cpu.
    Needs train.activation_checkpointing=full or N.
    """
    nvme_path: str | None = None
    """A folder on a local NVMe disk, for offload to nvme."""


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    name: Precision = Precision.fp32
    """Precision of weights in forward and backward; master weights and moments are always fp32."""
    fp8: bool = False
    """Multiply the matrices of decoder layers in fp8; weights and everything else are bf16. precision=fp8
    sets it.
    """
    initial_scale_power: int = 16
    """fp16: the loss scale starts at 2 to this power."""
    scale_window: int = 1000
    """fp16: the loss scale doubles after this many steps without overflow."""

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of weights and activations."""
        return 4 if self.name is Precision.fp32 else 2

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
class RollbackConfig:
    window: int = 10
    """Steps whose samples a rollback skips: the bad step and those before it, as far back as the
    checkpoint.
    """
    limit: int = 3
    """Rollbacks to one checkpoint. When the next one is due, the run fails with exit code 65."""

    def __post_init__(self) -> None:
        at_least("train.rollback", 1, window=self.window, limit=self.limit)


@dataclass(kw_only=True, slots=True)
class EarlyStoppingConfig:
    metric: str | None = None
    """End the run when this metric of an evaluation, SET/NAME as validation/loss, no longer improves. Null:
    train all steps.
    """
    mode: MetricMode = MetricMode.min
    """min: smaller values are better; max: larger ones."""
    patience: int = 5
    """Evaluations in a row without improvement after which the run ends."""
    min_delta: float = 0.0
    """Smallest change that counts as an improvement."""

    def __post_init__(self) -> None:
        at_least("train.early_stopping", 1, patience=self.patience)
        at_least("train.early_stopping", 0, min_delta=self.min_delta)


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    steps: int = 100
    """Optimizer steps of the run: 10000, 1e4 or 10k. A larger number continues a finished run."""
    tokens: str | None = None
    """Length of the run in tokens, 500M or 10B, instead of train.steps: a whole number of global batches."""
    epochs: float | None = None
    """Length of the run in passes over the training data, instead of train.steps: the smallest number of
    steps that reads so many. Needs data whose size is known: stdlib, prepared or arrays.
    """
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
    activation_checkpointing: str = "none"
    """What the backward pass recomputes instead of storing it: none; selective (cheap operators; matrix
    products and attention are stored); full (each block from its input: least memory, about a third more
    compute); or a
    number N: every N-th block whole.
    """
    loss_kernel: LossKernel = LossKernel.auto
    """How the cross-entropy of the next token is computed. plain: from the logits of the whole micro-batch,
    in fp32. fused: from hidden states, with the logits and gradients of one chunk of tokens at a time. auto:
    fused on GPUs for models of families in bf16 and fp32, otherwise plain.
    """
    loss_chunk: int | None = None
    """Tokens of a chunk of the fused loss; fewer need less memory and more time. Null: as many as have 1 GiB
    of fp32 logits.
    """
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    """What to do if a loss, gradient norm or weight is infinite or NaN: stop (the run fails with exit code
    65), skip (train on; every engine leaves out the update of such a step) or rollback (continue from the
    newest sound checkpoint without the samples of train.rollback.window). Non-finite weights are never saved.
    """
    on_spike: OnSpike = OnSpike.ignore
    """What to do if the loss is more than ten times its noise above the ten steps before it: ignore, or
    rollback (as train.on_nonfinite=rollback).
    """
    rollback: RollbackConfig = field(default_factory=RollbackConfig)
    batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)

    def __post_init__(self) -> None:
        at_least("train", 1, steps=self.steps, global_batch=self.global_batch, micro_batch=self.micro_batch)
        at_least("train", 1, sequence_length=self.sequence_length, loss_chunk=self.loss_chunk)
        check(
            self.tokens is None or (parse_count(self.tokens) or 0) > 0,
            "train.tokens",
            self.tokens,
            "a number of tokens is whole and positive",
            "write train.tokens=500M, train.tokens=10B or train.tokens=1e9",
        )
        check(
            self.epochs is None or 0 < self.epochs < float("inf"),
            "train.epochs",
            self.epochs,
            "a number of epochs is positive",
            "write train.epochs=1",
        )
        check(
            self.tokens is None or self.epochs is None,
            "train.epochs",
            f"{self.epochs}, train.tokens={self.tokens}",
            "one of train.steps, train.tokens and train.epochs decides the length of a run",
            "write train.tokens=null, or train.epochs=null",
        )
        at_least("train", 0, seed=self.seed)
        parse_recomputation(self.activation_checkpointing)
        self.activation_checkpointing = normalize(self.activation_checkpointing)

    @property
    def rollback_keys(self) -> dict[str, str]:
        """The keys that ask for rollbacks, each with the words that do without them."""
        asked = {
            "train.on_nonfinite=stop": self.on_nonfinite is OnNonfinite.rollback,
            "train.on_spike=ignore": self.on_spike is OnSpike.rollback,
        }
        return {word.partition("=")[0]: word for word, asks in asked.items() if asks}

    @property
    def recomputation(self) -> Recomputation:
        return parse_recomputation(self.activation_checkpointing)


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
    resume; or the path or URL (s3://...) of a checkpoint.
    """
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    hooks: dict[str, Any] = field(default_factory=dict)
    """NAME: {target: my.package.Hook, arguments: {...}, ranks: all}, given as +hooks.NAME.target=...: hooks
    derived from toolkit.Hook, called at the events of training.
    """
    metrics: dict[str, Any] = field(default_factory=dict)
    """NAME: {target: my.package.Metric, arguments: {...}}, given as +metrics.NAME.target=...: metrics of
    every evaluation, reduced exactly over ranks.
    """
