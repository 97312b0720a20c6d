"""What launch/reshard.py does: a checkpoint of any format becomes one of any other, or is looked at. Imports no torch."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from toolkit import families
from toolkit.checkpoint import verify as looking
from toolkit.checkpoint.formats import native
from toolkit.checkpoint.offline import diff as comparing
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.offline.inspect import describe, named
from toolkit.checkpoint.offline.plan import ReshardPlan, plan_reshard
from toolkit.checkpoint.planner import check
from toolkit.checkpoint.shard import MASTER, WEIGHT, TensorKey
from toolkit.checkpoint.source import Source, open_source
from toolkit.checkpoint.states import tensors_of, weights_dtype
from toolkit.checkpoint.target import Target
from toolkit.config.reshard import Format, ReshardConfig, TargetConfig
from toolkit.config.schema import ModelConfig
from toolkit.errors import CheckpointError, ConfigError, ExitCode, InputError, Problem
from toolkit.families.base import ModelShape
from toolkit.plan.pretrained import resolve_model
from toolkit.progress import Progress, ProgressTask, duration, quantity

# Modules of ``formats/`` with ``lay_out(source, config)``.
WRITERS: Mapping[Format, str] = {
    Format.deepspeed: "deepspeed_target",
    Format.universal: "universal_target",
    Format.megatron: "megatron_target",
    Format.huggingface: "huggingface_target",
}
PROBE_BYTES = 64 * 2**20


def shape_said(model: ModelConfig) -> ModelShape | None:
    """What the user says that the model is; None where nothing is said.

    Raises:
        ConfigError: sizes of no family. PlanError, InputError: sizes are missing or do not fit.
    """
    if model == ModelConfig():
        return None
    model = resolve_model(model)
    if model.family is None:
        raise ConfigError(
            Problem(
                "model.family",
                "model.family=null, with other keys of model",
                "sizes are those of a family",
                f"write model=FAMILY too, one of {', '.join(families.FAMILIES)}",
            )
        )
    return families.get_family(model.family).resolve_shape(model)


def open_asked(config: ReshardConfig) -> Source:
    """``source``, as the model that is said or that it is of."""
    assert config.source is not None
    return open_source(config.source, shape_said(config.model))


def lay_out(source: Source, config: TargetConfig) -> Target:
    """What ``config`` asks for, of what ``source`` has.

    Raises:
        CheckpointError, InputError: the source does not have it, or is not of the model that is said, or the format cannot have it so.
    """
    if source.shape is not None:
        dtype = weights_dtype(source, config.precision)
        parameters = families.get_family(source.shape.family).parameters(source.shape)
        check(source.catalog, [(TensorKey(WEIGHT, spec.name), dtype, spec.shape) for spec in parameters])
    states = {key.state for key in source.catalog.tensors} - {WEIGHT, MASTER}
    if config.optimizer and not states:
        raise CheckpointError(
            Problem(
                "target.optimizer",
                f"target.optimizer=true, and {source.folder} has no optimizer's state",
                "a target holds what its source holds",
                "leave it out, or take a checkpoint that training saved",
            )
        )
    if config.format is Format.native:
        return native.lay_out(
            source,
            tensors_of(source, config.precision, optimizer=config.optimizer is not False, uniform=False),
        )
    if config.format not in WRITERS:
        raise InputError(
            Problem(
                "target.format",
                f"target.format={config.format.name}",
                "that format is read only, so far",
                f"write one of {', '.join(['native', *(one.name for one in WRITERS)])}",
            )
        )
    target: Target = import_module(f"toolkit.checkpoint.formats.{WRITERS[config.format]}").lay_out(
        source, config
    )
    return target


# ---- converting


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What was done. ``resumed``: an earlier attempt had been killed, and this one went on."""

    path: Path
    source: Source
    target: Target
    source_bytes: int
    target_bytes: int
    seconds: float
    resumed: bool
    unused: Sequence[TensorKey]


def convert(config: ReshardConfig, progress: Progress) -> Converted:
    """Raises UserError: the source is damaged, the target cannot be laid out or written."""
    began = time.monotonic()
    assert config.target.path is not None
    path = Path(config.target.path).expanduser().absolute()
    source = open_asked(config)
    target = lay_out(source, config.target)
    conversion = Conversion(
        source.catalog,
        target,
        path,
        origin=source.origin(),
        refuse=source.refuse,
        workers=config.workers,
        examine=config.examine,
        advance=lambda numbytes: task.advance(numbytes),
    )
    target_bytes = sum(file.numbytes for file in target.files)
    _check_room(path, target_bytes - _allocated(conversion.temporary))
    with progress.task("resharding", total=conversion.source_bytes, unit="B") as task:
        resumed = conversion.run()
    return Converted(
        path=path,
        source=source,
        target=target,
        source_bytes=conversion.source_bytes,
        target_bytes=target_bytes,
        seconds=time.monotonic() - began,
        resumed=resumed,
        unused=conversion.unused,
    )


def _allocated(folder: Path) -> int:
    """Bytes on disk of what an attempt before left."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def _check_room(path: Path, numbytes: int) -> None:
    folder = next(parent for parent in path.parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if numbytes > free:
        seen = f"target={path} takes {quantity(numbytes, 'B')}, and {folder} has {quantity(free, 'B')} free"
        raise CheckpointError(
            Problem(
                "target", seen, "a target is written whole", "free room there, or name another target=PATH"
            )
        )


def words_of(done: Converted) -> list[str]:
    """Of a conversion, for people."""
    seconds = max(done.seconds, 1e-3)
    rate = quantity(done.target_bytes / seconds, "B")
    lines = [
        f"source     {done.source.format}: {done.source.folder}",
        f"target     {done.target.format}: {done.path}",
        f"step       {'of no training step' if done.source.step is None else done.source.step}",
        f"bytes      {quantity(done.source_bytes, 'B')} of tensors read, {quantity(done.target_bytes, 'B')} written in "
        f"{duration(seconds)} ({rate}/s), each block hashed",
    ]
    if done.resumed:
        lines.append("resumed    an attempt before this one was ended; what it had written was taken over")
    return [
        *lines,
        *_dropped(done.unused, done.source),
        *(f"mind       {words}" for words in done.target.notes),
    ]


def _dropped(unused: Sequence[TensorKey], source: Source) -> list[str]:
    lines = [f"not used   {named(unused, source.catalog.tensors)}"] if unused else []
    return [*lines, *(f"left out   {words}" for words in source.left_out)]


# ---- planning


def plan(config: ReshardConfig) -> list[str]:
    """What the same words with action=convert would do, in lines for people. Raises UserError as that would before its first byte."""
    source = open_asked(config)
    target = lay_out(source, config.target)
    found = plan_reshard(source.catalog, target, examine=config.examine)
    folder = (
        Path(config.target.path).expanduser().absolute().parent if config.target.path is not None else None
    )
    rate, how = (config.rate * 1e9, "as stated") if config.rate is not None else probe(source.folder, folder)
    return [
        f"source     {source.format}: {source.folder}",
        f"target     {target.format}: {config.target.path or 'not named'}, {len(target.files)} files, {found.tensors} tensors",
        *_numbers(found, config.workers, rate, how),
        *_dropped(found.unused, source),
        *(f"mind       {words}" for words in target.notes),
        "proven     every element of the source is in one place, every byte of the target is written once",
    ]


def _numbers(found: ReshardPlan, workers: int, rate: float | None, how: str) -> list[str]:
    estimate = (
        f"about {duration(max(found.bytes_read, found.target_bytes) / rate)} at {quantity(rate, 'B')}/s, {how}"
        if rate
        else how
    )
    return [
        f"reads      {quantity(found.bytes_read, 'B')} in {found.reads:,} reads of {found.files_read:,} files "
        f"({found.source_pieces:,} pieces)",
        f"writes     {quantity(found.bytes_written, 'B')} in {found.writes:,} writes ({found.target_pieces:,} pieces); "
        f"{quantity(found.fixed_bytes, 'B')} of headers, {quantity(found.padding_bytes, 'B')} of padding",
        f"memory     {workers} workers of at most {quantity(found.worker_bytes, 'B')} each, besides Python and the list of pieces",
        f"time       {estimate}",
    ]


def probe(source: Path, target: Path | None) -> tuple[float | None, str]:
    """Bytes a second that are copied from ``source`` to the folder ``target``, fsync included, and how that was found. Leaves nothing."""
    largest = max(
        (path for path in source.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
        default=None,
    )
    while target is not None and not target.is_dir():
        target = target.parent
    if target is None or largest is None or not os.access(target, os.W_OK):
        return (
            None,
            "unknown: write target=PATH, where 64 MiB are copied to measure it, or rate=GB_PER_SECOND",
        )
    place = target / f".{os.getpid()}.reshard-probe"
    count = 0
    with largest.open("rb", buffering=0) as read:
        os.posix_fadvise(
            read.fileno(), 0, PROBE_BYTES, os.POSIX_FADV_DONTNEED
        )  # as a source that nobody has looked at
        began = time.monotonic()
        try:
            with place.open("wb", buffering=0) as written:
                while count < PROBE_BYTES and (block := read.read(2**22)):
                    written.write(block)
                    count += len(block)
                os.fsync(written.fileno())
        finally:
            place.unlink(missing_ok=True)
    seconds = time.monotonic() - began
    return (count / seconds if count else None), f"measured by copying {quantity(count, 'B')} there"


# ---- looking


def inspect(config: ReshardConfig) -> list[str]:
    """What ``source`` is. Raises UserError: it is no checkpoint, or a damaged one."""
    return describe(open_asked(config))


def verify(config: ReshardConfig, progress: Progress) -> tuple[ExitCode, list[str]]:
    """Whether ``source`` is sound, and what is wrong with it."""
    assert config.source is not None
    findings = looking.verify(
        config.source, shape_said(config.model), workers=config.workers, advance=_shown(progress, "verifying")
    )
    if findings:
        return ExitCode.FAILURE, [f"{config.source} is not sound:", *map(str, findings)]
    return ExitCode.DONE, [f"{config.source} is sound: every byte was looked at"]


def diff(config: ReshardConfig, progress: Progress) -> tuple[ExitCode, list[str]]:
    """Whether ``source`` (the left) and ``target`` (the right) hold the same, and what differs."""
    assert config.source is not None
    assert config.target.path is not None
    found = comparing.diff(
        config.source,
        config.target.path,
        shape_said(config.model),
        workers=config.workers,
        advance=_shown(progress, "comparing"),
    )
    return ExitCode.DONE if found.equal else ExitCode.FAILURE, found.lines()


def _shown(progress: Progress, description: str) -> Callable[[int, int], None]:
    """``advance`` of long looks: bytes done since the last call, and all of them."""
    tasks: list[ProgressTask] = []

    def advance(done: int, total: int) -> None:
        if not tasks:
            tasks.append(progress.task(description, total=total, unit="B"))
        tasks[0].advance(done)

    return advance
