"""Compare resharding a checkpoint with ``cp`` and sync of the same bytes, and with the vendors' tools.

    python benchmarks/reshard.py                                        the whole comparison
    python benchmarks/reshard.py --folder /mnt/nvme --only cp native    another folder; some contenders
    python benchmarks/reshard.py --parameters 20 --runs 1               a quick try

The whole comparison takes 10 to 20 minutes and 20 GB of disk: five runs with 322 M parameters and Adam's
state (3.9 GB).

Contenders, each in its own process, alternating within each run:

    cp                cp -r of the native folder, and sync -f
    native            this toolkit, native to native: the least that it has to do
    zero3-megatron    this toolkit, DeepSpeed ZeRO 3 on 4 ranks to Megatron-core's distributed optimizer
    universal         deepspeed.checkpoint.ds_to_universal of the ZeRO 3 folder, and sync -f
    dcp               torch.distributed.checkpoint: load, and save (which syncs its files)

Every contender processes 12 bytes per parameter: fp32 weights and two moments of a Llama with random values,
written in the vendors' formats before the clock starts. Before each job the page cache is dropped,
completely if permitted, else the files' pages (``--cold files`` always does the latter). Seconds are those
until the bytes are durable, without the start of Python and imports. CPU seconds and peak resident memory
include child processes. Temporary bytes are the most on disk during the job, beyond what is left at the end.
Figures are medians; ratios are medians of the ratios to ``cp`` within runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.environment import describe_machine, package_versions
from reshard_sources import NATIVE, convert, make_dcp, make_native

from toolkit.checkpoint.source import open_source
from toolkit.config.reshard import TargetFormat, TargetOptimConfig, TargetParallelConfig, TargetZeroStage

BYTES_PER_PARAMETER = 12
RANKS = 4
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SMALLER = (16, 4, 1)  # divisors of the model size, for the memory by size
ZERO3, DCP = "zero3", "dcp"
# The source that each contender reads.
CONTENDERS = {"cp": NATIVE, "native": NATIVE, "zero3-megatron": ZERO3, "universal": ZERO3, "dcp": DCP}
OURS = ("native", "zero3-megatron")


# ---- jobs


def copy_and_sync(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", "-f", target], check=True)


def make_job(name: str, source: Path, target: Path) -> Callable[[], object]:
    """Return the function that is timed, after importing what it needs."""
    if name == "universal":
        from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal

        given = argparse.Namespace(
            input_folder=str(next(source.glob("global_step*"))),
            output_folder=str(target),
            num_extract_workers=4,
            num_merge_workers=2,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
        return lambda: (ds_to_universal(given), subprocess.run(["sync", "-f", target], check=True))
    if name == "dcp":
        import torch
        import torch.distributed.checkpoint as dcp

        def load_and_save() -> None:
            stored = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
            tensors = {key: torch.empty(metadata.size) for key, metadata in stored.items()}  # type: ignore[union-attr]
            dcp.load(tensors, checkpoint_id=source, no_dist=True)
            dcp.save(tensors, checkpoint_id=target, no_dist=True)

        return load_and_save
    if name == "zero3-megatron":
        import toolkit.checkpoint.formats.megatron.target  # noqa: F401

        return lambda: convert(
            open_source(source), target, TargetFormat.megatron, zero=TargetZeroStage.stage1
        )
    return {
        "cp": lambda: copy_and_sync(source, target),
        "native": lambda: convert(open_source(source), target, TargetFormat.native),
    }[name]


def run_job(name: str, source: Path, target: Path) -> None:
    """Run one job and print its figures."""
    job = make_job(name, source, target)
    began, cpu = time.perf_counter(), _cpu_seconds()
    job()
    wall = time.perf_counter() - began
    status = Path("/proc/self/status").read_text()
    own = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    memory = of_children if name == "cp" else max(own, of_children)
    print(json.dumps({"seconds": wall, "cpu_seconds": _cpu_seconds() - cpu, "peak_bytes": 1024 * memory}))


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


# ---- measuring


def drop_page_cache(folder: Path, cold: str) -> str:
    """Drop the files, or everything, from the page cache; return the method."""
    os.sync()
    if cold == "no":
        return "nothing"
    if cold == "all" and os.access(DROP_CACHES, os.W_OK):
        DROP_CACHES.write_text("3\n")
        return "drop_caches"
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return "posix_fadvise"


def allocated_bytes(folder: Path) -> int:
    """Return the bytes that are allocated in ``folder`` now."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # removed in the meantime
                total += 512 * Path(directory, name).lstat().st_blocks
    return total


def measure(name: str, source: Path, work: Path, cold: str) -> dict[str, float]:
    """Run one job in a new process from a cold cache."""
    out = work / "out"
    out.mkdir()
    drop_page_cache(source, cold)
    command = [sys.executable, __file__, "--child", name, str(source), str(out / "target")]
    most, ended = 0, threading.Event()

    def watch_size() -> None:
        nonlocal most
        while not ended.wait(0.5):
            most = max(most, allocated_bytes(out))

    watcher = threading.Thread(target=watch_size)
    watcher.start()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=False
        )
    finally:
        ended.set()
        watcher.join()
    if done.returncode:
        raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    left = allocated_bytes(out)
    shutil.rmtree(out)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures | {"temporary_bytes": max(0, most - left)}


def prepare(work: Path, parameters: float, contenders: list[str]) -> int:
    """Write the sources that these contenders read; return the number of parameters."""
    count = make_native(work, parameters)
    kinds = {CONTENDERS[name] for name in contenders}
    if ZERO3 in kinds:
        settings = TargetOptimConfig(lr=3e-4, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1)
        convert(
            open_source(work / NATIVE),
            work / ZERO3,
            TargetFormat.deepspeed,
            zero=TargetZeroStage.stage3,
            parallel=TargetParallelConfig(data=RANKS),
            optim=settings,
        )
    if DCP in kinds:  # in its own process, because it needs as much memory as the model
        subprocess.run(
            [sys.executable, __file__, "--make-dcp", str(work / NATIVE), str(work / DCP)],
            check=True,
            capture_output=True,
        )
    return count


def memory_by_size(
    work: Path, parameters: float, contenders: list[str], cold: str
) -> dict[str, dict[str, float]]:
    """Return the toolkit's peak bytes for a sixteenth of the model, a quarter, and all of it."""
    peaks_by_contender: dict[str, dict[str, float]] = {name: {} for name in OURS if name in contenders}
    for part in SMALLER if peaks_by_contender else ():
        folder = work / f"part-{part}"
        count = prepare(folder, parameters / part, list(peaks_by_contender))
        for name, peaks in peaks_by_contender.items():
            peaks[f"1/{part}: {count / 1e6:.1f} M"] = measure(name, folder / CONTENDERS[name], folder, cold)[
                "peak_bytes"
            ]
        shutil.rmtree(folder)
    return peaks_by_contender


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=322, help="millions of parameters")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--folder", type=Path, default=Path(), help="folder on the disk to measure")
    parser.add_argument(
        "--cold",
        choices=["all", "files", "no"],
        default="all",
        help="how to drop the page cache before a job",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "reshard.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--make-dcp", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        run_job(given.child[0], Path(given.child[1]), Path(given.child[2]))
        return
    if given.make_dcp:
        make_dcp(*map(Path, given.make_dcp))
        return
    contenders = ["cp", *(name for name in given.only if name != "cp")]  # the baseline is always included
    work = given.folder.absolute() / f"reshard-benchmark-{os.getpid()}"
    try:
        began = time.perf_counter()
        count = prepare(work, given.parameters * 1e6, contenders)
        print(
            f"{count / 1e6:.1f} M parameters, {count * BYTES_PER_PARAMETER / 1e9:.2f} GB, "
            f"written in {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        rows = measure_all(work, contenders, given.runs, given.cold)
        cache = drop_page_cache(work, given.cold)
        memory = memory_by_size(work, given.parameters * 1e6, contenders, given.cold)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    size = {"parameters": count, "bytes": count * BYTES_PER_PARAMETER, "runs": given.runs, "cold_by": cache}
    report({**size, **summarise(rows), "peak_bytes_by_parameters": memory, "rows": rows}, given.out)


def measure_all(work: Path, contenders: list[str], runs: int, cold: str) -> dict[str, list[dict[str, float]]]:
    """Measure the contenders in turn, ``runs`` times."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(runs):
        for name in contenders:
            row = measure(name, work / CONTENDERS[name], work, cold)
            rows[name].append(row)
            print(
                f"run {number}: {name:>14} {row['seconds']:6.2f} s, {row['cpu_seconds']:6.2f} CPU s, "
                f"{row['peak_bytes'] / 1e6:5.0f} MB, {row['temporary_bytes'] / 1e6:5.0f} MB temporary",
                flush=True,
            )
    return rows


def summarise(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the medians of each contender, and its seconds over those of ``cp`` in the same run."""
    return {
        "median": {
            name: {key: statistics.median(row[key] for row in of) for key in of[0]}
            for name, of in rows.items()
        },
        "times_cp": {
            name: _spread(
                [row["seconds"] / floor["seconds"] for row, floor in zip(of, rows["cp"], strict=True)]
            )
            for name, of in rows.items()
        },
    }


def report(result: dict[str, Any], out: Path) -> None:
    """Write the result with the machine and the versions, and print its ratios and peaks."""
    versions = package_versions("numpy", "xxhash", "isal", "torch", "deepspeed", "megatron-core")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({**result, "machine": describe_machine(), "versions": versions}, indent=1) + "\n"
    )
    for name, ratio in result["times_cp"].items():
        print(
            f"{name:>14}: {ratio['median']:.2f} x cp and sync ({ratio['least']:.2f} .. {ratio['most']:.2f})"
        )
    for name, peaks in result["peak_bytes_by_parameters"].items():
        print(f"{name:>14}: " + ", ".join(f"{peak / 1e6:.0f} MB for {size}" for size, peak in peaks.items()))


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


if __name__ == "__main__":
    main()
