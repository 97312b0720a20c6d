"""Write an adoption as an experiment file, with a comment for every key of the files."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from toolkit.adopt.decide import Adoption
from toolkit.adopt.types import AdoptedKey, Outcome
from toolkit.config.compose import escape_interpolation
from toolkit.errors import without_secrets

GROUPS = (
    "model",
    "engine",
    "zero",
    "offload",
    "precision",
    "compile",
    "data",
    "optim",
    "schedule",
    "monitor",
    "debug",
)
MOST_SHOWN = 80  # characters of a value in a comment


def write_experiment(adoption: Adoption, name: str, files: Sequence[str]) -> str:
    """Return the text of ``exp/<name>.yaml``."""
    return "\n".join(_lines(adoption, name, files)) + "\n"


def _lines(adoption: Adoption, name: str, files: Sequence[str]) -> Iterator[str]:
    settings = {"run.name": name, **adoption.settings}
    comments = _comments(adoption)
    launcher = "torchrun --nproc_per_node 8" if settings["engine"] == "megatron" else "deepspeed"
    yield "# @package _global_"
    yield f"# {launcher} launch/train.py +exp={name}"
    yield f"# Adopted from {', '.join(files)}: {summary(adoption)}."
    yield "# The comment above a setting is the key that it comes from, or the other tool's default."
    if "model" not in settings:
        yield "# These files name no model: the default is a tiny llama. Choose another with model=OPTION."
    yield "defaults:"
    for group in GROUPS:
        if group in settings:
            for comment in comments[group]:
                yield f"  # {comment}"
            yield f"  - override /{group}: {settings[group]}"
    yield "  - _self_"
    yield ""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in GROUPS:
            _put(tree, key.split("."), value)
    yield from _tree(tree, "", comments)
    for title, outcome in (("Already the default here", Outcome.DEFAULT), ("Refused", Outcome.REFUSED)):
        yield from _list(title, [key for key in adoption.keys if key.outcome is outcome])
    yield from _list(
        "Without a setting of its own",
        [key for key in adoption.keys if not key.targets and key.outcome in (Outcome.EXACT, Outcome.CHANGED)],
    )


def summary(adoption: Adoption) -> str:
    """``29 keys: 12 mapped exactly, 3 mapped with a changed meaning, ...``."""
    counts = ", ".join(f"{adoption.count(outcome)} {outcome}" for outcome in Outcome)
    return f"{len(adoption.keys)} keys: {counts}"


def _comments(adoption: Adoption) -> dict[str, list[str]]:
    """Return the keys from which each setting comes."""
    found: dict[str, list[str]] = defaultdict(list)
    decided = {target for key in adoption.keys for target, _ in key.targets}
    for key in adoption.keys:
        for target, _ in key.targets:
            found[target].append(_comment(key))
    for key in adoption.unset_defaults:
        for target, _ in key.targets:
            if target not in decided and key.key not in (*GROUPS, target):
                found[target].append(
                    f"no {_comment(key)}" if key.value is None else f"default: {_comment(key)}"
                )
            elif target not in decided and key.note:
                found[target].append(_one_line(key.note))
    return found


def _comment(key: AdoptedKey) -> str:
    changed = "CHANGED: " if key.outcome is Outcome.CHANGED else ""
    note = f" ({changed}{key.note})" if key.note else ""
    return _one_line(f"{key.key}: {_shown(key.value)}{note}")


def _list(title: str, keys: Sequence[AdoptedKey]) -> Iterator[str]:
    if keys:
        yield ""
        yield f"# {title}:"
        for key in keys:
            yield f"#   {_comment(key)}"


def _shown(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."


def _one_line(text: str) -> str:
    return " ".join(without_secrets(text).split())


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        inner = tree.setdefault(part, {})
        tree = inner if isinstance(inner, dict) else {}
    tree[path[-1]] = value


def _tree(tree: Mapping[str, Any], above: str, comments: Mapping[str, list[str]]) -> Iterator[str]:
    indent = "  " * above.count(".")
    for name, value in tree.items():
        full = f"{above}{name}"
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:"
            yield from _tree(value, f"{full}.", comments)
        else:
            for comment in comments.get(full, []):
                yield f"{indent}# {comment}"
            yield f"{indent}{name}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        value = escape_interpolation(value)
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
