"""Runs on two simulated nodes with fake GPUs: faults are named within 20 steps, and a driver that hangs
delays no step and changes no loss.

    pytest tests/train/test_run_system.py -m full

Quickly, tests/monitor has the sampler with a driver that hangs, and the detectors.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import pynvml
import pytest

from tests.monitor.fake_nvml import FakeGpu, FakeNvml
from toolkit.config.monitor import MonitorConfig, WandbMode
from toolkit.config.schema import EngineName, EvalConfig, RunConfig, RunSection
from toolkit.data.tokens.stdlib import ensure_stdlib
from toolkit.errors import ExitCode
from toolkit.estimate.plan_report import to_json
from toolkit.monitor.system.sampler import PATIENCE_SECONDS
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.testing.dist import RankPool, rank_pool
from toolkit.testing.tiny import tiny_config

WORLD = World(ranks=2, ranks_per_node=1, device=Device.CPU, has_compiler=True)
STEPS, FAULT, WITHIN = 60, 20, 20


def config_of(folder: str, data: str, system_seconds: float) -> RunConfig:
    config = tiny_config(
        "gpt2",
        train__steps=STEPS,
        engine__name=EngineName.deepspeed,
        checkpoint__every="never",
        checkpoint__at_end=False,
    )
    config.monitor = MonitorConfig(
        wandb=WandbMode.disabled,
        system_seconds=system_seconds,
        probe=False,
        ledger=False,
        replicas_every=0,
        hang_seconds=0,
    )
    config.run, config.eval = RunSection(dir=folder), EvalConfig(every=0)
    config.data.path, config.data.vocab_size = data, 264
    config.debug.threads = 1
    return config


def train_on_node(rank: int, ranks: int, folder: str, data: str, system_seconds: float, faults: bool) -> int:
    from toolkit.observe import system
    from toolkit.train.run import run

    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # CPU ranks see no GPUs, not even the fake driver's
    nvml, steps = FakeNvml([FakeGpu(), FakeGpu()]), 0
    system.load_nvml = lambda plan: nvml

    def stop() -> None:
        nonlocal steps
        steps += 1
        if faults and steps >= FAULT:
            time.sleep(0.05)  # the run must last longer than a driver may take
        if faults and steps == FAULT and rank == 0:
            nvml.hangs("nvmlDeviceGetTotalEccErrors")
        if faults and steps == FAULT and rank == 1:
            nvml.gpus[0].throttle, nvml.gpus[0].sm_clock, nvml.gpus[0].celsius = (
                pynvml.nvmlClocksEventReasonHwThermalSlowdown,
                990,
                92,
            )
            nvml.happens(0, xid=63)

    return int(
        run(
            make_plan(config_of(folder, data, system_seconds), WORLD),
            rank=rank,
            local_rank=0,
            stop=stop,
            attempt=1,
        )
    )


def trained(folder: Path, data: Path, pool: RankPool, *, system_seconds: float, faults: bool) -> RunDirectory:
    config = config_of(str(folder), str(data), system_seconds)
    directory = RunDirectory(folder)
    directory.begin(config, to_json(make_plan(config, WORLD)))
    codes = pool.run(train_on_node, str(folder), str(data), system_seconds, faults)
    assert codes == [ExitCode.DONE] * 2
    directory.release()
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data") / "monitor"
    ensure_stdlib(data, 264, root=Path(__file__).resolve().parents[2] / "toolkit" / "monitor")
    return data


def alerts(directory: RunDirectory, node: int) -> list[dict[str, Any]]:
    return list(read_rows(directory.node_alerts_file(node)))


@pytest.mark.full
def test_gpu_faults_are_named_and_delay_no_step(data: Path, tmp_path: Path) -> None:
    with rank_pool(2) as pool:
        bare = trained(tmp_path / "bare", data, pool, system_seconds=0, faults=False)
        faulty = trained(tmp_path / "faulty", data, pool, system_seconds=0.02, faults=True)
    steps = list(read_rows(faulty.metrics_file))
    assert [(row["loss"], row["grad_norm"]) for row in read_rows(bare.metrics_file)] == [
        (row["loss"], row["grad_norm"]) for row in steps
    ]
    assert not bare.system_file(0).exists() or not list(read_rows(bare.system_file(0)))

    first, second = (list(read_rows(faulty.system_file(node))) for node in (0, 1))
    assert {row["node"] for row in second} == {1}
    assert second[0]["gpu/count"] == 1, "one rank on the node, so one GPU of its two"
    assert second[-1]["step"] > FAULT + 3
    assert any("gpu/silent_seconds" in row for row in first)
    assert all("rank/0/private_bytes" in row for row in first if "host/silent_seconds" not in row)
    assert all("rank/1/private_bytes" in row for row in second if "host/silent_seconds" not in row)

    found = alerts(faulty, 1)
    throttled, xid = (
        next(alert for alert in found if (alert["name"], alert["fault"]) == kind)
        for kind in (("gpu-slow", "throttled"), ("gpu-fault", "xid"))
    )
    assert FAULT - 1 <= throttled["step"] <= FAULT + WITHIN
    assert FAULT - 1 <= xid["step"] <= FAULT + WITHIN
    assert (throttled["where"], xid["where"]) == ("node 1, GPU 0", "node 1, GPU 0")
    assert "hardware-thermal" in throttled["cause"]
    assert "990 of 1980 MHz (50%)" in throttled["evidence"]
    assert "92 °C" in throttled["evidence"]
    assert "XID 63" in xid["cause"]
    assert {
        alert["fault"] for alert in found if alert["name"] in ("gpu-slow", "gpu-fault", "host-fault")
    } == {"throttled", "xid"}
    assert not [alert for alert in alerts(faulty, 0) if alert["name"].startswith("gpu")]

    after = median(row["step_seconds"] for row in steps[FAULT:])
    assert after < PATIENCE_SECONDS[0] / 2, "waiting for the hanging driver would take longer"
