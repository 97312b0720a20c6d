"""Comparison of sample fingerprints: a run continues on the samples and in the order with which it began."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.errors import CheckpointError, Problem

FORK = "or start a new run from that state: run.fork=PATH"
# The key of an entry, and what to do; {key} and {saved} are replaced by the entry's.
Remedy = tuple[str, str]


def check_same(
    mine: Mapping[str, object],
    saved: Mapping[str, object],
    remedies: Mapping[str, Remedy],
    *,
    default: Remedy | None = None,
    details: Mapping[str, str] | None = None,
) -> None:
    """Check that every entry is the same in ``mine`` and ``saved``.

    Args:
        remedies: by the first part of an entry's name.
        otherwise: the remedy of all other entries; None: the other entries are not compared.
        details: text to append to the error of an entry, by its name.

    Raises:
        CheckpointError: names everything that differs.
    """
    problems = []
    for name in sorted(mine.keys() | saved.keys()):
        remedy = remedies.get(name.partition(" ")[0], default)
        if remedy is None or saved.get(name) == mine.get(name):
            continue
        seen = f"{name}={mine.get(name)}, the checkpoint has {name}={saved.get(name)}{(details or {}).get(name, '')}"
        key, text = (part.format(key=name, saved=saved.get(name)) for part in remedy)
        problems.append(
            Problem(key, seen, "a run continues on the samples and in the order with which it began", text)
        )
    if problems:
        raise CheckpointError(*problems)
