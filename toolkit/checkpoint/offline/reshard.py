"""The actions of launch/reshard.py: convert, plan, inspect, verify and diff. Imports no torch."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from toolkit import families
from toolkit.checkpoint.formats import native
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.offline.diff import diff as diff_checkpoints
from toolkit.checkpoint.offline.inspect import describe, summarize_keys
from toolkit.checkpoint.offline.plan import ReshardPlan, plan_reshard
from toolkit.checkpoint.planner import check_available
from toolkit.checkpoint.shard import MASTER, WEIGHT, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.target import CheckpointTarget
from toolkit.checkpoint.target_tensors import choose_weights_dtype, select_target_tensors
from toolkit.checkpoint.verify import verify as verify_checkpoint
from toolkit.config.model import ModelConfig
from toolkit.config.reshard import ReshardConfig, TargetConfig, TargetFormat
from toolkit.errors import CheckpointError, ConfigError, ExitCode, InputError, Problem
from toolkit.families.base import ModelShape
from toolkit.paths import Location, Url
from toolkit.plan.pretrained import resolve_model
from toolkit.progress import Progress, ProgressTask, duration, quantity

# Format -> module in ``formats/`` with ``lay_out(source, config)``.
WRITERS: Mapping[TargetFormat, str] = {
    TargetFormat.deepspeed: "deepspeed.target",
    TargetFormat.universal: "universal.target",
    TargetFormat.megatron: "megatron.target",
    TargetFormat.huggingface: "huggingface.target",
}
PROBE_BYTES = 64 * 2**20


def requested_shape(model: ModelConfig) -> ModelShape | None:
    """Return the shape of the model in the configuration, or None if none is given.

    Raises:
        ConfigError: Sizes without a family. PlanError, InputError: Sizes are missing or invalid.
    """
    if model == ModelConfig():
        return None
    model = resolve_model(model)
    if model.family is None:
        raise ConfigError(
            Problem(
                "model.family",
                "model.family=null, with other keys of model",
                "sizes require a family",
                f"add model=FAMILY, one of {', '.join(families.FAMILIES)}",
            )
        )
    return families.resolve_shape_of(families.load_family(model.family), model)


def open_requested(config: ReshardConfig) -> CheckpointSource:
    """Open ``source``, with the model of the configuration if there is one."""
    assert config.source is not None
    return open_source(config.source, requested_shape(config.model))


def lay_out(source: CheckpointSource, config: TargetConfig) -> CheckpointTarget:
    """Lay out the target that ``config`` requests from ``source``.

    Raises:
        CheckpointError, InputError: The source lacks a tensor, is not of the given model, or the format does
            not support the request.
    """
    if source.shape is not None:
        dtype = choose_weights_dtype(source, config.precision)
        parameters = families.get_family(source.shape.family).parameters(source.shape)
        check_available(
            source.catalog, [(TensorKey(WEIGHT, spec.name), dtype, spec.shape) for spec in parameters]
        )
    states = {key.state for key in source.catalog.tensors} - {WEIGHT, MASTER}
    if config.optimizer and not states:
        raise CheckpointError(
            Problem(
                "target.optimizer",
                f"target.optimizer=true, but {source.folder} has no optimizer state",
                "a target contains only what its source contains",
                "remove the option, or use a checkpoint that training saved",
            )
        )
    if config.format is TargetFormat.native:
        return native.lay_out(
            source,
            select_target_tensors(
                source, config.precision, optimizer=config.optimizer is not False, uniform=False
            ),
        )
    if config.format not in WRITERS:
        raise InputError(
            Problem(
                "target.format",
                f"target.format={config.format.name}",
                "this format can be read but not written",
                f"write one of {', '.join(['native', *(form.name for form in WRITERS)])}",
            )
        )
    target: CheckpointTarget = import_module(f"toolkit.checkpoint.formats.{WRITERS[config.format]}").lay_out(
        source, config
    )
    return target


# ---- converting


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionResult:
    """The result of a conversion. ``resumed``: it continued a killed attempt."""

    path: Path
    source: CheckpointSource
    target: CheckpointTarget
    source_bytes: int
    target_bytes: int
    seconds: float
    resumed: bool
    unused: Sequence[TensorKey]


def convert(config: ReshardConfig, progress: Progress) -> ConversionResult:
    """Write the target of ``config``. Raises UserError if the source is damaged, or the target cannot be laid
    out or written.
    """
    began = time.monotonic()
    assert config.target.path is not None
    path = Path(config.target.path).expanduser().absolute()
    source = open_requested(config)
    target = lay_out(source, config.target)
    conversion = Conversion(
        source,
        target,
        path,
        workers=config.workers,
        examine=config.examine,
        advance=lambda numbytes: task.advance(numbytes),
    )
    target_bytes = sum(file.numbytes for file in target.files)
    _check_disk_space(path, target_bytes - _allocated(conversion.temporary))
    with progress.task("resharding", total=conversion.source_bytes, unit="B") as task:
        resumed = conversion.run()
    return ConversionResult(
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
    """Return the bytes on disk that an earlier attempt left."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def _check_disk_space(path: Path, numbytes: int) -> None:
    folder = next(parent for parent in path.parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if numbytes > free:
        seen = f"target={path} takes {quantity(numbytes, 'B')}, and {folder} has {quantity(free, 'B')} free"
        raise CheckpointError(
            Problem(
                "target",
                seen,
                "a target is written whole",
                "free disk space there, or choose another target=PATH",
            )
        )


def describe_result(result: ConversionResult) -> list[str]:
    """Return the summary of a conversion, as lines."""
    seconds = max(result.seconds, 1e-3)
    rate = quantity(result.target_bytes / seconds, "B")
    lines = [
        f"source     {result.source.format}: {result.source.folder}",
        f"target     {result.target.format}: {result.path}",
        f"step       {'none (no training step)' if result.source.step is None else result.source.step}",
        f"bytes      {quantity(result.source_bytes, 'B')} of tensors read, "
        f"{quantity(result.target_bytes, 'B')} written in "
        f"{duration(seconds)} ({rate}/s), each block hashed",
    ]
    if result.resumed:
        lines.append("resumed    continued an interrupted attempt and kept what it had written")
    return [
        *lines,
        *_dropped(result.unused, result.source),
        *(f"note       {note}" for note in result.target.notes),
    ]


def _dropped(unused: Sequence[TensorKey], source: CheckpointSource) -> list[str]:
    lines = [f"not used   {summarize_keys(unused, source.catalog.tensors)}"] if unused else []
    return [*lines, *(f"left out   {label}" for label in source.omitted)]


# ---- planning


def plan(config: ReshardConfig) -> list[str]:
    """Return what the same command with action=convert would do, as lines. Raises UserError as that would
    before its first byte.
    """
    source = open_requested(config)
    target = lay_out(source, config.target)
    found = plan_reshard(source.catalog, target, examine=config.examine)
    folder = (
        Path(config.target.path).expanduser().absolute().parent if config.target.path is not None else None
    )
    rate, how = (
        (config.rate * 1e9, "as stated")
        if config.rate is not None
        else measure_copy_rate(source.folder, folder)
    )
    return [
        f"source     {source.format}: {source.folder}",
        f"target     {target.format}: {config.target.path or 'not named'}, {len(target.files)} files, "
        f"{found.tensors} tensors",
        *_numbers(found, config.workers, rate, how),
        *_dropped(found.unused, source),
        *(f"note       {note}" for note in target.notes),
        "proven     every element of the source is stored once, every byte of the target is written once",
    ]


def _numbers(numbers: ReshardPlan, workers: int, rate: float | None, how: str) -> list[str]:
    estimate = (
        f"about {duration(max(numbers.bytes_read, numbers.target_bytes) / rate)} at {quantity(rate, 'B')}/s, "
        f"{how}"
        if rate
        else how
    )
    return [
        f"reads      {quantity(numbers.bytes_read, 'B')} in {numbers.reads:,} reads of "
        f"{numbers.files_read:,} files ({numbers.source_pieces:,} pieces)",
        f"writes     {quantity(numbers.bytes_written, 'B')} in {numbers.writes:,} writes "
        f"({numbers.target_pieces:,} pieces); {quantity(numbers.fixed_bytes, 'B')} of headers, "
        f"{quantity(numbers.padding_bytes, 'B')} of padding",
        f"memory     {workers} workers of at most {quantity(numbers.worker_bytes, 'B')} each, besides Python "
        "and the list of pieces",
        f"time       {estimate}",
    ]


def measure_copy_rate(source: Location, target: Path | None) -> tuple[float | None, str]:
    """Return the bytes per second of a copy from ``source`` to the folder ``target``, including fsync, and a
    description.

    The temporary copy is removed.
    """
    if isinstance(source, Url):
        return None, "unknown: set rate=GB_PER_SECOND, the speed at which the store is read"
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
            "unknown: set target=PATH, where 64 MiB are copied to measure it, or rate=GB_PER_SECOND",
        )
    temporary = target / f".{os.getpid()}.reshard-probe"
    count = 0
    with largest.open("rb", buffering=0) as read:
        # drop cached pages, as of a source that was not read before
        os.posix_fadvise(read.fileno(), 0, PROBE_BYTES, os.POSIX_FADV_DONTNEED)
        began = time.monotonic()
        try:
            with temporary.open("wb", buffering=0) as written:
                while count < PROBE_BYTES and (block := read.read(2**22)):
                    written.write(block)
                    count += len(block)
                os.fsync(written.fileno())
        finally:
            temporary.unlink(missing_ok=True)
    seconds = time.monotonic() - began
    return (count / seconds if count else None), f"measured by copying {quantity(count, 'B')} there"


# ---- inspecting and comparing


def inspect(config: ReshardConfig) -> list[str]:
    """Describe ``source``. Raises UserError if it is not a checkpoint, or damaged."""
    return describe(open_requested(config))


def verify(config: ReshardConfig, progress: Progress) -> tuple[ExitCode, list[str]]:
    """Verify ``source``. Returns the exit code and the findings as lines."""
    assert config.source is not None
    findings = verify_checkpoint(
        config.source,
        requested_shape(config.model),
        workers=config.workers,
        advance=_show_progress(progress, "verifying"),
    )
    if findings:
        return ExitCode.FAILURE, [f"{config.source} is damaged:", *map(str, findings)]
    return ExitCode.DONE, [f"{config.source} is intact: every byte was checked"]


def diff(config: ReshardConfig, progress: Progress) -> tuple[ExitCode, list[str]]:
    """Compare ``source`` (left) with ``target`` (right).

    Returns the exit code and the differences as lines.
    """
    assert config.source is not None
    assert config.target.path is not None
    found = diff_checkpoints(
        config.source,
        config.target.path,
        requested_shape(config.model),
        workers=config.workers,
        advance=_show_progress(progress, "comparing"),
    )
    return ExitCode.DONE if found.equal else ExitCode.FAILURE, found.lines()


def _show_progress(progress: Progress, description: str) -> Callable[[int, int], None]:
    """Return an ``advance`` callback (bytes since the last call, total) that shows progress."""
    tasks: list[ProgressTask] = []

    def advance(done: int, total: int) -> None:
        if not tasks:
            tasks.append(progress.task(description, total=total, unit="B"))
        tasks[0].advance(done)

    return advance
