"""Update a preparation whose input changed: tokens of unchanged files are reused, other files are read again.

The result equals a preparation of the changed input from scratch, except for a tokenizer that was trained
before.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.config.prepare import OnBadRow, PrepareConfig
from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.digest import hash_file
from toolkit.data.prepare import merge, tokenise
from toolkit.data.prepare.document_keys import find_validation_threshold
from toolkit.data.prepare.parts import SPLITS, remove_parts
from toolkit.data.prepare.plan import (
    InputListing,
    InputSource,
    PreparationPlan,
    WorkUnit,
    build_recipe,
    cut_units,
    draft_plan,
    hash_sources,
)
from toolkit.data.prepare.read import check_first_rows
from toolkit.progress import Progress

# Replaces a unit whose files changed: units keep their numbers, after which parts are named.
EMPTY_UNIT = WorkUnit(0, 0, 0, 0, 0)
# Settings that only refuse input: tokens are the same with any other value.
STRICT_SETTINGS = {"special_tokens": SpecialTokens.refuse.name, "on_bad_row": OnBadRow.refuse.name}


@dataclass(frozen=True, slots=True)
class InputChanges:
    """Names of files that were added, removed, modified, or only touched (another time, the same content)."""

    new: frozenset[str]
    removed: frozenset[str]
    modified: frozenset[str]
    touched: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.new or self.removed or self.modified or self.touched)

    def first(self) -> str | None:
        """Describe the first change for an error; None if there is none."""
        descriptions = {
            **dict.fromkeys(self.new, "is new"),
            **dict.fromkeys(self.removed, "was removed"),
            **dict.fromkeys(self.modified, "changed"),
        }
        return next((f"{name} {descriptions[name]}" for name in sorted(descriptions)), None)


def find_changes(plan: PreparationPlan, listed: InputListing) -> InputChanges:
    """Compare names, sizes and times; read and compare files of which only the time differs."""
    planned = {source.name: source for source in plan.present}
    current = _current_stats(listed)
    differing = {
        name
        for name in planned.keys() & current.keys()
        if (planned[name].bytes, planned[name].modified) != current[name]
    }
    touched = {
        name
        for name in differing
        if planned[name].bytes == current[name][0]
        and hash_file(Path(listed.root, name)).xxh3_128 == planned[name].xxh3_128
    }
    return InputChanges(
        frozenset(current.keys() - planned.keys()),
        frozenset(planned.keys() - current.keys()),
        frozenset(differing - touched),
        frozenset(touched),
    )


def relax_recipe(plan: PreparationPlan, config: PrepareConfig) -> PreparationPlan:
    """Update ``special_tokens`` and ``on_bad_row`` in the plan if their planned values only refuse input."""
    requested = build_recipe(config)
    changed = {
        key: requested[key] for key, refusing in STRICT_SETTINGS.items() if plan.recipe.get(key) == refusing
    }
    return replace(plan, recipe={**plan.recipe, **changed})


def update_plan(
    plan: PreparationPlan,
    input_changes: InputChanges,
    config: PrepareConfig,
    listed: InputListing,
    work: Path,
    progress: Progress,
) -> PreparationPlan:
    """Update the plan to the current input. Removes the parts of changed files, and all shards.

    Raises InputError if the first rows of a changed file cannot be read.
    """
    draft = draft_plan(config, listed)
    current = {source.name: source for source in draft.sources}
    read_again = input_changes.new | input_changes.modified
    sources = [_updated(source, input_changes, current) for source in plan.sources]
    numbers = {source.name: number for number, source in enumerate(sources) if not source.gone}
    for name in sorted(input_changes.new):
        numbers[name] = len(sources)
        sources.append(current[name])
    check_first_rows(
        replace(plan, sources=tuple(sources)), [numbers[name] for name in sorted(read_again)], progress
    )
    rehashed = hash_sources(plan.root, [current[name] for name in sorted(read_again)], progress)
    for source in rehashed:
        sources[numbers[source.name]] = source

    changed_sources = {
        number
        for number, source in enumerate(plan.sources)
        if source.name in read_again | input_changes.removed and not source.gone
    }
    obsolete_units = {
        number
        for number, unit in enumerate(plan.units)
        if not changed_sources.isdisjoint(range(unit.first, unit.last))
    }
    unit_sources = {
        number
        for index in obsolete_units
        for number in range(plan.units[index].first, plan.units[index].last)
    }
    reread = sorted(
        {number for number in unit_sources if not sources[number].gone}
        | {numbers[name] for name in read_again}
    )
    updated = replace(plan, sources=tuple(sources))
    new_units = cut_units(config, plan.root, [(number, sources[number]) for number in reread], updated.bytes)
    units = [EMPTY_UNIT if index in obsolete_units else unit for index, unit in enumerate(plan.units)]
    updated = replace(updated, units=(*units, *new_units))
    updated = replace(updated, validation_below=find_validation_threshold(updated, progress))
    if updated.validation_below != plan.validation_below:
        obsolete_units = set(range(len(plan.units)))  # documents move to the other split
    for index in obsolete_units:
        remove_parts(work / tokenise.PARTS, index)
    remove_shards(work)
    return updated


def remove_shards(work: Path) -> None:
    shutil.rmtree(work / merge.SHARDS, ignore_errors=True)
    for split in SPLITS:
        for path in work.parent.glob(f"{split}-*"):
            path.unlink()


def _updated(
    source: InputSource, input_changes: InputChanges, current: dict[str, InputSource]
) -> InputSource:
    if source.gone or source.name in input_changes.removed:
        return replace(source, gone=True)
    return (
        replace(source, modified=current[source.name].modified)
        if source.name in input_changes.touched
        else source
    )


def _current_stats(listed: InputListing) -> dict[str, tuple[int, int]]:
    """Return the current size and modification time of each listed file."""
    stats: dict[str, tuple[int, int]] = {}
    for name, _, size, modified in listed.files:
        path = Path(listed.root, name)
        if not modified:
            stats[name] = (size, modified)
        elif path.is_file():
            stat = path.stat()
            stats[name] = (stat.st_size, stat.st_mtime_ns)
    return stats
