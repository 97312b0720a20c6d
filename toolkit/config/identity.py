"""Run identity: what decides the samples and the losses, as eight hex digits.

In it: ``model``, ``data``, ``optim``, ``schedule`` and ``train``, but for the keys of ``CARRIAGE``, which say how or how long the same
run is carried out. Two layouts of one run, or a longer one, share an identity and so a run directory; another model never does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from toolkit.config.keys import flatten, table
from toolkit.config.schema import RunConfig

SECTIONS = ("model", "data", "optim", "schedule", "train")

CARRIAGE = frozenset(
    {
        "train.steps",  # a longer run continues a shorter one
        "train.micro_batch",  # the loss is divided by the units of the global batch, however that is cut
        "train.activation_checkpointing",  # recomputes the same activations
        "train.on_nonfinite",  # whether the run ends at a step that is skipped in any case
        "optim.kernel",  # the same update by another implementation
        "data.cache.folder",
        "data.cache.gib",  # the same bytes from nearer by
        # Where the data lies on this machine. Which data it is, the stream's fingerprint says: resuming with other samples is
        # refused by it, and a moved folder resumes.
        "data.path",
        "data.sources.*.path",
        "data.dataset.path",
        "data.dataset.tokenizer",
        "data.dataset.workers",  # processes
        "data.dataset.trust_remote_code",  # the tokenizer is known by its hash
        "data.special_tokens",  # refuse and text give the same tokens; parse is part of the stream's fingerprint
    }
)


def identity(config: RunConfig) -> str:
    """Eight hex digits, equal in every process and for every order of keys.

    Values at their default are left out, so that a key that a later version adds leaves the identity of older runs as it is.
    """
    keys = table()
    decisive = {
        name: value
        for name, value in _decisive(config).items()
        if name not in keys or value != _plain(name, keys[name].default)
    }
    text = json.dumps(decisive, sort_keys=True, separators=(",", ":"), allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def carried(name: str) -> bool:
    """Whether the key ``name`` says how a run is carried out."""
    return any(fnmatchcase(name, pattern) for pattern in CARRIAGE)


def identity_differences(a: RunConfig, b: RunConfig) -> list[str]:
    """``key: value in a -> value in b`` for every key in which the identities differ."""
    before, after = _decisive(a), _decisive(b)
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name}: {_show(before, name)} -> {_show(after, name)}"
        for name in names
        if name not in before or name not in after or before[name] != after[name]
    ]


def _decisive(config: RunConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section in SECTIONS:
        found |= flatten(getattr(config, section), section + ".")
    return {name: _plain(name, value) for name, value in found.items() if not carried(name)}


def _plain(name: str, value: Any) -> Any:
    """As JSON has it; an int where the schema says float is that float, however the configuration was made."""
    key = table().get(name)
    if isinstance(value, int) and key is not None and key.kinds == (float,):
        return float(value)
    if isinstance(value, list) and key is not None and key.kinds == (list[float],):
        return [float(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def _show(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "absent"
    return "null" if values[name] is None else str(values[name])
