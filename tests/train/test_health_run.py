"""Runs with one injected fault each: the right cause is named within 20 steps. Healthy runs raise no alert.

pytest tests/train/test_health_run.py             on one rank
pytest tests/train/test_health_run.py -m full     on two ranks, and 10,000 healthy steps next to a hog
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.ledger_cases import slow_calls
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.config.monitor import MonitorConfig, WandbMode
from toolkit.config.schema import EngineName, EvalConfig, OnNonfinite, RunConfig, RunSection
from toolkit.data.order import stream as stream_module
from toolkit.data.order.samples import TokenWindows
from toolkit.data.tokens.stdlib import ensure
from toolkit.engine.local import LocalEngine
from toolkit.engine.protocol import StepResult
from toolkit.errors import ExitCode
from toolkit.monitor.alert import Alert
from toolkit.monitor.health import detector
from toolkit.monitor.parts import DATA, communication
from toolkit.plan import make_plan
from toolkit.plan.present import to_json
from toolkit.plan.types import Device, RunPlan, World
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.testing.dist import RankPool, rank_pool
from toolkit.testing.tiny import tiny_config
from toolkit.train import loop
from toolkit.train.run import run

SINCE, WITHIN = 60, 20

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch, type, int], None]  # the engine's class and this rank


def patch_steps(patch: Patch, engine: type, act: Callable[[Any, int], None], after: bool = False) -> None:
    """Call ``act(engine, step)`` in each training step from SINCE."""
    original = engine.train_step  # type: ignore[attr-defined]

    def train_step(self: Any, batches: Any, settings: Any) -> StepResult:
        step = settings.step + 1
        if step >= SINCE and not after:
            act(self, step)
        result: StepResult = original(self, batches, settings)
        if step >= SINCE and after:
            act(self, step)
        return result

    patch.setattr(engine, "train_step", train_step)


def nothing(patch: Patch, engine: type, rank: int) -> None:
    pass


def slow_loader(patch: Patch, engine: type, rank: int) -> None:
    read, slow = TokenWindows.read, []

    def slowly(self: TokenWindows, epochs: Any, numbers: Any) -> Any:
        time.sleep(0.15 if slow else 0.0)
        return read(self, epochs, numbers)

    patch.setattr(TokenWindows, "read", slowly)
    patch.setattr(stream_module, "READ_AT_ONCE", 0)  # a step at a time
    patch.setattr(stream_module, "CHUNKS_AHEAD", 1)
    patch_steps(patch, engine, lambda self, step: slow.append(step))


def garbage(patch: Patch, engine: type, rank: int) -> None:
    kept: list[list[int]] = []

    def collect(self: LocalEngine, step: int) -> None:
        if not kept:  # created while training, because older objects are frozen
            kept.extend([number] for number in range(200_000))
        gc.collect()

    patch_steps(patch, engine, collect)


def pauses(patch: Patch, engine: type, rank: int) -> None:
    patch_steps(patch, engine, lambda self, step: time.sleep(0.4 if step % 3 == 0 else 0.0))


def two_data_waits(patch: Patch, engine: type, rank: int, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Wait for data twice, for most of the time of 20 steps."""
    record_waits = loop._record_waits

    def slowly(stream: Any, recorder: Any) -> Iterator[Any]:
        for step, samples in enumerate(record_waits(stream, recorder), 1):
            if step in (SINCE + 4, SINCE + 12) and rank in ranks:
                with recorder.part(DATA):
                    time.sleep(1.2)
            yield samples

    patch.setattr(loop, "_record_waits", slowly)


def two_data_waits_of_rank_1(patch: Patch, engine: type, rank: int) -> None:
    two_data_waits(patch, engine, rank, (1,))


def stopped(patch: Patch, engine: type, rank: int) -> None:
    """Stop the last rank for 3 s, twice."""

    def stop(self: Any, step: int) -> None:
        if step in (SINCE + 4, SINCE + 12) and rank == max(0, int(os.environ.get("WORLD_SIZE", "1")) - 1):
            subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 3; kill -CONT {os.getpid()}"])
            time.sleep(0.2)  # until the signal arrives

    patch_steps(patch, engine, stop)


def slow_save_of_rank_0(patch: Patch, engine: type, rank: int) -> None:
    if rank == 0:
        slow_disk(patch, engine, rank)


def slow_disk(patch: Patch, engine: type, rank: int) -> None:
    save = CheckpointStore.save

    def slowly(self: CheckpointStore, step: int, *arguments: Any, **named: Any) -> Any:
        time.sleep(0.6 if step >= SINCE else 0.0)
        return save(self, step, *arguments, **named)

    patch.setattr(CheckpointStore, "save", slowly)


def not_a_number(patch: Patch, engine: type, rank: int) -> None:
    patch_steps(patch, engine, lambda self, step: next(iter(self._parameters.values())).data.fill_(torch.nan))


def loss_spike(patch: Patch, engine: type, rank: int) -> None:
    """Scale the weights for one step."""
    kept: dict[str, torch.Tensor] = {}

    def disturb(self: LocalEngine, step: int) -> None:
        if step == SINCE:
            for name, parameter in self._parameters.items():
                kept[name] = parameter.detach().clone()
                parameter.data.mul_(8.0)
        elif step == SINCE + 1:
            for name, parameter in self._parameters.items():
                parameter.data.copy_(kept[name])

    patch_steps(patch, engine, disturb)


def leak(patch: Patch, engine: type, rank: int) -> None:
    kept: list[np.ndarray] = []
    patch_steps(patch, engine, lambda self, step: kept.append(np.ones(2**21)))  # 16 MiB


def slow_rank(patch: Patch, engine: type, rank: int) -> None:
    patch_steps(patch, engine, lambda self, step: time.sleep(0.08 if rank == 1 else 0.0))


def flipped_bit(patch: Patch, engine: type, rank: int) -> None:
    def flip(self: Any, step: int) -> None:
        if step == SINCE and rank == 1:
            parameter = dict(self._ds.module.named_parameters())["model.layers.1.mlp.up_proj.weight"]
            parameter.data.view(-1).view(torch.int32)[100] ^= 1

    patch_steps(patch, engine, flip, after=True)


class SlowNetwork:
    """Delay every collective of the data axis (tests/engine/ledger_cases.py)."""

    now = "communication"

    def __init__(self) -> None:
        self.slow = False

    def strike(self, name: str) -> None:
        if self.slow and name == communication("data"):
            time.sleep(0.02)


CASES: list[tuple[Fault, int, str, str, str]] = [
    (slow_loader, 1, "data-stall", "", "the data pipeline is slow"),
    (garbage, 1, "garbage-collection", "", "garbage collection stops training"),
    (pauses, 1, "pauses", "unexplained", "again and again"),
    (slow_disk, 1, "slow-checkpoint", "", "saving has become slow"),
    (two_data_waits, 1, "data-stall", "", "the data pipeline is slow"),
    (two_data_waits_of_rank_1, 2, "data-stall", "rank 1", "the data pipeline of rank 1 is slow"),
    (stopped, 1, "pauses", "rank 0", "the process of rank 0 is stopped"),
    (stopped, 2, "pauses", "rank 1", "the process of rank 1 is stopped"),
    (slow_save_of_rank_0, 2, "slow-checkpoint", "", "saving has become slow"),
    (not_a_number, 1, "non-finite-loss", "", f"first in step {SINCE}"),
    (loss_spike, 1, "loss-spike", "", f"the loss jumped in step {SINCE}"),
    (leak, 1, "memory-creep", "", "grows step by step"),
    (slow_rank, 2, "straggler", "rank 1", "rank 1 (place 1 of node 0) computes longer"),
    (flipped_bit, 2, "replicas-differ", "ranks 0, 1", "model.layers.1.mlp.up_proj.weight"),
]
QUICK = (slow_loader, not_a_number)
SAVING: dict[Fault, dict[str, Any]] = {
    fault: {"checkpoint__every": "5"} for fault in (slow_disk, slow_save_of_rank_0)
}
SYMPTOMS = {
    "falling-throughput",
    "non-finite-evaluation",
    "gradient-spike",
    "gradient-shift",
    "loss-shift",
}  # symptoms of other causes
BUSY = {"host-busy"}  # true while other tests run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "asyncio"
    ensure(folder, 264, root=Path(asyncio.__file__).parent)
    return folder


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(2) as ranks:
        yield ranks


def plan_of(config: RunConfig, ranks: int) -> RunPlan:
    return make_plan(config, World(ranks=ranks, ranks_per_node=ranks, device=Device.CPU, has_compiler=True))


def train_on_rank(
    rank: int, ranks: int, config: RunConfig, attempt: int, fault: Fault, unit_seconds: float
) -> int:
    if ranks == 1:
        engine: type = LocalEngine
    else:
        from toolkit.engine.deepspeed.engine import DeepSpeedEngine as engine
    plan = plan_of(config, ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detector, "UNIT_SECONDS", unit_seconds)
        if fault is slow_network:
            network = SlowNetwork()
            patch_steps(patch, engine, lambda self, step: setattr(network, "slow", True))
            with slow_calls(network, plan.axes):  # type: ignore[arg-type]
                return int(run(plan, rank=rank, local_rank=rank, stop=lambda: None, attempt=attempt))
        fault(patch, engine, rank)
        return int(run(plan, rank=rank, local_rank=rank, stop=lambda: None, attempt=attempt))


def slow_network(patch: Patch, engine: type, rank: int) -> None:
    raise AssertionError("train_on_rank installs it below the timing of collectives")


def alerts_of(
    folder: Path,
    data: Path,
    fault: Fault,
    ranks: int,
    pool: RankPool | None,
    steps: int,
    unit_seconds: float = 0.0,
    **changes: Any,
) -> list[dict[str, Any]]:
    """Train and return the alerts. With ``unit_seconds`` 0, detectors judge every step by itself."""
    config = tiny_config(
        "llama",
        engine__name=EngineName.local if ranks == 1 else EngineName.deepspeed,
        train__steps=steps,
        zero__stage=0,
        train__on_nonfinite=OnNonfinite["continue"],
        **{"checkpoint__every": "never", "checkpoint__at_end": False, **changes},
    )
    config.run, config.eval, config.debug.threads = (
        RunSection(dir=str(folder)),
        EvalConfig(every=25, batches=1),
        1,
    )
    config.data.path, config.data.vocab_size = str(data), 264
    config.monitor = MonitorConfig(
        wandb=WandbMode.disabled,
        probe=False,
        system_seconds=0,
        hang_seconds=0,
        replicas_every=10,
        every=steps,
    )
    directory = RunDirectory(folder)
    attempt = directory.begin(config, to_json(plan_of(config, ranks)))
    try:
        arguments = (config, attempt, fault, unit_seconds)
        codes = (
            [train_on_rank(0, 1, *arguments)]
            if pool is None
            else pool.run(train_on_rank, *arguments, ranks=ranks)
        )
    finally:
        directory.release()
    assert codes == [ExitCode.DONE] * ranks
    assert len(list(read_rows(directory.metrics_file))) == steps
    return list(read_rows(directory.alerts_file))


def check_alerts(found: list[dict[str, Any]], name: str, where: str, cause: str) -> None:
    right = [row for row in found if (row["name"], row["where"]) == (name, where)]
    assert right, f"{name} is not among {[(row['name'], row['where'], row['step']) for row in found]}"
    assert SINCE <= right[0]["step"] < SINCE + WITHIN
    assert cause in right[0]["cause"]
    assert not [row for row in found if row["step"] < SINCE and row["name"] not in BUSY]
    assert {row["name"] for row in found} <= {name} | SYMPTOMS | BUSY, "no wrong cause"
    assert {row["where"] for row in found if row["name"] == "pauses" == name} <= {where}, "nor a wrong place"


@pytest.mark.parametrize(
    ("fault", "name", "where", "cause"),
    [
        pytest.param(
            fault, name, where, cause, id=fault.__name__, marks=[] if fault in QUICK else [pytest.mark.full]
        )
        for fault, ranks, name, where, cause in CASES
        if ranks == 1
    ],
)
def test_fault_on_one_rank_is_named(
    fault: Fault, name: str, where: str, cause: str, data: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    check_alerts(
        alerts_of(tmp_path / "run", data, fault, 1, None, SINCE + WITHIN, **SAVING.get(fault, {})),
        name,
        where,
        cause,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "name", "where", "cause"),
    [
        pytest.param(fault, name, where, cause, id=fault.__name__)
        for fault, name, where, cause in [
            *((fault, name, where, cause) for fault, ranks, name, where, cause in CASES if ranks == 2),
            (slow_network, "slow-collective", "axis data", "collectives along axis data have become slow"),
        ]
    ],
)
def test_fault_on_one_of_two_ranks_is_named(
    fault: Fault, name: str, where: str, cause: str, data: Path, tmp_path: Path, pool: RankPool
) -> None:
    check_alerts(
        alerts_of(tmp_path / "run", data, fault, 2, pool, SINCE + WITHIN, **SAVING.get(fault, {})),
        name,
        where,
        cause,
    )


def padded(patch: Patch, engine: Any, rank: int) -> None:
    """Give every step a minimum duration, because small machines are slow now and then."""
    original = engine.train_step

    def train_step(self: Any, batches: Any, settings: Any) -> StepResult:
        until = time.perf_counter() + 0.03
        result: StepResult = original(self, batches, settings)
        time.sleep(max(0.0, until - time.perf_counter()))
        return result

    patch.setattr(engine, "train_step", train_step)


@contextmanager
def hog() -> Iterator[None]:
    """Run a process that keeps a processor busy."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time\nend = time.time() + 600\nwhile time.time() < end: pass"]
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.full
@pytest.mark.parametrize("number", range(5))
def test_two_thousand_clean_steps_next_to_a_hog_only_report_a_busy_host(
    number: int, data: Path, tmp_path: Path, pool: RankPool
) -> None:
    """One of five runs has one rank, whose steps have idle time; the others have two."""
    torch.set_num_threads(1)
    ranks, fault = (1, padded) if number == 0 else (2, nothing)
    with hog():
        found = alerts_of(
            tmp_path / "run",
            data,
            fault,
            ranks,
            pool if ranks == 2 else None,
            2000,
            detector.UNIT_SECONDS,
            checkpoint__every="100",
        )
    assert [str(Alert.of(row)) for row in found if row["name"] not in BUSY] == []
    assert len(found) <= 1, "there is at most one alert"


@pytest.mark.full
@pytest.mark.skipif(len(os.sched_getaffinity(0)) > 4, reason="needs one hog per processor")
def test_rank_that_shares_its_processor_with_a_hog_is_named(data: Path, tmp_path: Path) -> None:
    """Both run on one core."""
    torch.set_num_threads(1)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})  # the hog and the threads of the run are its children
    try:
        with hog():
            found = alerts_of(tmp_path / "run", data, padded, 1, None, 1000, detector.UNIT_SECONDS)
    finally:
        os.sched_setaffinity(0, before)
    assert {row["name"] for row in found} == BUSY
    assert "had no processor for" in found[0]["evidence"]
