"""Write a configuration as an experiment: a YAML file with its differences from the defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from toolkit.config import search_path
from toolkit.config.compose import as_yaml, compose
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, Problem

SUFFIX = ".yaml"


def experiment_text(config: RunConfig, comment: Sequence[str]) -> str:
    """Return the file of an experiment that composes to ``config`` without other arguments.

    Args:
        comment: its first lines, of which ``--help`` shows the first two: a command, and what the
            experiment is.
    """
    tree = _changes(config, compose([]))
    lines = ["# @package _global_", *(f"# {line}".rstrip() for line in comment)]
    return "\n".join(lines) + "\n" + yaml.safe_dump(tree, sort_keys=False, width=110)


def _changes(value: Any, default: Any) -> dict[str, Any]:
    """Return the keys of a section that differ from ``default``. Dictionaries, which are empty there, are
    whole.
    """
    changed: dict[str, Any] = {}
    for field in fields(value):
        inner, usual = getattr(value, field.name), getattr(default, field.name)
        if inner != usual:
            changed[field.name] = _changes(inner, usual) if is_dataclass(inner) else as_yaml(inner)
    return changed


def experiment_file(out: str, own: Path | None) -> Path:
    """Return the file that ``out`` names.

    Args:
        out: the name of an experiment, or the path of a YAML file.
        own: the folder of ``--config-dir``; None: that of the project, or of the toolkit.

    Raises:
        ConfigError: ``out`` is neither, or the file exists.
    """
    is_file = out.endswith(SUFFIX)
    if not is_file and not all(letter.isalnum() or letter in "-_" for letter in out):
        raise ConfigError(
            Problem(
                "out",
                f"out={out}",
                "it is the name of an experiment, of letters, digits, - and _, or a path that ends in .yaml",
                "write out=mine, or out=conf/exp/mine.yaml",
            )
        )
    path = Path(out) if is_file else search_path.folders(own)[-1] / search_path.EXPERIMENT / f"{out}{SUFFIX}"
    if path.exists():
        raise ConfigError(
            Problem(
                "out",
                f"out={out}: {path} exists",
                "an experiment is not overwritten",
                "write another name, or remove the file",
            )
        )
    return path
