"""``launch/prepare.py``: a folder of tokenised shards from text. Started again after any end, it goes on where it was.

OUTPUT/train-00000.bin .idx ..., validation-00000 ..., tokenizer/, sources.json, report.json, lengths.png
OUTPUT/manifest.json      written last: without it the folder is no data
OUTPUT/.work/             plan, parts and receipts, while it is made; about as large as the shards, and a copy of an input in a store
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.config.keys import flatten
from toolkit.config.prepare import InputFormat, PrepareConfig
from toolkit.config.urls import is_url
from toolkit.data.digest import digest
from toolkit.data.manifest import NAME as MANIFEST
from toolkit.data.manifest import DataManifest, TokenizerInfo, read_manifest
from toolkit.data.prepare import merge, report, store, tokenise
from toolkit.data.prepare.changes import changes, relaxed, replanned
from toolkit.data.prepare.check import check_first_rows
from toolkit.data.prepare.parts import SPLITS, read_receipts
from toolkit.data.prepare.plan import (
    Listing,
    Plan,
    as_typed,
    drafted,
    list_input,
    make_plan,
    read_plan,
    recipe,
)
from toolkit.data.prepare.split import validation_below
from toolkit.data.prepare.vocabulary import ready_vocabulary, vocabulary
from toolkit.data.prepare.work import each
from toolkit.data.tokens import stdlib
from toolkit.data.tokens.index import token_dtype
from toolkit.data.tokens.tokenizer import FOLDER as TOKENIZER
from toolkit.errors import InputError, Problem
from toolkit.progress import Progress

WORK = ".work"
STDLIB = "stdlib"
STDLIB_PATH = "data/stdlib"  # where training with data=stdlib finds it
# Keys that the embedded text takes; the rest of how it is made is fixed, so that every machine has the same.
STDLIB_KEYS = {
    "input",
    "output",
    "workers",
    "memory_mib",
    "sequence_length",
    "samples",
    "tokenizer.vocab_size",
}


def prepare(config: PrepareConfig, progress: Progress) -> DataManifest:
    """Make the data folder, or find it made.

    Raises:
        InputError: the input cannot be read, changed meanwhile, or the output holds something else.
    """
    if config.input == STDLIB:
        return _stdlib(config, progress)
    output = output_folder(config)
    listed = store.list_store(config, output / WORK) if _in_store(config) else list_input(config)
    if (output / MANIFEST).is_file():
        return _found(config, listed, output, progress)
    work = output / WORK
    if output.is_dir() and not work.is_dir() and any(output.iterdir()):
        raise _occupied(output, "it holds other files")
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _alone(work):
            if (output / MANIFEST).is_file():  # by a process that was here before us
                return _found(config, listed, output, progress)
            return _make(config, listed, work, output, progress)
    except OSError as error:
        rule, remedy = (
            "the input can be read and the output folder written, with room in it",
            "mend it, or name another one: output=FOLDER",
        )
        raise InputError(Problem("output", f"output={output}: {error}", rule, remedy)) from error


def _in_store(config: PrepareConfig) -> bool:
    """Datasets are opened by a package that knows URLs of its own."""
    url = is_url(config.input or "") and not str(config.input).startswith("file://")
    return url and config.format is not InputFormat.dataset


def output_folder(config: PrepareConfig) -> Path:
    if config.output is not None:
        return Path(config.output)
    assert config.input is not None
    stem = Path(config.input).name.partition(".")[0]
    if not stem or not all(letter.isalnum() or letter in "-_" for letter in stem):
        remedy = "write output=FOLDER"
        raise InputError(
            Problem(
                "output",
                f"input={config.input} without output",
                "an input without a plain name needs an output",
                remedy,
            )
        )
    return Path("data", stem)


def _make(
    config: PrepareConfig, listed: Listing, work: Path, output: Path, progress: Progress
) -> DataManifest:
    if listed.url is not None:
        store.fetch(listed, progress)
    plan = _plan(config, listed, work, progress)
    workers = config.workers or os.cpu_count() or 1
    for folder in (tokenise.PARTS, merge.SHARDS):
        (work / folder).mkdir(exist_ok=True)
    tokenizer = ready_vocabulary(config, plan, work, output, progress)
    words = vocabulary(output, tokenizer, plan)
    left, before = tokenise.units_left(work / tokenise.PARTS, plan)
    total = sum(unit.bytes for unit in plan.units)
    with progress.task("tokenising", total=total or None, unit="B", done=before) as task:
        each(partial(tokenise.tokenising, work, words), left, workers, task)
    assert not tokenise.units_left(work / tokenise.PARTS, plan)[0], "every unit is done"
    receipts = read_receipts(work / tokenise.PARTS)
    if not sum(receipt.tokens[0] for receipt in receipts):
        kept, empty = sum(receipt.kept[1] for receipt in receipts), sum(receipt.empty for receipt in receipts)
        seen = (
            f"input={config.input}: {kept} documents for validation, {empty} without text, none for training"
        )
        raise InputError(
            Problem(
                "input",
                seen,
                f"the split {SPLITS[0]} gets a document",
                "give more text, or write validation=0",
            )
        )
    shards = merge.pieces(receipts, words.dtype.itemsize, config.shard_mib << 20)
    _write_shards(config, work, output, tokenizer, shards, workers, progress)
    changed = changes(plan, listed).first()
    if changed is not None:
        seen, rule = (
            f"{listed.url or listed.root}/{changed} since the preparation began",
            "the input stays as it is while it is prepared",
        )
        raise InputError(
            Problem("input", seen, rule, "run the command again: only what changed is read again")
        )
    manifest = report.finish(
        plan, output, tokenizer, words.dtype, receipts, shards, merge.written(work, shards)
    )
    shutil.rmtree(work)
    return manifest


def _write_shards(
    config: PrepareConfig,
    work: Path,
    output: Path,
    tokenizer: TokenizerInfo,
    shards: list[merge.Piece],
    workers: int,
    progress: Progress,
) -> None:
    for left_over in output.glob(
        "*.partial-*"
    ):  # of a killed process: nobody else writes while we hold the lock
        left_over.unlink()
    done = merge.written(work, shards)
    left = [number for number in range(len(shards)) if number not in done]
    begin = partial(
        merge.merging,
        work,
        output,
        token_dtype(tokenizer.size),
        shards,
        config.memory_mib << 20,
        config.deduplicate,
    )
    total, before = sum(piece.bytes for piece in shards), sum(shards[number].bytes for number in done)
    with progress.task("writing shards", total=total, unit="B", done=before) as task:
        each(begin, left, workers, task)


def _plan(config: PrepareConfig, listed: Listing, work: Path, progress: Progress) -> Plan:
    """The plan under way, if it is of this recipe, brought up to date with the input; a new one if nothing was tokenised by it."""
    before = read_plan(work)
    if before is not None:
        plan = relaxed(before, config)
        problems, found = (
            _differences(plan.recipe, config, work.parent, "is being made"),
            changes(plan, listed),
        )
        if not problems and not found:
            if plan != before:
                plan.write(work)
            return plan
        if any((work / tokenise.PARTS).glob("*.json")):
            if problems:
                raise InputError(*problems)
            plan = replanned(plan, found, config, listed, work, progress)
            plan.write(work)
            return plan
        shutil.rmtree(
            work.parent / TOKENIZER, ignore_errors=True
        )  # of a recipe or an input that was mistaken
    draft = drafted(config, listed)
    check_first_rows(draft, range(len(draft.sources)), progress)
    plan = make_plan(config, listed, progress)
    plan = replace(plan, validation_below=validation_below(plan, progress))
    plan.write(work)
    return plan


# -- what is there already


def _found(config: PrepareConfig, listed: Listing, output: Path, progress: Progress) -> DataManifest:
    """The finished folder, if it is of this recipe and input."""
    manifest = read_manifest(output)
    problems = _differences(manifest.recipe, config, output, "was made")
    if problems:
        raise InputError(*problems)
    _check_input(listed, output, progress)
    shutil.rmtree(output / WORK, ignore_errors=True)  # killed after the manifest, before the end
    return manifest


def _differences(made: Any, config: PrepareConfig, output: Path, how: str) -> list[Problem]:
    """A problem for each key of the recipe in which what is there differs from what is asked."""
    if not made:
        raise _occupied(output, "it was made by something else")
    wanted = recipe(config)
    if made.get("version") != wanted["version"]:
        seen = f"output={output} {how} by recipe version {made.get('version')}, and this toolkit has version {wanted['version']}"
        return [
            Problem(
                "output",
                seen,
                "an output is of one recipe; what is made stays",
                "name another output: output=FOLDER",
            )
        ]
    return [
        Problem(key, f"{key}={as_typed(wanted.get(key))}, and output={output} {how} with {key}={as_typed(made.get(key))}",
                "an output is of one recipe; what is made stays",
                f"write {key}={as_typed(made.get(key))}, or name another output: output=FOLDER")
        for key in [*made, *(key for key in wanted if key not in made)] if wanted.get(key) != made.get(key)
    ]  # fmt: skip


def _check_input(listed: Listing, output: Path, progress: Progress) -> None:
    """The input is the one that ``output`` was made of. A file that was touched since is read and compared."""
    made = {source["name"]: source for source in json.loads((output / report.SOURCES).read_bytes())}
    since = (output / MANIFEST).stat().st_mtime_ns
    names = {name for name, *_ in listed.files}
    problem = next((f"{name} is new" for name in sorted(names - made.keys())), None)
    problem = problem or next((f"{name} is gone" for name in sorted(made.keys() - names)), None)
    touched = []
    for name, _, size, modified in listed.files:
        if problem is None and size != made[name]["bytes"]:
            problem = f"{name} has {size} bytes, and had {made[name]['bytes']}"
        elif (
            modified
            and (modified if listed.url is not None else Path(listed.root, name).stat().st_ctime_ns) > since
        ):
            touched.append(name)
    if problem is None and touched:
        problem = _other_content(listed, touched, made, progress)
    if problem is not None:
        seen, rule = (
            f"input: {problem} since output={output} was made",
            "an output is of one input; what is made stays",
        )
        raise InputError(Problem("input", seen, rule, "name another output: output=FOLDER"))


def _other_content(
    listed: Listing, names: Sequence[str], made: Mapping[str, Any], progress: Progress
) -> str | None:
    """The first of these files that is not what was read."""
    with progress.task("comparing the input", total=len(names), unit="files") as task:
        now = store.xxh3_128(listed, names) if listed.url is not None else {}
        for name in names:
            if (now.get(name) or digest(Path(listed.root, name)).xxh3_128) != made[name]["xxh3_128"]:
                return f"{name} has another content"
            task.advance()
    return None


def _occupied(output: Path, why: str) -> InputError:
    rule = "the output is a new folder, or one that this command began"
    return InputError(
        Problem("output", f"output={output}: {why}", rule, "name another output: output=FOLDER")
    )


# -- the embedded text, and being alone


def _stdlib(config: PrepareConfig, progress: Progress) -> DataManifest:
    plain = flatten(PrepareConfig(input=STDLIB))
    problems = [
        Problem(key, f"{key}={as_typed(value)} with input=stdlib", "how the embedded text is made is fixed, but for its vocabulary",
                "leave it out, or name files of your own: input=FOLDER")
        for key, value in flatten(config).items() if key not in STDLIB_KEYS and value != plain[key]
    ]  # fmt: skip
    if problems:
        raise InputError(*problems)
    return stdlib.ensure(config.output or STDLIB_PATH, config.tokenizer.vocab_size, progress)


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """The kernel lets go of the lock when its holder ends, however it ends."""
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            seen, rule = (
                f"{work.parent} is being prepared by another process",
                "one process prepares a folder at a time",
            )
            raise InputError(
                Problem("output", seen, rule, "wait for it, or name another output: output=FOLDER")
            ) from None
        yield
