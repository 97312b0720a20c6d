"""Take a few steps with an optimizer of the user's own on small tensors, to learn how it behaves.

The steps show its states, whether a run resumes exactly from them, and whether flat partitions compute the
same update. ZeRO 1 to 3 flatten a parameter group, give each rank a range of it, and call ``step`` once for
each group (ZeRO 1, 2) or sub-group (ZeRO 3). The trial does the same with two ranges and compares. This takes
milliseconds and decides for any class which layouts are exact.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from toolkit.config.optim import OptimConfig
from toolkit.optimizers.base import StateLayout, has_evaluation_mode, parameter_groups
from toolkit.optimizers.torch_state import create_state, read_numbers, restore_number
from toolkit.user_code import UserObject, describe_source, load_target, user_code

# One parameter has more than 4096 elements, from which on libraries quantize states.
SHAPES = ((4, 6), (96, 64), (7,), (2,))
STEPS = 4
RESUME_AT = 2
TOLERANCE = 1e-6  # of a flat partition's weights, relative to the largest update

RULE = "optim.target is a class derived from torch.optim.Optimizer"


@dataclass(frozen=True, slots=True)
class OptimizerBehaviour:
    """Properties of a custom optimizer that its steps have shown.

    Attributes:
        not_flat: why ZeRO 1 and 2, and tensor parallelism, would compute another update; None if they are
            exact.
        not_stage3: why ZeRO 3 would.
    """

    states: StateLayout
    not_flat: str | None
    not_stage3: str | None


def create_custom(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """Call ``optim.target`` with parameter groups, ``lr=optim.lr`` and ``optim.arguments``.

    Raises:
        ConfigError: it does not accept them, or returns something else than an optimizer. Errors that its
            code raises pass, with a note that names the line.
    """
    given = user_object(optim)
    factory = load_target(given)
    if not callable(factory):
        raise given.problem(f"it is a {type(factory).__name__}", RULE, "name a class")
    try:
        inspect.signature(factory).bind(groups, lr=optim.lr, **optim.arguments)
    except TypeError as error:
        raise given.problem(
            f"it is called with (groups, lr={optim.lr:g}"
            + "".join(f", {name}={value!r}" for name, value in optim.arguments.items())
            + f"): {error} ({describe_source(factory)})",
            "the constructor accepts parameter groups, lr and optim.arguments",
            "write +optim.arguments.NAME=VALUE for each further required argument, and no unknown ones",
        ) from error
    if isinstance(factory, type) and (required := _required_arguments(getattr(factory, "step", len))):
        raise given.problem(
            f"step requires {', '.join(required)} ({describe_source(factory.step)})",  # type: ignore[attr-defined]
            "step is called without arguments: the gradients of the global batch are in parameter.grad",
            "choose an optimizer whose step has no required arguments",
        )
    if not optim.weight_decay:  # an optimizer without weight decay has no such key
        groups = [{"params": group["params"]} for group in groups]
    with user_code("optim.target", factory):
        created = factory(groups, lr=optim.lr, **optim.arguments)
    if not isinstance(created, torch.optim.Optimizer):
        raise given.problem(
            f"it returns a {type(created).__name__}", RULE, "derive the class from torch.optim.Optimizer"
        )
    for group in created.param_groups:
        if not optim.weight_decay and "weight_decay" in created.defaults:
            group["weight_decay"] = 0.0  # the class may have another default
    if optim.weight_decay and "weight_decay" not in created.defaults:
        raise given.problem(
            f"it has no weight_decay, and optim.weight_decay={optim.weight_decay:g}",
            "an optimizer that decays weights has weight_decay among its defaults",
            "write optim.weight_decay=0",
        )
    if any("lr" not in group for group in created.param_groups):
        raise given.problem(
            "its parameter groups have no lr",
            "the training loop sets the learning rate of each step as lr of every group",
            'pass defaults with the key "lr" to torch.optim.Optimizer.__init__',
        )
    if has_evaluation_mode(created):
        created.train()  # type: ignore[attr-defined]
    step = created.step

    def named_step(*arguments: Any, **settings: Any) -> Any:
        with user_code("optim.target", factory):
            return step(*arguments, **settings)

    created.step = named_step  # type: ignore[method-assign]  # every engine calls it
    return created


def user_object(optim: OptimConfig) -> UserObject:
    assert optim.target is not None, "a rule requires optim.target"
    return UserObject("optim", optim.target, optim.arguments)


def run_trial_steps(optim: OptimConfig) -> OptimizerBehaviour:
    """Return the behaviour of the class, which is tried once per process.

    Raises:
        ConfigError: it cannot train, or a run could not resume from its states.
    """
    settings = json.dumps([optim.lr, optim.weight_decay, optim.arguments], sort_keys=True, default=str)
    assert optim.target is not None
    return _run(_Key(optim.target, settings, optim))


@dataclass(frozen=True)
class _Key:
    """The settings that decide how an optimizer behaves; ``optim`` is not compared."""

    target: str
    settings: str
    optim: OptimConfig = field(compare=False)


@cache
def _run(key: _Key) -> OptimizerBehaviour:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rngs = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=rngs):
        return _Trial(key.optim, device).run()


class _Trial:
    def __init__(self, optim: OptimConfig, device: str) -> None:
        self.optim, self.device, self.given = optim, device, user_object(optim)
        generator = torch.Generator().manual_seed(0)
        self.start = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
        self.gradients = [
            [torch.randn(shape, generator=generator).to(device) for shape in SHAPES] for _ in range(STEPS)
        ]

    def run(self) -> OptimizerBehaviour:
        parameters, optimizer = self.create()
        before = [_numbers_of(group) for group in optimizer.param_groups]
        saved: list[dict[str, Any]] = []
        middle: list[torch.Tensor] = []
        for step in range(STEPS):
            if step == RESUME_AT:
                saved = [_copy(optimizer.state.get(parameter, {})) for parameter in parameters]
                saved_groups = [_numbers_of(group) for group in optimizer.param_groups]
                middle = [parameter.detach().clone() for parameter in parameters]
            self.step(optimizer, parameters, step)
        end = [parameter.detach().clone() for parameter in parameters]
        if not all(bool(tensor.isfinite().all()) for tensor in end):
            raise self.given.problem(
                f"after {STEPS} steps on small tensors with lr={self.optim.lr:g} weights are not finite",
                "an update of finite gradients is finite",
                "correct step, or lower optim.lr",
            )
        if self.optim.lr and all(torch.equal(a, b) for a, b in zip(self.start, end, strict=True)):
            raise self.given.problem(
                f"{STEPS} steps with lr={self.optim.lr:g} change no parameter",
                "step updates the parameters in place",
                "modify each parameter of self.param_groups in place",
            )
        changed = tuple(
            name
            for name in before[0]
            if any(group.get(name) != first[name] for group, first in zip(saved_groups, before, strict=True))
        )
        states = self.classify(parameters, optimizer, changed)
        self.check_resume(states, saved, saved_groups, middle, end)
        if isinstance(optimizer, torch.optim.Adagrad):
            replaced = "DeepSpeed replaces torch.optim.Adagrad by one without parameter groups"
            return OptimizerBehaviour(states, replaced, replaced)
        return OptimizerBehaviour(
            states, self.flat_difference(end, self.flat_steps), self.flat_difference(end, self.stage3_steps)
        )

    def create(
        self, values: Sequence[torch.Tensor] = ()
    ) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        parameters = [torch.nn.Parameter(value.clone()) for value in values or self.start]
        return parameters, create_custom(parameter_groups(parameters, self.optim.weight_decay), self.optim)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        step: int,
        gradients: Sequence[torch.Tensor] = (),
    ) -> None:
        for parameter, gradient in zip(parameters, gradients or self.gradients[step], strict=True):
            parameter.grad = gradient.clone()
        self.call_step(optimizer, step)

    def call_step(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        torch.manual_seed(step)
        for group in optimizer.param_groups:
            group["lr"] = self.optim.lr * (1 + step / 4)
        optimizer.step()

    def classify(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        group_numbers: tuple[str, ...],
    ) -> StateLayout:
        tensors, numbers, whole = dict[str, None](), dict[str, None](), dict[str, None]()
        examples: dict[str, Any] = {}
        of_names: dict[str, list[tuple[torch.Tensor, Any]]] = {}
        for parameter in parameters:
            for name, value in optimizer.state.get(parameter, {}).items():
                of_names.setdefault(name, []).append((parameter, value))
        for name, pairs in of_names.items():
            values = [value for _, value in pairs]
            examples[name] = values[0]
            if all(isinstance(value, torch.Tensor) for value in values):
                single = all(value.numel() == 1 and value.dim() == 0 for value in values)
                if single and len({float(value) for value in values}) == 1:
                    numbers[name] = None
                elif len(pairs) == len(parameters) and all(
                    value.shape == parameter.shape and value.dtype == values[0].dtype
                    for parameter, value in pairs
                ):
                    tensors[name] = None
                else:
                    whole[name] = None
                    del examples[name]
            elif all(isinstance(value, int | float) for value in values) and len(set(values)) == 1:
                numbers[name] = None
            elif any(value is not None and not isinstance(value, str | tuple | bool) for value in values):
                raise self.given.problem(
                    f"its state {name} is a {type(values[0]).__name__}"
                    + (" with several values" if isinstance(values[0], int | float) else ""),
                    "a checkpoint stores tensors, and numbers that are equal for all parameters",
                    "keep it as a tensor of the parameter's shape",
                )
        return StateLayout(
            tensors=tuple(tensors),
            numbers=tuple(numbers),
            group_numbers=group_numbers,
            whole=tuple(whole),
            examples=examples,
        )

    def check_resume(
        self,
        states: StateLayout,
        saved: Sequence[dict[str, Any]],
        saved_groups: Sequence[dict[str, Any]],
        middle: Sequence[torch.Tensor],
        end: Sequence[torch.Tensor],
    ) -> None:
        """Continue in another object from the states, as a resumed run does."""
        numbers = read_numbers([(states, state) for state in saved], saved_groups)
        parameters, optimizer = self.create(middle)
        groups = [group for group in optimizer.param_groups for _ in group["params"]]
        for parameter, group, old in zip(parameters, groups, saved, strict=True):
            created = create_state(states, optimizer, group, parameter, numbers)
            for name in (*states.tensors, *states.whole):
                if name in old:
                    created[name] = old[name].clone()
            optimizer.state[parameter] = created
        for group in optimizer.param_groups:
            for name in states.group_numbers:
                group[name] = restore_number(optimizer, group, middle[0], numbers[name], group[name])
        for step in range(RESUME_AT, STEPS):
            self.step(optimizer, parameters, step)
        if not all(torch.equal(ours, right) for ours, right in zip(parameters, end, strict=True)):
            raise self.given.problem(
                "another object that continues from its states and parameter groups computes other weights",
                "everything that an update depends on is in self.state and self.param_groups",
                "move attributes that step changes there",
            )

    # -- flat partitions

    def flat_difference(
        self, end: Sequence[torch.Tensor], run: Callable[[], list[torch.Tensor]]
    ) -> str | None:
        """Return why the weights after ``run`` differ from ``end``; None if they are equal."""
        try:
            found = run()
        except Exception as error:  # noqa: BLE001 - the message becomes the reason
            return f"step raises {type(error).__name__}: {error}"
        largest = max(float((a - b).abs().max()) for a, b in zip(self.start, end, strict=True))
        worst = max(float((a - b).abs().max()) for a, b in zip(found, end, strict=True))
        if worst <= TOLERANCE * max(largest, 1e-3):
            return None
        return f"the update of a flat range differs from that of the parameter by {worst / largest:.1e}"

    def flat_steps(self) -> list[torch.Tensor]:
        """ZeRO 1 and 2: each of two ranks has one range of each flat group, and steps group by group."""
        found: list[list[torch.Tensor]] = []
        for rank in range(2):
            parameters, optimizer = self.create()
            groups = optimizer.param_groups
            members = [_indices(group["params"], parameters) for group in groups]
            masters = [
                torch.nn.Parameter(_halves([self.start[i] for i in indices])[rank]) for indices in members
            ]
            for group, master in zip(groups, masters, strict=True):
                group["params"] = [master]
            for step in range(STEPS):
                for group, master, indices in zip(groups, masters, members, strict=True):
                    master.grad = _halves([self.gradients[step][i] for i in indices])[rank]
                    optimizer.param_groups = [group]
                    self.call_step(optimizer, step)
                optimizer.param_groups = groups
            found.append([master.detach() for master in masters])
        flat = [torch.cat(parts) for parts in zip(*found, strict=True)]
        return self.unflatten(flat, members)

    def stage3_steps(self) -> list[torch.Tensor]:
        """ZeRO 3: a rank has a range of each parameter; other groups have no parameters during a step."""
        halves: list[list[torch.Tensor]] = []
        for rank in range(2):
            parameters, optimizer = self.create()
            groups = optimizer.param_groups
            members = [_indices(group["params"], parameters) for group in groups]
            for group in groups:
                group["params"] = []
            masters = [torch.nn.Parameter(_halves([value])[rank]) for value in self.start]
            for step in range(STEPS):
                for group, indices in zip(groups, members, strict=True):
                    for index in indices:
                        masters[index].grad = _halves([self.gradients[step][index]])[rank]
                        group["params"] = [masters[index]]
                        self.call_step(optimizer, step)
                        group["params"] = []
            halves.append([master.detach() for master in masters])
        return [
            torch.cat(parts)[: value.numel()].view(value.shape)
            for parts, value in zip(zip(*halves, strict=True), self.start, strict=True)
        ]

    def unflatten(self, flat: Sequence[torch.Tensor], members: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for whole, indices in zip(flat, members, strict=True):
            at = 0
            for index in indices:
                value = self.start[index]
                found[index] = whole[at : at + value.numel()].view(value.shape)
                at += value.numel()
        return [found[index] for index in range(len(self.start))]


def _halves(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Flatten and pad ``tensors``, and cut them at an offset that is inside a row."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    half = -(-flat.numel() // 2) + 3
    return flat[:half].clone(), torch.cat([flat[half:], flat.new_zeros(5)])


def _indices(parameters: Sequence[torch.Tensor], all_parameters: Sequence[torch.Tensor]) -> list[int]:
    return [
        next(i for i, other in enumerate(all_parameters) if other is parameter) for parameter in parameters
    ]


def _numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in group.items()
        if name != "lr" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()
    }


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
