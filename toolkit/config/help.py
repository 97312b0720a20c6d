"""The text of ``--help``, generated from the source of the schema and the files in conf/."""

from __future__ import annotations

import ast
import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from toolkit.commands import in_this_form
from toolkit.config import keys, search_path
from toolkit.config.compose import compose
from toolkit.config.mistakes import unknown_key
from toolkit.config.roots import PLAN, RUN, SWEEP, ConfigRoot
from toolkit.config.search_path import EXPERIMENT
from toolkit.errors import ConfigError, ExitCode

INTRODUCTION = """\
Train a language model. One run description works with every engine and layout. A run can be stopped, and
resumed in another layout.

START
  deepspeed --num_gpus 2 launch/train.py +exp=quickstart          DeepSpeed's launcher (also without GPUs)
  torchrun --nproc_per_node 2 launch/train.py +exp=quickstart     torch's launcher
  python launch/train.py +exp=quickstart cluster.cpu_ranks=2      no launcher: this process starts the ranks
  python launch/train.py -m +exp=quickstart zero=stage1,stage2    a sweep: one run per combination of values
  python launch/plan.py +exp=quickstart                           show layout and memory; starts nothing
ARGUMENTS
  GROUP=OPTION               choose an option of a group: zero=stage3
  KEY=VALUE                  change a key: train.steps=20  optim.betas=[0.9,0.99]  'monitor.prompt="def f():"'
  +exp=NAME                  add an experiment, a file with differences from the defaults
  +engine.deepspeed.a.b=V    set a key of DeepSpeed: +engine.deepspeed.zero_optimization.overlap_comm=false
  --config-dir=FOLDER        also search groups and experiments in your own folder: FOLDER/exp/mine.yaml
  --help NAME                this text for one section, group or key: --help optim
"""


def show_help(arguments: Sequence[str], above: str = "", root: ConfigRoot = RUN) -> ExitCode:
    """Print the help on ``arguments`` below the text ``above``, or an error if one of them is unknown."""
    try:
        text = help_text(arguments, root)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    print(in_this_form(f"{above}\n{text}" if above else text))
    return ExitCode.DONE


def help_text(arguments: Sequence[str] = (), root: ConfigRoot = RUN) -> str:
    """Return the help on the sections, groups and keys in ``arguments``; without any, the whole help.

    Overrides are ignored.

    Raises:
        ConfigError: an argument is not a section, group or key.
    """
    topics = [name for name in arguments if not name.startswith(("-", "+")) and "=" not in name]
    folders = search_path.folders(None)
    groups = search_path.groups(folders) if root.groups is None else root.groups
    if not topics:
        sections = (_section(name, root) for name in ["", *keys.sections(root)])
        all_keys = ["KEYS (with their defaults)", *sections]
        parts = [INTRODUCTION, _experiments(folders)] if root.groups is None else []
        if groups:
            parts += [
                "GROUPS (defaults are marked *)",
                *(_group(folders, name, root) for name in _ordered(groups, root)),
            ]
        of_sweeps = ["KEYS OF A SWEEP (with -m)", _section("sweep", SWEEP)] if root is RUN else []
        of_plans = (
            ["ARGUMENTS OF plan", *(_section(name, PLAN) for name in ["", *keys.sections(PLAN)])]
            if root is RUN
            else []
        )
        return "\n".join(part for part in [*parts, *all_keys, *of_sweeps, *of_plans] if part)
    return "\n".join(_topic(topic, folders, groups, root) for topic in topics)


def _topic(topic: str, folders: Sequence[Path], groups: Sequence[str], root: ConfigRoot) -> str:
    parts = []
    if topic == EXPERIMENT and root.groups is None:
        parts.append(_experiments(folders))
    elif topic in groups:
        parts.append(_group(folders, topic, root))
    if topic in keys.sections(root):
        parts += [
            _section(name, root)
            for name in keys.sections(root)
            if name == topic or name.startswith(topic + ".")
        ]
    elif topic == "sweep" and root is RUN:
        parts.append(_section(topic, SWEEP))
    elif topic in keys.keys_by_name(root):
        parts.append("\n".join(_key(topic, root)))
    elif root is RUN and (topic in keys.keys_by_name(PLAN) or topic in keys.sections(PLAN)):
        names = [name for name in keys.keys_by_name(PLAN) if name == topic or name.startswith(topic + ".")]
        parts += ["\n".join(_key(name, PLAN)) for name in names]
    if not parts:
        raise ConfigError(unknown_key(topic, f"--help {topic}", groups, root))
    return "\n".join(parts)


# -- groups and experiments


def _experiments(folders: Sequence[Path]) -> str:
    lines = ["EXPERIMENTS"]
    for name in search_path.options(folders, EXPERIMENT):
        command, about = _comment(folders, EXPERIMENT, name)
        lines += [f"  {name}", *_wrapped(about, 6), f"      {command}"]
    return "\n".join(lines) + "\n"


def _group(folders: Sequence[Path], group: str, root: ConfigRoot) -> str:
    if group == EXPERIMENT:
        return ""
    chosen = _defaults(root).get(group)
    lines = [f"  {group}="]
    for option in search_path.options(folders, group):
        about = " ".join(_comment(folders, group, option)).strip()
        lines += _labelled(f"    {option}{'*' if option == chosen else ''}", about, 22)
    return "\n".join(lines)


def _ordered(groups: Sequence[str], root: ConfigRoot) -> list[str]:
    """Return the groups in the order of the defaults list, then the others."""
    first = list(_defaults(root))
    return [*(name for name in first if name in groups), *(name for name in groups if name not in first)]


def _defaults(root: ConfigRoot) -> dict[str, str | None]:
    """Group -> the default option, according to the command's file in conf/."""
    entries = yaml.safe_load((search_path.ROOT / f"{root.file}.yaml").read_text(encoding="utf-8"))["defaults"]
    return {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}


def _comment(folders: Sequence[Path], group: str, option: str) -> tuple[str, str]:
    """Return the first two lines of a file's leading comment. In experiments the first line is the
    command.
    """
    path = next(path for folder in folders if (path := folder / group / f"{option}.yaml").is_file())
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line and (text := line.removeprefix("#").strip()):
            lines.append(text)
    first, second, *_ = [*lines, "", ""]
    return first, second


# -- keys


def _section(section: str, root: ConfigRoot) -> str:
    """Return the keys directly in ``section``, without nested sections."""
    lines = [f"  {section}"] if section else []
    for name, key in keys.keys_by_name(root).items():
        if key.section == section:
            lines += _key(name, root)
    return "\n".join(lines) + "\n"


def _key(name: str, root: ConfigRoot) -> list[str]:
    value = _values(root).get(name, keys.keys_by_name(root)[name].default)
    return _labelled(f"    {name}={_show(value)}", _descriptions(root)[name], 44)


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return "[" + ",".join(_show(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def _values(root: ConfigRoot) -> dict[str, Any]:
    """Return the values of all keys after the defaults list is applied."""
    return keys.flatten(compose([])) if root is RUN else {}


@cache
def _descriptions(root: ConfigRoot) -> dict[str, str]:
    """Return the string below each field of the schema, by the full name of the key."""
    return dict(_walk(root.kind, ""))


def _walk(kind: type, prefix: str) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _walk(hint, f"{prefix}{field.name}.")
        else:
            yield (
                f"{prefix}{field.name}",
                " ".join(_field_strings(kind.__module__)[kind.__name__][field.name].split()),
            )


@cache
def _field_strings(module: str) -> dict[str, dict[str, str]]:
    """Return the strings below the fields of the classes in ``module``, by class and field."""
    return {
        node.name: {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in zip(node.body, node.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for node in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(node, ast.ClassDef)
    }


# -- layout of the text


def _width() -> int:
    return max(80, min(140, shutil.get_terminal_size((120, 24)).columns))


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, _width(), initial_indent=" " * indent, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def _labelled(label: str, text: str, column: int) -> list[str]:
    """``label`` followed by ``text`` in ``column``, or on the next line if the label is too long."""
    lines = _wrapped(text, column)
    if len(label) >= column or not lines:
        return [label, *lines]
    return [label.ljust(column) + lines[0].lstrip(), *lines[1:]]
