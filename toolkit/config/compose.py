"""Compose groups, experiments and overrides into a typed configuration; convert it to YAML and back.

Hydra is used only for composition, without output folders, logging or decorators. Neither its classes nor
``DictConfig`` are used outside this folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, get_type_hints

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationValidationError, OmegaConfBaseException

from toolkit.config import keys, search_path
from toolkit.config.mistakes import unknown_key, wrong_value
from toolkit.config.overrides import DeepSpeedFile, ParsedOverrides, default_config, parse_overrides
from toolkit.config.plan_arguments import LISTS, PlanArguments
from toolkit.config.prepare import PrepareConfig
from toolkit.config.reshard import ReshardConfig, check_together
from toolkit.config.roots import PLAN, PREPARE, RESHARD, RUN, SWEEP, ConfigRoot
from toolkit.config.schema import RunConfig
from toolkit.config.sweep import SweepConfig, SweepSection
from toolkit.errors import ConfigError, Problem


def compose(overrides: Sequence[str]) -> RunConfig:
    """Return the configuration for overrides like ``["+exp=quickstart", "zero=stage3",
    "--config-dir=mine"]``.

    Raises:
        ConfigError: with every mistake that was found, each with the value, the rule and the remedy.
    """
    parsed = parse_overrides(overrides)
    composed = _composed(parsed, RUN)
    if parsed.deepspeed_file is not None:
        _add_file(composed, parsed.deepspeed_file)
    config = _to_dataclass(composed)
    assert isinstance(config, RunConfig)
    return config


def compose_prepare(overrides: Sequence[str]) -> PrepareConfig:
    """Compose the configuration of ``launch/prepare.py``. Raises as :func:`compose`."""
    config = _to_dataclass(_composed(parse_overrides(overrides, PREPARE), PREPARE), PREPARE)
    assert isinstance(config, PrepareConfig)
    return config


def compose_reshard(overrides: Sequence[str]) -> ReshardConfig:
    """Compose the configuration of ``launch/reshard.py``.

    Raises as :func:`compose`, and for keys that the action does not use.
    """
    parsed = parse_overrides(overrides, RESHARD)
    config = _to_dataclass(_composed(parsed, RESHARD), RESHARD)
    assert isinstance(config, ReshardConfig)
    check_together(config, parsed.overrides)
    return config


def compose_sweep(overrides: Sequence[str]) -> SweepSection:
    """Compose the keys ``sweep.*`` of a sweep. Raises as :func:`compose`."""
    config = _to_dataclass(_composed(parse_overrides(overrides, SWEEP), SWEEP), SWEEP)
    assert isinstance(config, SweepConfig)
    return config.sweep


def compose_plan_arguments(arguments: Sequence[str]) -> tuple[PlanArguments, list[str]]:
    """Compose the arguments that only ``launch/plan.py`` takes, and return the other arguments too.

    Raises as :func:`compose`.
    """
    names = {field.name for field in fields(PlanArguments)}
    own, others = list[str](), list[str]()
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in LISTS and "," in value:  # several values would be a sweep in Hydra's grammar
            argument = f"{name}={QuotedString(value, Quote.single).with_quotes()}"
        (own if name.lstrip("+~").partition(".")[0] in names else others).append(argument)
    if not own:
        return PlanArguments(), others
    config = _to_dataclass(_composed(parse_overrides(own, PLAN), PLAN), PLAN)
    assert isinstance(config, PlanArguments)
    return config, others


def to_yaml(config: RunConfig) -> str:
    """Return the configuration as YAML for :func:`from_yaml`. ``${`` is escaped for OmegaConf."""
    return yaml.safe_dump(as_yaml(config), sort_keys=False, width=140)


def from_yaml(text: str) -> RunConfig:
    """Parse the YAML of :func:`to_yaml`. Missing keys have their defaults.

    The text may come from another user's run directory, so nothing in it is evaluated. Interpolations such as
    ``${oc.env:NAME}``, which would read this machine's environment, are refused.

    Raises:
        ConfigError: the text is not YAML, or has unknown keys, wrong values or interpolations.
    """
    try:
        written = yaml.load(text, _DataLoader)  # OmegaConf's loader would read the text 1e3 as a number
        if not isinstance(written, dict):
            raise ConfigError(
                Problem(
                    "config.yaml", text[:80], "a configuration has sections with keys", "restore the file"
                )
            )
        mistakes = [*_interpolations(written), *_unknown(written)]
        if mistakes:
            raise ConfigError(*mistakes)
        config = OmegaConf.merge(default_config(), written)
    except yaml.YAMLError as error:
        raise _no_yaml(error) from error
    except OmegaConfBaseException as error:
        raise ConfigError(_problem_of(error)) from error
    assert isinstance(config, DictConfig)
    return _to_dataclass(config)


class _DataLoader(yaml.SafeLoader):
    """A loader that refuses aliases: a few lines of nested aliases expand to a gigabyte."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()
            raise yaml.composer.ComposerError(
                None, None, "it refers to another value with *", event.start_mark
            )
        return super().compose_node(parent, index)


# OmegaConf evaluates ${ after an even number of backslashes.
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")


def _interpolations(value: Any, name: str = "") -> Iterator[Problem]:
    """Yield values that OmegaConf would evaluate."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _interpolations(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _interpolations(inner, name)
    elif isinstance(value, str) and _INTERPOLATION.search(value):
        yield Problem(
            name,
            f"{name}={value}",
            "${...} is not evaluated in the configuration of a run",
            "write the value, or \\${ for the literal characters",
        )


# -- composing


def _add_file(config: DictConfig, file: DeepSpeedFile) -> None:
    """Merge the file's keys as if they were typed; settings that were typed win over the file's."""
    with open_dict(config):
        keys_of_file = OmegaConf.create(as_yaml(file.keys))
        config.engine.deepspeed = OmegaConf.merge(config.engine.deepspeed, keys_of_file)
        config.engine.deepspeed_file = escape_interpolation(file.name)
        for override in file.overrides:
            OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)


def _composed(parsed: ParsedOverrides, root: ConfigRoot) -> DictConfig:
    config = _hydra(parsed, parsed.overrides, root)
    if not parsed.changes:
        return config
    # Below an open key, only settings from an experiment's file may be changed without a plus.
    absent = [text for text in parsed.changes if not _present(config, text.partition("=")[0])]
    if absent:
        raise ConfigError(*(_needs_plus(text, root) for text in absent))
    return _hydra(parsed, parsed.overrides + parsed.changes, root)


@cache
def register(root: ConfigRoot) -> None:
    """Register the schema with Hydra. The defaults list of the root's file in conf/ begins with it."""
    ConfigStore.instance().store(name=root.schema, node=root.kind, provider="toolkit")


def _hydra(parsed: ParsedOverrides, overrides: list[str], root: ConfigRoot) -> DictConfig:
    register(root)
    own = [f"file://{folder}" for folder in parsed.search[1:]]
    try:
        with initialize_config_dir(str(search_path.ROOT), version_base="1.3"):
            config = hydra_compose(
                root.file,
                [*overrides, f"hydra.searchpath={own}"] if own else overrides,
                return_hydra_config=True,
            )
    except yaml.YAMLError as error:
        raise _no_yaml(error) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_problem_of(error, root)) from error
    _check_required(parsed, config, overrides, root)
    with open_dict(config):
        del config["hydra"]
    return config


def _check_required(
    parsed: ParsedOverrides, config: DictConfig, overrides: Sequence[str], root: ConfigRoot
) -> None:
    """Check that keys with ``KEY: ???`` in a selected file have a value.

    Merging a default would hide the ``???``, so the files themselves are searched.
    """
    defaults = keys.keys_by_name(root)
    given = {text.lstrip("+").partition("=")[0] for text in overrides}
    problems = []
    for group, choice in config.hydra.runtime.choices.items():
        for path in (folder / group / f"{choice}.yaml" for folder in parsed.search):
            if not path.is_file() or "???" not in (text := path.read_text(encoding="utf-8")):
                continue
            prefix = "" if text.startswith("# @package _global_") else group + "."
            left = (
                name for name, value in keys.flatten(yaml.safe_load(text), prefix).items() if value == "???"
            )
            problems += [
                _missing_key(name, f"{group}={choice}")
                for name in left
                if name not in given
                and name in defaults
                and OmegaConf.select(config, name) == defaults[name].default
            ]
    if problems:
        raise ConfigError(*problems)


def _missing_key(name: str, option: str) -> Problem:
    return Problem(
        name, f"{option} without {name}", "the option requires this key", f"write {option} {name}=VALUE"
    )


def _present(config: DictConfig, name: str) -> bool:
    parent, _, last = name.rpartition(".")
    inner = OmegaConf.select(config, parent)
    return isinstance(inner, DictConfig) and last in inner


def _needs_plus(text: str, root: ConfigRoot) -> Problem:
    name = text.partition("=")[0]
    above = next(above for above in root.open if name.startswith(above + "."))
    return Problem(
        name,
        text,
        f"keys below {above} are not in the schema, so they are added with a plus",
        f"write +{text}",
    )


# -- from OmegaConf's tree to dataclasses


def _to_dataclass(config: DictConfig, root: ConfigRoot = RUN) -> Any:
    written = OmegaConf.to_container(config, resolve=False)
    assert isinstance(written, dict)
    problems = [*_unknown(written, root), *_unresolved(config, written, root)]
    if problems:
        raise ConfigError(*problems)
    sections: dict[str, Any] = {}
    for field in fields(root.kind):
        try:  # section by section, to report the mistakes of all sections
            value = config[field.name]
            sections[field.name] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
        except ConfigError as error:
            problems += error.problems
        except OmegaConfBaseException as error:
            problems.append(_problem_of(error, root))
    if problems:
        raise ConfigError(*problems)
    return root.kind(**sections)


def _unknown(
    written: Mapping[Any, Any], root: ConfigRoot = RUN, kind: type | None = None, prefix: str = ""
) -> Iterator[Problem]:
    """Yield the keys that are not in the schema. Hydra adds keys from files and with a plus without checking
    them.
    """
    hints = get_type_hints(kind or root.kind)
    for name, inner in written.items():
        hint = hints.get(str(name))
        if hint is None:
            yield unknown_key(f"{prefix}{name}", f"{prefix}{name}", root=root)
        elif is_dataclass(hint) and isinstance(inner, dict):
            assert isinstance(hint, type)
            yield from _unknown(inner, root, hint, f"{prefix}{name}.")


def _unresolved(config: DictConfig, written: Mapping[Any, Any], root: ConfigRoot) -> Iterator[Problem]:
    """Yield values that are missing, or that refer to a key that does not exist or has another type."""
    for name, value in keys.flatten(written).items():
        if value == "???":
            yield Problem(name, f"{name}=???", "??? is a placeholder for a value", f"write {name}=VALUE")
        elif "${" in str(value):
            try:
                found = OmegaConf.select(config, name)
                if OmegaConf.is_config(found):
                    OmegaConf.to_container(found, resolve=True)
            except InterpolationValidationError:
                yield wrong_value(name, f"{name}={value}", root)
            except OmegaConfBaseException as error:
                why = str(error).splitlines()[0]
                yield Problem(
                    name,
                    f"{name}={value}",
                    f"${{KEY}} stands for the value of another key, by its full name ({why})",
                    "write ${train.steps}, or \\${ for the literal characters",
                )


# -- text


def as_yaml(value: Any) -> Any:
    """``value`` in the types of YAML; ``${`` is escaped for OmegaConf."""
    if is_dataclass(value):
        return {field.name: as_yaml(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: as_yaml(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_yaml(inner) for inner in value]
    if isinstance(value, Enum):
        return value.name
    return escape_interpolation(value) if isinstance(value, str) else value


def escape_interpolation(text: str) -> str:
    """OmegaConf reads ``\\${`` as ``${`` and halves the backslashes before it."""
    parts = text.split("${")
    for index, part in enumerate(parts[:-1]):
        backslashes = len(part) - len(part.rstrip("\\"))
        parts[index] = part + "\\" * (backslashes + 1)
    return "${".join(parts)


# -- errors in files, and between overrides


def _no_yaml(error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    where = f"{mark.name}, line {mark.line + 1}" if mark is not None else "a configuration file"
    why = getattr(error, "problem", None) or error
    return ConfigError(Problem(where, where, f"a configuration file is YAML ({why})", "correct that line"))


def _problem_of(error: Exception, root: ConfigRoot = RUN) -> Problem:
    """Return the problem that an exception of Hydra or OmegaConf reports."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    location = str(error).partition(":")[0] + ": " if str(error).startswith("In '") else ""
    name = getattr(cause, "full_key", None) or ""
    text = str(cause or error).splitlines()[0]
    if name == "exp" or name.startswith("exp.") or "@exp." in text:
        return Problem(
            name or "exp",
            location + text.removeprefix(location),
            "an experiment's file sets keys of the whole configuration",
            "begin the file with the line: # @package _global_",
        )
    if (
        name
        and name not in keys.keys_by_name(root)
        and name not in keys.sections(root)
        and not keys.is_open(name, root)
    ):
        return unknown_key(name, location + name, root=root)
    if name:
        return wrong_value(name, f"{location}{name}: {text}", root)
    if text.startswith("Could not delete"):
        return Problem(
            text.split("'")[1], text, "only keys from an experiment's file can be deleted", "leave it out"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        near = search_path.nearest_option(option, error.options)
        return Problem(
            group,
            f"a file chooses {group}: {option}",
            f"the options of {group} are {', '.join(error.options)}",
            f"write {group}: {near}" if near else "choose one of them",
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Problem(
        "configuration",
        lines[0],
        " ".join(lines[1:]) or "the groups and files compose to one configuration",
        "see the groups and their options with --help",
    )
