"""The cases of a campaign: which fault happens in which layout, under which launcher, and when.

Everything here is decided by the seed before anything runs, so that a case can be repeated alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

PLANNED_CASES = 500  # of a campaign
STEPS, SAVE_EVERY, BATCH = 20, 5, 24  # BATCH divides among 2, 3, 4 and 8 data ranks
MEMORY_EVERY = 2  # steps between two snapshots in memory, of runs that take them
STEP_SECONDS = (
    0.1  # the pause after each step from the fault on, which leaves time to inject it between two steps
)
LAUNCHERS = ("python", "torchrun", "deepspeed")
PARENT = "python"  # the launcher whose parent process can keep standbys and snapshots in memory
MOST_WARM_RANKS = 4  # eight ranks and eight standbys would share two cores

# The quickstart with a tiny model.
MODEL = (
    "+exp=quickstart",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=2",
    "data=prepared",
    "model.vocab_size=264",
    "train.sequence_length=32",
    f"train.global_batch={BATCH}",
    f"train.steps={STEPS}",
    "schedule=constant",
    "schedule.warmup=0",
    "eval.every=0",
    f"checkpoint.every={SAVE_EVERY}",
    "checkpoint.export=false",
    "monitor=files",
    "monitor.prompt=null",
    "monitor.probe=false",
    "debug.threads=1",
    "task.target=benchmarks.faults.instrumentation.InstrumentedTask",
    "+hooks.instrumentation.target=benchmarks.faults.instrumentation.InstrumentationHook",
)


@dataclass(frozen=True)
class RunLayout:
    """The engine, axes and ranks of a run.

    Attributes:
        overrides: those that select the engine and its axes.
        weight: how often the layout is chosen, relative to others.
        nodes: number of simulated machines; each has ``ranks / nodes`` ranks.
    """

    name: str
    ranks: int
    overrides: tuple[str, ...]
    weight: float = 1.0
    nodes: int = 1


def _deepspeed(stage: int, ranks: int, weight: float = 1.0, nodes: int = 1) -> RunLayout:
    place = f"nodes{nodes}-" if nodes > 1 else ""
    return RunLayout(
        f"{place}deepspeed-zero{stage}-ranks{ranks}", ranks, (f"zero=stage{stage}",), weight, nodes
    )


def _megatron(name: str, ranks: int, *overrides: str, weight: float = 1.0, nodes: int = 1) -> RunLayout:
    place = f"nodes{nodes}-" if nodes > 1 else ""
    zero = () if any(word.startswith("zero=") for word in overrides) else ("zero=stage0",)
    return RunLayout(f"{place}megatron-{name}", ranks, ("engine=megatron", *overrides, *zero), weight, nodes)


TP2, PP2 = "parallel.tensor=2", "parallel.pipeline=2"
DISTRIBUTED: Mapping[str, RunLayout] = {
    layout.name: layout
    for layout in (
        *(_deepspeed(stage, 2, 2.0) for stage in range(4)),
        _deepspeed(1, 3),
        _deepspeed(2, 4),
        _deepspeed(3, 4),
        _deepspeed(1, 8, 0.2),
        _megatron("dp2", 2, weight=2.0),
        _megatron("dp2-zero1", 2, "zero=stage1", weight=2.0),
        _megatron("tp2", 2, TP2, weight=2.0),
        _megatron("pp2", 2, PP2, weight=2.0),
        _megatron("dp3", 3),
        _megatron("tp2-dp2", 4, TP2),
        _megatron("tp2-pp2", 4, TP2, PP2),
        _megatron("tp2-pp2-dp2", 8, TP2, PP2, weight=0.2),
        _deepspeed(1, 2, nodes=2),
        _deepspeed(3, 2, nodes=2),
        _megatron("dp2", 2, nodes=2),
    )
}
# ``local`` starts quickly; it is no part of a campaign unless it is named.
LAYOUTS = {"local": RunLayout("local", 1, ("engine=local", "zero=stage0")), **DISTRIBUTED}


@dataclass(frozen=True)
class Case:
    """One run with one fault.

    Attributes:
        moment: when the fault is injected, in steps after the end of the first one: between 0 and STEPS - 2.
            The part after the decimal point is the share of a step.
        seed: of what the fault itself chooses, such as the rank.
        warm: the run has a standby for each rank, and takes snapshots in memory.
    """

    number: int
    fault: str
    layout: str
    launcher: str
    moment: float
    seed: int
    warm: bool = False

    @property
    def name(self) -> str:
        return f"case-{self.number:05d}"

    @property
    def step(self) -> int:
        """The step after whose end the fault is injected."""
        return 1 + int(self.moment)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Choice:
    """What a class of faults can be combined with: launchers, number of nodes, and values of ``Case.warm``
    under ``PARENT``.
    """

    launchers: Sequence[str]
    nodes: int
    warm: Sequence[bool] = (False,)


def choose_cases(
    seed: int, count: int, faults: Mapping[str, Choice], layouts: Mapping[str, RunLayout] = DISTRIBUTED
) -> Iterator[Case]:
    """Yield ``count`` cases. Each class occurs once before any class occurs again.

    A case depends on ``seed``, its number, the classes and the layouts, but not on ``count``, so a longer
    campaign continues a shorter one.

    Args:
        faults: by name; classes that cannot be injected here are left out by the caller.
        layouts: by name; must contain a layout for each class.
    """
    names = sorted(faults)
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        order = random.Random(f"{seed} round {number // len(names)}").sample(names, len(names))
        fault = order[number % len(names)]
        choice = faults[fault]
        fitting = [layout for layout in layouts.values() if layout.nodes == choice.nodes]
        if False not in choice.warm:
            fitting = [layout for layout in fitting if layout.ranks <= MOST_WARM_RANKS]
        if not fitting:
            raise ValueError(f"no layout of {choice.nodes} nodes for {fault}: {', '.join(layouts)}")
        layout = chance.choices(fitting, [each.weight for each in fitting])[0]
        case = Case(
            number=number,
            fault=fault,
            layout=layout.name,
            launcher=chance.choice(choice.launchers),
            moment=chance.uniform(0, STEPS - 2),
            seed=chance.randrange(2**31),
        )
        can_be_warm = case.launcher == PARENT and layout.ranks <= MOST_WARM_RANKS
        yield replace(case, warm=chance.choice(choice.warm)) if can_be_warm else case
