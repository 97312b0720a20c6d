"""Real runs with one injected fault each, whose cause is named within 20 steps, and healthy runs.

pytest tests/train/test_health_run.py             on one rank
pytest tests/train/test_health_run.py -m full     on two ranks, and healthy runs next to a busy process
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
from tests.train.tiny_run import without_fixed_costs
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.config.monitor import MonitorConfig, WandbMode
from toolkit.config.schema import EngineName, EvalConfig, OnNonfinite, RunConfig, RunSection
from toolkit.data.order import stream as stream_module
from toolkit.data.order.samples import TokenWindows
from toolkit.data.tokens.stdlib import ensure_stdlib
from toolkit.engine.local import LocalEngine
from toolkit.engine.protocol import StepResult
from toolkit.errors import ExitCode
from toolkit.estimate.plan_report import to_json
from toolkit.monitor.alert import Alert
from toolkit.monitor.health import detector
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.step_parts import DATA, communication
from toolkit.testing.dist import RankPool, rank_pool
from toolkit.testing.tiny import tiny_config
from toolkit.train import loop
from toolkit.train.run import run

SINCE, WITHIN = 60, 20

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch, type, int], None]  # the engine's class and this rank


def act_in_each_step(
    patch: Patch, engine: type, act: Callable[[Any, int], None], after: bool = False
) -> None:
    """Call ``act(engine, step)`` in each training step from SINCE on."""
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
    patch.setattr(stream_module, "READ_CHUNK_BYTES", 0)  # a step at a time
    patch.setattr(stream_module, "CHUNKS_AHEAD", 1)
    act_in_each_step(patch, engine, lambda self, step: slow.append(step))


def garbage(patch: Patch, engine: type, rank: int) -> None:
    kept: list[list[int]] = []

    def collect(self: LocalEngine, step: int) -> None:
        if not kept:  # created during training: older objects are not scanned
            kept.extend([number] for number in range(200_000))
        gc.collect()

    act_in_each_step(patch, engine, collect)


def pauses(patch: Patch, engine: type, rank: int) -> None:
    act_in_each_step(patch, engine, lambda self, step: time.sleep(0.4 if step % 3 == 0 else 0.0))


def two_data_waits_of_rank_1(patch: Patch, engine: type, rank: int) -> None:
    """Two waits of more than a second each, most of the time of 20 steps."""
    record_waits = loop._record_waits

    def slowly(stream: Any, recorder: Any) -> Iterator[Any]:
        for step, samples in enumerate(record_waits(stream, recorder), 1):
            if step in (SINCE + 4, SINCE + 12) and rank == 1:
                with recorder.part(DATA):
                    time.sleep(1.2)
            yield samples

    patch.setattr(loop, "_record_waits", slowly)


def stopped(patch: Patch, engine: type, rank: int) -> None:
    """Stop rank 1 twice for 3 s with SIGSTOP."""

    def stop(self: Any, step: int) -> None:
        if step in (SINCE + 4, SINCE + 12) and rank == 1:
            subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 3; kill -CONT {os.getpid()}"])
            time.sleep(0.2)  # until the signal has arrived

    act_in_each_step(patch, engine, stop)


def slow_save_of_rank_0(patch: Patch, engine: type, rank: int) -> None:
    save = CheckpointStore.save

    def slowly(self: CheckpointStore, step: int, *arguments: Any, **named: Any) -> Any:
        time.sleep(0.6 if step >= SINCE and rank == 0 else 0.0)
        return save(self, step, *arguments, **named)

    patch.setattr(CheckpointStore, "save", slowly)


def not_a_number(patch: Patch, engine: type, rank: int) -> None:
    act_in_each_step(
        patch, engine, lambda self, step: next(iter(self._parameters.values())).data.fill_(torch.nan)
    )


def loss_spike(patch: Patch, engine: type, rank: int) -> None:
    """Change the weights of one step, then restore them."""
    kept: dict[str, torch.Tensor] = {}

    def disturb(self: LocalEngine, step: int) -> None:
        if step == SINCE:
            for name, parameter in self._parameters.items():
                kept[name] = parameter.detach().clone()
                parameter.data.mul_(8.0)
        elif step == SINCE + 1:
            for name, parameter in self._parameters.items():
                parameter.data.copy_(kept[name])

    act_in_each_step(patch, engine, disturb)


def leak(patch: Patch, engine: type, rank: int) -> None:
    kept: list[np.ndarray] = []
    act_in_each_step(patch, engine, lambda self, step: kept.append(np.ones(2**21)))  # 16 MiB


def slow_rank(patch: Patch, engine: type, rank: int) -> None:
    act_in_each_step(patch, engine, lambda self, step: time.sleep(0.08 if rank == 1 else 0.0))


def flipped_bit(patch: Patch, engine: type, rank: int) -> None:
    def flip(self: Any, step: int) -> None:
        if step == SINCE and rank == 1:
            parameter = dict(self._ds.module.named_parameters())["model.layers.1.mlp.up_proj.weight"]
            parameter.data.view(-1).view(torch.int32)[100] ^= 1

    act_in_each_step(patch, engine, flip, after=True)


class SlowNetwork:
    """Delays every collective of the data axis, as tests/engine/ledger_cases.py expects."""

    now = "communication"

    def __init__(self) -> None:
        self.slow = False

    def strike(self, name: str) -> None:
        if self.slow and name == communication("data"):
            time.sleep(0.02)


# (injected fault, ranks, name of the alert, its fault, where, part of the cause)
CASES: list[tuple[Fault, int, str, str, str, str]] = [
    (slow_loader, 1, "data-stall", "", "", "the data pipeline is slow"),
    (garbage, 1, "slow-steps", "garbage-collection", "", "garbage collection stops training"),
    (pauses, 1, "slow-steps", "pauses", "unexplained", "repeatedly take far longer"),
    (two_data_waits_of_rank_1, 2, "data-stall", "", "rank 1", "the data pipeline of rank 1 is slow"),
    (stopped, 2, "slow-steps", "stopped-process", "rank 1", "the process of rank 1 is stopped"),
    (slow_save_of_rank_0, 2, "slow-checkpoint", "slow-save", "", "saving has become slow"),
    (not_a_number, 1, "non-finite", "loss", "", f"first in step {SINCE}"),
    (loss_spike, 1, "loss-jump", "loss-spike", "", f"the loss jumped in step {SINCE}"),
    (leak, 1, "memory-growth", "process-memory", "", "grows step by step"),
    (slow_rank, 2, "straggler", "", "rank 1", "rank 1 (local rank 1 of node 0) computes longer"),
    (flipped_bit, 2, "replicas-differ", "state", "ranks 0, 1", "model.layers.1.mlp.up_proj.weight"),
]
QUICK = (not_a_number,)
SAVING: dict[Fault, dict[str, Any]] = {slow_save_of_rank_0: {"checkpoint__every": "5"}}
# Faults that other causes entail.
SYMPTOMS = {"falling-throughput", "evaluation", "gradient-spike", "gradient-shift", "loss-shift"}
BUSY = {"host-busy"}  # may be true while other tests run
BUSY_STEPS = 1000  # half a minute; lasting conditions are judged over 20 s


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "asyncio"
    ensure_stdlib(folder, 264, root=Path(asyncio.__file__).parent)
    return folder


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(2) as ranks:
        yield ranks


def plan_of(config: RunConfig, ranks: int) -> RunPlan:
    return make_plan(config, World(ranks=ranks, ranks_per_node=ranks, device=Device.CPU, has_compiler=True))


def trained(
    rank: int, ranks: int, config: RunConfig, attempt: int, fault: Fault, group_seconds: float
) -> int:
    if ranks == 1:
        engine: type = LocalEngine
    else:
        from toolkit.engine.deepspeed.engine import DeepSpeedEngine as engine
    plan = plan_of(config, ranks)
    with without_fixed_costs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(detector, "GROUP_SECONDS", group_seconds)
        if fault is slow_network:
            network = SlowNetwork()
            act_in_each_step(patch, engine, lambda self, step: setattr(network, "slow", True))
            with slow_calls(network, plan.axes):  # type: ignore[arg-type]
                return int(run(plan, rank=rank, local_rank=rank, stop=lambda: None, attempt=attempt))
        fault(patch, engine, rank)
        return int(run(plan, rank=rank, local_rank=rank, stop=lambda: None, attempt=attempt))


def slow_network(patch: Patch, engine: type, rank: int) -> None:
    raise AssertionError("trained() injects it below the timing of collectives")


def alerts_of(
    folder: Path,
    data: Path,
    fault: Fault,
    ranks: int,
    pool: RankPool | None,
    steps: int,
    group_seconds: float = 0.0,
    **changes: Any,
) -> list[dict[str, Any]]:
    """``group_seconds`` of lasting conditions; 0 judges each of the few short steps of a test separately."""
    config = tiny_config(
        "llama",
        engine__name=EngineName.local if ranks == 1 else EngineName.deepspeed,
        train__steps=steps,
        zero__stage=0,
        train__on_nonfinite=OnNonfinite.skip,
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
        arguments = (config, attempt, fault, group_seconds)
        if pool is None:
            codes = [trained(0, 1, *arguments)]
        else:
            codes = pool.run(trained, *arguments, ranks=ranks, timeout=600)
    finally:
        directory.release()
    assert codes == [ExitCode.DONE] * ranks
    assert len(list(read_rows(directory.metrics_file))) == steps
    return list(read_rows(directory.alerts_file))


def check(found: list[dict[str, Any]], name: str, fault: str, where: str, cause: str) -> None:
    right = [row for row in found if (row["name"], row["fault"], row["where"]) == (name, fault, where)]
    assert right, [(row["name"], row["fault"], row["where"], row["step"]) for row in found]
    assert SINCE <= right[0]["step"] < SINCE + WITHIN
    assert cause in right[0]["cause"]
    assert not [row for row in found if row["step"] < SINCE and row["name"] not in BUSY]
    others = [row for row in found if (row["name"], row["fault"]) != (name, fault)]
    assert not [row for row in others if row["fault"] not in SYMPTOMS and row["name"] not in BUSY], (
        "no wrong cause"
    )
    if fault in ("pauses", "stopped-process"):
        assert {row["where"] for row in found if row["fault"] == fault} <= {where}, "no wrong location"


@pytest.mark.parametrize(
    ("inject", "name", "fault", "where", "cause"),
    [
        pytest.param(
            inject, *expected, id=inject.__name__, marks=[] if inject in QUICK else [pytest.mark.full]
        )
        for inject, ranks, *expected in CASES
        if ranks == 1
    ],
)
def test_fault_on_one_rank_is_named(
    inject: Fault, name: str, fault: str, where: str, cause: str, data: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    check(alerts_of(tmp_path / "run", data, inject, 1, None, SINCE + WITHIN), name, fault, where, cause)


@pytest.mark.full
@pytest.mark.parametrize(
    ("inject", "name", "fault", "where", "cause"),
    [
        pytest.param(inject, *expected, id=inject.__name__)
        for inject, *expected in [
            *((inject, *expected) for inject, ranks, *expected in CASES if ranks == 2),
            (
                slow_network,
                "slow-collective",
                "",
                "axis data",
                "collectives along axis data have become slow",
            ),
        ]
    ],
)
def test_fault_on_one_of_two_ranks_is_named(
    inject: Fault, name: str, fault: str, where: str, cause: str, data: Path, tmp_path: Path, pool: RankPool
) -> None:
    check(
        alerts_of(tmp_path / "run", data, inject, 2, pool, SINCE + WITHIN, **SAVING.get(inject, {})),
        name,
        fault,
        where,
        cause,
    )


def padded(patch: Patch, engine: Any, rank: int) -> None:
    """Pad each step to a fixed time, because cores of a small machine are occasionally slow for seconds."""
    original = engine.train_step

    def train_step(self: Any, batches: Any, settings: Any) -> StepResult:
        until = time.perf_counter() + 0.03
        result: StepResult = original(self, batches, settings)
        time.sleep(max(0.0, until - time.perf_counter()))
        return result

    patch.setattr(engine, "train_step", train_step)


@contextmanager
def hog() -> Iterator[None]:
    """A process that keeps a processor busy, and ends by itself in any case."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time\nend = time.time() + 600\nwhile time.time() < end: pass"]
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_healthy_run_on_a_busy_host_gives_only_its_alert(
    ranks: int, data: Path, tmp_path: Path, pool: RankPool
) -> None:
    """One rank with idle time in its steps, and two ranks on two processors."""
    torch.set_num_threads(1)
    with hog():
        found = alerts_of(
            tmp_path / "run",
            data,
            padded if ranks == 1 else nothing,
            ranks,
            pool if ranks == 2 else None,
            BUSY_STEPS,
            detector.GROUP_SECONDS,
            checkpoint__every="100",
        )
    assert [str(Alert.from_row(row)) for row in found if row["name"] not in BUSY] == []
    assert len(found) <= 1, "the alert is shown once"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) > 4, reason="needs a busy process per processor")
def test_rank_on_a_shared_processor_gives_the_busy_host_alert(data: Path, tmp_path: Path) -> None:
    """Both run on one core."""
    torch.set_num_threads(1)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})  # the hog and the threads of the run are its children
    try:
        with hog():
            found = alerts_of(tmp_path / "run", data, padded, 1, None, BUSY_STEPS, detector.GROUP_SECONDS)
    finally:
        os.sched_setaffinity(0, before)
    assert {row["name"] for row in found} == BUSY
    assert "had no processor for" in found[0]["evidence"]
