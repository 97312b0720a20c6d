"""``launch/prepare.py``: make a folder of tokenised shards from text. After a kill it continues where it was.

OUTPUT/train-00000.bin .idx ..., validation-00000 ..., tokenizer/, sources.json, report.json, lengths.png
OUTPUT/manifest.json    written last: without it the folder is not data
OUTPUT/.work/           plan, parts and receipts of an unfinished preparation, about as large as the
                        shards, and a copy of an input from a store
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
from toolkit.data.digest import hash_file
from toolkit.data.manifest import DataManifest, TokenizerInfo, read_manifest
from toolkit.data.manifest_file import MANIFEST_NAME
from toolkit.data.prepare import merge, report, tokenise
from toolkit.data.prepare.document_keys import find_validation_threshold
from toolkit.data.prepare.input_changes import find_changes, relax_recipe, update_plan
from toolkit.data.prepare.input_store import fetch_input, hash_stored_files, list_store
from toolkit.data.prepare.parts import SPLITS, read_receipts
from toolkit.data.prepare.plan import (
    InputListing,
    PreparationPlan,
    build_recipe,
    draft_plan,
    format_value,
    list_input,
    make_plan,
    read_plan,
)
from toolkit.data.prepare.read import check_first_rows
from toolkit.data.prepare.tokenizer import ensure_tokenizer, tokenizer_spec
from toolkit.data.prepare.worker_pool import run_tasks
from toolkit.data.tokens import stdlib
from toolkit.data.tokens.index import token_dtype
from toolkit.data.tokens.tokenizer import TOKENIZER_FOLDER
from toolkit.errors import InputError, Problem
from toolkit.progress import Progress

WORK = ".work"
STDLIB = "stdlib"
STDLIB_PATH = "data/stdlib"  # the default of data=stdlib
# The settings that apply to the embedded text; all others are fixed, so that every machine has the same data.
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
    """Make the data folder, or find a finished one.

    Raises:
        InputError: the input cannot be read or changed meanwhile, or the output contains something else.
    """
    if config.input == STDLIB:
        return _stdlib(config, progress)
    output = output_folder(config)
    listed = list_store(config, output / WORK) if _in_store(config) else list_input(config)
    if (output / MANIFEST_NAME).is_file():
        return _check_finished(config, listed, output, progress)
    work = output / WORK
    if output.is_dir() and not work.is_dir() and any(output.iterdir()):
        raise _output_error(output, "it contains other files")
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _lock(work):
            if (output / MANIFEST_NAME).is_file():  # finished by another process before the lock was acquired
                return _check_finished(config, listed, output, progress)
            return _prepare_folder(config, listed, work, output, progress)
    except OSError as error:
        rule, remedy = (
            "the input is readable, and the output folder is writable and has room",
            "fix it, or name another one: output=FOLDER",
        )
        raise InputError(Problem("output", f"output={output}: {error}", rule, remedy)) from error


def _in_store(config: PrepareConfig) -> bool:
    """Return whether the input is in a store. Datasets are opened by a package with URLs of its own."""
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


def _prepare_folder(
    config: PrepareConfig, listed: InputListing, work: Path, output: Path, progress: Progress
) -> DataManifest:
    if listed.url is not None:
        fetch_input(listed, progress)
    plan = _load_or_make_plan(config, listed, work, progress)
    workers = config.workers or os.cpu_count() or 1
    for folder in (tokenise.PARTS, merge.SHARDS):
        (work / folder).mkdir(exist_ok=True)
    tokenizer = ensure_tokenizer(config, plan, work, output, progress)
    spec = tokenizer_spec(output, tokenizer, plan)
    remaining, previous = tokenise.find_unfinished_units(work / tokenise.PARTS, plan)
    total = sum(unit.bytes for unit in plan.units)
    with progress.task("tokenising", total=total or None, unit="B", done=previous) as task:
        run_tasks(partial(tokenise.start_tokenising, work, spec), remaining, workers, task)
    assert not tokenise.find_unfinished_units(work / tokenise.PARTS, plan)[0], "every unit is finished"
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
    shards = merge.plan_shards(receipts, spec.dtype.itemsize, config.shard_mib << 20)
    _write_shards(config, work, output, tokenizer, shards, workers, progress)
    change = find_changes(plan, listed).first()
    if change is not None:
        seen, rule = (
            f"{listed.url or listed.root}/{change} since the preparation began",
            "the input stays as it is while it is prepared",
        )
        raise InputError(
            Problem("input", seen, rule, "run the command again: only what changed is read again")
        )
    manifest = report.write_results(
        plan, output, tokenizer, spec.dtype, receipts, shards, merge.read_shard_receipts(work, shards)
    )
    shutil.rmtree(work)
    return manifest


def _write_shards(
    config: PrepareConfig,
    work: Path,
    output: Path,
    tokenizer: TokenizerInfo,
    shards: list[merge.ShardPlan],
    workers: int,
    progress: Progress,
) -> None:
    # Left by a killed process: only the holder of the lock writes here.
    for partial_file in output.glob("*.partial-*"):
        partial_file.unlink()
    finished = merge.read_shard_receipts(work, shards)
    remaining = [number for number in range(len(shards)) if number not in finished]
    start_task = partial(
        merge.start_merging,
        work,
        output,
        token_dtype(tokenizer.size),
        shards,
        config.memory_mib << 20,
        config.deduplicate,
    )
    total, previous = sum(piece.bytes for piece in shards), sum(shards[number].bytes for number in finished)
    with progress.task("writing shards", total=total, unit="B", done=previous) as task:
        run_tasks(start_task, remaining, workers, task)


def _load_or_make_plan(
    config: PrepareConfig, listed: InputListing, work: Path, progress: Progress
) -> PreparationPlan:
    """Return the unfinished plan of this recipe updated to the input, or a new one if no tokens exist yet."""
    previous = read_plan(work)
    if previous is not None:
        plan = relax_recipe(previous, config)
        problems, changed_files = (
            _recipe_problems(plan.recipe, config, work.parent, "is being prepared"),
            find_changes(plan, listed),
        )
        if not problems and not changed_files:
            if plan != previous:
                plan.write(work)
            return plan
        if any((work / tokenise.PARTS).glob("*.json")):
            if problems:
                raise InputError(*problems)
            plan = update_plan(plan, changed_files, config, listed, work, progress)
            plan.write(work)
            return plan
        # The tokenizer of a recipe or an input that was given by mistake.
        shutil.rmtree(work.parent / TOKENIZER_FOLDER, ignore_errors=True)
    draft = draft_plan(config, listed)
    check_first_rows(draft, range(len(draft.sources)), progress)
    plan = make_plan(config, listed, progress)
    plan = replace(plan, validation_below=find_validation_threshold(plan, progress))
    plan.write(work)
    return plan


# -- an output that exists already


def _check_finished(
    config: PrepareConfig, listed: InputListing, output: Path, progress: Progress
) -> DataManifest:
    """Check that the finished folder has this recipe and input."""
    manifest = read_manifest(output)
    problems = _recipe_problems(manifest.recipe, config, output, "was made")
    if problems:
        raise InputError(*problems)
    _check_input(listed, output, progress)
    shutil.rmtree(output / WORK, ignore_errors=True)  # left if killed after writing the manifest
    return manifest


def _recipe_problems(existing_recipe: Any, config: PrepareConfig, output: Path, origin: str) -> list[Problem]:
    """Return a problem for each key in which the existing recipe differs from the configured one."""
    if not existing_recipe:
        raise _output_error(output, "another command wrote it")
    requested = build_recipe(config)
    if existing_recipe.get("version") != requested["version"]:
        seen = (
            f"output={output} {origin} by recipe version {existing_recipe.get('version')}, "
            f"and this toolkit has version {requested['version']}"
        )
        return [
            Problem(
                "output",
                seen,
                "an output has one recipe and is not overwritten",
                "name another output: output=FOLDER",
            )
        ]
    return [
        Problem(
            key,
            f"{key}={format_value(requested.get(key))}, and output={output} {origin} with "
            f"{key}={format_value(existing_recipe.get(key))}",
            "an output has one recipe and is not overwritten",
            f"write {key}={format_value(existing_recipe.get(key))}, or name another output: output=FOLDER",
        )
        for key in [*existing_recipe, *(key for key in requested if key not in existing_recipe)]
        if requested.get(key) != existing_recipe.get(key)
    ]


def _check_input(listed: InputListing, output: Path, progress: Progress) -> None:
    """Check that ``output`` was made from this input. Files modified since are read and compared."""
    recorded_sources = {
        source["name"]: source for source in json.loads((output / report.SOURCES).read_bytes())
    }
    since = (output / MANIFEST_NAME).stat().st_mtime_ns
    names = {name for name, *_ in listed.files}
    problem = next((f"{name} is new" for name in sorted(names - recorded_sources.keys())), None)
    problem = problem or next(
        (f"{name} was removed" for name in sorted(recorded_sources.keys() - names)), None
    )
    touched = []
    for name, _, size, modified in listed.files:
        if problem is None and size != recorded_sources[name]["bytes"]:
            problem = f"{name} has {size} bytes, and had {recorded_sources[name]['bytes']}"
        elif (
            modified
            and (modified if listed.url is not None else Path(listed.root, name).stat().st_ctime_ns) > since
        ):
            touched.append(name)
    if problem is None and touched:
        problem = _first_changed_file(listed, touched, recorded_sources, progress)
    if problem is not None:
        seen, rule = (
            f"input: {problem} since output={output} was made",
            "an output has one input and is not overwritten",
        )
        raise InputError(Problem("input", seen, rule, "name another output: output=FOLDER"))


def _first_changed_file(
    listed: InputListing, names: Sequence[str], recorded_sources: Mapping[str, Any], progress: Progress
) -> str | None:
    """Return the first of these files whose content differs from what was read, or None."""
    with progress.task("comparing the input", total=len(names), unit="files") as task:
        now = hash_stored_files(listed, names) if listed.url is not None else {}
        for name in names:
            if (now.get(name) or hash_file(Path(listed.root, name)).xxh3_128) != recorded_sources[name][
                "xxh3_128"
            ]:
                return f"{name} has different content"
            task.advance()
    return None


def _output_error(output: Path, why: str) -> InputError:
    rule = "the output is a new folder, or one that this command began"
    return InputError(
        Problem("output", f"output={output}: {why}", rule, "name another output: output=FOLDER")
    )


# -- the embedded text, and the lock


def _stdlib(config: PrepareConfig, progress: Progress) -> DataManifest:
    plain = flatten(PrepareConfig(input=STDLIB))
    problems = [
        Problem(
            key,
            f"{key}={format_value(value)} with input=stdlib",
            "the preparation of the embedded text is fixed, except for its vocabulary",
            "leave it out, or name files of your own: input=FOLDER",
        )
        for key, value in flatten(config).items()
        if key not in STDLIB_KEYS and value != plain[key]
    ]
    if problems:
        raise InputError(*problems)
    return stdlib.ensure_stdlib(config.output or STDLIB_PATH, config.tokenizer.vocab_size, progress)


@contextmanager
def _lock(work: Path) -> Iterator[None]:
    """Exclude other processes. The kernel releases the lock when its holder exits for any reason."""
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            seen, rule = (
                f"{work.parent} is being prepared by another process",
                "only one process prepares a folder at a time",
            )
            raise InputError(
                Problem("output", seen, rule, "wait for it, or name another output: output=FOLDER")
            ) from None
        yield
