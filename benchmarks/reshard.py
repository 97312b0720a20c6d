"""Resharding a checkpoint beside its floor, ``cp`` and sync of the same bytes, and beside the tools that others have for it.

    python benchmarks/reshard.py                                        322 M parameters with Adam's state: 3.9 GB, five runs, 10 to 20
                                                                        minutes, 20 GB of disk in the current folder
    python benchmarks/reshard.py --folder /mnt/nvme --only cp native    elsewhere; some contenders
    python benchmarks/reshard.py --parameters 20 --runs 1               a quick look

Contenders, each in a process of its own, in turns within each run, so that noise of the machine falls on all of them:

    cp                cp -r of the native folder, and sync -f
    native            this toolkit, native to native: what it has to do at least
    zero3-megatron    this toolkit, DeepSpeed ZeRO-3 of 4 ranks to Megatron-core's distributed optimizer
    universal         deepspeed.checkpoint.ds_to_universal of the ZeRO-3 folder, and sync -f
    dcp               torch.distributed.checkpoint: load, and save (which syncs its files)

Every contender looks at 12 bytes a parameter: fp32 weights and two moments of a Llama of random values, written by this toolkit in the
vendors' formats (dcp: by torch) before the clock starts. Before each job the page cache is dropped, all of it where we may, else the
files' pages (--cold files spares other users of the machine). Seconds are those of the job until its bytes are durable, without the
start of Python and imports. Processor seconds and memory (peak resident set) count child processes: memory is that of the largest
(of ``cp`` no less than the Python that starts it). Temporary bytes are what lay on the disk at most, of what is made, beyond what was
left at the end. Figures are medians; ratios are medians of the ratios to ``cp`` within runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from toolkit import families
from toolkit.checkpoint.catalog import Catalog, TensorPiece, byte_length
from toolkit.checkpoint.offline import reshard
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import CheckpointSource, foreign_damage_error, open_source
from toolkit.config.reshard import (
    TargetConfig,
    TargetFormat,
    TargetOptimConfig,
    TargetParallelConfig,
    TargetZeroStage,
)
from toolkit.families.base import ModelShape

BYTES_PER_PARAMETER = 12
NOISE_ELEMENTS = 2**24
RANKS = 4
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SMALLER = (16, 4, 1)  # of the model, for the memory of each size
NATIVE, ZERO3, DCP = "native", "zero3", "dcp"
# Contender -> the source that it reads.
CONTENDERS = {"cp": NATIVE, "native": NATIVE, "zero3-megatron": ZERO3, "universal": ZERO3, "dcp": DCP}
OURS = ("native", "zero3-megatron")


def llama(parameters: float) -> ModelShape:
    """Of about so many parameters: 20 layers, H x (31.25 H) embeddings, not tied."""
    hidden = max(64, round((parameters / 307.5) ** 0.5 / 64) * 64)
    return ModelShape(
        family="llama",
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=20,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        vocab_size=hidden * 125 // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )


# ---- sources


def make_native(folder: Path, parameters: float) -> int:
    """Weights and moments of random values. Returns their number of parameters."""
    shape = llama(parameters)
    specs = families.get_family(shape.family).parameters(shape)
    tensors = {
        TensorKey(state, spec.name): TensorInfo("float32", spec.shape)
        for state in (WEIGHT, EXP_AVG, EXP_AVG_SQ)
        for spec in specs
    }
    noise, pieces, at = folder / "noise", {}, 0
    noise.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    with noise.open("wb") as file:
        for key, info in tensors.items():
            numbytes = byte_length(info.dtype, info.shape)
            pieces[key] = (
                TensorPiece(
                    key, info.dtype, info.shape, Box.whole(info.shape), noise.name, at, at + numbytes
                ),
            )
            for first in range(0, numbytes // 4, NOISE_ELEMENTS):
                count = min(NOISE_ELEMENTS, numbytes // 4 - first)
                file.write(np.square(random.standard_normal(count, np.float32)).data)
            at += numbytes
    source = CheckpointSource(
        format="noise",
        catalog=Catalog(folder, tensors, pieces, {"step": 10, "optimizer_step": 10, "consumed_samples": 80}),
        namespace=families.get_family(shape.family).namespace,
        step=10,
        shape=shape,
        refuse=foreign_damage_error,
    )
    convert(source, folder / NATIVE, TargetFormat.native)
    noise.unlink()
    return sum(spec.numel for spec in specs)


def make_dcp(source: Path, target: Path) -> None:
    """The same tensors, as torch saves them."""
    import torch
    import torch.distributed.checkpoint as dcp

    from toolkit.checkpoint.shard import Shard

    reader = open_source(source).reader()
    tensors = {f"{key}": torch.empty(info.shape) for key, info in reader.tensors.items()}
    reader.read(
        [
            Shard(key, info.shape, Box.whole(info.shape), tensors[f"{key}"])
            for key, info in reader.tensors.items()
        ]
    )
    dcp.save(tensors, checkpoint_id=target, no_dist=True)


# ---- jobs


def convert(source: CheckpointSource, target: Path, form: TargetFormat, **more: Any) -> None:
    laid_out = reshard.lay_out(source, TargetConfig(format=form, **more))
    Conversion(source, laid_out, target).run()


def copied(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", "-f", target], check=True)


def job_of(name: str, source: Path, target: Path) -> Callable[[], object]:
    """What is timed. What it needs is imported here."""
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
            stored_dtype = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
            tensors = {key: torch.empty(of.size) for key, of in stored_dtype.items()}  # type: ignore[union-attr]
            dcp.load(tensors, checkpoint_id=source, no_dist=True)
            dcp.save(tensors, checkpoint_id=target, no_dist=True)

        return load_and_save
    if name == "zero3-megatron":
        import toolkit.checkpoint.formats.megatron.target  # noqa: F401

        return lambda: convert(
            open_source(source), target, TargetFormat.megatron, zero=TargetZeroStage.stage1
        )
    return {
        "cp": lambda: copied(source, target),
        "native": lambda: convert(open_source(source), target, TargetFormat.native),
    }[name]


def child(name: str, source: Path, target: Path) -> None:
    """One job, and its figures to stdout."""
    job = job_of(name, source, target)
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
    return sum(one.ru_utime + one.ru_stime for one in used)


# ---- measuring


def forget(folder: Path, cold: str) -> str:
    """Drop what the page cache has of the files, or all that it has. Returns how."""
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


def on_disk(folder: Path) -> int:
    """Bytes that are allocated in ``folder`` now."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # removed meanwhile
                total += 512 * Path(place, name).lstat().st_blocks
    return total


def measure(name: str, source: Path, work: Path, cold: str) -> dict[str, float]:
    """One job in a new process, from a cold cache."""
    out = work / "out"
    out.mkdir()
    forget(source, cold)
    command = [sys.executable, __file__, "--child", name, str(source), str(out / "made")]
    most, ended = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.5):
            most = max(most, on_disk(out))

    watcher = threading.Thread(target=look)
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
    left = on_disk(out)
    shutil.rmtree(out)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found | {"temporary_bytes": max(0, most - left)}


def prepare(work: Path, parameters: float, contenders: list[str]) -> int:
    """The sources that these contenders read. Returns the number of parameters."""
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
    if DCP in kinds:  # in a process of its own: it takes as much memory as the model
        subprocess.run(
            [sys.executable, __file__, "--make-dcp", str(work / NATIVE), str(work / DCP)],
            check=True,
            capture_output=True,
        )
    return count


def memory_by_size(
    work: Path, parameters: float, contenders: list[str], cold: str
) -> dict[str, dict[str, float]]:
    """Peak bytes of our contenders, for a sixteenth of the model, a quarter, and all of it."""
    found: dict[str, dict[str, float]] = {name: {} for name in OURS if name in contenders}
    for part in SMALLER if found else ():
        folder = work / f"part-{part}"
        count = prepare(folder, parameters / part, list(found))
        for name, peaks in found.items():
            peaks[f"1/{part}: {count / 1e6:.1f} M"] = measure(name, folder / CONTENDERS[name], folder, cold)[
                "peak_bytes"
            ]
        shutil.rmtree(folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=322, help="millions")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument(
        "--cold",
        choices=["all", "files", "no"],
        default="all",
        help="what is dropped from the page cache before a job",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "reshard.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--make-dcp", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], Path(given.child[1]), Path(given.child[2]))
        return
    if given.make_dcp:
        make_dcp(*map(Path, given.make_dcp))
        return
    contenders = ["cp", *(name for name in given.only if name != "cp")]  # the floor is always there
    work = given.folder.absolute() / f"reshard-benchmark-{os.getpid()}"
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    try:
        began = time.perf_counter()
        count = prepare(work, given.parameters * 1e6, contenders)
        print(
            f"{count / 1e6:.1f} M parameters, {count * BYTES_PER_PARAMETER / 1e9:.2f} GB, made in {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        for number in range(given.runs):
            for name in contenders:
                row = measure(name, work / CONTENDERS[name], work, given.cold)
                rows[name].append(row)
                print(
                    f"run {number}: {name:>14} {row['seconds']:6.2f} s, {row['cpu_seconds']:6.2f} s of processors, "
                    f"{row['peak_bytes'] / 1e6:5.0f} MB, {row['temporary_bytes'] / 1e6:5.0f} MB temporary",
                    flush=True,
                )
        cache = forget(work, given.cold)
        memory = memory_by_size(work, given.parameters * 1e6, contenders, given.cold)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    packages = ("numpy", "xxhash", "isal", "torch", "deepspeed", "megatron-core")
    result = {
        "parameters": count,
        "bytes": count * BYTES_PER_PARAMETER,
        "runs": given.runs,
        "cold_by": cache,
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
        "peak_bytes_by_parameters": memory,
        "rows": rows,
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.processor() or platform.machine(),
            "system": platform.platform(),
            "load": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
        },
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, ratio in result["times_cp"].items():
        print(
            f"{name:>14}: {ratio['median']:.2f} x cp and sync ({ratio['least']:.2f} .. {ratio['most']:.2f})"
        )
    for name, peaks in memory.items():
        print(f"{name:>14}: " + ", ".join(f"{peak / 1e6:.0f} MB for {size}" for size, peak in peaks.items()))


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


if __name__ == "__main__":
    main()
