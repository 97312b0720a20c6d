"""The sections ``hooks`` and ``monitor.sinks``: objects of the user's own code by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.errors import Problem

EXAMPLES = {"hooks": "my.package.Hook", "metrics": "my.package.Metric", "monitor.sinks": "my.package.Sink"}
# Sinks of toolkit/monitor/sinks that are used by their name alone, and the package that each needs.
SINK_TARGETS = {
    "tensorboard": ("toolkit.monitor.sinks.tensorboard.TensorBoardSink", "tensorboard"),
    "mlflow": ("toolkit.monitor.sinks.mlflow.MlflowSink", "mlflow"),
    "aim": ("toolkit.monitor.sinks.aim.AimSink", "aim"),
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def sink_target(name: str, given: Mapping[str, Any]) -> str | None:
    """Return the target of one of ``monitor.sinks``; the names in SINK_TARGETS need none."""
    return given.get("target") or SINK_TARGETS.get(name, (None,))[0]


def hook_ranks(given: Mapping[str, Any], ranks: int) -> tuple[int, ...]:
    """Return the ranks on which a hook runs: ``all`` (the default), ``first``, or numbers."""
    wanted = given.get("ranks", "all")
    if wanted == "all":
        return tuple(range(ranks))
    return (0,) if wanted == "first" else tuple(sorted(set(wanted)))


def object_problems(section: str, objects: Mapping[str, Any], ranks: int) -> Iterator[Problem]:
    """Yield what is wrong with the objects of a section, without looking at their targets.

    Args:
        ranks: number of ranks of the run.
    """
    example = EXAMPLES[section]
    keys = ["target", "arguments", *(["ranks"] if section == "hooks" else [])]
    for name, given in objects.items():
        key = f"{section}.{name}"
        if not _NAME.fullmatch(str(name)):
            yield Problem(
                key,
                key,
                "a name has only letters, digits, '_' and '-', and begins with a letter",
                f"rename it: +{section}.mine.target={example}",
            )
            continue
        if not isinstance(given, Mapping):
            yield Problem(
                key,
                f"{key}={given}",
                f"{key} has the keys {', '.join(keys)}",
                f"write +{key}.target={given if isinstance(given, str) and '.' in given else example}",
            )
            continue
        for unknown in given.keys() - set(keys):
            close = difflib.get_close_matches(str(unknown), keys, n=1)
            yield Problem(
                f"{key}.{unknown}",
                f"{key}.{unknown}={given[unknown]}",
                f"{key} has the keys {', '.join(keys)}",
                f"write +{key}.{close[0]}={given[unknown]}"
                if close
                else f"if it is an argument of the class, write +{key}.arguments.{unknown}={given[unknown]}",
            )
        target = sink_target(name, given) if section == "monitor.sinks" else given.get("target")
        if not isinstance(target, str):
            known = f", or one of the names {', '.join(SINK_TARGETS)}" if section == "monitor.sinks" else ""
            yield Problem(
                f"{key}.target",
                f"{key}.target={'null' if target is None else target}",
                f"{key} has a target, the dotted path of a class{known}",
                f"write +{key}.target={example}",
            )
        arguments = given.get("arguments")
        if arguments is not None and not isinstance(arguments, Mapping):
            yield Problem(
                f"{key}.arguments",
                f"{key}.arguments={arguments}",
                "arguments have names",
                f"write +{key}.arguments.NAME={arguments}",
            )
        if section == "hooks":
            yield from _rank_problems(key, given.get("ranks", "all"), ranks)


def _rank_problems(key: str, wanted: Any, ranks: int) -> Iterator[Problem]:
    if wanted in ("all", "first"):
        return
    numbers = isinstance(wanted, list | tuple) and all(type(rank) is int for rank in wanted)
    if not numbers or not wanted:
        example = f"[{wanted}]" if type(wanted) is int and 0 <= wanted < ranks else "all"
        yield Problem(
            f"{key}.ranks",
            f"{key}.ranks={wanted}",
            "the ranks of a hook are all, first (rank 0), or a list of numbers",
            f"write +{key}.ranks={example}",
        )
    elif min(wanted) < 0 or max(wanted) >= ranks:
        yield Problem(
            f"{key}.ranks",
            f"{key}.ranks=[{','.join(map(str, wanted))}], {ranks} rank{'s' * (ranks > 1)}",
            "the ranks of a hook are numbers from 0 to the number of ranks - 1",
            f"write +{key}.ranks=all, or ranks from 0 to {ranks - 1}",
        )
