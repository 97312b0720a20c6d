"""Check each command-line argument before the composition, so that all mistakes are reported together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toolkit.commands import command_line, in_this_form
from toolkit.config import keys, search_path
from toolkit.config.mistakes import unknown_key, unreadable, wrong_value
from toolkit.config.numbers import parse_count
from toolkit.config.roots import RUN, ConfigRoot
from toolkit.config.search_path import EXPERIMENT
from toolkit.errors import ConfigError, Problem

CONFIG_DIR = ("--config-dir", "-cd")
MULTIRUN = ("-m", "--multirun")
# Options of launchers, which users of other tools type behind the script, and their launchers.
LAUNCHER_OPTIONS = {
    "--num_gpus": "deepspeed",
    "--hostfile": "deepspeed",
    "--nproc_per_node": "torchrun",
    "--nproc-per-node": "torchrun",
    "--nnodes": "torchrun",
}
DEEPSPEED_KEYS = "engine.deepspeed"
DURATIONS = ("train.steps", "train.tokens", "train.epochs")  # one of them decides the length of a run
# Keys whose values may have a suffix: 10k, 2M. In sizes of a model or a sequence, 4k could mean 4096.
COUNTS = (
    "train.steps",
    "train.batch_ramp.samples",
    "data.max_samples",
    "schedule.warmup",
    "schedule.decay",
    "eval.every",
    "checkpoint.keep_every",
)


@dataclass(frozen=True, slots=True)
class DeepSpeedFile:
    """The keys of ``+engine.deepspeed=FILE.json``, and overrides of keys below engine.deepspeed."""

    name: str
    keys: dict[str, Any]
    overrides: tuple[Override, ...] = ()


@dataclass(slots=True)
class ParsedOverrides:
    """Checked overrides for Hydra, and the folders with groups.

    ``changes`` are settings below an open key without a plus, which are valid only if an experiment's file
    sets them. The keys of ``deepspeed_file`` win over those of an experiment, and ``overrides`` over both.
    """

    search: tuple[Path, ...]
    overrides: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    deepspeed_file: DeepSpeedFile | None = None


def parse_overrides(arguments: Sequence[str], root: ConfigRoot = RUN) -> ParsedOverrides:
    """Check every argument.

    Raises:
        ConfigError: with a problem for each invalid argument.
    """
    plain, own, problems = split_options(arguments)
    parsed = ParsedOverrides(search_path.folders(own))
    checker = _Checker(parsed.search, root)
    below: list[Override] = []
    for argument in plain:
        text = _long(argument, root)
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            problems.append(unreadable(text, error, parsed.search if EXPERIMENT in checker.groups else ()))
            continue
        if override.key_or_group == DEEPSPEED_KEYS and isinstance(override.value(), str):
            try:
                parsed.deepspeed_file = read_deepspeed_file(override)
            except ConfigError as error:
                problems += error.problems
            continue
        found = list(checker.check(override))
        problems += found
        if found:
            continue
        if override.key_or_group.startswith(f"{DEEPSPEED_KEYS}."):
            below.append(override)
        if override.type is OverrideType.CHANGE and keys.is_open(override.key_or_group, root):
            parsed.changes.append(text)
        else:
            parsed.overrides.append(_for_hydra(override, root))
    if root is RUN:
        resets, found = _reset_other_durations(parsed.overrides)
        problems += found
        parsed.overrides += resets
    if parsed.deepspeed_file is not None:
        parsed.deepspeed_file = replace(parsed.deepspeed_file, overrides=tuple(below))
    if problems:
        raise ConfigError(*problems)
    return parsed


def overridden_keys(arguments: Sequence[str]) -> frozenset[str]:
    """Return the keys that ``arguments`` set by name, or by choosing an option of a group: ``zero=stage3``
    sets all keys of the section ``zero``. Experiments and options such as ``--config-dir`` set none.
    """
    names = {
        argument.partition("=")[0].lstrip("+~") for argument in arguments if not argument.startswith("-")
    }
    groups = names.intersection(keys.sections())
    of_groups = {key for key in keys.keys_by_name() if key.partition(".")[0] in groups}
    return frozenset((names - groups - {EXPERIMENT}) | of_groups)


def read_deepspeed_file(override: Override) -> DeepSpeedFile:
    """Read the JSON that ``+engine.deepspeed=FILE.json`` names, relative to the working directory.

    Raises:
        ConfigError: the file cannot be read, or is not an object.
    """
    name, text = str(override.value()), override.input_line or ""
    rule = "engine.deepspeed is a file with DeepSpeed's JSON, or a dictionary"
    remedy = (
        f"write +{DEEPSPEED_KEYS}=FILE.json with an existing file, or one key: +{DEEPSPEED_KEYS}.KEY=VALUE"
    )
    try:
        tree = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise ConfigError(Problem(DEEPSPEED_KEYS, f"{text}: {why}", rule, remedy)) from None
    if not isinstance(tree, dict):
        raise ConfigError(Problem(DEEPSPEED_KEYS, f"{text}: not an object", rule, remedy))
    return DeepSpeedFile(name, tree)


def _long(text: str, root: ConfigRoot) -> str:
    """``target.path=PATH`` for ``target=PATH``. In OmegaConf a name is either a section or a value.

    Whole numbers may be written as 1e4, and counts as 10k.
    """
    name, equals, value = text.partition("=")
    if not equals:
        return text
    name = dict(root.short).get(name, name)
    key = keys.keys_by_name(root).get(name)
    if key is not None and key.kinds[0] is int:
        count = parse_count(value, suffixes=name in COUNTS)
        return f"{name}={value if count is None else count}"
    return f"{name}={value}"


def _reset_other_durations(overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Return overrides that reset the other durations, which a file may set, and a problem if several are
    set.
    """
    values = dict(text.lstrip("+").split("=", 1) for text in overrides if "=" in text)
    given = [name for name in DURATIONS if values.get(name, "null") != "null"]
    if len(given) > 1:
        seen = " ".join(f"{name}={values[name]}" for name in given)
        rule = "one of train.steps, train.tokens and train.epochs decides the length of a run"
        return [], [Problem(given[1], seen, rule, f"write only {given[0]}={values[given[0]]}")]
    resets = [f"{name}=null" for name in DURATIONS[1:] if given and name not in values]
    return resets, []


def split_options(arguments: Sequence[str]) -> tuple[list[str], Path | None, list[Problem]]:
    """Return arguments without options that begin with a dash, the user's configuration folder, and
    problems.
    """
    plain: list[str] = []
    problems: list[Problem] = []
    own: Path | None = None
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in LAUNCHER_OPTIONS:
            value = value if equals else next(rest, "")
            problems.append(
                Problem(
                    name,
                    f"{name} {value}".strip(),
                    "options of a launcher stand before the script; everything after it is KEY=VALUE",
                    "leave it out, or start with "
                    + in_this_form(f"{LAUNCHER_OPTIONS[name]} {name} {value or 'N'} launch/train.py"),
                )
            )
            continue
        if not argument.startswith("-"):
            plain.append(argument)
        elif name in CONFIG_DIR:
            folder = value if equals else next(rest, "")
            if not folder:
                problems.append(
                    Problem(
                        name, argument, "--config-dir is followed by a folder", "write --config-dir=FOLDER"
                    )
                )
            own = Path(folder).expanduser().absolute() if folder else own
        elif name in MULTIRUN:
            problems.append(
                Problem(
                    argument,
                    argument,
                    f"only {command_line('train', '-m')} starts a sweep",
                    f"leave it out, or write {command_line('train', '-m')} with the same arguments",
                )
            )
        else:
            problems.append(
                Problem(
                    argument,
                    argument,
                    "an option is --help or --config-dir=FOLDER; everything else is KEY=VALUE",
                    f"leave it out; {command_line('plan')} with the same arguments shows what would run",
                )
            )
    return plain, own, problems


def _for_hydra(override: Override, root: ConfigRoot) -> str:
    """Return the override as Hydra needs it.

    A setting below an open key may exist already, from an experiment's file, so it is added or changed. For a
    key of type text, ``007`` and ``1e3`` are text and not the numbers 7 and 1000.
    """
    assert override.input_line is not None
    text = override.input_line
    if override.key_or_group in root.open:
        return "++" + text.lstrip("+")
    if override.type is OverrideType.ADD and keys.is_open(override.key_or_group, root):
        return "+" + text
    key = keys.keys_by_name(root).get(override.key_or_group)
    if key is not None and key.kinds == (str,) and isinstance(override.value(), int | float):
        name, _, value = text.partition("=")
        return f"{name}='{value.strip()}'"
    return text


@cache
def default_config(root: ConfigRoot = RUN) -> DictConfig:
    """Return the schema with its defaults as an OmegaConf object. Callers must copy it before they modify
    it.
    """
    return OmegaConf.structured(root.kind)


class _Checker:
    def __init__(self, folders: Sequence[Path], root: ConfigRoot) -> None:
        self.folders = folders
        self.root = root
        self.groups = search_path.groups(folders) if root.groups is None else root.groups

    def check(self, override: Override) -> Iterator[Problem]:
        name, text = override.key_or_group, override.input_line or ""
        if not name:
            yield Problem(
                text,
                text,
                "an argument is KEY=VALUE, GROUP=OPTION or +exp=NAME",
                "write the key before the =",
            )
        elif override.is_sweep_override():
            value = text.partition("=")[2]
            yield Problem(
                name,
                text,
                "several values need a sweep, which is started with -m",
                f"write {command_line('train', '-m')}, or one value; write a list as {name}=[{value}], "
                "text with commas in quotes",
            )
        elif override.package is not None:
            yield Problem(
                name,
                text,
                "the package of a group cannot be changed",
                f"write {text.replace('@' + override.package, '')}",
            )
        elif name.startswith("sweep.") and self.root is RUN:
            yield Problem(
                name,
                text,
                "the keys of a sweep need -m",
                f"write {command_line('train', '-m')} {text}, or leave it out",
            )
        elif name == "hydra" or name.startswith(("hydra.", "hydra/")):
            yield Problem(
                name,
                text,
                "Hydra is used only for composition, without folders and logs",
                "write run.dir=FOLDER for the run directory, or --config-dir=FOLDER for your own files",
            )
        elif name in self.groups:
            yield from self._group(override)
        elif not keys.is_open(name, self.root):
            yield from self._key(override)

    def _group(self, override: Override) -> Iterator[Problem]:
        name, text = override.key_or_group, override.input_line or ""
        choices = search_path.options(self.folders, name)
        if override.type is OverrideType.DEL:
            yield Problem(
                name,
                text,
                f"a run has exactly one option of the group {name}",
                f"write {_one_of(name, choices)}",
            )
            return
        value = override.value()
        choice = value if isinstance(value, str) else (text.partition("=")[2])
        if choice not in choices:
            near = search_path.nearest_option(choice, choices)
            plus = "+" if name == EXPERIMENT else ""
            yield Problem(
                name,
                text,
                f"the options of {name} are {', '.join(choices)}",
                f"write {plus}{name}={near}" if near else f"write {_one_of(plus + name, choices)}",
            )
        elif name == EXPERIMENT and override.type is not OverrideType.ADD:
            yield Problem(name, text, "an experiment is added with a plus", f"write +exp={choice}")
        elif name != EXPERIMENT and override.type is not OverrideType.CHANGE:
            yield Problem(
                name,
                text,
                f"the option of the group {name} is changed without a plus",
                f"write {name}={choice}",
            )

    def _key(self, override: Override) -> Iterator[Problem]:
        name, text = override.key_or_group, override.input_line or ""
        known = keys.keys_by_name(self.root).get(name)
        if known is None and name not in keys.sections(self.root):
            yield unknown_key(name, text, self.groups, self.root)
        elif override.type is OverrideType.DEL:
            yield Problem(
                name,
                text,
                "a key of the schema cannot be deleted",
                f"write {name}=null"
                if known and known.nullable
                else f"leave it out: then {name} has its default",
            )
        elif override.type is OverrideType.ADD and name not in self.root.open:
            yield Problem(
                name,
                text,
                f"{name} is a key of the schema, which is changed without a plus",
                f"write {text.lstrip('+')}",
            )
        else:
            yield from self._value(override)

    def _value(self, override: Override) -> Iterator[Problem]:
        """Assign the value to a default section, which checks its type."""
        name, text = override.key_or_group, override.input_line or ""
        section, _, inside = name.partition(".")
        config = default_config(self.root)[section].copy() if inside else default_config(self.root).copy()
        try:
            OmegaConf.update(config, inside or name, override.value(), force_add=False)
        except OmegaConfBaseException as error:
            full_key = getattr(error, "full_key", None) or name
            yield wrong_value(full_key if full_key in keys.keys_by_name(self.root) else name, text, self.root)


def _one_of(name: str, choices: Sequence[str]) -> str:
    """``zero=stage0, zero=stage1 or zero=stage2``."""
    overrides = [f"{name}={choice}" for choice in choices]
    return " or ".join(filter(None, [", ".join(overrides[:-1]), overrides[-1]]))
