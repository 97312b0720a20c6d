"""Ranks compute a micro-batch of one of them: wrong values are found and named, and losses do not change.

pytest tests/train/test_computation_check.py
pytest tests/train/test_computation_check.py -m full     more layouts
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.fakes import completed_step, context_of
from tests.train.tiny_run import TinyRun, read_jsonl
from toolkit.config.monitor import OnWrongComputation
from toolkit.config.schema import RunConfig
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.forward_hashes import hash_forward
from toolkit.engine.protocol import StepResult, StepSettings
from toolkit.engine.rank_sync import make_flag_reduce
from toolkit.errors import ExitCode
from toolkit.monitor.alert import Alert
from toolkit.observe.gather import make_gather
from toolkit.observe.replicas import ReplicaCheck
from toolkit.plan.types import RunPlan
from toolkit.rundir.excluded_hosts import SLURM_JOB, read_excluded_hosts
from toolkit.rundir.status import RunState
from toolkit.testing.dist import RankPool, rank_pool
from toolkit.testing.matrix import Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.parity import rank_samples
from toolkit.train.computation_check import ComputationCheck
from toolkit.train.task import text_task

EVERY, STEPS = 2, 6
SINCE = 3  # the step from which on a fault is there
Fault = Callable[[torch.Tensor, int], None]  # changes an output; the number of calls so far


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as ranks:
        yield ranks


def add_ulp(output: torch.Tensor, call: int) -> None:
    """Change the last bit of one element."""
    output.view(-1).view({2: torch.int16, 4: torch.int32}[output.element_size()])[3] += 1


def add_ulp_in_turn(output: torch.Tensor, call: int) -> None:
    if call % 2:
        add_ulp(output, call)


@dataclass(frozen=True)
class RankResult:
    """What rank 0 saw.

    Attributes:
        alerts: of the check of the computation.
        replicas: of the comparison of replicas.
        random: whether the check left torch's random state as it was.
    """

    results: list[StepResult]
    alerts: list[Alert]
    replicas: list[Alert]
    random: bool


def train(
    rank: int, ranks: int, plan: RunPlan, module: str, faults: dict[int, Fault], check: bool
) -> RankResult:
    """Train with a check every two steps. From ``SINCE`` on, outputs of ``module`` have the rank's fault."""
    task = text_task(plan)
    engine = build_engine(plan, task, rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    context = context_of(plan, Path(), rank, make_flag_reduce(ranks))
    alerts: list[Alert] = []
    replicas: list[Alert] = []
    hook = ComputationCheck(context, engine, task, alerts.append)
    comparison = ReplicaCheck(
        context, engine, make_gather(rank, ranks, ranks), every=1, alert=replicas.append
    )
    results, random = [], True
    for step in range(STEPS):
        if step + 1 == SINCE and rank in faults:
            inject(engine, module, faults[rank])
        batches = rank_samples(engine, plan, step, rank)
        results.append(engine.train_step(batches, StepSettings(step, 1e-2)))
        done = replace(completed_step(step + 1), micro_batches=batches)
        comparison.on_step(done)
        if check:
            before = torch.get_rng_state()
            hook.on_step(done)
            random = random and torch.equal(before, torch.get_rng_state())
    comparison.on_end(STEPS)
    engine.close()
    return RankResult(results, alerts, replicas, random)


def inject(engine: Any, name: str, fault: Fault) -> None:
    chunks = engine._model.chunks if hasattr(engine, "_model") else [engine._ds.module]
    (module,) = [each for chunk in chunks for key, each in chunk.named_modules() if key.endswith(name)]
    calls = iter(range(10**6))

    def change(module: nn.Module, inputs: Any, output: Any) -> None:
        with torch.no_grad():
            fault(output[0] if isinstance(output, tuple) else output, next(calls))

    module.register_forward_hook(change)


def plan_of(cell: Cell, **more: Any) -> RunPlan:
    plan = cell.plan(OptimizerCase.ADAM, **more)
    plan.config.monitor.computation_every = EVERY
    return plan


HF, CORE = "layers.1.mlp.up_proj", "layers.1.mlp.linear_fc1"
QUICK = [(deepspeed("llama", 1, data=2), HF), (megatron("llama", data=2), CORE)]
MORE = [
    (deepspeed("llama", 3, data=2), HF),
    (deepspeed("gpt2", 1, pipeline=2, data=2), "h.1.mlp.c_proj"),
    (deepspeed("llama", 1, context=2, data=2), HF),
    (deepspeed("llama", 1, tensor=2, data=2), HF),
    (megatron("llama", tensor=2, data=2, zero=1), CORE),
    (megatron("llama", pipeline=2, data=2), "layers.0.mlp.linear_fc1"),
    (megatron("mixtral", data=2), "layers.1.mlp.router"),
    (deepspeed("mixtral", 1, data=2), "layers.1.mlp.gate"),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]


@pytest.mark.parametrize(("cell", "module"), CASES, ids=str)
def test_wrong_output_is_found_and_losses_are_those_without_the_check(
    cell: Cell, module: str, pool: RankPool
) -> None:
    dropout = {"model__dropout": 0.1} if cell.family == "gpt2" or "megatron" in cell.name else {}
    plan, odd = plan_of(cell, **dropout), cell.ranks - 1
    healthy = pool.run(train, plan, module, {}, True, ranks=cell.ranks)[0]
    assert (healthy.alerts, healthy.random) == ([], True)
    without = pool.run(train, plan, module, {}, False, ranks=cell.ranks)[0]
    assert healthy.results == without.results, "equal to the bit"

    faulty = pool.run(train, plan, module, {odd: add_ulp}, True, ranks=cell.ranks)[0]
    assert faulty.results[: SINCE - 1] == without.results[: SINCE - 1]
    assert faulty.replicas == [], "weights are equal although they are wrong: the other check is blind to it"
    assert [alert.step for alert in faulty.alerts] == [step for step in (4, 6) if step >= SINCE]
    for alert in faulty.alerts:
        suspects = [odd - cell.tensor * cell.context * (cell.data - 1), odd]
        assert alert.where == f"ranks {suspects[0]}, {suspects[1]}"
        assert f"rank {odd} ({socket.gethostname()}, cpu)" in alert.cause
        stage = " of pipeline stage 1" if cell.pipeline > 1 else ""
        assert f"{module}{stage} from one micro-batch" in alert.cause


def test_rank_that_disagrees_with_itself_is_faulty(pool: RankPool) -> None:
    cell, module = QUICK[0]
    found = pool.run(train, plan_of(cell), module, {1: add_ulp_in_turn}, True, ranks=2)[0]
    assert found.alerts
    assert {alert.where for alert in found.alerts} == {"rank 1"}


def train_in_slurm(rank: int, ranks: int, plan: RunPlan, module: str, faults: dict[int, Fault]) -> RankResult:
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv(SLURM_JOB, "7")
        environ.setenv("SLURMD_NODENAME", f"node{rank}")
        return train(rank, ranks, plan, module, faults, True)


def test_host_of_the_faulty_rank_is_excluded_from_the_next_start_on_slurm(
    pool: RankPool, tmp_path: Path
) -> None:
    cell, module = QUICK[0]
    plan = replace(plan_of(cell), run_dir=str(tmp_path))
    pool.run(train_in_slurm, plan, module, {}, ranks=2)
    assert read_excluded_hosts(tmp_path) == [], "control"
    pool.run(train_in_slurm, plan, module, {0: add_ulp}, ranks=2)
    assert read_excluded_hosts(tmp_path) == [], "two ranks do not show which is wrong"
    (alert, *_) = pool.run(train_in_slurm, plan, module, {1: add_ulp_in_turn}, ranks=2)[0].alerts
    (excluded,) = read_excluded_hosts(tmp_path)
    assert (excluded.host, excluded.reason) == ("node1", alert.cause)


@pytest.mark.full
def test_third_rank_names_the_faulty_one(pool: RankPool) -> None:
    cell, module = deepspeed("llama", 1, data=4), HF
    found = pool.run(train, plan_of(cell), module, {2: add_ulp}, True, ranks=4)[0]
    assert [alert.where for alert in found.alerts] == ["rank 2", "rank 2"]


class CountingModule(nn.Module):
    """A module whose buffers change in every forward, in place and by assignment, and that draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(4, 4), nn.BatchNorm1d(4).eval()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = self.mean + x.mean() + torch.rand(())
        y: torch.Tensor = self.frozen(self.linear(x))
        return y


def test_hashing_restores_buffers_modes_and_random_state() -> None:
    module, inputs = CountingModule().train(), torch.ones(2, 4)
    module.frozen.eval()
    module(inputs)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state, own = torch.get_rng_state(), module.mean
    with hash_forward([module], torch.device("cpu")) as hashes:
        assert not module(inputs).requires_grad
        assert module.calls == 2
    assert list(hashes.read()) == ["linear", "frozen"]
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert module.mean is own
    assert torch.equal(torch.get_rng_state(), state)
    assert (module.training, module.linear.training, module.frozen.training) == (True, True, False)
    assert not module.linear._forward_hooks
    module(inputs)
    assert not torch.equal(module.mean, before["mean"]), "control: a forward changes them"


def test_single_bit_of_one_output_changes_its_hash() -> None:
    module, inputs = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)

    def run() -> dict[str, int]:
        with hash_forward([module], torch.device("cpu")) as hashes:
            module(inputs)
        return hashes.read()

    healthy = run()
    assert run() == healthy
    module[1].register_forward_hook(lambda module, given, output: add_ulp(output, 0))
    wrong = run()
    assert (wrong["0"] == healthy["0"], wrong["1"] == healthy["1"]) == (True, False)


@pytest.mark.full
def test_compiled_layers_are_hashed_as_a_whole() -> None:
    model, inputs = (
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))),
        torch.ones(2, 4),
    )
    layer = model[0]
    layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
    model[2].compile(backend="eager")
    for _ in range(2):
        with hash_forward([model], torch.device("cpu")) as hashes:
            model(inputs)
        assert list(hashes.read()) == ["0", "1.0", "1.1"], "a hook in a graph would stay there"


def test_stop_ends_the_run_unsaved_and_names_the_host(
    tmp_path: Path, data: Path, whole: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(config: RunConfig) -> None:
        config.monitor.computation_every = 2
        config.monitor.on_wrong_computation = OnWrongComputation.stop

    healthy = TinyRun(tmp_path / "healthy", data, config=stop)
    assert healthy.code is ExitCode.DONE
    assert healthy.rows() == whole.rows(), "the same losses as without checks"
    linear, calls = torch.nn.functional.linear, iter(range(10**6))

    def wrong(*arguments: Any) -> torch.Tensor:
        output = linear(*arguments)
        if not torch.is_grad_enabled():
            add_ulp_in_turn(output, next(calls))
        return output

    monkeypatch.setattr(torch.nn.functional, "linear", wrong)
    monkeypatch.setenv("SLURMD_NODENAME", "node17")
    run = TinyRun(tmp_path / "faulty", data, config=stop, checkpoint__every="1")
    assert (run.code, run.status.state, run.status.step) == (ExitCode.DIVERGED, RunState.FAILED, 2)
    assert run.status.checkpoint == str(run.directory.checkpoints / "step-00000001"), "step 2 is not saved"
    reason = run.status.reason or ""
    assert reason.startswith(
        "step 2: rank 0 (node17, cpu) computed two different outputs of lm_head from one micro-batch; "
        f"the newest checkpoint is {run.status.checkpoint}"
    )
    assert f"without node17 (Slurm: cluster.slurm.exclude=node17) with resume={run.directory.path}" in reason
    (alert,) = read_jsonl(run.directory.alerts_file)
    assert (alert["name"], alert["fault"], alert["where"]) == ("replicas-differ", "computation", "rank 0")
