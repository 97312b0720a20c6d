"""Write run directories from formulas, so that the expected content of a report is known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.goodput import AttemptTimes, write_times

BEGAN = 1_790_000_000.0  # Unix time of the first sample
STEP_SECONDS = 2.0
HOSTILE = (
    "</script><script>window.hurt = 1</script><img src=http://example.com/x.png onerror=alert(1)> & "
    "'quotes' \"\u2028"
)
PARTS = {
    "forward": 0.28,
    "backward": 0.51,
    "optimizer": 0.06,
    "data": 0.02,
    "transfer": 0.005,
    "communication/data": 0.05,
    "communication/tensor": 0.03,
    "bubble": 0.03,
    "logging": 0.004,
    "unexplained": 0.011,
}


def step_rows(steps: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    noise = random.Random(seed)
    for step in range(1, steps + 1):
        seconds = STEP_SECONDS * noise.lognormvariate(0, 0.03) * (3 if step % 97 == 0 else 1)
        loss = 2.1 + 8.7 * math.exp(-step / (0.15 * steps)) + noise.gauss(0, 0.04)
        yield {
            "step": step,
            "loss": math.nan if step == steps // 2 else loss,
            "grad_norm": 0.8 + 3 * math.exp(-step / (0.05 * steps)) + noise.random() * 0.2,
            "lr": 3e-4
            * min(1.0, step / max(1, steps // 20))
            * (0.5 + 0.5 * math.cos(math.pi * step / steps)),
            "tokens": 4_194_304,
            "step_seconds": seconds,
            "data_seconds": 0.02 * seconds,
            "tokens_per_second": 4_194_304 / seconds,
            "samples_per_second": 1024 / seconds,
            "tokens_per_second_per_gpu": 4_194_304 / seconds / 16,
            "model_tflops_per_gpu": 900 / seconds,
            "mfu": 0.91 / seconds,
            "elapsed_seconds": 40 + step * STEP_SECONDS * 1.02,
            "gpu_hours": 16 * step * STEP_SECONDS / 3600,
            "gc_seconds": 0.001,
            "host_bytes": 4.1e9 + 1e4 * step,
            "device_bytes": 1.15e10,
            "device_peak_bytes": 1.9e10,
            "cost": 40 * step * STEP_SECONDS / 3600,
            "eta_seconds": (steps - step) * STEP_SECONDS,
        }


def eval_rows(steps: int, every: int) -> Iterator[dict[str, Any]]:
    for step in range(every, steps + 1, every):
        for name, worse in (("validation", 0.1), ("code", 0.3)):
            yield {
                "step": step,
                "set": name,
                "loss": 2.1 + worse + 8.7 * math.exp(-step / (0.15 * steps)),
                "tokens": 65536,
                "seconds": 3.5,
            }


def ledger_rows(steps: int, ranks: int, save_every: int) -> Iterator[dict[str, Any]]:
    for step in range(1, steps + 1):
        parts = {
            name: [0.9 * share * STEP_SECONDS, share * STEP_SECONDS, 1.2 * share * STEP_SECONDS]
            for name, share in PARTS.items()
        }
        wall = STEP_SECONDS
        if step % save_every == 0:
            parts["checkpoint"] = [9.0, 10.0, 11.0]
            wall += 10.0
        yield {
            "step": step,
            "ranks": ranks,
            "wall_seconds": wall,
            "parts": parts,
            "slowest_rank": 5 if step % 3 else step % ranks,
            "data_rank": 3,
            "slowest_busy_seconds": 1.9,
            "median_busy_seconds": 1.8,
            "unexplained_share": PARTS["unexplained"],
        }


def system_rows(node: int, seconds: float, every: float, gpus: int) -> Iterator[dict[str, Any]]:
    noise = random.Random(node)
    count = int(seconds / every)
    for number in range(count):
        # two hours between two attempts
        at = BEGAN + number * every + (7200.0 if number >= count // 2 else 0.0)
        slow = node == 1 and number > count * 0.75
        row: dict[str, Any] = {
            "node": node,
            "step": int(number * every / STEP_SECONDS),
            "time": at,
            "sample_seconds": 0.03,
            "host/cpu_percent": 31 + noise.random(),
            "host/memory_used_bytes": 2.1e11 + 1e7 * number,
            "process/private_bytes": 9e10,
            "disk/free_bytes": 3e12 - 1e9 * number,
            "network/send_bytes_per_second": 1.1e10 * noise.random(),
        }
        for gpu in range(gpus):
            hot = slow and gpu == 2
            row |= {
                f"gpu/{gpu}/utilization_percent": 97 + noise.randint(0, 3),
                f"gpu/{gpu}/tensor_active_percent": 41 + noise.random(),
                f"gpu/{gpu}/memory_used_bytes": 7.1e10 + gpu * 1e8,
                f"gpu/{gpu}/power_watts": 640 + 20 * noise.random(),
                f"gpu/{gpu}/temperature_celsius": 91 if hot else 62 + gpu,
                f"gpu/{gpu}/sm_clock_ratio": 0.55 if hot else 0.94,
                f"gpu/{gpu}/throttle_reasons": "hardware-thermal" if hot else "power-cap",
                f"gpu/{gpu}/throttled_percent": 88.0 if hot else 0.0,
                f"rank/{node * gpus + gpu}/private_bytes": 4e9,
            }
            if number == 0:
                row |= {
                    f"gpu/{gpu}/name": "NVIDIA H100 80GB HBM3",
                    f"gpu/{gpu}/ecc_uncorrected_errors": 0,
                    f"gpu/{gpu}/xid_events": 0,
                }
        if gpus:
            row |= {
                "gpu/utilization_percent_mean": 98.5,
                "gpu/tensor_active_percent_mean": 41.5,
                "gpu/sm_clock_ratio_min": 0.55 if slow else 0.94,
                "gpu/temperature_celsius_max": 91 if slow else 69,
                "gpu/power_watts_sum": 5200,
                "gpu/memory_used_bytes_max": 7.17e10,
            }
        yield row


ALERTS: tuple[dict[str, Any], ...] = (
    {
        "name": "non-finite",
        "level": "error",
        "step": 150,
        "cause": "The loss is not a number.",
        "evidence": "loss NaN at step 150, gradient norm 0.9",
        "where": "",
        "next_step": "python launch/train.py ... resume=runs/x/checkpoints/step-00000100",
    },
    {
        "name": "throttling",
        "level": "warning",
        "step": 240,
        "cause": "The GPU is hot and lowers its clock.",
        "evidence": "clock 55% of its maximum at 91 °C",
        "next_step": "look at the cooling of node 1",
        "where": "node 1, GPU 2",
    },
    {
        "name": "throttling",
        "level": "warning",
        "step": 270,
        "cause": HOSTILE,
        "evidence": HOSTILE,
        "next_step": HOSTILE,
        "where": HOSTILE,
    },
)


def write_run(
    folder: Path, steps: int = 300, *, nodes: int = 2, gpus: int = 8, sample_seconds: float = 10.0
) -> Path:
    """Write a run that failed in its second attempt, with all kinds of files, some with hostile text."""
    folder.mkdir(parents=True)
    _jsonl(folder / "metrics.jsonl", step_rows(steps))
    _jsonl(folder / "eval.jsonl", eval_rows(steps, max(1, steps // 6)))
    _jsonl(folder / "ledger.jsonl", ledger_rows(steps, max(1, nodes * gpus), 100))
    _jsonl(folder / "alerts.jsonl", iter(ALERTS))
    for node in range(nodes):
        _jsonl(
            folder / "system" / f"node-{node}.jsonl",
            system_rows(node, steps * STEP_SECONDS, sample_seconds, gpus),
        )
    config = {
        "train": {"steps": 2 * steps, "micro_batch": 2},
        "monitor": {"hang_seconds": 600, "price_per_gpu_hour": 2.5},
        "data": {"path": "s3://user:secret@bucket/data?key=hush"},
        "run": {"name": HOSTILE},
        "engine": {"megatron": {"virtual_pipeline_model_parallel_size": 2}},
    }
    (folder / "config.yaml").write_text(json.dumps(config, indent=1), encoding="utf-8")  # JSON is YAML
    (folder / "plan.json").write_text(json.dumps(PLAN), encoding="utf-8")
    status = {
        "state": "failed",
        "attempt": 2,
        "exit_code": 1,
        "step": steps,
        "checkpoint": None,
        "reason": f"rank 3 died {HOSTILE}",
    }
    (folder / "status.json").write_text(json.dumps(status), encoding="utf-8")
    for attempt in (1, 2):
        attempt_folder = folder / "attempts" / f"{attempt:03d}"
        attempt_folder.mkdir(parents=True)
        (attempt_folder / "config.yaml").write_text("{}", encoding="utf-8")
        (attempt_folder / "log.txt").write_text(f"a line\n{HOSTILE}\n", encoding="utf-8")
        packages = {"torch": f"2.1{attempt}", "deepspeed": None}
        environment = {"python": "3.11.9", "packages": packages, "git": {"commit": "abc", "dirty": False}}
        (attempt_folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    for number, first, last in ((1, 0, steps // 2), (2, steps // 2, steps)):
        attempt_folder = folder / "attempts" / f"{number:03d}"
        write_times(
            attempt_folder,
            AttemptTimes(
                began=BEGAN + 9000 * (number - 1), seen=BEGAN + 9000 * number, first=first, step=last
            ),
        )
        plan = {
            **PLAN,
            "engine": "megatron" if number == 2 else "deepspeed",
            "batch": {**PLAN["batch"], "tokens_per_step": 4_194_304 * number},
        }
        (attempt_folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    (folder / "attempts/001/metrics.jsonl").write_text(
        '{"step": 5, "loss": 1.0}\n{"step": 6, "loss": 1.0}\n', encoding="utf-8"
    )
    (folder / "attempts/001/hang.txt").write_text("rank 1 is missing\n", encoding="utf-8")
    (folder / "attempts/002/probe.json").write_text(
        json.dumps({"step": 0, "seconds": 0.6, "axes": PROBED}), encoding="utf-8"
    )
    return folder


PLAN: dict[str, Any] = {
    "engine": "megatron",
    "world": {"ranks": 16, "nodes": 2, "device": "cuda", "gpu": "h100"},
    "axes": {"data": 2, "tensor": 2, "pipeline": 4, "context": 1, "expert": 1},
    "batch": {"micro_batch": 2, "accumulation": 16, "tokens_per_step": 4_194_304, "stages": [{}]},
    "flops_per_step": 2.9e16,
    "flops": {"peak_per_gpu": 989.4e12},
    "memory": {"device_total": 65_000_000_000, "parameters": 8_000_000_000, "optimizer": 3_000_000_000},
    "device_memory_bytes": 85_520_809_984,
    "warnings": [
        {
            "key": "zero.stage",
            "seen": "zero.stage=0",
            "rule": "a rule",
            "remedy": "a remedy",
            "severity": "warning",
        }
    ],
}
PROBED: list[dict[str, Any]] = [
    {
        "axis": "tensor",
        "operation": "all_reduce",
        "ranks": 2,
        "latency_p50_seconds": 1.1e-5,
        "latency_p99_seconds": 3.1e-5,
        "large_bytes": 67108864,
        "bandwidth_bytes_per_second": 3.1e11,
        "best_bandwidth_bytes_per_second": 3.3e11,
        "slowest_ranks": [4, 5],
    },
    {"axis": "data", "ranks": 2, "missing": "no process group of just the ranks along this axis"},
]


def _jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
