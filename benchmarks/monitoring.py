"""What monitoring costs: all of it on against all of it off, on steps of at least 200 ms.

    python benchmarks/monitoring.py                  half an hour on two cores, on a machine that does nothing else
    python benchmarks/monitoring.py --pairs 8        a try

Jobs are alive at once and take turns of a few steps (benchmarks/sides/turns.py), and the ones whose turn it is not are stopped with all
their processes: what a sampler, W&B or a watchdog does falls into the turns of its own job. A turn's first step does not count: caches are
the other job's, and whatever has a clock finds at once that it is late, as in no process that runs. The turn's figure is the mean of the
others from hook to hook; they take longer than a second, so that what happens once a second is in it; what is rarer, the sampler's ten
seconds, is late and in the first, where only ``cpu`` has it. A pair's is the ratio of two turns one after the other, and a comparison's the
median over pairs with bounds from the bootstrap (Efron, 1979), each of 95% alone. ``total`` is the ratio of all time that counts, and
``cpu`` that of all processor time of all processes, which sees work on cores that training does not use.

A turn varies by some per cent from the one before on a small virtual machine (by more if the C library gives its memory back after each
tensor, which here it does not), so a bound of 1% takes hundreds of them. All are compared with

    off      nothing: no sinks, not even files, no ledger, probe, sampler, replicas, watchdog

on one rank of DeepSpeed on two cores, as nodes that train have cores to spare for what runs beside training:

    on       the defaults: ledger, sampler, W&B offline, JSONL, console, alerts, watchdog, replicas
    flood    on, and 2,000 metrics a step more, as 16 nodes would have them; here all go through the sinks of one
    asleep   off, and 2% of each step asleep: the control, which has to show

and on two ranks of ZeRO 3, one a core, where each cycle that monitoring takes anywhere is one that training lacks. No bound is asked of it:

    crowded  on

Written to benchmarks/results/monitoring.json. Exit code 1: a bound is not kept, or the control does not show.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from sides.turns import ON_CPU, ROOT, WARM_UP_BLOCKS, Job

RESULTS = ROOT / "benchmarks" / "results" / "monitoring.json"
STEP_SECONDS = 0.2  # at least
UNCOUNTED = 1  # steps at the beginning of a turn
BOUND = 1.01
ASLEEP = 0.02
NODES, METRICS = 16, 2000
SETTLE_SECONDS = 10.0  # W&B starts beside the first steps, on cores that here are training's
RESAMPLES = 20_000
# Without it each large tensor is mapped and unmapped, and half of a step is the kernel's: mallopt(3).
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_TOP_PAD_": str(256 << 20)}
MODEL = ("model.hidden_size=256", "model.intermediate_size=704", "model.num_hidden_layers=4", "model.num_attention_heads=4",
         "model.num_key_value_heads=2", "model.tie_word_embeddings=true", "train.micro_batch=2", "train.sequence_length=128",
         "optim.lr=1e-3", "schedule=constant", "checkpoint.every=never", "checkpoint.at_end=false", "eval.every=0", "debug.threads=1")
RANKS = {1: ("engine=deepspeed", "zero=stage1", "train.global_batch=6"),
         2: ("engine=deepspeed", "zero=stage3", "train.global_batch=8")}  # ZeRO-3 has the most collectives a step, and each is timed
OFF = ("monitor.wandb=disabled", "monitor.ledger=false", "monitor.probe=false", "monitor.system_seconds=0", "monitor.replicas_every=0",
       "monitor.hang_seconds=0")
ON = ("monitor.wandb=offline", "monitor.every=10")
NOTHING = {"words": OFF, "without_sinks": True}


class StoppingJob(Job):
    """Its processes are stopped but for its turns, once it has begun."""

    def begin(self) -> None:
        """A turn, after which it goes on with whatever it does in the background."""
        super().block()

    def block(self) -> list[float]:
        self._signal(signal.SIGCONT)
        seconds = super().block()
        self.stop()
        return seconds[UNCOUNTED:]

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def cpu_seconds(self) -> float:
        """Of all its processes so far; one that ends counts no more."""
        return sum(map(cpu_seconds, family(self._process.pid)))

    def __exit__(self, *error: object) -> None:
        self._signal(signal.SIGCONT)
        super().__exit__(*error)

    def _signal(self, number: signal.Signals) -> None:
        for process in family(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(process, number)


def family(process: int) -> Iterator[int]:
    """A process and all that it and they have started, parents first."""
    yield process
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from family(int(child))


def cpu_seconds(process: int) -> float:
    """User and system time, to a hundredth of a second: fields 14 and 15 of proc(5)'s stat, after the name, which may have spaces."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(off: StoppingJob, other: StoppingJob, pairs: int) -> dict[str, Any]:
    """Turns of one and of the other; who begins alternates."""
    jobs = (off, other)
    for job in jobs:
        job.begin()
    time.sleep(SETTLE_SECONDS)
    for job in jobs:
        job.stop()
    for job in jobs * (WARM_UP_BLOCKS - 1):
        job.block()
    seconds: dict[str, list[float]] = {job.name: [] for job in jobs}
    before = {job.name: job.cpu_seconds() for job in jobs}
    for pair in range(pairs):
        for job in jobs if pair % 2 == 0 else reversed(jobs):
            seconds[job.name].append(statistics.fmean(job.block()))
    used = {job.name: job.cpu_seconds() - before[job.name] for job in jobs}
    return {**against(seconds[other.name], seconds[off.name]), "cpu": used[other.name] / used[off.name],
            "step_seconds": {name: statistics.median(values) for name, values in seconds.items()}}


def against(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    ratios = np.array(ours) / np.array(theirs)
    draws = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    lower, upper = np.quantile(np.median(draws, axis=1), [0.05, 0.95])
    return {"pairs": len(ratios), "ratio": float(np.median(ratios)), "lower_95": float(lower), "upper_95": float(upper),
            "total": sum(ours) / sum(theirs)}


def comparison(name: str, spec: Mapping[str, Any], ranks: int, pairs: int, block: int) -> dict[str, Any]:
    """Args: spec: what ``sides/monitored_side.py`` is told."""
    turn = UNCOUNTED + block
    steps = (pairs + WARM_UP_BLOCKS) * turn
    with tempfile.TemporaryDirectory() as folder, ExitStack() as alive:
        jobs = []
        for side, its in (("off", NOTHING), (name, spec)):
            overrides = [*MODEL, *RANKS[ranks], *its["words"], f"train.steps={steps}", f"run.dir={Path(folder, 'runs', side)}",
                         f"data.path={ROOT / 'data' / 'stdlib'}"]
            job = StoppingJob(side, "monitored_side.py", {**its, "overrides": overrides}, Path(folder), turn, ranks=ranks,
                              environ={**ON_CPU, **KEEPS_MEMORY})
            jobs.append(alive.enter_context(job))
        row = compare(*jobs, pairs)
    print(f"{name:>7} over off on {ranks} rank{'s' if ranks > 1 else ''}: {row['ratio']:.4f} [{row['lower_95']:.4f}, "
          f"{row['upper_95']:.4f}], in all {row['total']:.4f}, processor time {row['cpu']:.4f}; "
          f"{row['step_seconds']['off'] * 1e3:.0f} ms a step", flush=True)
    return {"ranks": ranks, **row}


def mistakes(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What does not hold of what was asked for."""
    told = [f"{name}: upper bound {row['upper_95']:.4f}, allowed {BOUND}" +
            ("; the figure itself keeps it: more --pairs or a quieter machine would tell" if row["ratio"] < BOUND else "")
            for name, row in found.items() if name in ("on", "flood") and row["upper_95"] >= BOUND]
    asleep = found["asleep"]
    if asleep["lower_95"] <= 1.0 or asleep["upper_95"] < BOUND:
        told.append(f"the control of {ASLEEP:.0%} does not show: [{asleep['lower_95']:.4f}, {asleep['upper_95']:.4f}]")
    return told + [f"{name}: a step of {row['step_seconds']['off']:.3f} s, needed {STEP_SECONDS}"
                   for name, row in found.items() if row["step_seconds"]["off"] < STEP_SECONDS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=160, help="turns of each job that are timed; at least 30 for figures to report")
    parser.add_argument("--block", type=int, default=5, help="steps of a turn that count")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # stopped processes would stay for ever
    from toolkit.data.stdlib import ensure

    ensure(str(ROOT / "data" / "stdlib"), 4096)
    load = os.getloadavg()[0]
    on = {"words": ON}
    found = {name: comparison(name, spec, ranks, given.pairs // share, given.block) for name, spec, ranks, share in (
        ("on", on, 1, 1), ("flood", {**on, "nodes": NODES, "metrics": METRICS}, 1, 1),
        ("asleep", {**NOTHING, "sleep_share": ASLEEP}, 1, 2), ("crowded", on, 2, 2))}
    told = mistakes(found)
    versions = {name: metadata.version(name) for name in ("torch", "deepspeed", "wandb")}
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load_before": load}
    given.out.write_text(json.dumps({"machine": machine, "versions": versions, "steps_a_turn": given.block, "over_off": found,
                                     "mistakes": told}, indent=1) + "\n")
    for line in told:
        print(line)
    sys.exit(1 if told else 0)


if __name__ == "__main__":
    main()
