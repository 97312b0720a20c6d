"""Which steps are bad, which checkpoints are sound, and what a rollback decides, without training.

pytest tests/train/test_soundness.py
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.schema import OnNonfinite, OnSpike, TrainConfig
from toolkit.data.order.skipped import SkippedSamples
from toolkit.engine.protocol import StepResult
from toolkit.engine.rank_sync import StepConsensus
from toolkit.hooks import CompletedStep
from toolkit.monitor.health.loss import MIN_STEPS
from toolkit.monitor.sinks.jsonl import append_durable_row
from toolkit.observe.goodput_tracker import GoodputTracker
from toolkit.plan.types import BatchPlan, RampStage
from toolkit.rundir.repeated_steps import cut_rows
from toolkit.train.nonfinite import Diverged
from toolkit.train.rollback import (
    Rollback,
    RollbackFacts,
    decide_rollback,
    read_decisions,
    read_rollbacks,
    skipped_on_resume,
)
from toolkit.train.soundness import SETTLED_SAVES, FaultKind, RollbackRequired, Soundness, judge_step

# 4 samples a step, 8 from step 10 on
BATCH = BatchPlan(
    micro_batch=1,
    global_batch=8,
    data_parallel=1,
    stages=(RampStage(4, 0, 0, 10), RampStage(8, 10, 40, None)),
)


def completed(step: int, loss: float = 3.0, norm: float = 1.0) -> CompletedStep:
    result = StepResult(loss=loss, grad_norm=norm, tokens=1)
    return CompletedStep(step, 1e-3, result, 0.1, StepConsensus(nonfinite=result.nonfinite), last=False)


def settings(on_nonfinite: str = "rollback", on_spike: str = "rollback") -> TrainConfig:
    return TrainConfig(on_nonfinite=OnNonfinite[on_nonfinite], on_spike=OnSpike[on_spike])


def healthy_losses(count: int) -> list[float]:
    noise = random.Random(1)
    return [3.0 + noise.gauss(0, 0.05) - step / 10000 for step in range(count)]


def trained(soundness: Soundness, losses: list[float], first: int = 1) -> None:
    for step, loss in enumerate(losses, first):
        soundness.on_step(completed(step, loss))


def folder(step: int) -> Path:
    return Path(f"step-{step:08d}")


def test_healthy_losses_are_no_spikes_and_a_jump_is_one() -> None:
    soundness = Soundness(settings())
    trained(soundness, healthy_losses(2000))
    trained(soundness, [3.0], first=2001)
    with pytest.raises(RollbackRequired) as required:
        trained(soundness, [6.0], first=2002)
    fault = required.value.fault
    assert (fault.step, fault.kind, fault.loss, fault.weights_finite) == (2002, FaultKind.SPIKE, 6.0, True)
    assert "step 2002: the loss is a spike (loss 6" in fault.cause


def test_too_few_losses_are_not_judged() -> None:
    soundness = Soundness(settings())
    trained(soundness, [*healthy_losses(MIN_STEPS - 1), 100.0])


def test_resumed_run_judges_as_the_unbroken_one() -> None:
    """The state is that of the checkpoint, in JSON. Control: without it the spike is not seen."""
    losses = healthy_losses(60)
    unbroken, resumed, forgetful = (Soundness(settings()) for _ in range(3))
    trained(unbroken, losses)
    resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))
    assert resumed.state_dict() == unbroken.state_dict()
    for soundness in (unbroken, resumed):
        with pytest.raises(RollbackRequired):
            trained(soundness, [5.0], first=61)
    trained(forgetful, [5.0], first=61)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, math.inf), (math.inf, 1.0), (3.0, math.inf)])
def test_each_key_decides_what_follows(loss: float, norm: float) -> None:
    with pytest.raises(Diverged, match=r"step 5: the .* is not finite"):
        Soundness(settings("stop")).on_step(completed(5, loss, norm))
    with pytest.raises(RollbackRequired) as required:
        Soundness(settings("rollback")).on_step(completed(5, loss, norm))
    assert required.value.fault.kind is FaultKind.NONFINITE
    Soundness(settings("skip")).on_step(completed(5, loss, norm))
    for on_nonfinite in ("stop", "skip", "rollback"):
        soundness = Soundness(settings(on_nonfinite, "ignore"))
        trained(soundness, [*healthy_losses(30), 50.0])
        assert not soundness.judge_save()


def test_checkpoint_is_sound_if_no_step_since_the_one_before_is_bad() -> None:
    soundness = Soundness(settings("skip", "ignore"))
    trained(soundness, healthy_losses(30), first=11)
    assert soundness.judge_save()
    soundness.on_checkpoint(folder(40))
    trained(soundness, [math.nan, 3.0], first=41)
    assert not soundness.judge_save()
    assert soundness.state_dict()["losses"][-1] == 3.0, "a loss that is not finite is not compared with"
    soundness.on_checkpoint(folder(42))
    assert soundness.judge_save()
    trained(soundness, [50.0], first=43)
    soundness.on_checkpoint(folder(42))  # a save in the background that began before
    assert not soundness.judge_save()
    soundness.on_rollback(folder(40))
    assert soundness.judge_save()


def saved_soundness(
    soundness: Soundness, losses: list[float], first: int = 1, every: int = 10
) -> dict[int, bool]:
    """Train and save; return whether each checkpoint is sound, by step."""
    found = {}
    for step, loss in enumerate(losses, first):
        soundness.on_step(completed(step, loss))
        if step % every == 0:
            found[step] = soundness.judge_save()
            soundness.on_checkpoint(folder(step))
    return found


def shifted(losses: list[float], by: float) -> list[float]:
    return [loss + by for loss in losses]


@pytest.mark.parametrize("every", [1, 2, 3, 5, 7, 10, 40])
@pytest.mark.parametrize("by", [0.7, 0.9, 3.0])  # the limit is about 0.5 higher
def test_checkpoints_after_a_jump_that_stays_are_not_sound(every: int, by: float) -> None:
    """Control: without the recorded limit, as in a checkpoint of an earlier version, the plateau is sound."""
    soundness, earlier = Soundness(settings("skip", "ignore")), Soundness(settings("skip", "ignore"))
    assert all(saved_soundness(soundness, healthy_losses(120), every=every).values())
    plateau = shifted(healthy_losses(400), by)
    after = list(saved_soundness(soundness, plateau, first=121, every=every).values())
    assert after
    assert not any(after[:SETTLED_SAVES])
    earlier.load_state_dict({"losses": healthy_losses(120)[-50:]})
    after = list(saved_soundness(earlier, plateau, first=121, every=every).values())
    assert any(after[: SETTLED_SAVES + 1])


def test_loss_that_stays_high_for_ten_saves_is_the_new_level() -> None:
    soundness = Soundness(settings("skip", "ignore"))
    losses = [*healthy_losses(100), *shifted(healthy_losses(150), 3.0)]
    sound = saved_soundness(soundness, losses)
    assert [step for step, found in sound.items() if not found] == list(range(110, 210, 10))


def test_run_that_continues_from_memory_remembers_bad_steps_since_its_checkpoint() -> None:
    """Control: the checkpoint was judged, so a run that continues from it begins without a bad step."""
    soundness = Soundness(settings("skip", "ignore"))
    saved_soundness(soundness, healthy_losses(40))
    trained(soundness, [50.0, 3.0], first=41)
    snapshot = soundness.state_dict()
    assert not soundness.judge_save()
    checkpoint = soundness.state_dict()
    for state, is_sound in ((snapshot, False), (checkpoint, True)):
        resumed = Soundness(settings("skip", "ignore"))
        resumed.load_state_dict(json.loads(json.dumps(state)))
        trained(resumed, healthy_losses(8), first=43)
        assert resumed.judge_save() is is_sound


def test_checkpoints_are_sound_again_once_the_loss_has_returned() -> None:
    soundness = Soundness(settings("skip", "ignore"))
    losses = [*healthy_losses(105), *shifted(healthy_losses(50), 3.0), *healthy_losses(45)]
    sound = saved_soundness(soundness, losses)
    assert [step for step, found in sound.items() if not found] == [110, 120, 130, 140, 150]


def test_checkpoints_stay_sound_while_the_loss_falls_or_rises_by_less_than_a_spike() -> None:
    falling = [8.0 * 0.999**step + noise - 3 for step, noise in enumerate(healthy_losses(1000))]
    rising = [step * 0.003 + loss for step, loss in enumerate(healthy_losses(1000))]
    for losses in (falling, rising):
        assert all(saved_soundness(Soundness(settings("skip", "ignore")), losses, every=50).values())


def test_resumed_run_judges_saves_as_the_unbroken_one_and_a_rollback_forgets_the_later_ones() -> None:
    unbroken, resumed, back = (Soundness(settings("skip", "ignore")) for _ in range(3))
    states = {}
    for begin in range(0, 200, 10):
        states[begin] = json.loads(json.dumps(unbroken.state_dict()))
        saved_soundness(unbroken, [5.0 - begin / 100] * 10, first=begin + 1)
    expected = saved_soundness(unbroken, [3.6] * 30, first=201)
    assert not any(expected.values()), "the limit is 3.1 and 10% more"
    assert states[100]["limit"] > states[190]["limit"]

    resumed.load_state_dict(states[190])
    resumed.on_start(190)
    saved_soundness(resumed, [5.0 - 190 / 100] * 10, first=191)
    assert saved_soundness(resumed, [3.6] * 30, first=201) == expected
    assert resumed.state_dict() == unbroken.state_dict()

    saved_soundness(back, [3.0] * 100)
    back.on_rollback(folder(20))
    assert back.state_dict()["limit"] is None, "a checkpoint of an earlier version has no limit"
    back.load_state_dict(states[100])
    assert saved_soundness(back, [4.2] * 10, first=101) == {110: True}


FACTS = RollbackFacts(
    attempt=1,
    step=8,
    reason=FaultKind.NONFINITE.value,
    loss=math.nan,
    grad_norm=math.nan,
    losses=(),
    checkpoint_step=4,
    unsound=(6,),
    earlier=(),
    window=2,
    limit=2,
    batch=BATCH,
    already_skipped=(),
)


def decided(step: int, target: int = 4, **changes: Any) -> Rollback:
    decision = decide_rollback(replace(FACTS, step=step, checkpoint_step=target, **changes))
    assert decision.rollback is not None
    assert decision.refusal is None
    return decision.rollback


def test_window_ends_with_the_bad_step_and_begins_at_the_checkpoint_at_the_earliest() -> None:
    assert decided(8).skipped == (24, 32)
    assert decided(8, window=1).skipped == (28, 32)
    assert decided(8, window=100).skipped == (16, 32)
    assert decided(12).skipped == (40, 56), "after the batch ramp"
    assert decided(11).skipped == (36, 48), "across it"
    assert decided(8, already_skipped=((8, 16),)).skipped == (32, 40), "positions, not numbers"
    assert decided(8, already_skipped=((28, 36),)).skipped == (24, 40), "joined with a range inside"


def test_limit_counts_rollbacks_to_the_same_checkpoint() -> None:
    assert decided(9, earlier=(4,)).checkpoint_step == 4
    assert decided(9, target=8, earlier=(4, 4)).checkpoint_step == 8
    for changes, why in (
        ({"earlier": (4, 4)}, "2 rollbacks to step-00000004 have not helped"),
        ({"checkpoint_step": None}, "there is no sound checkpoint"),
    ):
        decision = decide_rollback(replace(FACTS, **changes))  # type: ignore[arg-type]
        assert decision.rollback is None
        assert why in (decision.refusal or "")


def test_rows_of_rollbacks_replay_the_decisions(tmp_path: Path) -> None:
    file = tmp_path / "rollbacks.jsonl"
    spike = replace(FACTS, reason="spike", loss=6.0, grad_norm=1.0, losses=tuple(healthy_losses(50)))
    facts = [FACTS, spike, replace(FACTS, earlier=(4, 4)), replace(spike, checkpoint_step=None)]
    facts.append(replace(FACTS, step=12, already_skipped=((8, 16), (24, 32))))
    decisions = [decide_rollback(each) for each in facts]
    assert [decision.rollback is None for decision in decisions] == [False, False, True, True, False]
    for decision in decisions:
        append_durable_row(file, decision.to_row())
    with file.open("a") as torn:
        torn.write('{"step": 3')
    found = read_decisions(file)
    assert found == decisions
    assert [decide_rollback(each.facts) for each in found] == decisions
    for change in ({"window": 3}, {"checkpoint_step": 7}, {"limit": 0}, {"already_skipped": ((0, 8),)}):
        changed = decide_rollback(replace(found[0].facts, **change))  # type: ignore[arg-type]
        assert (changed.rollback, changed.refusal) != (found[0].rollback, found[0].refusal), "control"
    judged = judge_step(completed(spike.step, found[1].facts.loss), found[1].facts.losses)
    assert judged is not None, "the losses of the row show the spike"
    assert judge_step(completed(spike.step, 3.2), found[1].facts.losses) is None, "control"


def test_start_skips_what_later_rollbacks_skipped_but_not_what_it_has_learned_from() -> None:
    first = SkippedSamples(((24, 32),))
    rollbacks = [decided(8), decided(12, target=9, already_skipped=first.ranges)]
    assert skipped_on_resume(SkippedSamples(), rollbacks, 16).ranges == ((24, 32), (48, 64))
    assert skipped_on_resume(SkippedSamples(), rollbacks, 36).ranges == ((48, 64),)
    assert skipped_on_resume(first, rollbacks, 36).ranges == ((24, 32), (48, 64))
    assert skipped_on_resume(first, [], 36) == first


def test_rows_of_rollbacks_are_read_back_without_the_decisions_to_end(tmp_path: Path) -> None:
    file = tmp_path / "rollbacks.jsonl"
    assert read_rollbacks(file) == []
    append_durable_row(file, asdict(decided(8)))  # of an earlier version: without facts
    append_durable_row(file, decide_rollback(replace(FACTS, step=12)).to_row())
    append_durable_row(file, decide_rollback(replace(FACTS, step=13, checkpoint_step=None)).to_row())
    with file.open("a") as torn:
        torn.write('{"step": 3')
    first, second = read_rollbacks(file)
    assert json.loads(file.read_text().splitlines()[0])["loss"] is None
    assert math.isnan(first.loss)
    assert math.isnan(first.grad_norm), "JSON has no infinity"
    assert (first.skipped, second.skipped) == ((24, 32), (40, 56))
    assert (first.step, first.checkpoint_step, first.attempt) == (8, 4, 1)
    append_durable_row(file, decide_rollback(replace(FACTS, step=16)).to_row())
    assert [rollback.step for rollback in read_rollbacks(file)] == [8, 12, 16]
    assert [decision.facts.step for decision in read_decisions(file)] == [12, 13, 16]


def test_rows_are_cut_from_a_file_that_stays_open(tmp_path: Path) -> None:
    file, target = tmp_path / "metrics.jsonl", tmp_path / "attempts" / "001" / "metrics.jsonl"
    rows = [f'{{"step":{step}}}\n' for step in range(1, 8)]
    with file.open("ab") as opened:
        opened.write("".join(rows).encode())
        opened.flush()
        cut_rows(file, target, 4)
        assert file.read_text() == "".join(rows[:4])
        opened.write(b'{"step":5}\n')
        opened.flush()
        cut_rows(file, target, 9)
    assert file.read_text() == "".join(rows[:5])
    assert target.read_text() == "".join(rows[4:])


def test_undone_steps_count_as_repeated_in_the_goodput(tmp_path: Path) -> None:
    now = 0.0
    tracker = GoodputTracker(tmp_path, [], clock=lambda: now)
    tracker.on_start(0)

    def train(first: int, last: int) -> None:
        nonlocal now
        for step in range(first, last + 1):
            now += 1.0
            tracker.on_step(
                CompletedStep(step, 1e-3, completed(step).result, 1.0, StepConsensus(), last=False)
            )

    train(1, 4)
    tracker.on_save_start(4)
    tracker.on_save_end(4, 0.1, 10)
    train(5, 8)
    tracker.on_save_start(8)
    tracker.on_save_end(8, 0.1, 10)
    train(9, 9)
    tracker.on_rollback(folder(4))
    train(5, 12)
    found = tracker.goodput()
    assert found is not None
    assert (found.wall_seconds, found.useful_seconds, found.lost["repeated"]) == (17.0, 12.0, 5.0)
    assert found.lost["other"] == 0
    assert [json.loads(row)["step"] for row in (tmp_path / "saves.jsonl").read_text().splitlines()] == [4]
    kept = tracker.goodput(saved_step=4)
    assert kept is not None
    assert (kept.useful_seconds, kept.lost["repeated"]) == (4.0, 13.0)
