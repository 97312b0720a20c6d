"""The description of an optimizer: its states, its parameter groups, its engines and its class.

Each optimizer is one object of a class derived from :class:`OptimizerSpec`, in a file of its own. Plans read
it, so ``torch`` is imported only inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from toolkit.config.optim import OptimConfig, OptimizerKernel
from toolkit.config.schema import EngineName, RunConfig

if TYPE_CHECKING:
    import torch

FP32 = 4  # bytes
# States of the shape of their parameter, under torch's names. They have the same meaning in all engines.
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
MOMENTUM = "momentum_buffer"
STEP = "step"  # the step count


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The states that an optimizer has for each parameter of a group after its first step.

    Attributes:
        tensors: names of those with the shape of the parameter. Checkpoints store them as boxes, so any
            layout resumes from any other.
        numbers: names of single numbers that are equal for all parameters, such as the step count. Any layout
            resumes from them.
        group_numbers: names of numbers in parameter groups that steps change, equal for all groups.
        whole: names of tensors of another shape, such as factored moments. They exist only if a rank has the
            whole parameter: under the local engine and ZeRO 0.
        examples: for the user's own class, a value of each of ``numbers``, whose type a restored value gets,
            and of each state that never changes.
    """

    tensors: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    group_numbers: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    examples: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RuleViolation:
    """A rule that a run with this optimizer breaks.

    Attributes:
        keys: space-separated configuration keys; the first one is at fault.
        warning: the run may start.
    """

    keys: str
    rule: str
    remedy: str
    warning: bool = False


def uses_weight_decay(dims: int) -> bool:
    """Return whether weight decay applies to a parameter of ``dims`` dimensions: to matrices, not to
    vectors.
    """
    return dims > 1


class _HasDims(Protocol):
    def dim(self) -> int: ...


P = TypeVar("P", bound=_HasDims)


def parameter_groups(parameters: Iterable[P], weight_decay: float) -> list[dict[str, Any]]:
    """Return a group with weight decay, then one without; empty groups are left out."""
    decaying: list[P] = []
    rest: list[P] = []
    for parameter in parameters:
        (decaying if uses_weight_decay(parameter.dim()) else rest).append(parameter)
    groups = ({"params": decaying, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


class OptimizerSpec:
    """The base class: an elementwise optimizer without states that DeepSpeed gets as a torch optimizer.

    Attributes:
        name: ``optim.name``, and the name of its file in conf/optim.
        settings: which of ``betas``, ``eps`` and ``momentum`` of ``optim`` it uses. All optimizers use
            ``lr``, ``weight_decay`` and ``clip``.
        arguments: the names that ``optim.arguments`` may have, with their defaults.
        kernels: implementations that ``optim.kernel`` may choose.
        needs_whole_parameters: why each rank must have them, which only the local engine and ZeRO 0 provide.
            None: the update of an element depends on the history of this element alone, so flat partitions
            (ZeRO 1 to 3) and cut matrices (tensor parallelism) compute the same update.
        whole_parameter_kinds: kinds of parameters (see :meth:`parameter_kind`) of which DeepSpeed's ZeRO 1
            and 2 store the states of whole parameters, in the gradients' dtype.
        tested_by_deepspeed: ZeRO accepts it without ``zero_allow_untested_optimizer``.
        package: the pip package that it needs, and the module to import.
        not_on_megatron: why Megatron-core cannot train with it, and the remedy; None if it can.
    """

    name: ClassVar[str]
    settings: ClassVar[frozenset[str]] = frozenset()
    arguments: ClassVar[Mapping[str, Any]] = {}
    kernels: ClassVar[frozenset[OptimizerKernel]] = frozenset({OptimizerKernel.torch})
    needs_whole_parameters: ClassVar[str | None] = None
    whole_parameter_kinds: ClassVar[frozenset[str]] = frozenset()
    tested_by_deepspeed: ClassVar[bool] = False
    package: ClassVar[tuple[str, str] | None] = None
    not_on_megatron: ClassVar[tuple[str, str] | None] = (
        "Megatron-core builds its own optimizers, which are AdamW and SGD",
        "write engine=deepspeed, or optim=adamw",
    )

    # -- parameter groups and states

    def parameter_kind(self, name: str, dims: int) -> str:
        """Return the kind of the group that the parameter of this canonical name belongs to.

        Optimizers that treat some parameters differently have several kinds. Weight decay divides each kind
        into two groups.
        """
        return ""

    def group_kind(self, group: Mapping[str, Any]) -> str:
        """Return the kind of a parameter group (or of the defaults) of the engine's optimizer."""
        return ""

    def states(self, optim: OptimConfig, kind: str = "") -> StateLayout:
        return StateLayout()

    def element_bytes(self, optim: OptimConfig, kind: str = "") -> int:
        """Return the bytes of the states per element of an elementwise optimizer."""
        return FP32 * len(self.states(optim, kind).tensors)

    def parameter_bytes(self, optim: OptimConfig, name: str, shape: Sequence[int]) -> int:
        """Return the bytes of the states of one whole parameter, without numbers."""
        return math.prod(shape) * self.element_bytes(optim, self.parameter_kind(name, len(shape)))

    # -- engines

    def find_violations(self, config: RunConfig) -> Iterator[RuleViolation]:
        """Yield the rules that ``config`` breaks, beyond those that follow from the attributes."""
        yield from ()

    def deepspeed(self, optim: OptimConfig, kernel: OptimizerKernel) -> dict[str, Any] | None:
        """Return DeepSpeed's key ``optimizer``; None: it gets what :meth:`create` returns."""
        return None

    def deepspeed_zero(self, stage: int) -> dict[str, Any]:
        """Return what DeepSpeed's key ``zero_optimization`` must have for this optimizer."""
        return {}

    def megatron(self, optim: OptimConfig) -> dict[str, Any]:
        """Return the fields of Megatron-core's OptimizerConfig that choose and set this optimizer."""
        raise NotImplementedError(f"{self.name} is refused on Megatron-core")

    # -- torch

    def create(self, groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
        """Build the torch optimizer over ``groups``, which have ``params`` and ``weight_decay``."""
        raise NotImplementedError

    def build(
        self, parameters: Mapping[str, torch.Tensor], optim: OptimConfig
    ) -> list[torch.optim.Optimizer]:
        """Build the optimizers of the local engine.

        Args:
            parameters: the fp32 tensors to update, by canonical name.
        """
        return [self.create(parameter_groups(parameters.values(), optim.weight_decay), optim)]

    def transform_gradients(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Replace gradients by updates before the gradient norm is computed; return whether this was done."""
        return False

    def evaluating(self, optimizers: Sequence[torch.optim.Optimizer]) -> AbstractContextManager[object]:
        """Return a context in which the parameters are those to evaluate with.

        Optimizers with the methods ``eval`` and ``train`` (https://github.com/facebookresearch/schedule_free)
        replace the parameters for evaluation.
        """
        return _evaluating([optimizer for optimizer in optimizers if has_evaluation_mode(optimizer)])

    def merged_arguments(self, optim: OptimConfig) -> dict[str, Any]:
        """Return ``arguments`` with the values of ``optim.arguments``."""
        return {**self.arguments, **optim.arguments}


def has_evaluation_mode(optimizer: object) -> bool:
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


@contextmanager
def _evaluating(optimizers: Sequence[Any]) -> Iterator[None]:
    """Put copies back afterwards, because ``train`` after ``eval`` would change parameters by rounding."""
    tensors = [
        tensor for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"]
    ]
    copies = [tensor.detach().clone() for tensor in tensors]
    for optimizer in optimizers:
        optimizer.eval()
    try:
        yield
    finally:
        for optimizer in optimizers:
            optimizer.train()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.detach().copy_(copy)


def whole_parameters(config: RunConfig) -> bool:
    """Return whether each rank has whole parameters and their whole states."""
    parallel = config.parallel
    if config.engine.name is EngineName.local:
        return True
    return config.engine.name is EngineName.deepspeed and (
        config.zero.stage == 0 and parallel.tensor == parallel.expert == parallel.pipeline == 1
    )
