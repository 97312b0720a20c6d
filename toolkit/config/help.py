"""The text of ``--help``: everything that can be written, from the schema's own source and the files in conf/."""

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

from toolkit.config import keys, search
from toolkit.config.compose import compose
from toolkit.config.overrides import EXPERIMENT, unknown_key
from toolkit.config.roots import RUN, SWEEP, ConfigRoot
from toolkit.errors import ConfigError, ExitCode

INTRODUCTION = """\
Train a language model. One description of the run, carried out by the engine and in the layout that you name; stop it, change the
layout, start it again: it goes on.

START
  deepspeed --num_gpus 2 launch/train.py +exp=quickstart          DeepSpeed's launcher (two ranks, also without a GPU)
  torchrun --nproc_per_node 2 launch/train.py +exp=quickstart     torch's launcher
  python launch/train.py +exp=quickstart cluster.cpu_ranks=2      no launcher: this process starts the ranks
  python launch/train.py -m +exp=quickstart zero=stage1,stage2    a sweep: every combination of values is a run of its own
  python launch/plan.py +exp=quickstart cluster.nodes=8 cluster.gpus_per_node=8 cluster.gpu=h100
                                                                  what would run there: layout, settings, bytes; starts nothing
WORDS
  GROUP=OPTION               choose a file of a group: zero=stage3
  KEY=VALUE                  change one key: train.steps=20  optim.betas=[0.9,0.99]  'monitor.prompt="def main():"'
  +exp=NAME                  add an experiment: the differences from the defaults that make it
  +engine.deepspeed.a.b=V    a key of DeepSpeed's own: +engine.deepspeed.zero_optimization.overlap_comm=false
  --config-dir=FOLDER        look for groups and experiments in a folder of your own too: FOLDER/exp/mine.yaml
  --help WORD                this text for one section, group or key: --help optim
"""


def show_help(words: Sequence[str], above: str = "", root: ConfigRoot = RUN) -> ExitCode:
    """Print the help on ``words``, below the text ``above``; or the mistake among them."""
    try:
        text = help_text(words, root)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    print(f"{above}\n{text}" if above else text)
    return ExitCode.DONE


def help_text(words: Sequence[str] = (), root: ConfigRoot = RUN) -> str:
    """All of it, or what belongs to ``words``: sections, groups and keys. Options and overrides among them are passed over.

    Raises:
        ConfigError: a word is none of them.
    """
    topics = [word for word in words if not word.startswith(("-", "+")) and "=" not in word]
    folders = search.folders(None)
    groups = search.groups(folders) if root.groups is None else root.groups
    if not topics:
        sections = (_section(name, root) for name in ["", *keys.sections(root)])
        all_keys = ["KEYS (with the value they have when nothing is chosen)", *sections]
        parts = [INTRODUCTION, _experiments(folders)] if root.groups is None else []
        if groups:
            parts += [
                "GROUPS (the default is marked *)",
                *(_group(folders, name, root) for name in _ordered(groups, root)),
            ]
        of_sweeps = ["KEYS OF A SWEEP (with -m)", _section("sweep", SWEEP)] if root is RUN else []
        return "\n".join(part for part in [*parts, *all_keys, *of_sweeps] if part)
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
    elif topic in keys.table(root):
        parts.append("\n".join(_key(topic, root)))
    if not parts:
        raise ConfigError(unknown_key(topic, f"--help {topic}", groups, root))
    return "\n".join(parts)


# -- groups and experiments


def _experiments(folders: Sequence[Path]) -> str:
    lines = ["EXPERIMENTS"]
    for name in search.options(folders, EXPERIMENT):
        command, about = _comment(folders, EXPERIMENT, name)
        lines += [f"  {name}", *_wrapped(about, 6), f"      {command}"]
    return "\n".join(lines) + "\n"


def _group(folders: Sequence[Path], group: str, root: ConfigRoot) -> str:
    if group == EXPERIMENT:
        return ""
    chosen = _defaults(root).get(group)
    lines = [f"  {group}="]
    for option in search.options(folders, group):
        about = " ".join(_comment(folders, group, option)).strip()
        lines += _labelled(f"    {option}{'*' if option == chosen else ''}", about, 22)
    return "\n".join(lines)


def _ordered(groups: Sequence[str], root: ConfigRoot) -> list[str]:
    """As in the defaults list; others after them."""
    first = list(_defaults(root))
    return [*(name for name in first if name in groups), *(name for name in groups if name not in first)]


def _defaults(root: ConfigRoot) -> dict[str, str | None]:
    """Group -> the option that the command's file in conf/ chooses."""
    entries = yaml.safe_load((search.ROOT / f"{root.file}.yaml").read_text(encoding="utf-8"))["defaults"]
    return {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}


def _comment(folders: Sequence[Path], group: str, option: str) -> tuple[str, str]:
    """The first two lines of the comment that a file begins with. In experiments these are its command and what it is."""
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
    """The keys that stand right in ``section``, not those of sections within it."""
    lines = [f"  {section}"] if section else []
    for name, key in keys.table(root).items():
        if key.section == section:
            lines += _key(name, root)
    return "\n".join(lines) + "\n"


def _key(name: str, root: ConfigRoot) -> list[str]:
    value = _values(root).get(name, keys.table(root)[name].default)
    return _labelled(f"    {name}={_show(value)}", _documents(root)[name], 44)


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
    """What the defaults list sets besides the schema."""
    return keys.flatten(compose([])) if root is RUN else {}


@cache
def _documents(root: ConfigRoot) -> dict[str, str]:
    """The string under each field of the schema, by the key's full name."""
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
                " ".join(_texts(kind.__module__)[kind.__name__][field.name].split()),
            )


@cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """By class and field."""
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
    """``label``, and ``text`` from ``column`` on; below it where the label is too long."""
    lines = _wrapped(text, column)
    if len(label) >= column or not lines:
        return [label, *lines]
    return [label.ljust(column) + lines[0].lstrip(), *lines[1:]]
