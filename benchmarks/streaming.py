"""Compare the CPU time of a token on its way to the model with a memory map and with other loaders.

    python benchmarks/streaming.py --peers-venv /tmp/peers    every contender: 15 minutes, 3 GB of disk
    python benchmarks/streaming.py --only floor toolkit       some of them
    python benchmarks/streaming.py --layouts                  measure only shards, mixtures and dtypes again
    python benchmarks/streaming.py --report                   the table and docs/streaming.md from the JSON

One synthetic corpus of 200 M tokens (benchmarks/harness/corpus.py) is written in each contender's own format.
Every measurement is a process of its own with a time limit; rounds go through all contenders, so that noise
shows as spread. Within a process the contender alternates with slices of a memory map. Other loaders come
from benchmarks/peers.txt, in a virtual environment on top of this one, which is created if it is absent; a
loader that fails is reported with its error.

Results go to benchmarks/results/streaming.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import streaming_report
from harness.contender_runner import ContenderFailed, ContenderRunner, peers_python
from harness.contenders import CONTENDERS
from harness.contenders.common import GLOBAL_BATCH, LENGTH
from harness.corpus import make_corpus
from harness.environment import describe_machine, package_versions
from harness.mixing_quality import BATCH, at_scale, chi2_per_df
from harness.read_contender import AFTER

from toolkit.progress import Progress
from toolkit.testing.dist import find_free_port

BENCHMARKS = Path(__file__).resolve().parent
RESULTS = BENCHMARKS / "results" / "streaming.json"
RANKS = 2  # for the resume on another number of ranks
FLAT_SAMPLES = (10**6, 10**9, 10**12)
FEWEST_TOKENS = 2 * BATCH * LENGTH
LAYOUTS_LIMIT_SECONDS = 900.0
QUIET_LOAD = 0.5  # of other processes, in cores: above it the report calls the machine busy


def measure(
    runner: ContenderRunner, names: Sequence[str], rounds: int, seconds: float, progress: Progress
) -> dict[str, Any]:
    """Return the rows of streaming_report.py by contender."""
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        contender = CONTENDERS[name]
        rows[name] = {
            "label": contender.label,
            "settings": contender.settings,
            "peer": contender.peer,
            "failed": None,
            "speed": [],
            "resume_seconds": [],
        }
    with tempfile.TemporaryDirectory() as kept:
        with progress.task("files and orders", total=len(names), unit="contenders") as task:
            for name in names:
                task.advance(0, note=name)
                run_guarded(
                    rows[name], lambda row, name=name: row.update(measure_order(runner, name, Path(kept)))
                )
                task.advance(1)
        with progress.task("rounds", total=rounds * len(names), unit="turns") as task:
            for number in range(rounds):
                turned = [*names[number % len(names) :], *names[: number % len(names)]]
                for name in turned:
                    task.advance(0, note=name)
                    run_guarded(
                        rows[name],
                        lambda row, name=name: measure_round(row, runner, name, Path(kept), seconds),
                    )
                    task.advance(1)
    return rows


def run_guarded(row: dict[str, Any], work: Any) -> None:
    """Run ``work``; a contender that failed once is skipped from then on, and its row has the error."""
    if row["failed"] is None:
        try:
            work(row)
        except ContenderFailed as error:
            row["failed"] = str(error)
            print(f"{row['label']}: {error}", file=sys.stderr, flush=True)


def measure_order(runner: ContenderRunner, name: str, kept: Path) -> dict[str, Any]:
    made = runner.make(name)
    state, out = kept / f"{name}.state", kept / f"{name}.npz"
    found = runner.run(name, "order", "--state", str(state), "--out", str(out))
    with np.load(out) as epoch:
        numbers, domains = epoch["numbers"], epoch["domains"].ravel()
    # Of the epoch as delivered, because a mixture has shares of its own.
    shares = np.bincount(domains) / domains.size
    return {
        **made,
        "state_bytes": found["state_bytes"],
        "chi2_per_df": chi2_per_df(domains, shares),
        "epoch_samples": int(numbers.size),
        "epoch_distinct": len(np.unique(numbers)),
        "resume": compare_batches(numbers, resumed_samples(runner, name, state, kept, 1), found["state_at"]),
        "elastic": measure_elastic(runner, name, state, kept, numbers, found["state_at"]),
    }


def measure_elastic(
    runner: ContenderRunner, name: str, state: Path, kept: Path, numbers: np.ndarray, at: int
) -> dict[str, Any]:
    """Return the comparison on another number of ranks; a refusal is a result, not a failure."""
    try:
        return compare_batches(numbers, resumed_samples(runner, name, state, kept, RANKS), at)
    except ContenderFailed as error:
        return {"exact": False, "refused": str(error)}


def resumed_samples(runner: ContenderRunner, name: str, state: Path, kept: Path, ranks: int) -> np.ndarray:
    """Return the numbers of the samples after a resume, [AFTER, GLOBAL_BATCH], over all ranks."""
    outs = [kept / f"{name}-{rank}.npy" for rank in range(ranks)]
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    processes = [
        runner.start(
            name,
            "resume",
            "--state",
            str(state),
            "--out",
            str(out),
            "--rank",
            str(rank),
            "--ranks",
            str(ranks),
            environ={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else None,
        )
        for rank, out in enumerate(outs)
    ]
    problems = []
    for process in processes:
        try:
            runner.finish(process)
        except ContenderFailed as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return np.concatenate([np.load(out) for out in outs], axis=1)


def compare_batches(numbers: np.ndarray, after: np.ndarray, at: int) -> dict[str, Any]:
    """Compare the global batches after a resume with those of the uninterrupted run.

    Returns:
        Whether they are equal, and the share of their samples that had been used before.
    """
    expected = numbers[at : at + AFTER]
    exact = bool((np.sort(after, axis=1) == np.sort(expected, axis=1)).all())
    return {"exact": exact, "taken_before": float(np.isin(after, numbers[:at]).mean())}


def measure_round(
    row: dict[str, Any], runner: ContenderRunner, name: str, kept: Path, seconds: float
) -> None:
    found = runner.run(name, "speed", "--seconds", str(seconds))
    turns = found.pop("turns")
    row["versions"] = found.pop("versions")
    row["speed"].append({**found, **turn_medians(turns)})
    again = runner.run(
        name, "resume", "--state", str(kept / f"{name}.state"), "--out", str(kept / f"{name}-again.npy")
    )
    row["resume_seconds"].append(again["resume_seconds"])


def turn_medians(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return medians over the turns of one process; the ratio is taken within turns."""
    return {
        "turns": len(turns),
        "cpu_ns": statistics.median(turn["cpu_ns"] for turn in turns),
        "slice_cpu_ns": statistics.median(turn["slice_cpu_ns"] for turn in turns),
        "ratio": statistics.median(turn["cpu_ns"] / turn["slice_cpu_ns"] for turn in turns),
    }


def measure_flat(python: Path) -> list[dict[str, Any]]:
    """Return ``FlatCost`` of this toolkit's stream, each in its own process."""
    ask = (
        "import json, sys; from dataclasses import asdict; "
        "from toolkit.testing.stream_cost import measure_stream_cost; "
        "print(json.dumps(asdict(measure_stream_cost(int(sys.argv[1]), mixed=sys.argv[2] == 'mixed'))))"
    )
    argvs = [
        [str(python), "-c", ask, str(samples), kind] for kind in ("one", "mixed") for samples in FLAT_SAMPLES
    ]
    return [
        json.loads(subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120).stdout)
        for argv in argvs
    ]


def measure_layouts(tokens: int, seconds: float, limit_seconds: float) -> dict[str, Any]:
    """Run benchmarks/harness/data_layouts.py in its own process."""
    script, before = str(BENCHMARKS / "harness" / "data_layouts.py"), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, script, folder, "--tokens", str(tokens), "--seconds", str(seconds)]
        done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, timeout=limit_seconds)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "load_before": before,
        "busy": before > QUIET_LOAD,
        "tokens": tokens,
        "seconds": seconds,
        "cases": json.loads(done.stdout.splitlines()[-1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument(
        "--corpus", type=Path, help="folder of the corpus and its formats; default: a temporary one"
    )
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of the turns in one process")
    parser.add_argument("--limit", type=float, default=180.0, help="time limit of a process in seconds")
    parser.add_argument(
        "--peers-venv", type=Path, help="virtual environment of the other loaders; created if absent"
    )
    parser.add_argument(
        "--layouts",
        action="store_true",
        help="measure only the data layouts, and replace only them in the JSON",
    )
    parser.add_argument("--layout-tokens", type=int, default=100_000_000, help="tokens per data layout")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing; show and write the report of the JSON"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.tokens < FEWEST_TOKENS:
        parser.error(
            f"--tokens={given.tokens}: mixing needs batches of 1,024 samples, so at least {FEWEST_TOKENS}"
        )
    if given.layouts:
        results = json.loads(given.out.read_text())
        results["layouts"] = measure_layouts(given.layout_tokens, given.seconds, LAYOUTS_LIMIT_SECONDS)
        given.out.write_text(json.dumps(results, indent=1) + "\n")
    elif not given.report:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(run(given), indent=1) + "\n")
    results = json.loads(given.out.read_text())
    streaming_report.print_table(results)
    if given.out == RESULTS:
        streaming_report.write_page(results)


def run(given: argparse.Namespace) -> dict[str, Any]:
    python = peers_python(given.peers_venv)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary, Progress() as progress:
        corpus = make_corpus(given.corpus or Path(temporary, "corpus"), given.tokens)
        rows = measure(
            ContenderRunner(corpus, python, given.limit), given.only, given.rounds, given.seconds, progress
        )
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "load_before": before,
        "busy": before > QUIET_LOAD,
        "versions": package_versions("torch", "numpy"),
        "settings": {
            "length": LENGTH,
            "global_batch": GLOBAL_BATCH,
            "tokens": corpus.tokens,
            "documents": corpus.documents,
            "seed": corpus.seed,
            "rounds": given.rounds,
            "seconds": given.seconds,
        },
        "rows": rows,
        "flat": measure_flat(python),
        "at_scale": at_scale(),
        "layouts": measure_layouts(given.layout_tokens, given.seconds, LAYOUTS_LIMIT_SECONDS),
    }


if __name__ == "__main__":
    main()
