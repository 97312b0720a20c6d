"""Writers killed with -9: the newest complete checkpoint always loads and has the state of its step.

pytest tests/checkpoint/test_crash.py
CRASH_SEED=7 pytest tests/checkpoint/test_crash.py      random kill times with another seed
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.checkpoint import writer
from tests.checkpoint.layouts import whole
from toolkit import checkpoint_folder
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.commit import SavePhase
from toolkit.checkpoint.verify import verify

SEED = int(os.environ.get("CRASH_SEED", random.SystemRandom().randrange(10**6)))


@dataclass
class Run:
    """The attempts of one run, each with two processes."""

    folder: Path
    context: ForkServerContext
    attempt: int = 0
    steps_seen: list[int] = field(default_factory=list)

    def attempt_killed(
        self, victim: int, kill_at: tuple[SavePhase, int] | None, after_seconds: float = 0
    ) -> list[int]:
        """Start both writers, kill one, and end the other as a launcher does. Returns the phase of
        each.
        """
        self.attempt += 1
        where = [self.context.Value("i", writer.NOT_SAVING, lock=False) for _ in range(writer.RANKS)]
        ranks = []
        for rank, phase in enumerate(where):
            arguments = (self.folder, rank, self.attempt, phase, kill_at if rank == victim else None)
            ranks.append(self.context.Process(target=writer.write, args=arguments))
        before = checkpoint_folder.newest_checkpoint(self.folder)
        for process in ranks:
            process.start()
        if kill_at is None:
            self._await_newer(before)  # both writers have started
            time.sleep(after_seconds)
            ranks[victim].kill()
        ranks[victim].join(30)
        assert ranks[victim].exitcode == -9, (
            f"rank {victim} ended with {ranks[victim].exitcode} instead of by our kill"
        )
        phases = [value.value for value in where]
        for process in ranks:
            process.kill()
            process.join(30)
        return phases

    def _await_newer(self, before: Path | None) -> None:
        deadline = time.monotonic() + 30
        while checkpoint_folder.newest_checkpoint(self.folder) == before:
            assert time.monotonic() < deadline, "no save within 30 s"
            time.sleep(0.001)

    def check(self, *, deep: bool = True) -> int | None:
        """Check that the newest checkpoint has its step's state and that steps never decrease. Returns the
        step.
        """
        newest = checkpoint_folder.newest_checkpoint(self.folder)
        if newest is None:
            assert not self.steps_seen, "checkpoints were there and are gone"
            return None
        reader = open_reader(self.folder)
        assert reader.step is not None
        expected = writer.state(reader.step)
        found = whole(reader)
        assert found.keys() == expected.keys()
        assert all((found[key] == expected[key]).all() for key in expected)
        for folder in checkpoint_folder.committed_checkpoints(self.folder).values():
            assert not deep or verify(folder) == [], "whatever has a checkpoint's name is one"
        assert not self.steps_seen or reader.step >= self.steps_seen[-1], (
            f"step {reader.step} after {self.steps_seen[-1]}"
        )
        self.steps_seen.append(reader.step)
        return reader.step


@pytest.fixture
def run(tmp_path: Path, forks: ForkServerContext) -> Run:
    return Run(tmp_path / "checkpoints", forks)


# Entered n times: in the first save, and when earlier checkpoints could be lost. A save enters PIECES 1 +
# pieces times.
MOMENTS = [
    *((0, phase, nth) for phase in SavePhase for nth in (0, 3)),
    *((1, phase, nth) for phase in (SavePhase.PIECES, SavePhase.FSYNC) for nth in (0, 3)),
]


def test_save_killed_in_each_phase_keeps_previous_checkpoint(run: Run) -> None:
    for victim, phase, nth in MOMENTS:
        run.check(deep=False)
        phases = run.attempt_killed(victim, (phase, nth))
        assert phases[victim] == 1 + list(SavePhase).index(phase)
        run.check()
    assert run.steps_seen[-1] > 10, "attempts go on from each other"
    assert run.attempt_killed(0, (SavePhase.PIECES, 0))  # removes leftovers of earlier attempts
    left = [
        entry.name
        for entry in run.folder.iterdir()
        if entry.name.startswith((checkpoint_folder.TEMPORARY, checkpoint_folder.REMOVED))
    ]
    assert len(left) <= 2, f"more than the data and the locks of the last save stay: {left}"


def test_killed_at_random_times_resumes(run: Run) -> None:
    print(f"CRASH_SEED={SEED}")
    moments = random.Random(SEED)
    in_a_save = 0
    for _ in range(10):
        phases = run.attempt_killed(moments.randrange(writer.RANKS), None, moments.uniform(0, 0.05))
        in_a_save += any(phase != writer.NOT_SAVING for phase in phases)
        run.check()
    assert in_a_save, f"no kill fell into a save: CRASH_SEED={SEED} proves nothing"
    assert len(set(run.steps_seen)) == 10
