"""Compare predicted goodput with that of real runs whose ranks are killed at random moments.

    python benchmarks/goodput.py                              about 20 minutes on two cores
    python benchmarks/goodput.py --seconds 60 --kills 2       about seven minutes, to try it

A model of 11 M parameters trains with ZeRO 1 on two ranks under plain ``python``, which restarts them:

    cold    without standbys, from the newest checkpoint
    warm    standbys take the places of the ranks, which continue from the newest snapshot in memory

For each of them a calibration measures an undisturbed stretch of steps, and a few kills with ready standbys.
Then another run trains for ``--seconds`` while a rank is killed on average every ``--mean`` seconds. Nothing
of this run enters its prediction, except that ``of_schedule`` and ``replayed`` know its failures:

    predicted      Daly's formula, as the planner computes it, with the mean time between failures
    of_schedule    the same with the mean of the failures that happened
    replayed       the same figures moved through the moments of the failures that happened

Goodput is measured twice, from the moment at which the standbys are ready, and each way has its prediction:

    record    toolkit/goodput.py over all attempts: the share of the time in steps that were not repeated
    steps     surviving steps x the median undisturbed step / wall time; a slow step counts like a fast one

Results go to benchmarks/results/goodput.json.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from math import inf, sqrt
from pathlib import Path
from typing import Any

import psutil
from harness.environment import describe_machine, package_versions
from harness.failure_model import Failure, Figures, draw_failures, predict, replay, spread
from harness.running_training import RANKS, ROOT, RunningTraining, StepMoment

from toolkit.checkpoint_folder import committed_checkpoints
from toolkit.goodput import Goodput, compute_goodput
from toolkit.rundir.directory import RunDirectory

RESULTS = ROOT / "benchmarks" / "results" / "goodput.json"
CHECKPOINT_EVERY, MEMORY_EVERY = 20, 5  # steps
CONTENDERS = {"cold": CHECKPOINT_EVERY, "warm": MEMORY_EVERY}  # steps between states that a restart can load
WARM_UP_STEPS, UNDISTURBED_STEPS = 12, 5 * CHECKPOINT_EVERY
STEPS_AFTER_A_KILL = 10  # at least, until the run counts as back at its usual pace
READY_POLL_SECONDS, POLL_SECONDS = 0.5, 0.1  # a look at all processes costs the ranks time
ACCOUNTS = ("record", "steps")


@contextmanager
def started(name: str, data: str) -> Iterator[RunningTraining]:
    """Start a contender, and wait until it is ready for a failure."""
    standbys = RANKS if name == "warm" else 0
    overrides = [f"checkpoint.every={CHECKPOINT_EVERY}", f"cluster.standbys={standbys}"]
    if name == "warm":
        overrides.append(f"checkpoint.memory_every={MEMORY_EVERY}")
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningTraining(name, overrides, data, Path(folder), standbys=standbys) as training,
    ):
        wait_for_steps(training, WARM_UP_STEPS)
        wait_for_standbys(training)
        yield training


def wait_for_steps(training: RunningTraining, more: int) -> None:
    count = len(training.moments()) + more
    training.wait_until("stepping", lambda: training.has_steps(count), poll_seconds=POLL_SECONDS)


def wait_for_standbys(training: RunningTraining) -> None:
    training.wait_until("with standbys", training.standbys_are_ready, poll_seconds=READY_POLL_SECONDS)


def kill(training: RunningTraining, rank: int) -> float | None:
    """Kill a rank; return when, or None if it does not exist because the run waits before a restart."""
    process = training.ranks().get(rank)
    killed = time.time()
    try:
        if process is not None:
            process.send_signal(signal.SIGKILL)
            return killed
    except psutil.NoSuchProcess:  # it ended since the processes were listed, so it does not exist either
        pass
    return None


# ---- calibration


def calibrate(name: str, kills: int, seed: int, data: str) -> dict[str, Any]:
    """Measure undisturbed steps, the time until a state is saved, and what a kill costs."""
    rng = random.Random(seed)
    with started(name, data) as training:
        first = len(training.moments()) - 1
        lags = measure_lags(training, CONTENDERS[name])
        steps = training.moments()[first : first + UNDISTURBED_STEPS + 1]
        restarts = []
        for number in range(kills):
            wait_for_steps(training, WARM_UP_STEPS + rng.randrange(CHECKPOINT_EVERY))
            restarts.append(measure_restart(training, number % RANKS))
    return {
        "gaps": gaps(steps),
        "recorded": [moment.seconds for moment in steps[1:]],
        "lags": lags,
        "restarts": restarts,
    }


def measure_lags(training: RunningTraining, every: int) -> list[float]:
    """Return the seconds from the end of a step to the commit of its state, over ``UNDISTURBED_STEPS``."""
    done, found = len(training.moments()) + UNDISTURBED_STEPS, dict[int, float]()
    folder = training.dir / "checkpoints"
    if every == MEMORY_EVERY:
        handover = RunDirectory(training.dir).attempt_folder(1) / "handover.json"
        folder = Path(json.loads(handover.read_text())["memory"])

    def newest_step() -> int | None:
        return max(committed_checkpoints(folder), default=None)

    before = newest_step()

    def is_done() -> bool:
        newest = newest_step()
        if newest is not None and newest != before:
            found.setdefault(newest, time.time())
        return training.has_steps(done)

    training.wait_until("stepping", is_done)
    ends = {moment.step: moment.time for moment in training.moments()}
    return [max(0.0, moment - ends[step]) for step, moment in found.items() if step in ends]


def measure_restart(training: RunningTraining, rank: int) -> dict[str, float]:
    """Kill a rank; measure until its run trains at its usual pace."""
    killed = kill(training, rank)
    assert killed is not None, "the run trains"
    training.wait_until(
        "stepping again",
        lambda: sum(moment.time > killed + 0.5 for moment in training.moments()) >= STEPS_AFTER_A_KILL,
        poll_seconds=POLL_SECONDS,
    )
    wait_for_standbys(training)
    ready = time.time()
    wait_for_steps(training, 1)
    after = [moment for moment in training.moments() if moment.time > killed]
    return {
        "seconds": after[-1].time - killed,
        "steps": len(after),
        "recorded": sum(moment.seconds for moment in after),
        "rearm": ready - killed,
    }


def gaps(moments: Sequence[StepMoment]) -> list[float]:
    """Return the seconds between the ends of consecutive steps."""
    return [after.time - before.time for before, after in pairwise(moments) if after.step == before.step + 1]


def restart_losses(calibration: Mapping[str, Any], account: str) -> list[float]:
    """Return the seconds that each kill cost beyond repeated steps, and beyond the usual pauses."""
    step, a_step = useful_step(calibration, account), statistics.mean(calibration["gaps"])
    return [
        row["seconds"]
        - (row["recorded"] if account == "record" else row["steps"] * step)
        - row["steps"] * (a_step - step)
        for row in calibration["restarts"]
    ]


def useful_step(calibration: Mapping[str, Any], account: str) -> float:
    """Return the seconds that one undisturbed step counts as useful."""
    if account == "record":
        return statistics.mean(calibration["recorded"])
    return statistics.median(calibration["gaps"])


def figures_of(name: str, calibrations: Mapping[str, Mapping[str, Any]], account: str) -> Figures:
    """Return the figures of a contender in an account. Its restarts without a standby are those of cold."""
    own, every = calibrations[name], CONTENDERS[name]
    step = useful_step(own, account)
    pause = max(0.0, every * (statistics.mean(own["gaps"]) - step))
    return Figures(
        step=step,
        every=every,
        pause=pause,
        lag=max(0.0, statistics.median(own["lags"]) - pause),
        restart=statistics.mean(restart_losses(own, account)),
        unready_restart=statistics.mean(restart_losses(calibrations["cold"], account)),
        rearm=statistics.mean(row["rearm"] for row in own["restarts"]) if name == "warm" else 0.0,
    )


# ---- measurement


def measure(
    name: str, failures: Sequence[Failure], seconds: float, quiet: float, data: str
) -> dict[str, Any]:
    """Train for ``seconds`` while ranks are killed at the times of ``failures``.

    Args:
        quiet: seconds after a kill whose steps do not count as undisturbed.
    """
    with started(name, data) as training:
        directory = RunDirectory(training.dir)
        before, first, began = record(directory), training.moments()[-1], time.time()
        kills = []
        for failure in failures:
            time.sleep(max(0.0, began + failure.at - time.time()))
            if (killed := kill(training, failure.rank)) is not None:
                kills.append(killed)
        time.sleep(max(0.0, began + seconds - time.time()))
        ended = time.time()
        attempts = directory.attempt_times()
        # The next step shows from which state a restart that is under way continues.
        training.wait_until(
            "stepping again", lambda: training.moments()[-1].time > ended, poll_seconds=POLL_SECONDS
        )
        moments = training.moments()
    survived = next(moment.step for moment in moments if moment.time > ended) - 1
    *earlier, last = attempts
    if last.times.first_step is None:  # it still starts, and has written no time since it began
        last = replace(last, times=replace(last.times, seen=ended))
    after = compute_goodput([*earlier, last], kept=survived)
    assert after is not None, "the run has attempts"
    steps = [moment for moment in moments if began < moment.time <= ended]
    undisturbed = [moment for moment in steps if not any(0 < moment.time - each < quiet for each in kills)]
    # A short run with many failures may have no undisturbed step; then the median is that of all its steps.
    median_step = statistics.median(gaps(undisturbed) or gaps(steps))
    useful = after.useful_seconds - before.useful_seconds
    wall = after.wall_seconds - before.wall_seconds
    return {
        "failures": [moment - began for moment in kills],
        "wall_seconds": ended - began,
        "surviving_steps": survived - first.step,
        "median_step": median_step,
        "undisturbed_steps": len(undisturbed),
        "record": useful / wall,
        "steps": (survived - first.step) * median_step / (ended - began),
        "lost": {cause: lost - before.lost[cause] for cause, lost in after.lost.items()},
    }


def record(directory: RunDirectory) -> Goodput:
    found = compute_goodput(directory.attempt_times())
    assert found is not None, "the run has begun"
    return found


# ---- comparison


def compare(
    figures: Figures,
    measured: float,
    failures: Sequence[float],
    losses: Sequence[float],
    *,
    mean: float,
    wall: float,
) -> dict[str, Any]:
    """Compare a measured goodput with its predictions.

    Args:
        failures: when they happened, in seconds.
        losses: of the restarts in the calibration.
        mean: seconds between failures, from which the schedule was drawn.
        wall: seconds of the measurement.
    """
    count = len(failures)
    moments = [Failure(at, 0) for at in failures]
    average, deviation = spread(figures, mean, wall)
    predicted = {
        "predicted": predict(figures, mean),
        "of_schedule": predict(figures, wall / count if count else inf),
        "replayed": replay(figures, moments, wall),
    }
    # of the calibration's mean restart, and of the restarts in the measured run
    error = (
        statistics.stdev(losses) * sqrt(count + count**2 / len(losses)) / wall if len(losses) > 1 else None
    )
    return {
        "measured": measured,
        **predicted,
        "points_off": {name: 100 * (share - measured) for name, share in predicted.items()},
        "random_schedules": {"mean": average, "standard_deviation": deviation},
        "standard_error_of_restarts": error,
        "figures": asdict(figures),
    }


def describe(name: str, account: str, row: Mapping[str, Any], failures: int) -> str:
    shares = ", ".join(
        f"{kind} {row[kind]:.1%} ({off:+.1f} points)" for kind, off in row["points_off"].items()
    )
    error = row["standard_error_of_restarts"]
    chance = f"{100 * row['random_schedules']['standard_deviation']:.1f} by the random failures"
    if error is not None:
        chance += f", {100 * error:.1f} by the restarts"
    return (
        f"{name} by its {account}: measured {row['measured']:.1%} over {failures} failures; {shares}; "
        f"standard errors in points: {chance}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=360.0, help="of each measured run")
    parser.add_argument("--mean", type=float, default=60.0, help="seconds between failures")
    parser.add_argument("--kills", type=int, default=5, help="in each calibration")
    parser.add_argument(
        "--seed", type=int, default=7, help="of the failures; the calibration has the next one"
    )
    parser.add_argument(
        "--data", default=str(ROOT / "data" / "stdlib"), help="folder of the embedded text, created if absent"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.kills < 1 or given.mean <= 0 or given.seconds <= 0:
        parser.error("--kills, --mean and --seconds are greater than 0")
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "versions": package_versions("torch", "deepspeed"),
        "settings": {"seconds": given.seconds, "mean": given.mean, "kills": given.kills, "seed": given.seed},
        "contenders": {},
    }
    calibrations = {name: calibrate(name, given.kills, given.seed + 1, given.data) for name in CONTENDERS}
    failures = draw_failures(given.mean, given.seconds, ranks=RANKS, seed=given.seed)
    for name, calibration in calibrations.items():
        quiet = max(row["seconds"] for row in calibration["restarts"])
        measured = measure(name, failures, given.seconds, quiet, given.data)
        accounts = {
            account: compare(
                figures_of(name, calibrations, account),
                measured[account],
                measured["failures"],
                restart_losses(calibration, account),
                mean=given.mean,
                wall=measured["wall_seconds"],
            )
            for account in ACCOUNTS
        }
        for account, row in accounts.items():
            print(describe(name, account, row, len(measured["failures"])), flush=True)
        results["contenders"][name] = {"calibration": calibration, "measurement": measured, **accounts}
    given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
