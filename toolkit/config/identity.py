"""Run identity: eight hex digits of the keys that determine the samples and losses.

These are ``model``, ``data``, ``task``, ``optim``, ``schedule`` and ``train`` without the keys in
``EXECUTION_KEYS``, which decide only how, or for how long, the same run is executed. Different layouts of a
run, or a longer one, share an identity and so a run directory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from toolkit.config.keys import flatten, keys_by_name
from toolkit.config.schema import RunConfig

SECTIONS = ("model", "data", "task", "optim", "schedule", "train")

EXECUTION_KEYS = frozenset(
    {
        "train.steps",  # a longer run continues a shorter one
        "train.early_stopping.*",
        "train.tokens",  # train.steps in other units
        "train.epochs",
        "train.micro_batch",  # the loss is divided by the units of the global batch, however that is cut
        "train.activation_checkpointing",  # recomputes the same activations
        "train.loss_kernel",  # the same loss by another implementation
        "train.loss_chunk",
        "train.on_nonfinite",  # a non-finite step is skipped in any case
        # Rollbacks skip samples. Checkpoints record which, so that every start of the run skips the same.
        "train.on_spike",
        "train.rollback.*",
        "model.attention",  # the same products by another implementation
        "optim.kernel",  # the same update by another implementation
        "data.cache.folder",
        "data.cache.gib",
        # Paths of the data on this machine. The stream's fingerprint identifies the data, so that a run with
        # a moved folder resumes, and resuming with other samples is refused.
        "data.path",
        "data.sources.*.path",
        "data.dataset.path",
        "data.dataset.tokenizer",
        "data.workers",  # processes
        "data.dataset.workers",
        "data.dataset.trust_remote_code",  # the tokenizer is identified by its hash
        "data.special_tokens",  # refuse and text give equal tokens; parse is part of the stream's fingerprint
    }
)


def identity(config: RunConfig) -> str:
    """Eight hex digits, equal in every process and for every order of keys.

    Default values are left out, so that a key added in a later version does not change the identity of older
    runs.
    """
    keys = keys_by_name()
    decisive = {
        name: value
        for name, value in _decisive(config).items()
        if name not in keys or value != _plain(name, keys[name].default)
    }
    text = json.dumps(decisive, sort_keys=True, separators=(",", ":"), allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@cache
def is_execution_key(name: str) -> bool:
    """Return whether the key ``name`` decides only how a run is executed."""
    return any(fnmatchcase(name, pattern) for pattern in EXECUTION_KEYS)


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
    return {name: _plain(name, value) for name, value in found.items() if not is_execution_key(name)}


def _plain(name: str, value: Any) -> Any:
    """``value`` as a JSON value.

    An int for a key of type float becomes a float, whatever created the configuration.
    """
    key = keys_by_name().get(name)
    if isinstance(value, int) and key is not None and key.kinds == (float,):
        return float(value)
    if isinstance(value, list) and key is not None and key.kinds == (list[float],):
        return [float(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def _show(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "absent"
    return "null" if values[name] is None else str(values[name])
