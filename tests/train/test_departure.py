"""Whether faulty nodes leave a run. tests/launch/test_elastic.py has a whole run.

pytest tests/train/test_departure.py
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from tests.train.test_computation_check import add_ulp_in_turn
from tests.train.tiny_run import TinyRun, read_jsonl
from toolkit.config.monitor import OnWrongComputation
from toolkit.config.schema import RunConfig
from toolkit.errors import ExitCode
from toolkit.monitor.sinks.jsonl import append_durable_row
from toolkit.rundir.status import RunState
from toolkit.train import departure
from toolkit.train.departure import (
    DepartureFacts,
    ElasticNodes,
    decide_departure,
    leave_faulty_nodes,
    read_departures,
)

FOUND = DepartureFacts(
    attempt=1,
    step=20,
    cause="rank 5 (b, cpu) computed another output of lm_head from one micro-batch than rank 1 (a, cpu)",
    faulty_nodes=(2,),
    hosts=("b",),
    nodes=4,
    min_nodes=2,
    can_restart=True,
    host_leaves=False,
    agreed_step=10,
    checkpoint_step=8,
)


def leave(config: RunConfig) -> None:
    config.monitor.computation_every = 2
    config.monitor.on_wrong_computation = OnWrongComputation.leave


def compute_wrongly(monkeypatch: pytest.MonkeyPatch, after: Path | None = None) -> None:
    """Change every second output of the forward passes of checks, once ``after`` exists if it is given."""
    linear, calls = torch.nn.functional.linear, iter(range(10**6))

    def wrong(*arguments: Any) -> torch.Tensor:
        output = linear(*arguments)
        if not torch.is_grad_enabled() and (after is None or after.exists()):
            add_ulp_in_turn(output, next(calls))
        return output

    monkeypatch.setattr(torch.nn.functional, "linear", wrong)


@pytest.mark.parametrize("faulty", [(2,), (0, 3)])
def test_faulty_nodes_leave_a_run_that_may_have_fewer_nodes(faulty: tuple[int, ...]) -> None:
    decision = decide_departure(replace(FOUND, faulty_nodes=faulty))
    assert (decision.leaving, decision.refusal) == (faulty, None)


def test_departure_names_nodes_hosts_and_the_checkpoint() -> None:
    text = str(decide_departure(FOUND))
    assert text.startswith("step 20: rank 5 (b, cpu) computed another output")
    assert "; node 2 (b) left the run, which continues from step-00000008, or a snapshot" in text


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"min_nodes": None}, "the number of nodes is fixed"),
        ({"faulty_nodes": ()}, "no majority of the data ranks"),
        ({"faulty_nodes": (0, 1, 2)}, "1 of 4 nodes would be left, and the run needs 2"),
        ({"can_restart": False}, "no restarts left"),
        ({"host_leaves": True}, "serves the rendezvous"),
        ({"checkpoint_step": None}, "no sound checkpoint"),
        ({"agreed_step": None, "checkpoint_step": None}, "no sound checkpoint"),
    ],
)
def test_run_ends_if_it_cannot_continue_without_the_faulty_nodes(change: dict[str, Any], why: str) -> None:
    decision = decide_departure(replace(FOUND, **change))
    assert decision.leaving == ()
    assert why in (decision.refusal or "")


def test_rows_replay_the_decisions(tmp_path: Path) -> None:
    file = tmp_path / "departures.jsonl"
    decisions = [decide_departure(FOUND), decide_departure(replace(FOUND, attempt=2, min_nodes=4))]
    for decision in decisions:
        append_durable_row(file, decision.to_row())
    with file.open("a") as rows:
        rows.write('{"attempt": 3, "st')
    assert read_departures(file) == decisions
    assert [decide_departure(row.facts) for row in read_departures(file)] == decisions
    assert asdict(decisions[0].facts) != asdict(decisions[1].facts), "control"


def test_run_with_a_fixed_number_of_nodes_ends_and_keeps_the_confirmed_checkpoint(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks after steps 2 and 4 agree, and that after step 6 does not. Only one checkpoint is to be kept."""
    compute_wrongly(monkeypatch, after=tmp_path / "run/checkpoints/step-00000005")
    run = TinyRun(tmp_path / "run", data, config=leave, checkpoint__every="1", checkpoint__keep_last=1)
    assert (run.code, run.status.state, run.status.step) == (ExitCode.DIVERGED, RunState.FAILED, 6)
    reason = run.status.reason or ""
    assert "the run ends although monitor.on_wrong_computation=leave, because the number of nodes" in reason
    assert sorted(path.name for path in run.directory.checkpoints.glob("step-*")) == [
        "step-00000004",
        "step-00000005",
    ]
    (alert,) = read_jsonl(run.directory.alerts_file)
    assert alert["next_step"].startswith("none if the run continues on the other nodes")
    (row,) = read_departures(run.directory.departures_file)
    assert (row.leaving, row.facts.step, row.facts.agreed_step, row.facts.checkpoint_step) == ((), 6, 4, 4)


def test_later_attempt_doubts_what_an_earlier_one_saved_after_its_last_check(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt is checked after step 2 and ends with step 3. The second finds a difference."""
    first = TinyRun(tmp_path / "run", data, config=leave, checkpoint__every="1", train__steps=3)
    assert first.code is ExitCode.DONE
    compute_wrongly(monkeypatch)
    second = TinyRun(tmp_path / "run", data, config=leave, checkpoint__every="1")
    assert second.code is ExitCode.DIVERGED
    (row,) = read_departures(second.directory.departures_file)
    assert (row.facts.step, row.facts.agreed_step, row.facts.checkpoint_step) == (4, 2, 2)


@pytest.mark.parametrize("min_nodes", [2, 4])
def test_snapshots_after_the_agreed_step_are_removed_before_the_run_goes_back(
    min_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Mock()
    monkeypatch.setattr(departure, "agreed_sound_step", lambda *_: 8)
    monkeypatch.setattr(departure, "_rewind", calls.rewind)
    monkeypatch.setattr(departure, "append_durable_row", calls.record)
    training, hooks = MagicMock(), SimpleNamespace(snapshots=SimpleNamespace(remove_after=calls.remove_after))
    context = training.context
    context.rank = context.node = 0
    context.all_reduce_flags = list
    context.plan.config.monitor.on_wrong_computation = OnWrongComputation.leave
    context.plan.world.nodes, context.plan.world.ranks_per_node = 4, 1
    wrong = MagicMock(confirmed_faulty=[SimpleNamespace(rank=3, host="b")], agreed_step=10, step=20)
    elastic = ElasticNodes(min_nodes, 1, lambda: False, lambda reason: None)
    found = leave_faulty_nodes(training, hooks, wrong, elastic)  # type: ignore[arg-type]
    names = [name for name, _, _ in calls.mock_calls]
    if min_nodes == 4:
        assert found is None
        assert names == ["record"], "control"
    else:
        assert names == ["remove_after", "rewind", "record"]
        calls.remove_after.assert_called_once_with(10)
