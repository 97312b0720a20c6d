"""Generate docs/engine_support.md: which choices of a run description each engine supports.

    python -m toolkit.plan.engine_support > docs/engine_support.md

Each choice is planned on a described machine. If it is refused, overrides from the remedies are added (a ZeRO
stage for offload, for example). A choice that is still refused is listed with the rule and its remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml

from toolkit.config import search_path
from toolkit.config.compose import compose, from_yaml
from toolkit.config.schema import EngineConfig, EngineName, RunConfig
from toolkit.errors import PlanError, Problem, Severity
from toolkit.plan.make import make_plan
from toolkit.plan.transformer_engine import NEWEST
from toolkit.plan.types import Device, World

ENGINES = (EngineName.local, EngineName.deepspeed, EngineName.megatron)
GROUPS = (
    "model",
    "zero",
    "offload",
    "precision",
    "compile",
    "optim",
    "schedule",
    "checkpoint",
    "data",
    "monitor",
    "debug",
)
# Keys that an option leaves to the user.
GIVEN: dict[str, dict[str, Any]] = {
    "model=custom": {"target": "my.package.Model"},
    "model=huggingface": {
        "hf": {
            "architecture": "AutoModelForCausalLM",
            "model_type": "phi3",
            "config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        }
    },
    "optim=custom": {"target": "my.package.Optimizer"},
    "schedule=custom": {"target": "my.package.factor"},
    "data=prepared": {"path": "data/mine"},
    "data=arrays": {"path": "data/tiles"},
    "data=mixture": {"sources": {"web": {"path": "data/web"}, "code": {"path": "data/code"}}},
    "data=dataset": {"dataset": {"path": "allenai/c4", "name": "en", "tokenizer": "gpt2"}},
    "offload=nvme": {"nvme_path": "/local_nvme"},
}
LEFT_OUT = ("model=pretrained",)  # behaves like the family of the pretrained model
AXES = ("tensor", "pipeline", "context", "expert")
LAYOUTS: tuple[tuple[str, ...], ...] = (
    *((f"parallel.{axis}=2",) for axis in AXES[:3]),
    ("model=mixtral", "parallel.expert=2"),
    *(
        (f"parallel.{one}=2", f"parallel.{other}=2")
        for index, one in enumerate(AXES[:3])
        for other in AXES[index + 1 : 3]
    ),
    *(("model=mixtral", f"parallel.{axis}=2", "parallel.expert=2") for axis in AXES[:3]),
    ("parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2"),
)
KEYS: tuple[tuple[str, ...], ...] = (
    ("train.activation_checkpointing=full",),
    ("train.activation_checkpointing=selective",),
    ("train.activation_checkpointing=2",),
    ("train.activation_checkpointing=full", "offload.activations=cpu"),
    ("train.loss_kernel=fused",),
    ("train.batch_ramp.start=16", "train.batch_ramp.increment=16", "train.batch_ramp.samples=100"),
    ("model.dropout=0.1",),
    ("model=mixtral", "model.router_aux_loss_coef=0.02"),
    ("model.tie_word_embeddings=true",),
    ("model.vocab_size=4099",),
    ("optim.clip=0.0",),
    ("optim=sgd", "optim.momentum=0.9"),
    ("optim.kernel=torch",),
    ("optim.kernel=fused",),
    ("optim.kernel=cpu",),
    ("checkpoint.background=true",),
    ("checkpoint.export=true",),
    ("data.documents=separate",),
    ("precision=bf16", "model.attention=flash"),
    ("model.attention=flex", "data.documents=separate"),
    ("model.attention=sdpa", "data.documents=separate"),
    ("model.attention=eager",),
)
MACHINE = World(
    ranks=8,
    ranks_per_node=8,
    device=Device.CUDA,
    gpu="h100",
    has_libaio=True,
    has_compiler=True,
    has_nvcc=True,
    transformer_engine=NEWEST,
)
CLUSTER = replace(MACHINE, ranks=64)
TWO_CORES = World(ranks=2, ranks_per_node=2, device=Device.CPU)
BATCH = ("train.global_batch=64", "train.micro_batch=2", "train.sequence_length=128")
INSTALL = "install it: pip"  # the document does not depend on the packages of this machine
OVERRIDE = re.compile(r"(?<![\w.+])\+?[a-z_]+(?:\.\w+)*=[^\s,;()]+")


INTRODUCTION = """\
# What each engine supports

Generated from the rules: `python -m toolkit.plan.engine_support > docs/engine_support.md`. A test checks that
it is up to date.

*exact*: the same samples in the same order, and the same losses up to the order of summation: docs/parity.md
has measurements over 20 steps (16-bit precisions round at different points in each engine). *exact for one
train.micro_batch*: the loss has a part that is computed per micro-batch. *own dropout masks*: each layout
draws its own masks, so losses of two layouts differ from the first step on, by 0.001 to 0.008 in tiny models
at 0.1; the same layout repeats itself. *with*: the choice needs another one as well.
*refused*: nothing starts, and the error prints the rule and the remedy. The basis is a small llama on one
node of 8 H100 (`local`: one of them).
`model=pretrained` behaves like the family of the pretrained model."""

EXACT, OWN_MASKS, ONE_MICRO_BATCH = "exact", "own dropout masks", "exact for one train.micro_batch"


@dataclass(frozen=True, slots=True)
class Support:
    """The support of one engine for a choice.

    Attributes:
        overrides: further overrides that the choice needs.
        problem: why the engine refuses the choice; None if it supports it.
        exactness: how well the losses of different layouts agree.
    """

    overrides: tuple[str, ...] = ()
    problem: Problem | None = None
    exactness: str = EXACT

    def __str__(self) -> str:
        if self.problem is not None:
            return f"refused: {self.problem.rule}. Remedy: {self.problem.remedy}"
        return (
            self.exactness if not self.overrides else f"{self.exactness}, with `{' '.join(self.overrides)}`"
        )


def exactness_of_layouts(config: RunConfig) -> str:
    """Return how well the losses of two layouts of ``config`` agree."""
    if config.model.dropout:
        return OWN_MASKS
    return ONE_MICRO_BATCH if config.model.router_aux_loss_coef else EXACT


def engine_support(overrides: Sequence[str], engine: EngineName) -> Support:
    """Return how ``engine`` supports ``overrides``."""
    return find_support(tuple(overrides), lambda tried: small_run(tried, engine), _world(engine), depth=2)


def find_support(
    overrides: tuple[str, ...],
    compose_run: Callable[[tuple[str, ...]], RunConfig],
    world: World,
    *,
    depth: int,
) -> Support:
    """Plan ``overrides``.

    If they are refused, add up to ``depth`` overrides from the remedies for other keys.
    """
    config = compose_run(overrides)
    errors = plan_errors(config, world)
    if not errors:
        return Support(exactness=exactness_of_layouts(config))
    chosen = {override.partition("=")[0] for override in overrides}
    suggested = dict.fromkeys(word for problem in errors for word in OVERRIDE.findall(problem.remedy))
    for override in suggested if depth else ():
        name = override.partition("=")[0]
        if name != "engine" and name not in chosen and not is_placeholder(override):
            found = find_support((*overrides, override), compose_run, world, depth=depth - 1)
            if found.problem is None:
                return replace(found, overrides=(override, *found.overrides))
    # Of several errors, prefer the one about the engine.
    return Support(problem=next((problem for problem in errors if "engine.name" in problem.seen), errors[0]))


def plan_errors(config: RunConfig, world: World) -> list[Problem]:
    try:
        make_plan(config, world)
    except PlanError as error:
        return [
            problem
            for problem in error.problems
            if problem.severity is Severity.ERROR and not problem.remedy.startswith(INSTALL)
        ]
    return []


def is_placeholder(override: str) -> bool:
    """Return whether the value is a placeholder, as in ``data.path=FOLDER``."""
    return override.partition("=")[2].isupper()


def small_run(overrides: Sequence[str], engine: EngineName) -> RunConfig:
    """Return a small run with ``overrides``, composed without Hydra: options are read from their files."""
    sections: dict[str, tuple[str, ...]] = {"model": ("model=llama",), "train": BATCH}
    for word in overrides:
        section = word.removeprefix("+").partition("=")[0].partition(".")[0]
        sections[section] = (*sections.get(section, ()), word)
    found: dict[str, Any] = {name: _section(name, given) for name, given in sections.items()}
    return RunConfig(engine=EngineConfig(name=engine), **found)


@cache
def _section(section: str, choices: tuple[str, ...]) -> Any:
    """Return one section of a configuration: the file of an option, and keys that override it."""
    tree: dict[str, Any] = {}
    for choice in choices:
        name, _, value = choice.removeprefix("+").partition("=")
        *path, leaf = name.split(".")[1:] or [""]
        if not leaf:
            text = (search_path.ROOT / section / f"{value}.yaml").read_text(encoding="utf-8")
            tree = {
                key: given for key, given in (yaml.safe_load(text) or {}).items() if given != "???"
            } | GIVEN.get(choice, {})
        else:
            tree = _with(tree, path, leaf, yaml.safe_load(value))
    return getattr(from_yaml(yaml.safe_dump({section: tree})), section)


def options(group: str) -> list[str]:
    return [
        name
        for name in sorted(path.stem for path in (search_path.ROOT / group).glob("*.yaml"))
        if f"{group}={name}" not in LEFT_OUT
    ]


def experiments() -> list[str]:
    return sorted(path.stem for path in (search_path.ROOT / "exp").glob("*.yaml"))


def experiment(name: str, engine: EngineName) -> Support:
    """Return how ``engine`` supports an experiment on 64 H100s (quickstart: two CPU ranks)."""
    return find_support(
        (f"+exp={name}", f"engine={engine.value}"),
        compose,
        TWO_CORES if name == "quickstart" else CLUSTER,
        depth=1,
    )


def document() -> str:
    """Return the text of docs/engine_support.md."""
    return "\n".join([*_introduction(), *_choices(), *_layouts(), *_experiments()]) + "\n"


def _introduction() -> Iterator[str]:
    yield from INTRODUCTION.splitlines()


def _choices() -> Iterator[str]:
    for group in GROUPS:
        yield from _table(f"## {group}", [(f"{group}={option}",) for option in options(group)])
    yield from _table("## Keys", KEYS)


def _layouts() -> Iterator[str]:
    yield from _table("## Axes", LAYOUTS)
    for axis in AXES:
        model = ("model=mixtral",) if axis == "expert" else ()
        rows = [(*model, f"parallel.{axis}=2", f"zero={stage}") for stage in options("zero")]
        yield from _table(f"## The {axis} axis and ZeRO", rows)


def _experiments() -> Iterator[str]:
    yield ""
    yield "## Experiments"
    yield ""
    yield (
        "On 64 H100, 8 per node (quickstart: two CPU ranks). "
        "*exact, with*: with one override from the remedy of the error."
    )
    yield ""
    yield from _header("experiment", ENGINES[1:])
    for name in experiments():
        yield _row(f"`+exp={name}`", [str(experiment(name, engine)) for engine in ENGINES[1:]])


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield ""
    yield title
    yield ""
    yield from _header("choice", ENGINES)
    for choices in rows:
        yield _row(f"`{' '.join(choices)}`", [str(engine_support(choices, engine)) for engine in ENGINES])


def _header(first: str, engines: Sequence[EngineName]) -> Iterator[str]:
    yield _row(first, [engine.value for engine in engines])
    yield "|" + "---|" * (len(engines) + 1)


def _row(first: str, cells: Sequence[str]) -> str:
    return f"| {first} | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _world(engine: EngineName) -> World:
    return replace(MACHINE, ranks=1) if engine is EngineName.local else MACHINE


def _with(tree: Mapping[str, Any], path: Sequence[str], leaf: str, value: Any) -> dict[str, Any]:
    """Return a copy of ``tree`` with one key changed."""
    if not path:
        return {**tree, leaf: value}
    return {**tree, path[0]: _with(tree.get(path[0], {}), path[1:], leaf, value)}


if __name__ == "__main__":
    print(document(), end="")
