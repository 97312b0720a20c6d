"""Ranks decide together: after one rank's request to stop, all stop at the same step with a checkpoint."""

from __future__ import annotations

import re

from tests.train.fakes import FakeEngine, completed_step, samples
from toolkit.engine.protocol import StepResult
from toolkit.engine.rank_sync import GlooFlagReduce, StepConsensus, check_same_data
from toolkit.errors import ExitCode, InputError
from toolkit.hooks import CompletedStep, Hook
from toolkit.testing.dist import run_ranks
from toolkit.testing.tiny import tiny_plan
from toolkit.train.loop import train
from toolkit.train.state import TrainState
from toolkit.train.task import NextTokenTask


def stops_together(rank: int, ranks: int) -> tuple[int, int, list[int]]:
    """Rank 1 requests a stop in its fifth step, rank 0 a save at its third; return code, step, saves."""
    all_reduce_flags, state, saved = GlooFlagReduce(), TrainState(), []

    class Saves(Hook):
        def on_step(self, completed: CompletedStep) -> None:
            if completed.consensus.save_due or completed.consensus.stop:
                saved.append(completed.step)

    def agree(waited: float, result: StepResult) -> StepConsensus:
        stop, save = all_reduce_flags([rank == 1 and state.step >= 5, rank == 0 and state.step == 3])
        return StepConsensus(stop=bool(stop), save_due=bool(save))

    assert all_reduce_flags([rank, -rank, 7]) == [1, 0, 7]
    code = train(
        tiny_plan(train__steps=50, train__global_batch=4),
        FakeEngine(),
        NextTokenTask(),
        samples(),
        state,
        Saves(),
        agree,
    )
    return int(code), state.step, saved


def test_all_ranks_stop_and_save_at_the_same_step() -> None:
    assert run_ranks(stops_together, 2) == [(int(ExitCode.STOPPED), 5, [3, 5])] * 2


def reads_its_own_data(rank: int, ranks: int) -> str:
    check_same_data({"data": "same", "seed": 1}, ranks)
    try:
        check_same_data({"data": f"of rank {rank // 2}", "seed": 1}, ranks)
    except InputError as error:
        return str(error)
    return "not noticed"


def test_different_data_raises_on_every_rank() -> None:
    answers = run_ranks(reads_its_own_data, 3)
    assert len(set(answers)) == 1
    assert re.search(
        r"rank 0 on \S+ reads data=of rank 0; rank 2 on \S+ reads data=of rank 1\n", answers[0]
    ), answers[0]
    assert "data.path=FOLDER" in answers[0]
    check_same_data({"data": "mine"}, 1)


def test_no_request_stops_or_saves_nothing() -> None:
    assert completed_step(1).consensus == StepConsensus()
