"""An input that changed while it was prepared: what was tokenised of files that did not change is kept, the others are read again.

The result is the one of a preparation that began with the input as it is now, except for a tokenizer that was trained before.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.config.prepare import OnBadRow, PrepareConfig
from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.digest import digest
from toolkit.data.prepare import merge, tokenise
from toolkit.data.prepare.check import check_first_rows
from toolkit.data.prepare.parts import SPLITS, remove_parts
from toolkit.data.prepare.plan import Listing, Plan, Source, Unit, drafted, hashed, recipe, units_of
from toolkit.data.prepare.split import validation_below
from toolkit.progress import Progress

NOTHING = Unit(
    0, 0, 0, 0, 0
)  # in the place of a unit whose files changed: units keep their numbers, which parts are named after
# Keys that only refuse: what was tokenised before is the same with any other value of theirs.
REFUSING = {"special_tokens": SpecialTokens.refuse.name, "on_bad_row": OnBadRow.refuse.name}


@dataclass(frozen=True, slots=True)
class Changes:
    """Names of files; ``same`` are those whose time of change is another and whose content is not."""

    new: frozenset[str]
    gone: frozenset[str]
    other: frozenset[str]
    same: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.new or self.gone or self.other or self.same)

    def first(self) -> str | None:
        """In words, for an error."""
        kinds = {
            **dict.fromkeys(self.new, "is new"),
            **dict.fromkeys(self.gone, "is gone"),
            **dict.fromkeys(self.other, "changed"),
        }
        return next((f"{name} {kinds[name]}" for name in sorted(kinds)), None)


def changes(plan: Plan, listed: Listing) -> Changes:
    """By names, sizes and times of change; a file of which only the time differs is read and compared."""
    planned = {source.name: source for source in plan.present}
    now = _as_now(listed)
    differing = {
        name
        for name in planned.keys() & now.keys()
        if (planned[name].bytes, planned[name].modified) != now[name]
    }
    same = {
        name
        for name in differing
        if planned[name].bytes == now[name][0]
        and digest(Path(listed.root, name)).xxh3_128 == planned[name].xxh3_128
    }
    return Changes(
        frozenset(now.keys() - planned.keys()),
        frozenset(planned.keys() - now.keys()),
        frozenset(differing - same),
        frozenset(same),
    )


def relaxed(plan: Plan, config: PrepareConfig) -> Plan:
    """With ``special_tokens`` and ``on_bad_row`` as they are asked for now, if the plan only refuses by them."""
    wanted = recipe(config)
    changed = {key: wanted[key] for key, refusing in REFUSING.items() if plan.recipe.get(key) == refusing}
    return replace(plan, recipe={**plan.recipe, **changed})


def replanned(
    plan: Plan, found: Changes, config: PrepareConfig, listed: Listing, work: Path, progress: Progress
) -> Plan:
    """The plan of the input as it is now. Parts of files that changed are removed, and so are shards, which hold all of them.

    Raises InputError if the first rows of a changed file cannot be read.
    """
    draft = drafted(config, listed)
    now = {source.name: source for source in draft.sources}
    read_again = found.new | found.other
    sources = [_updated(source, found, now) for source in plan.sources]
    numbers = {source.name: number for number, source in enumerate(sources) if not source.gone}
    for name in sorted(found.new):
        numbers[name] = len(sources)
        sources.append(now[name])
    check_first_rows(
        replace(plan, sources=tuple(sources)), [numbers[name] for name in sorted(read_again)], progress
    )
    fresh = hashed(plan.root, [now[name] for name in sorted(read_again)], progress)
    for source in fresh:
        sources[numbers[source.name]] = source

    touched = {
        number
        for number, source in enumerate(plan.sources)
        if source.name in read_again | found.gone and not source.gone
    }
    voided = {
        number
        for number, unit in enumerate(plan.units)
        if not touched.isdisjoint(range(unit.first, unit.last))
    }
    beside = {number for index in voided for number in range(plan.units[index].first, plan.units[index].last)}
    again = sorted(
        {number for number in beside if not sources[number].gone} | {numbers[name] for name in read_again}
    )
    updated = replace(plan, sources=tuple(sources))
    more = units_of(config, plan.root, [(number, sources[number]) for number in again], updated.bytes)
    units = [NOTHING if index in voided else unit for index, unit in enumerate(plan.units)]
    updated = replace(updated, units=(*units, *more))
    updated = replace(updated, validation_below=validation_below(updated, progress))
    if updated.validation_below != plan.validation_below:
        voided = set(range(len(plan.units)))  # documents change sides
    for index in voided:
        remove_parts(work / tokenise.PARTS, index)
    forget_shards(work)
    return updated


def forget_shards(work: Path) -> None:
    shutil.rmtree(work / merge.SHARDS, ignore_errors=True)
    for split in SPLITS:
        for path in work.parent.glob(f"{split}-*"):
            path.unlink()


def _updated(source: Source, found: Changes, now: dict[str, Source]) -> Source:
    if source.gone or source.name in found.gone:
        return replace(source, gone=True)
    return replace(source, modified=now[source.name].modified) if source.name in found.same else source


def _as_now(listed: Listing) -> dict[str, tuple[int, int]]:
    """The files of a listing as they are now: bytes, time of change."""
    found: dict[str, tuple[int, int]] = {}
    for name, _, size, modified in listed.files:
        path = Path(listed.root, name)
        if not modified:
            found[name] = (size, modified)
        elif path.is_file():
            stat = path.stat()
            found[name] = (stat.st_size, stat.st_mtime_ns)
    return found
