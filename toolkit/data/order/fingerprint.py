"""Fingerprints of samples, compared: a run continues on the samples and in the order that it began with."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.errors import CheckpointError, Problem

FORK = "or start a new run from that state: run.fork=PATH"
Remedy = tuple[
    str, str
]  # the key that an entry comes from, and what to do; {key} and {saved} stand for the entry's


def check_same(
    mine: Mapping[str, object],
    saved: Mapping[str, object],
    remedies: Mapping[str, Remedy],
    *,
    otherwise: Remedy | None = None,
    details: Mapping[str, str] | None = None,
) -> None:
    """Every entry of either is the same in both.

    Args:
        remedies: by the first word of an entry's name.
        otherwise: of entries that ``remedies`` has not; None: such entries only explain others.
        details: by an entry's name, what to add to what was seen.

    Raises:
        CheckpointError: names everything that differs.
    """
    problems = []
    for name in sorted(mine.keys() | saved.keys()):
        remedy = remedies.get(name.partition(" ")[0], otherwise)
        if remedy is None or saved.get(name) == mine.get(name):
            continue
        seen = f"{name}={mine.get(name)}, the checkpoint has {name}={saved.get(name)}{(details or {}).get(name, '')}"
        key, words = (part.format(key=name, saved=saved.get(name)) for part in remedy)
        problems.append(
            Problem(key, seen, "a run continues on the samples and in the order it began with", words)
        )
    if problems:
        raise CheckpointError(*problems)
