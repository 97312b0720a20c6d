"""Read the files and recognise their formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from toolkit.adopt.accelerate import RULES as ACCELERATE_RULES
from toolkit.adopt.shell import parse_options, read_command
from toolkit.adopt.trainer import RULES as TRAINER_RULES
from toolkit.adopt.types import Format, Source
from toolkit.config.keys import flatten
from toolkit.config.vendors.installed import DEEPSPEED, load_schema
from toolkit.errors import InputError, Problem, file_errors

FORMATS = (
    "a DeepSpeed JSON, a JSON of TrainingArguments, an accelerate YAML, or a script or list of Megatron-LM's "
    "arguments"
)
MOST_BYTES = 4 * 2**20
LAUNCHER_KEYS = {"nproc_per_node": "nproc_per_node", "nnodes": "nnodes", "num_gpus": "nproc_per_node"}


def read_source(path: Path) -> Source:
    """Return the keys of a file.

    Raises:
        InputError: the file cannot be read, or is in none of the formats.
    """
    with file_errors(remedy="name a file that exists"):
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            raise _unknown(path, "is larger than 4 MiB")
        text = path.read_bytes().decode("utf-8", errors="replace")
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        return _from_json(path, text)
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(path, text)
    return _from_shell(path, text)


def _from_json(path: Path, text: str) -> Source:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unknown(path, f"is not JSON: {error}") from None
    if not isinstance(tree, dict) or not tree:
        raise _unknown(path, "is not an object with keys")
    deepspeed = set(load_schema(DEEPSPEED).fields or {})
    trainer, top = set(TRAINER_RULES), set(tree)
    # Both have bf16 and fp16: sections in DeepSpeed's, true or false in TrainingArguments.
    sections = {name for name, value in tree.items() if isinstance(value, dict)}
    as_deepspeed = len(top & deepspeed) + len(sections & {"bf16", "fp16", "optimizer", "zero_optimization"})
    as_trainer = len(top & trainer) - len(sections & {"bf16", "fp16"})
    if not as_deepspeed and not as_trainer:
        raise _unknown(path, f"has none of their keys: {', '.join(sorted(top)[:5])}")
    if as_deepspeed >= as_trainer:
        return Source(Format.DEEPSPEED, path.name, flatten(tree))
    return Source(Format.TRAINER, path.name, _flat_trainer(tree))


def _flat_trainer(tree: Mapping[str, Any]) -> dict[str, Any]:
    """TrainingArguments are flat; only a DeepSpeed configuration inside them has keys of its own."""
    return {
        name: inner
        for key, value in tree.items()
        for name, inner in (
            flatten(value, f"{key}.").items()
            if key == "deepspeed" and isinstance(value, dict)
            else [(key, value)]
        )
    }


def _from_yaml(path: Path, text: str) -> Source:
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise _unknown(path, f"is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, dict) or not {str(name) for name in tree} & set(ACCELERATE_RULES):
        raise _unknown(path, "has none of the keys of accelerate's configuration")
    return Source(Format.ACCELERATE, path.name, flatten(tree))


def _from_shell(path: Path, text: str) -> Source:
    try:
        command = read_command(text)
    except ValueError as error:
        raise _unknown(path, str(error)) from None
    keys, conditions = parse_options(command.arguments)
    if not keys:
        raise _unknown(path, "has no command with options that begin with --")
    launcher, _ = parse_options(command.launcher)
    named = {LAUNCHER_KEYS[name]: value for name, value in launcher.items() if name in LAUNCHER_KEYS}
    return Source(Format.MEGATRON, path.name, {**named, **keys}, conditions)


def _unknown(path: Path, why: str) -> InputError:
    return InputError(
        Problem(
            str(path),
            f"{path} {why}",
            f"a file to adopt is {FORMATS}",
            "name such a file, or several at once",
        )
    )
