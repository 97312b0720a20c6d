"""Measure everything that this toolkit claims about one GPU, in at most ten minutes and without a network.

    make gpu                                     everything
    python benchmarks/gpu.py --only 1b           one model
    python benchmarks/gpu.py --words compile=none model.attention=sdpa      further overrides of each run
    python benchmarks/gpu.py --cpu               a smoke test of this script with tiny models on the CPU

First the parity cells that fit on one GPU (`launch/verify.py`), then each model of `conf/exp/bench_*.yaml`:
compiled plain torch, DeepSpeed ZeRO 1 and Megatron-core, the engines through `launch/train.py` with its data
stream, hooks and metrics. A row has tokens per second, MFU, peak memory and its ratio to the plan, and the
time ledger of the median step. Each row is written to benchmarks/results/gpu.json as soon as it is measured.
A contender that fails is a row with the reason, and the others go on. The first run of an engine also writes
a trace of two steps by torch.profiler.

MFU is given twice: with the whole attention matrix, as PaLM defines it, and with the causal half that flash
attention computes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_step import baseline_spec
from harness.environment import describe_machine, package_versions

from toolkit.cluster.world.environment import detect_world, read_launch
from toolkit.config.compose import compose
from toolkit.data.tokens.stdlib import ensure_stdlib
from toolkit.errors import UserError
from toolkit.families import get_family
from toolkit.files import write_whole
from toolkit.plan import make_plan
from toolkit.plan.flops import FORWARD_AND_BACKWARD, flops_per_step, peak_flops
from toolkit.plan.types import RunPlan

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
DATA = ROOT / "data" / "stdlib"
WARM_UP = 8  # steps: compilation, and the allocator's first blocks
TIMED = 16  # steps after the warm-up; the profiled steps follow
PROFILED = 2
PARITY_SECONDS = 150.0
CONTENDERS: dict[str, tuple[str, ...] | None] = {  # None: plain torch
    "torch": None,
    "deepspeed": ("engine=deepspeed",),
    "megatron": ("engine=megatron",),
}
MODELS = ("1b", "8b")
TINY = (
    "precision=fp32",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.vocab_size=4096",
    "train.sequence_length=64",
    "cluster.gpus_per_node=0",
    "cluster.cpu_ranks=1",
)


class NotMeasured(Exception):
    """A contender failed, or had no time; the message is the reason."""


@dataclass(frozen=True)
class Bench:
    """The settings that all contenders share.

    Attributes:
        folder: of the runs, which is kept if the user names it.
        overrides: of each run, after those of the preset.
        deadline: on the monotonic clock, for everything.
    """

    folder: Path
    overrides: tuple[str, ...]
    cpu: bool
    deadline: float

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


def measure_parity(bench: Bench) -> dict[str, Any]:
    """Return the number of cells by verdict, and the names of those that do not agree."""
    cells = ["deepspeed/llama/zero1", "--cpu"] if bench.cpu else ["core"]
    file = bench.folder / "parity.json"
    outputs = ["--json", str(file), "--markdown", str(bench.folder / "parity.md")]
    command = [str(ROOT / "launch" / "verify.py"), "--cells", *cells, *outputs]
    outcome = {"status": "measured"}
    try:
        run(command, bench, "parity", min(PARITY_SECONDS, bench.seconds_left()), accepted=(0, 1))
    except NotMeasured as error:
        outcome = {"status": "failed", "reason": str(error)}
        if not file.exists():
            return outcome
    rows = json.loads(file.read_text())["rows"]  # each is written when it is measured
    verdicts: dict[str, int] = {}
    for row in rows:
        verdicts[row["verdict"]] = verdicts.get(row["verdict"], 0) + 1
    apart = [
        f"{row['cell']} {row['case']}" for row in rows if row["verdict"] in ("apart", "failed", "invalid")
    ]
    return {**outcome, "verdicts": verdicts, "apart": apart}


def measure(bench: Bench, model: str, name: str, *, trace: bool) -> dict[str, Any]:
    """Return the row of one contender."""
    row = {"model": model, "contender": name}
    engine = CONTENDERS[name]
    steps = WARM_UP + TIMED + (PROFILED if trace else 0)
    folder = bench.folder / f"{model}-{name}"
    overrides = [
        f"+exp=bench_{model}",
        *(engine or ()),
        f"train.steps={steps}",
        f"run.dir={folder}",
        f"data.path={DATA}",
        *bench.overrides,
    ]
    try:
        config = compose(overrides)
        plan = make_plan(config, detect_world(config.cluster, read_launch({}, [])[0]))
        if plan.world.ranks != 1:
            raise NotMeasured(f"this is a comparison on one rank, and the plan has {plan.world.ranks}")
        limit = bench.seconds_left()
        if engine is None:
            seconds, found = run_baseline(bench, plan, folder, limit)
        else:
            profile = [f"monitor.profile_step={WARM_UP + TIMED + 1}", f"monitor.profile_steps={PROFILED}"]
            command = [str(ROOT / "launch" / "train.py"), *overrides, *(profile if trace else ())]
            run(command, bench, folder.name, limit)
            seconds, found = read_run(folder)
    except (NotMeasured, UserError) as error:
        return {**row, "status": "failed", "reason": str(error)}
    timed = seconds[WARM_UP : WARM_UP + TIMED]
    return {**row, "status": "measured", **speed(plan, timed), **compare_memory(plan, found), **found}


def run_baseline(
    bench: Bench, plan: RunPlan, folder: Path, limit: float
) -> tuple[list[float], dict[str, Any]]:
    folder.mkdir(parents=True)
    more = {"device": plan.world.device.value, "result": str(folder / "result.json")}
    (folder / "spec.json").write_text(json.dumps({**baseline_spec("torch", plan), **more}))
    script = str(ROOT / "benchmarks" / "harness" / "baseline_compiled.py")
    run([script, str(folder / "spec.json")], bench, folder.name, limit)
    result = json.loads((folder / "result.json").read_text())
    return result["step_seconds"], {"peak_bytes": result["peak_bytes"]}


def read_run(folder: Path) -> tuple[list[float], dict[str, Any]]:
    """Return the seconds of each step of a run, and the other measurements of its folder."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    timed = [row["parts"] for row in ledger if WARM_UP < row["step"] <= WARM_UP + TIMED]
    parts = {name for row in timed for name in row}
    plan = json.loads((folder / "plan.json").read_text())
    found: dict[str, Any] = {
        "peak_bytes": max((row.get("device_peak_bytes", 0) for row in steps), default=0) or None,
        # [minimum, median, maximum] over ranks, of which there is one
        "ledger_seconds": {
            name: statistics.median(row.get(name, [0.0, 0.0])[1] for row in timed) for name in sorted(parts)
        },
        "kernels": {name: choice["name"] for name, choice in plan["kernels"].items()},
    }
    traces = [str(file) for file in folder.rglob("*.json.gz")]
    return [row["step_seconds"] for row in steps], found | ({"trace": traces[0]} if traces else {})


def speed(plan: RunPlan, seconds: Sequence[float]) -> dict[str, Any]:
    step, quartiles = statistics.median(seconds), statistics.quantiles(seconds, n=4)
    whole, causal, peak = flops_per_step(plan), causal_flops_per_step(plan), peak_flops(plan)
    return {
        "gpu": plan.world.gpu,
        "step_seconds": step,
        "step_seconds_quartiles": [quartiles[0], quartiles[2]],
        "tokens_per_second": plan.units_per_step / step,
        "mfu_whole": whole / step / peak if peak and whole else None,  # None for an unknown GPU
        "mfu_causal": causal / step / peak if peak else None,
    }


def causal_flops_per_step(plan: RunPlan) -> float:
    """Model FLOPs of a step with half of the attention matrix."""
    assert plan.shape is not None
    forward = get_family(plan.shape.family).forward_flops(plan.shape, plan.config.train.sequence_length)
    return FORWARD_AND_BACKWARD * (forward.total - forward.scores / 2) * plan.units_per_step


def compare_memory(plan: RunPlan, found: Mapping[str, Any]) -> dict[str, Any]:
    assert plan.memory is not None
    peak = found["peak_bytes"]
    planned = plan.memory.allocated
    return {"planned_bytes": planned, "peak_over_planned": peak / planned if peak else None}


def run(
    command: Sequence[str], bench: Bench, name: str, limit: float, *, accepted: Sequence[int] = (0,)
) -> None:
    """Run a Python command for at most ``limit`` seconds, with its output in a file.

    Raises:
        NotMeasured: it exited with a code that is not accepted, or ran out of time.
    """
    if limit <= 0:
        raise NotMeasured("no time left")
    log = bench.folder / f"{name}.log"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    one_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environ = {
        **os.environ,
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "" if bench.cpu else one_gpu,
        **({"DS_ACCELERATOR": "cpu"} if bench.cpu else {}),
    }
    with (
        log.open("w") as output,
        subprocess.Popen(
            [sys.executable, *command],
            env=environ,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise NotMeasured(f"stopped after {limit:.0f} s: {tail(log)}") from None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if code not in accepted:
        raise NotMeasured(f"exit code {code}: {tail(log)}")


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:].strip()


def rows_of(bench: Bench, models: Sequence[str], contenders: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield each row when it is measured."""
    torch_speed: dict[str, float] = {}
    traced = False
    for model in models:
        for name in contenders:
            trace = not traced and CONTENDERS[name] is not None
            row = measure(bench, model, name, trace=trace)
            traced |= "trace" in row
            if row["status"] == "measured":
                torch_speed |= {model: row["tokens_per_second"]} if name == "torch" else {}
                if model in torch_speed:
                    row["over_torch"] = row["tokens_per_second"] / torch_speed[model]
            yield row


def describe(row: Mapping[str, Any]) -> str:
    head = f"{row['model']:>3} {row['contender']:<10}"
    if row["status"] != "measured":
        return f"{head} failed: {row['reason'].splitlines()[-1]}"
    parts = [f"{row['tokens_per_second']:>10,.0f} tokens/s", f"{row['step_seconds'] * 1e3:.0f} ms a step"]
    if row["mfu_whole"] is not None:
        parts.append(f"MFU {row['mfu_whole']:.1%} (causal {row['mfu_causal']:.1%})")
    if row["peak_bytes"]:
        parts.append(f"{row['peak_bytes'] / 1e9:.1f} GB, {row['peak_over_planned']:.2f} of the plan")
    if "over_torch" in row:
        parts.append(f"{row['over_torch']:.2f} of torch")
    return f"{head} {', '.join(parts)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MODELS, default=MODELS, help="models")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--words", nargs="*", default=[], help="further overrides of each run")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything; the rest is not run")
    parser.add_argument("--no-parity", action="store_true", help="leave the parity cells out")
    parser.add_argument("--cpu", action="store_true", help="smoke test: tiny models on the CPU")
    parser.add_argument("--folder", type=Path, help="keep the runs here; by default they are deleted")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results")
    given = parser.parse_args(arguments)
    if given.cpu and given.out == RESULTS:
        parser.error("--cpu measures nothing about GPUs: give another file with --out FILE")
    machine = describe_machine()
    if not given.cpu and not machine["gpus"]:
        parser.error("this machine has no GPU; --cpu --out FILE tests this script")
    deadline = time.monotonic() + 60 * given.minutes
    ensure_stdlib(str(DATA), 4096)
    report: dict[str, Any] = {"machine": machine, "versions": package_versions(), "rows": []}

    def save() -> None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(given.out, json.dumps(report, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        overrides = (*(TINY if given.cpu else ("cluster.gpus_per_node=1",)), *given.words)
        bench = Bench(folder.resolve(), overrides, given.cpu, deadline)
        if not given.no_parity:
            report["parity"] = measure_parity(bench)
            print(f"parity: {report['parity']}", flush=True)
            save()
        for row in rows_of(bench, given.only, given.contenders):
            report["rows"].append(row)
            print(describe(row), flush=True)
            save()
    rows_good = all(row["status"] == "measured" for row in report["rows"])
    parity_good = given.no_parity or (
        report["parity"]["status"] == "measured" and not report["parity"]["apart"]
    )
    return 0 if rows_good and parity_good else 1


if __name__ == "__main__":
    sys.exit(main())
