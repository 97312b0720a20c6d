"""What the remedy of an error says can be typed, and then the error is gone.

pytest tests/config/test_remedies.py -m "full or not full"
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tests.config.test_mistakes import MISTAKES as TYPED
from tests.plan.cases import run_config
from tests.plan.test_rules import MISTAKES as RULES
from tests.remedies import choices, composed, follow, typed_problems, words_of
from toolkit.config import engine_keys
from toolkit.config.overrides import parse_overrides
from toolkit.config.schema import EngineName
from toolkit.config.synonyms import ADVICE, SAME, WORDS, find_synonym, words_for
from toolkit.errors import ConfigError, Problem
from toolkit.plan.types import World
from toolkit.testing.tiny import tiny_plan
from toolkit.train.finalize import another_layout

# Remedies that are not words to type: a part of the text, and why.
NOT_TYPED = {
    "set its keys: ": "a section has many keys",
    "write the key before the =": "only the user knows the key",
    "create it, with groups as in conf/": "a folder",
    "write --config-dir=FOLDER": "a folder",
    "literal characters": "text that the shell or OmegaConf would evaluate",
    "choose the architecture by model.family": "an architecture",
    "start one rank": "the machine decides the number of ranks",
    "start 3 ranks": "the machine decides the number of ranks",
    ".increment as multiples of": "several keys that only the user can weigh",
    "write one of ": "a choice of numbers or names",
    "a smaller train.micro_batch": "sizes that only the user can weigh",
    "a divisor of the number of heads": "sizes that only the user can weigh",
    "write each name once": "a list",
    "quotes": "the quotes of the shell",
    "install g++": "a package",
    " -m sweep.": "another command",
    "with the same arguments shows": "another command",
}
# Rules whose remedies are steps in a direction: words that are accepted, and may not be enough alone.
DIRECTIONS = ("fit on its device", "memory", "is several times slower")


def typed_cases() -> Iterator[tuple[list[str], World | None]]:
    for typed, *_ in TYPED:
        yield ["engine=megatron", typed] if "engine.megatron" in typed else [typed], None
    for name in SYNONYMS:
        yield [name], None


def rule_cases() -> Iterator[tuple[list[str], World | None]]:
    for changes, world, *_ in RULES:
        yield words_of(run_config(**changes)), world


SYNONYMS = (
    *("optim.learning_rate=1e-4", "train.batch_size=4", "train.seq_len=64", "train.micro_batch=auto"),
    *("train.global_batch=auto", "optim.lr=auto", "max_steps=10", "warmup_ratio=0.03", "bf16=true"),
    *("lr_scheduler_type=linear", "gradient_accumulation_steps=4", "lora=true", "strategy=deepspeed_stage_2"),
    *("+engine.deepspeed.train_micro_batch_size_per_gpu=auto", "zero_optimization.stage=2"),
    "+engine.deepspeed.zero_optimization.reduce_bucket_size=auto",
)
AUDIT = (  # commands whose remedies once did not work, and what they say now
    (("optim.learning_rate=1e-4",), "write optim.lr=1e-4"),
    (("train.batch_size=4",), "write train.global_batch=4"),
    (("train.seq_len=64",), "write train.sequence_length=64"),
    (("train.micro_batch=auto",), "leave it out, or write train.micro_batch=null"),
    (("engine=megatron", "+engine.megatron.micro_batch_size=4"), "write train.micro_batch=4"),
    (
        ("cluster=slurm", "cluster.nodes=2", "cluster.gpus_per_node=0", "cluster.min_nodes=2"),
        "write cluster.min_nodes=1, or leave it out",
    ),
    (
        ("engine=megatron", "+engine.megatron.recompute_activations=true"),
        "+engine.megatron.recompute_granularity=selective",
    ),
)


def check_remedies(words: Sequence[str], world: World | None) -> int:
    """Follow every way of every remedy of a command. Returns how many there are."""
    found = typed_problems(words, world)
    assert found, f"no problem: {words}"
    refused = _refused_before_the_plan(words)
    followed = 0
    for problem in found:
        if any(text in problem.remedy for text in NOT_TYPED):
            continue
        ways = choices(problem.remedy)
        assert ways, f"nothing to type: {problem}"
        for way in ways:
            new = follow(words, problem, way, replace=problem in refused)
            after = typed_problems(new, world)
            unaccepted = [other for other in after if is_not_accepted(other, way.words)]
            assert not unaccepted, f"{problem}\n{new}\n{unaccepted[0]}"
            needs_files = any(word.startswith("model.pretrained=") for word in way.words)
            if not needs_files and not any(text in problem.rule for text in DIRECTIONS):
                still = [other for other in after if (other.key, other.rule) == (problem.key, problem.rule)]
                assert not still, f"{problem}\n{new}"
            followed += 1
    return followed


def is_not_accepted(problem: Problem, words: Sequence[str]) -> bool:
    """Whether the problem is that one of the words is not accepted, whatever else the run has."""
    typed = {word.lstrip("+").partition("=")[0] for word in words}
    return problem.key in typed and ("has no key" in problem.rule or "there is no" in problem.rule)


def _refused_before_the_plan(words: Sequence[str]) -> list[Problem]:
    """The problems of the arguments themselves, whose remedies replace the word at fault."""
    try:
        return engine_keys.problems(composed(tuple(words)))
    except ConfigError as error:
        return list(error.problems)


@pytest.mark.parametrize(
    ("words", "remedy"), AUDIT, ids=lambda value: value[-1] if isinstance(value, tuple) else ""
)
def test_remedies_that_once_failed_work(words: tuple[str, ...], remedy: str) -> None:
    assert any(remedy in problem.remedy for problem in typed_problems(words, None))
    assert check_remedies(words, None) > 0


def test_a_wrong_remedy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each kind of wrong remedy fails the check."""
    for remedy in ("write optim.kernel=1e-4", "write optim.learnin_rate=3", "write optim.lrr=3"):
        monkeypatch.setattr("toolkit.config.mistakes.find_synonym", lambda *_, r=remedy: (None, r))
        if "kernel" in remedy:
            words = follow(
                ["optim.learning_rate=1e-4"],
                typed_problems(["optim.learning_rate=1e-4"], None)[0],
                choices(remedy)[0],
                replace=True,
            )
            assert typed_problems(words, None), "1e-4 is no kernel"
            continue
        with pytest.raises(AssertionError):
            check_remedies(["optim.learning_rate=1e-4"], None)


def _cases(cases: Iterator[tuple[list[str], World | None]]) -> list[object]:
    return [
        pytest.param(words, world, id=" ".join(words)[-100:], marks=pytest.mark.full)
        for words, world in cases
    ]


@pytest.mark.parametrize(("words", "world"), _cases(typed_cases()))
def test_remedies_of_typing_mistakes(words: list[str], world: World | None) -> None:
    check_remedies(words, world)


@pytest.mark.parametrize(("words", "world"), _cases(rule_cases()))
def test_remedies_of_rules(words: list[str], world: World | None) -> None:
    check_remedies(words, world)


# -- synonyms


def test_synonyms_name_words_that_exist() -> None:
    assert len({*SAME, *WORDS, *ADVICE}) >= 200
    typed = {f"{key}=1" for key in SAME.values()}
    for name, by_value in WORDS.items():
        for value in by_value:
            words = words_for(by_value, "0.03" if value == "{}" else value)
            assert "{" not in words, name
            typed |= set(words.split())
    for _, remedy in ADVICE.values():
        typed |= {word for way in choices(remedy) for word in way.words}
    values = {"zero=stage0.03": "zero=stage3", "resume=1": "resume=auto"}
    keys = {values.get(word, word) for word in typed}
    problems = []
    for word in sorted(keys):
        try:
            parse_overrides([word])
        except ConfigError as error:
            problems += [
                problem
                for problem in error.problems
                if "no key" in problem.rule or "no section" in problem.rule or "options of" in problem.rule
            ]
    assert not problems, problems


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("learning_rate", "1e-4", "write optim.lr=1e-4"),
        ("per-device-train-batch-size", "4", "write train.micro_batch=4"),
        ("train.num_train_epochs", "3", "write train.epochs=3"),
        ("warmup_ratio", "0.03", "write schedule.warmup=3%"),
        ("fp16", "true", "write precision=fp16"),
        ("tensor_model_parallel_size", "2", "write parallel.tensor=2"),
        ("hf.lora.r", "8", "leave it out"),
        ("zero_optimization.offload_optimizer.device", "cpu", "write offload.optimizer=cpu"),
    ],
)
def test_synonyms(name: str, value: str, remedy: str) -> None:
    found = find_synonym(name, value)
    assert found is not None
    assert found[1].startswith(remedy)


def test_words_of_this_toolkit_are_no_synonyms() -> None:
    from toolkit.config.keys import keys_by_name

    top = {name for name in keys_by_name() if "." not in name}
    assert not top & {*SAME, *WORDS, *ADVICE}
    assert find_synonym("no_such_thing", "3") is None


# -- the hint after a run


def test_the_layout_that_a_finished_run_suggests_can_be_planned() -> None:
    assert another_layout(tiny_plan(ranks=2)) == "zero=stage3"
    assert another_layout(tiny_plan(ranks=2, zero__stage=3)) == "zero=stage2"
    megatron = tiny_plan(ranks=2, engine__name=EngineName.megatron, parallel__tensor=2)
    assert another_layout(megatron) == "engine=deepspeed zero=stage3 parallel.tensor=1"
    own = replace(
        megatron.config, engine=replace(megatron.config.engine, megatron={"overlap_grad_reduce": True})
    )
    assert another_layout(replace(megatron, config=own)) is None, "its own keys would be refused"
