"""The layouts that an advice chooses from: engine, axes, ZeRO stage, micro-batch, recomputation and offload.

A layout never changes what a run computes: the global batch, the precision and the optimizer are the user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from toolkit.config.schema import EngineName, OffloadDevice, Precision, RunConfig
from toolkit.families.base import ModelShape
from toolkit.optimizers import get_optimizer
from toolkit.plan.deepspeed import accumulates_in_fp32, merge
from toolkit.plan.types import Device, World

VIRTUAL = "virtual_pipeline_model_parallel_size"
VIRTUAL_KEY = f"engine.megatron.{VIRTUAL}"
# From the fastest to the one that needs least memory.
RECOMPUTATIONS = ("none", "selective", "full")
OFFLOADS = (
    (OffloadDevice.none, OffloadDevice.none),
    (OffloadDevice.cpu, OffloadDevice.none),
    (OffloadDevice.cpu, OffloadDevice.cpu),
)
MOST_PIPELINE = 64  # stages
LEAST_CONTEXT_TOKENS = (
    2048  # of a sequence on a context rank; fewer cannot hide the exchange of keys and values
)
MOST_VIRTUAL = 8  # model chunks of a stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The machines, axes and memory settings with which a run is executed.

    Attributes:
        nodes: machines.
        virtual: model chunks of a pipeline stage, in Megatron-core's interleaved schedule; 1: none.
        zero: ``zero.stage``.
        recomputation: ``train.activation_checkpointing``.
        offload: devices of the optimizer's states and of the parameters.
    """

    nodes: int
    engine: EngineName
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 0
    micro_batch: int = 1
    recomputation: str = "none"
    offload: tuple[OffloadDevice, OffloadDevice] = OFFLOADS[0]

    @property
    def model_ranks(self) -> int:
        """Ranks that share one replica of the model."""
        return self.tensor * self.pipeline * self.context

    def ranks(self, world: World) -> int:
        """Return the ranks on this layout's nodes, which are like those of ``world``."""
        return world.ranks if self.nodes == world.nodes else self.nodes * world.ranks_per_node

    def world(self, world: World) -> World:
        """Return ``world`` with this layout's number of nodes."""
        return world if self.nodes == world.nodes else replace(world, ranks=self.ranks(world))

    def apply(self, config: RunConfig) -> RunConfig:
        """Return ``config`` in this layout.

        Gradients of several micro-batches accumulate in fp32, which DeepSpeed does not do by itself under
        ZeRO 1 and with an offloaded optimizer. Activations are offloaded only if they are recomputed.
        """
        megatron = {key: value for key, value in config.engine.megatron.items() if key != VIRTUAL}
        if self.virtual > 1:
            megatron[VIRTUAL] = self.virtual
        offload = replace(config.offload, optimizer=self.offload[0], parameters=self.offload[1])
        if self.recomputation != "full":
            offload = replace(offload, activations=OffloadDevice.none)
        changed = replace(
            config,
            engine=replace(config.engine, name=self.engine, megatron=megatron),
            parallel=replace(
                config.parallel,
                tensor=self.tensor,
                pipeline=self.pipeline,
                context=self.context,
                expert=self.expert,
            ),
            zero=replace(config.zero, stage=self.zero),
            offload=offload,
            train=replace(
                config.train, micro_batch=self.micro_batch, activation_checkpointing=self.recomputation
            ),
        )
        if config.cluster.nodes is not None:
            changed = replace(changed, cluster=replace(config.cluster, nodes=self.nodes))
        if (
            self.engine is EngineName.deepspeed
            and config.precision.name is Precision.bf16
            and not accumulates_in_fp32(changed)
        ):
            settings = merge({"data_types": {"grad_accum_dtype": "fp32"}}, config.engine.deepspeed)
            changed = replace(changed, engine=replace(changed.engine, deepspeed=settings))
        return changed

    def __str__(self) -> str:
        axes = {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "virtual stages": self.virtual,
            "context": self.context,
            "expert": self.expert,
        }
        parts = [self.engine.value, *(f"{name} {size}" for name, size in axes.items() if size > 1)]
        parts += [f"ZeRO {self.zero}"] if self.zero else []
        parts += [f"micro-batch {self.micro_batch}"]
        if self.recomputation != "none":
            parts.append(f"recomputation {self.recomputation}")
        kinds = ("optimizer", "parameters")
        offloaded = [
            kind for kind, at in zip(kinds, self.offload, strict=True) if at is not OffloadDevice.none
        ]
        parts += [f"offload of {' and '.join(offloaded)}"] if offloaded else []
        return ", ".join(parts)


def layout_of(config: RunConfig, world: World) -> Layout:
    """Return the layout that ``config`` has on ``world``."""
    parallel = config.parallel
    data = max(1, world.ranks // (parallel.tensor * parallel.pipeline * parallel.context))
    return Layout(
        nodes=world.nodes,
        engine=config.engine.name,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual=int(config.engine.megatron.get(VIRTUAL) or 1),
        context=parallel.context,
        expert=parallel.expert,
        zero=config.zero.stage,
        micro_batch=config.train.micro_batch or max(1, config.train.global_batch // data),
        recomputation=config.train.activation_checkpointing,
        offload=(config.offload.optimizer, config.offload.parameters),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """All layouts of a run.

    Attributes:
        config: the user's run, a starting point.
        world: the machines; a layout has at most its nodes.
        shape: of the model; None: a model that only data parallelism divides.
        fixed: keys that keep their values.
        fewer_nodes: whether layouts on fewer nodes are included.
    """

    config: RunConfig
    world: World
    shape: ModelShape | None
    fixed: frozenset[str] = frozenset()
    fewer_nodes: bool = False

    def layouts(self) -> Iterator[Layout]:
        """Yield the layouts that can be divided evenly. The rules of the plan refuse some of them."""
        for nodes in self._nodes():
            ranks = nodes * self.world.ranks_per_node if self.fewer_nodes else self.world.ranks
            for engine in self._engines(ranks):
                for axes in self._axes(engine, ranks):
                    yield from self._executions(engine, nodes, ranks, axes)

    def _nodes(self) -> list[int]:
        most = self.world.nodes
        if not self.fewer_nodes:
            return [most]
        return sorted({most, *(2**power for power in range(most.bit_length()) if 2**power < most)})

    def _engines(self, ranks: int) -> list[EngineName]:
        if "engine.name" in self.fixed:
            return [self.config.engine.name]
        for engine in (EngineName.deepspeed, EngineName.megatron):
            if any(key.startswith(f"engine.{engine.value}") for key in self.fixed):
                return [engine]
        engines = [EngineName.deepspeed]
        if self.shape is not None and get_optimizer(self.config.optim.name).not_on_megatron is None:
            engines.append(EngineName.megatron)
        return [EngineName.local, *engines] if ranks == 1 else engines

    def _axes(self, engine: EngineName, ranks: int) -> Iterator[Mapping[str, int]]:
        """Yield sizes of tensor, context, pipeline, virtual and expert whose product divides the ranks."""
        shape, train = self.shape, self.config.train
        several = shape is not None and engine is not EngineName.local
        layers = shape.num_hidden_layers if shape is not None else 1
        heads = shape.num_attention_heads if shape is not None else 1
        experts = shape.num_local_experts if shape is not None and shape.num_local_experts else 1
        per_node = min(ranks, self.world.ranks_per_node)
        megatron = engine is EngineName.megatron
        tensors = [size for size in divisors(per_node) if heads % size == 0] if several else [1]
        contexts = divisors(gcd(ranks, train.sequence_length), train.sequence_length // LEAST_CONTEXT_TOKENS)
        for tensor in self._choices("parallel.tensor", tensors):
            for context in self._choices("parallel.context", contexts if several else [1]):
                if ranks % (tensor * context):
                    continue
                stages = divisors(ranks // (tensor * context), MOST_PIPELINE)
                stages = [size for size in stages if size <= layers and (not megatron or layers % size == 0)]
                for pipeline in self._choices("parallel.pipeline", stages if several else [1]):
                    if ranks % (tensor * context * pipeline):
                        continue
                    data = ranks // (tensor * context * pipeline)
                    shared = gcd(experts, data * context)
                    for expert in self._choices("parallel.expert", divisors(shared) if several else [1]):
                        used = sum(size > 1 for size in (tensor, context, pipeline, expert))
                        if not megatron and used > 1:
                            continue  # DeepSpeed combines one axis with data parallelism
                        for virtual in self._virtual(megatron, layers, pipeline):
                            yield {
                                "tensor": tensor,
                                "context": context,
                                "pipeline": pipeline,
                                "expert": expert,
                                "virtual": virtual,
                            }

    def _virtual(self, megatron: bool, layers: int, pipeline: int) -> list[int]:
        if not megatron or pipeline == 1 or layers % pipeline:
            return [1]
        return self._choices(VIRTUAL_KEY, divisors(layers // pipeline, MOST_VIRTUAL))

    def _executions(
        self, engine: EngineName, nodes: int, ranks: int, axes: Mapping[str, int]
    ) -> Iterator[Layout]:
        data = ranks // (axes["tensor"] * axes["context"] * axes["pipeline"])
        batch = self.config.train.global_batch
        if batch % data:
            return
        for micro_batch in self._micro_batches(batch // data):
            for zero in self._choices("zero.stage", self._stages(engine, axes)):
                for offload in self._offloads(engine, zero, axes):
                    for recomputation in self._recomputations():
                        yield Layout(
                            nodes=nodes,
                            engine=engine,
                            zero=zero,
                            micro_batch=micro_batch,
                            recomputation=recomputation,
                            offload=offload,
                            **axes,
                        )

    def _micro_batches(self, each: int) -> list[int]:
        """Divisors of a rank's samples of a step: powers of two, and the user's own value."""
        own = self.config.train.micro_batch
        if "train.micro_batch" in self.fixed:
            own = own or each
            return [own] if each % own == 0 else []
        sizes = {2**power for power in range(each.bit_length()) if each % 2**power == 0}
        return sorted(sizes | ({own} if own and each % own == 0 else set()))

    def _stages(self, engine: EngineName, axes: Mapping[str, int]) -> list[int]:
        if engine is EngineName.local:
            return [0]
        if engine is EngineName.megatron:
            return [0, 1]
        least = 0 if self.config.precision.name is Precision.fp32 else 1
        if axes["pipeline"] > 1:
            return list(range(least, 2))
        return [1, 2] if axes["expert"] > 1 else list(range(least, 4))

    def _offloads(
        self, engine: EngineName, zero: int, axes: Mapping[str, int]
    ) -> list[tuple[OffloadDevice, OffloadDevice]]:
        offload = self.config.offload
        own = (offload.optimizer, offload.parameters)
        if "offload.optimizer" in self.fixed or "offload.parameters" in self.fixed:
            return [own]
        on_gpus = self.world.device is Device.CUDA
        if engine is not EngineName.deepspeed or not on_gpus or not zero or axes["pipeline"] > 1:
            return [OFFLOADS[0]]
        options = list(OFFLOADS if zero == 3 else OFFLOADS[:2])
        return options if own in options or OffloadDevice.nvme not in own else [*options, own]

    def _recomputations(self) -> list[str]:
        own = self.config.train.activation_checkpointing
        # A module of the user's own decides itself what to recompute.
        options = list(RECOMPUTATIONS[:1] if self.config.model.target is not None else RECOMPUTATIONS)
        if own not in options and self.config.model.target is None:  # every N-th block
            options.insert(2, own)
        return self._choices("train.activation_checkpointing", options)

    def _choices(self, key: str, options: list[Any]) -> list[Any]:
        """Return ``options``, or the user's value of ``key`` if it is fixed."""
        if key not in self.fixed:
            return options
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part, 1) if isinstance(value, Mapping) else getattr(value, part)
        return [value]


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of ``number`` up to ``most``, in rising order; at least 1."""
    largest = number if most is None else max(1, min(number, most))
    return [size for size in range(1, largest + 1) if number % size == 0]
