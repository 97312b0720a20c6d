"""Commit, retention, background saves, and full disks.

pytest tests/checkpoint/test_store.py
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.checkpoint.layouts import LAYOUTS, NAMESPACE, save, shards_of, whole
from tests.damage import flip_byte
from toolkit import checkpoint_folder
from toolkit.checkpoint import directory, open_reader
from toolkit.checkpoint.online import commit, writing
from toolkit.checkpoint.online import store as store_module
from toolkit.checkpoint.online.commit import SaveFailed, SavePhase
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import EXP_AVG, WEIGHT, Box, Shard, TensorKey
from toolkit.checkpoint.verify import verify
from toolkit.errors import CheckpointError
from toolkit.rundir.find import find_run

KEY = TensorKey(WEIGHT, "w")


def state(value: float, size: int = 64) -> list[Shard]:
    data = torch.full((size,), float(value))
    return [Shard(KEY, (size,), Box.whole((size,)), data)]


def save_alone(
    store: CheckpointStore,
    step: int,
    shards: list[Shard],
    *,
    attempt: int = 1,
    background: bool = False,
    best: Sequence[int] = (),
) -> Path:
    return store.save(
        step,
        shards,
        {"step": step},
        namespace=NAMESPACE,
        rank=0,
        ranks=1,
        attempt=attempt,
        background=background,
        best=best,
    ).wait()


def value(path: Path | None) -> float:
    assert path is not None
    return float(whole(open_reader(path))[KEY][0])


def test_retention_keeps_last_multiples_and_pointed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=20)
    for step in range(10, 70, 10):
        save_alone(store, step, state(step))
    assert sorted(checkpoint_folder.committed_checkpoints(tmp_path)) == [20, 40, 50, 60]
    assert (tmp_path / "latest").read_text() == "step-00000060\n"
    assert checkpoint_folder.newest_checkpoint(store.directory) == tmp_path / "step-00000060"
    assert [path.name for path in directory.complete_checkpoints(tmp_path)] == [
        f"step-{step:08d}" for step in (20, 40, 50, 60)
    ]
    assert not list(tmp_path.glob(".*")), "nothing temporary stays"


# The best steps at each save, the best first.
BEST = {1: [1], 2: [2], 3: [2], 4: [2], 5: [5, 2], 6: [5, 2]}


def test_checkpoint_that_cannot_be_removed_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, rename = CheckpointStore(tmp_path, keep_last=1), Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if target.name.startswith(checkpoint_folder.REMOVED):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return rename(self, target)

    save_alone(store, 1, state(1))
    with monkeypatch.context() as patches:
        patches.setattr(Path, "rename", refuse)
        save_alone(store, 2, state(2))
    assert value(tmp_path) == 2
    assert "could not be cleaned up, and the next save tries again: " in caplog.text
    save_alone(store, 3, state(3))
    assert list(checkpoint_folder.committed_checkpoints(tmp_path)) == [3]


def test_retention_keeps_the_best_and_points_to_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    for step, best in BEST.items():
        save_alone(store, step, state(step), best=best)
        folders = checkpoint_folder.committed_checkpoints(tmp_path)
        assert sorted(folders) == sorted({step, *best})
        assert directory.find_checkpoint(tmp_path / "best") == folders[best[0]]
        assert checkpoint_folder.newest_checkpoint(store.directory) == folders[step]
    assert find_run(tmp_path / "best", "resume") == tmp_path / "step-00000005"
    directory.rewind_to_checkpoint(tmp_path, tmp_path / "step-00000002", 2, tmp_path / "aside")
    assert not (tmp_path / "best").exists(), "it does not name a checkpoint that was moved"
    save_alone(store, 3, state(3), best=[7, 2])
    assert value(directory.find_checkpoint(tmp_path / "best")) == 2, "step 7 does not exist"
    save_alone(store, 4, state(4))
    assert not (tmp_path / "best").exists()


@pytest.mark.parametrize("phase", [SavePhase.RENAME, SavePhase.POINTER, SavePhase.RETENTION])
def test_death_during_a_save_leaves_the_best_checkpoint(phase: SavePhase, tmp_path: Path) -> None:
    def die(reached: SavePhase) -> None:
        if reached is phase:
            raise KeyboardInterrupt

    for step, best in BEST.items():
        if step > 1:
            store = CheckpointStore(tmp_path, keep_last=1, on_phase=die)
            with pytest.raises(KeyboardInterrupt):
                save_alone(store, step, state(step), attempt=step, best=best)
            named = directory.find_checkpoint(tmp_path / "best")
            assert value(named) in (BEST[step][0], BEST[step - 1][0]), "it names a checkpoint that exists"
        save_alone(CheckpointStore(tmp_path, keep_last=1), step, state(step), attempt=10 + step, best=best)
        assert value(directory.find_checkpoint(tmp_path / "best")) == best[0]


def test_retention_uses_step_and_completeness() -> None:
    def removed(steps: list[int], whole: list[int] | None = None, **options: int) -> list[int]:
        options = {"saved": max(steps), "keep_last": 1, "keep_every": 0, **options}
        return directory.removable_steps(steps, steps if whole is None else whole, **options)

    assert removed([1, 2, 3]) == [1, 2]
    assert removed([1, 2, 3], keep_last=5) == []
    assert removed([1, 2, 3, 4], whole=[1, 2, 4], keep_last=2) == [
        1,
        3,
    ]  # a damaged checkpoint does not count as kept
    assert removed([5, 10, 15, 20], keep_every=10) == [5, 15]
    assert removed([10, 20, 30, 40], saved=20) == [10]  # later steps are kept
    assert removed([10, 20, 30, 40], sound=20) == [10, 30]  # the newest sound one is kept


def test_crash_leftovers_are_consistent(tmp_path: Path) -> None:
    """A temporary folder; a checkpoint renamed before the pointer was written; a first checkpoint without
    a pointer.
    """
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=9)
    save_alone(store, 1, state(1))
    pointer = tmp_path / "checkpoints" / "latest"
    pointer.unlink()
    assert value(tmp_path) == 1
    save_alone(store, 2, state(2))
    pointer.write_text("step-00000001\n")
    (tmp_path / "checkpoints" / ".tmp-step-00000003-attempt-001-3").mkdir()
    assert value(tmp_path) == value(tmp_path / "checkpoints") == 2


def test_two_deaths_before_pointer_resume(tmp_path: Path) -> None:
    class Death(BaseException):
        pass

    def die(phase: SavePhase) -> None:
        if phase is SavePhase.POINTER:
            raise Death

    save_alone(CheckpointStore(tmp_path), 1, state(1))
    for step in (2, 3):
        with pytest.raises(Death):
            save_alone(CheckpointStore(tmp_path, keep_last=9, on_phase=die), step, state(step), attempt=step)
        assert value(tmp_path) == step


@pytest.mark.parametrize(
    "pointer",
    ["step-00000009", "", "../step-00000001", "nonsense", "/no/such", "step-00000001", "\0", "x" * 5000],
)
def test_inconsistent_pointer_is_rejected(pointer: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=9)
    for step in (1, 2, 3):
        save_alone(store, step, state(step))
    (tmp_path / "checkpoints" / "latest").write_text(pointer)
    with pytest.raises(
        CheckpointError,
        match=r"latest names[\s\S]*step-00000001, step-00000002, step-00000003[\s\S]*resume=never",
    ):
        open_reader(tmp_path)
    assert value(tmp_path / "checkpoints" / "step-00000003") == 3


def test_folder_without_manifest_is_rejected(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=9)
    for step in (1, 2, 3):
        save_alone(store, step, state(step))
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").unlink()
    assert value(tmp_path) == 3, "what is older than the newest does not matter"
    (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    for _ in range(2):  # with the pointer, and without it
        with pytest.raises(
            CheckpointError,
            match=r"step-00000003 has no manifest.json[\s\S]*resume=.*step-00000002 continues",
        ):
            open_reader(tmp_path)
        (tmp_path / "checkpoints" / "latest").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"manifest.json is missing[\s\S]*resume=.*step-00000002"):
        open_reader(tmp_path / "checkpoints" / "step-00000003")


def test_folder_named_after_other_step_is_rejected(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=9)
    for step in (1, 2, 3):
        save_alone(store, step, state(step))
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000003")
    shutil.copytree(tmp_path / "checkpoints" / "step-00000001", tmp_path / "checkpoints" / "step-00000003")
    with pytest.raises(CheckpointError, match=r"is of step 1[\s\S]*resume=.*step-00000002"):
        open_reader(tmp_path)


def test_going_back_moves_later_checkpoints_aside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=9)
    for step in (1, 2, 3, 4):
        save_alone(store, step, state(step))
    aside = tmp_path / "run" / "attempts" / "001" / "checkpoints"
    moved = directory.rewind_to_checkpoint(store.directory, store.directory / "step-00000002", 2, aside)
    assert moved == [aside / "step-00000003", aside / "step-00000004"]
    assert [value(path) for path in moved] == [3, 4]
    assert value(tmp_path / "run") == 2
    assert sorted(checkpoint_folder.committed_checkpoints(store.directory)) == [1, 2]
    assert directory.rewind_to_checkpoint(store.directory, store.directory / "step-00000002", 2, aside) == []
    save_alone(store, 3, state(30), attempt=2)
    assert value(tmp_path / "run") == 30, "not the one of the steps that were left"


def test_pointer_to_outside_checkpoint_lasts_until_next_save(tmp_path: Path) -> None:
    store, other = (
        CheckpointStore(tmp_path / "run" / "checkpoints"),
        CheckpointStore(tmp_path / "other" / "checkpoints"),
    )
    save_alone(store, 1, state(1))
    copied = save_alone(other, 5, state(5))
    assert directory.rewind_to_checkpoint(store.directory, copied, 5, tmp_path / "aside") == []
    assert checkpoint_folder.newest_checkpoint(store.directory) == copied
    assert value(tmp_path / "run") == 5
    save_alone(store, 6, state(6))
    assert value(tmp_path / "run") == 6
    assert copied.exists()


def test_missing_checkpoint_is_reported(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=r"contains no checkpoint|does not exist"):
            open_reader(path)
    assert checkpoint_folder.newest_checkpoint(tmp_path / "absent") is None


def test_background_save_equals_blocking_save(tmp_path: Path) -> None:
    go = threading.Event()

    def hold(phase: SavePhase) -> None:
        if phase is SavePhase.PIECES:
            assert go.wait(20)

    named = {TensorKey(state, name): torch.randn(37, 19) for state in (WEIGHT, EXP_AVG) for name in "abc"}
    named[TensorKey(WEIGHT, "half")] = torch.randn(5).bfloat16()
    before = {key: tensor.clone() for key, tensor in named.items()}
    [shards] = shards_of(named, LAYOUTS["columns"], 1)
    blocking = save(tmp_path / "blocking", 4, [shards])
    store = CheckpointStore(tmp_path / "background", on_phase=hold)
    pending = store.save(
        4, shards, {"step": 4}, namespace=NAMESPACE, rank=0, ranks=1, attempt=1, background=True
    )
    assert not pending.done()
    for tensor in named.values():
        tensor.zero_()
    go.set()
    path = pending.wait()
    assert pending.done()
    assert pending.error is None
    assert {key: tensor.tolist() for key, tensor in whole(open_reader(path)).items()} == {
        key: t.tolist() for key, t in before.items()
    }
    assert sorted(file.name for file in path.iterdir()) == sorted(file.name for file in blocking.iterdir())
    for file in path.iterdir():
        assert file.read_bytes() == (blocking / file.name).read_bytes()
    later = whole(open_reader(save_alone(store, 5, shards, background=True)))  # in the same memory
    assert float(later[TensorKey(WEIGHT, "a")].abs().max()) == 0


def test_background_saves_reuse_their_buffer(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save_alone(store, 1, state(1), background=True)
    buffer = store._snapshot._buffer.data_ptr()
    path = save_alone(store, 2, state(2), background=True)
    assert store._snapshot._buffer.data_ptr() == buffer
    assert value(path) == 2


def test_more_state_than_the_staging_area_is_saved_in_the_foreground(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, staging_bytes=256)
    for step, size, copied in ((1, 64, True), (2, 65, False)):
        options = {"namespace": NAMESPACE, "rank": 0, "ranks": 1, "attempt": 1, "background": True}
        shards = state(step, size)
        pending = store.save(step, shards, {}, **options)
        assert pending.waited is not copied, "it waits for a save in the foreground only"
        assert value(pending.wait()) == step
        assert ("in the foreground" in caplog.text) is not copied
    assert store._snapshot._buffer.numel() == 256


def test_background_error_is_raised_once(tmp_path: Path) -> None:
    def fail(phase: SavePhase) -> None:
        raise OSError(errno.EIO, "the disk says no")

    store = CheckpointStore(tmp_path, on_phase=fail)
    options = {"namespace": NAMESPACE, "rank": 0, "ranks": 1, "attempt": 1, "background": True}
    store.save(1, state(1), {}, **options)
    with pytest.raises(SaveFailed, match="the disk says no"):
        store.save(2, state(2), {}, **options)
    store._on_phase = lambda phase: None
    assert store.save(2, state(2), {}, **options).wait() == tmp_path / "step-00000002"


def test_saving_same_step_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save_alone(store, 5, state(1))
    inode = path.stat().st_ino
    assert save_alone(store, 5, state(1)) == path  # within one attempt the step is not written twice
    assert path.stat().st_ino == inode
    assert save_alone(CheckpointStore(tmp_path), 5, state(2), attempt=2) == path
    assert value(path) == 1, "a complete checkpoint of the step is kept"
    file = path / "part-00000.safetensors"
    flip_byte(file)
    assert save_alone(CheckpointStore(tmp_path), 5, state(3), attempt=3) == path
    assert value(path) == 3, "a damaged one is replaced"
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["latest", "step-00000005"]
    with pytest.raises(CheckpointError, match="namespace=test/1"):
        CheckpointStore(tmp_path).save(5, state(4), {}, namespace="other/1", rank=0, ranks=1, attempt=4)


def test_rank_without_shards_reports(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [state(1), [], []])
    assert value(path) == 1
    assert verify(path) == []
    assert len(list(path.iterdir())) == 2


def test_scalars_step_and_versions_are_recorded(tmp_path: Path) -> None:
    scalars = {"consumed_samples": 2**60 + 1, "loss_scale": 65536.0, "nested": {"list": [1, 0.1, None, "x"]}}
    reader = open_reader(save(tmp_path, 12, [state(1)], scalars=scalars))
    assert reader.scalars == scalars
    assert (reader.step, reader.namespace) == (12, NAMESPACE)
    content = json.loads((tmp_path / "step-00000012" / "manifest.json").read_text())
    assert content["format_version"] == 1
    assert content["software"]["torch"] == torch.__version__


@pytest.fixture
def disk_events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Syncs and renames in order: a kill cannot simulate a power failure."""
    events: list[str] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def name(path: Path) -> str:
        name = re.sub(r"^\.(.*)\.[0-9a-f]{8}\.writing$", r"\1", path.name)
        return "TEMPORARY" if path.name.startswith(checkpoint_folder.TEMPORARY) else name

    def logged_fsync(descriptor: int) -> None:
        events.append(f"sync {name(Path(f'/proc/self/fd/{descriptor}').readlink())}")
        fsync(descriptor)

    def logged_rename(self: Path, target: Path) -> Path:
        events.append(f"name {name(target)}")
        return rename(self, target)

    def logged_replace(self: Path, target: Path) -> Path:
        events.append(f"name {name(target)}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    monkeypatch.setattr(Path, "replace", logged_replace)
    return events


def test_checkpoints_that_move_aside_are_durable_before_the_pointer(
    tmp_path: Path, disk_events: list[str]
) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        (folder / checkpoint_folder.step_name(step)).mkdir(parents=True)
    directory.rewind_to_checkpoint(folder, folder / "step-00000001", 1, tmp_path / "001" / "aside")
    assert disk_events == [
        "name step-00000003",
        "name step-00000002",
        "sync 001",
        "sync aside",
        "sync checkpoints",
        "sync latest",
        "name latest",
        "sync checkpoints",
    ]


def test_sync_precedes_rename(tmp_path: Path, disk_events: list[str]) -> None:
    save_alone(CheckpointStore(tmp_path / "checkpoints"), 1, state(1))
    assert disk_events == [
        "sync part-00000.safetensors",
        "name report-00000.json",
        "sync manifest.json",
        "name manifest.json",
        "sync TEMPORARY",
        "name step-00000001",
        "sync checkpoints",
        "sync latest",
        "name latest",
        "sync checkpoints",
    ]


def test_silent_rank_is_reported_after_timeout(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, timeout_seconds=0.3)
    with pytest.raises(SaveFailed, match="ranks 1, 2 did not write their parts within 0 s of saving step 1"):
        store.save(1, state(1), {}, namespace=NAMESPACE, rank=0, ranks=3, attempt=1)
    with pytest.raises(SaveFailed, match="rank 0 could not save step 1"):  # the late rank fails at once
        CheckpointStore(tmp_path, timeout_seconds=20).save(
            1, [], {}, namespace=NAMESPACE, rank=1, ranks=3, attempt=1
        )


class Reports:
    """What the watchdog hears."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[str] = []
        monkeypatch.setattr(store_module, "PROGRESS_SECONDS", 0.01)
        monkeypatch.setattr(store_module, "report_progress", self.heard.append)


def test_waiting_for_other_ranks_is_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports(monkeypatch)
    store = CheckpointStore(tmp_path, timeout_seconds=0.3)
    with pytest.raises(SaveFailed, match="rank 1 did not write its part"):
        store.save(1, state(1), {}, namespace=NAMESPACE, rank=0, ranks=2, attempt=1)
    assert len(reports.heard) <= 1, "only this rank's own part is progress"


def test_each_written_block_is_progress_only_while_training_waits_for_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports, written = Reports(monkeypatch), threading.Semaphore(0)
    blocks: list[int] = []
    shards = [Shard(TensorKey(WEIGHT, name), (64,), Box.whole((64,)), torch.zeros(64)) for name in "abcd"]
    write = writing._write_all

    def write_slowly(descriptor: int, data: memoryview) -> None:
        written.acquire()
        write(descriptor, data)
        blocks.append(len(data))

    monkeypatch.setattr(writing, "_write_all", write_slowly)
    pending = CheckpointStore(tmp_path).save(
        1, shards, {}, namespace=NAMESPACE, rank=0, ranks=1, attempt=1, background=True
    )
    written.release(2)  # the header and a block
    while len(blocks) < 2:
        time.sleep(0.001)
    assert reports.heard == [], "training does not wait"
    waiting = threading.Thread(target=pending.wait)
    waiting.start()
    for heard in (1, 2, 3):
        while len(reports.heard) < heard:
            time.sleep(0.001)
        time.sleep(0.05)
        assert len(reports.heard) == heard, "without a further block there is no progress"
        written.release()
    waiting.join()


RANK_THAT_DIES = """
import os, signal, sys
import torch
from toolkit.checkpoint.online.commit import SavePhase
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import WEIGHT, Box, Shard, TensorKey

rank = int(sys.argv[2])
dies_in = SavePhase.FSYNC if rank else SavePhase.RENAME

def die(phase):
    if phase is dies_in:
        os.kill(os.getpid(), signal.SIGKILL)

shard = Shard(TensorKey(WEIGHT, "w"), (128,), Box((64 * rank,), (64,)), torch.zeros(64))
store = CheckpointStore(sys.argv[1], on_phase=die)
store.save(1, [shard], {}, namespace="test/1", rank=rank, ranks=2, attempt=1)
"""


@pytest.mark.full  # a silent rank is reported: the test above
@pytest.mark.parametrize("dies", [0, 1])
def test_killed_rank_fails_save_on_other_ranks(dies: int, tmp_path: Path) -> None:
    """The death is detected before the timeout (30 minutes), and without signals from a launcher."""
    other = subprocess.Popen([sys.executable, "-c", RANK_THAT_DIES, str(tmp_path), str(dies)])
    shard = Shard(KEY, (128,), Box((64 * (1 - dies),), (64,)), torch.zeros(64))
    began = time.monotonic()
    with pytest.raises(SaveFailed, match=f"rank {dies} died while step 1 was being saved"):
        CheckpointStore(tmp_path).save(1, [shard], {}, namespace=NAMESPACE, rank=1 - dies, ranks=2, attempt=1)
    assert other.wait(timeout=10) == -signal.SIGKILL
    assert time.monotonic() - began < 30, "most of it is the other process importing torch"
    assert directory.newest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("work", ["_remove_leftovers", "_apply_retention"])
def test_file_system_that_refuses_the_cleaning_up_fails_no_save(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(saved: commit.RankSave) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(commit, work, refuse)
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    store = CheckpointStore(tmp_path, keep_last=1)
    for step in (1, 2):
        path = store.save(step, state(step), {}, namespace=NAMESPACE, rank=0, ranks=1, attempt=1).wait()
        assert path.name == checkpoint_folder.step_name(step)
    assert "could not be cleaned up, and the next save tries again" in caplog.text


def test_leftovers_of_dead_attempts_are_removed(tmp_path: Path) -> None:
    for name in (".tmp-step-00000003-attempt-001-4", ".removed-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-00000.safetensors").write_bytes(b"half")
    save_alone(CheckpointStore(tmp_path), 3, state(3), attempt=2)
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["latest", "step-00000003"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, CheckpointError), (errno.EACCES, CheckpointError), (errno.EIO, SaveFailed)],
    ids=["full", "forbidden", "broken"],
)
def test_write_error_keeps_previous_checkpoint(
    number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cause that the user must fix is a user error on all ranks; other file system errors are failures on
    all ranks.
    """
    named = {KEY: torch.arange(4096.0)}
    stores = [CheckpointStore(tmp_path, timeout_seconds=20) for _ in range(2)]
    ranks = shards_of(named, LAYOUTS["flat"], 2)
    first = save(tmp_path, 1, ranks, stores=stores)
    write = writing._write_all

    def full(descriptor: int, data: memoryview) -> None:
        if (
            Path(f"/proc/self/fd/{descriptor}").readlink().name == "part-00001.safetensors"
            and len(data) > 1000
        ):
            raise OSError(number, os.strerror(number))
        write(descriptor, data)

    monkeypatch.setattr(writing, "_write_all", full)
    with pytest.raises(kind, match=os.strerror(number)) as caught:
        save(tmp_path, 2, ranks, stores=stores)
    assert str(first) in str(caught.value)
    assert all(type(store._pending and store._pending.error) is kind for store in stores)
    assert checkpoint_folder.newest_checkpoint(stores[0].directory) == first
    assert not list(tmp_path.rglob(".tmp*/*.safetensors")), "the room is given back"
    monkeypatch.undo()
    save(tmp_path, 3, ranks, stores=stores)
    assert open_reader(tmp_path).step == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, if mounting is permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, timeout=10
        ).returncode
    ):
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", folder], check=True, timeout=10)


def test_full_disk_keeps_previous_checkpoint(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints", keep_last=1)
    first = save_alone(store, 1, state(1, 100_000))
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        save_alone(store, 2, state(2, 200_000))
    remedy = caught.value.problems[0].remedy
    assert all(part in remedy for part in ("free 0.0008 GB", "checkpoint.keep_last=1", str(first)))
    assert value(checkpoint_folder.newest_checkpoint(store.directory)) == 1
    assert verify(first) == []
    save_alone(store, 3, state(3, 100_000))
    assert value(checkpoint_folder.newest_checkpoint(store.directory)) == 3
