"""Uploads of checkpoints to an object store: killed, repeated, refused, skipped and removed.

pytest tests/checkpoint/test_uploads.py
"""

from __future__ import annotations

import errno
import shutil
import time
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch

from tests.checkpoint.layouts import LAYOUTS, same_bits, save, shards_of, whole
from tests.checkpoint.uploads import IDENTITY, SECONDS, UploadingRun, poll_often, run_until_killed, state
from tests.damage import flip_byte
from tests.data.local_stores import Store, environment
from tests.waiting import wait_until
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.catalog import block_count
from toolkit.checkpoint.offline import reshard
from toolkit.checkpoint.planner import ReadPlanner
from toolkit.checkpoint.remote import upload
from toolkit.checkpoint.remote.pointer import (
    Pointer,
    StoreClaim,
    StoredCheckpoint,
    Writer,
    claimed_pointer,
    parse_pointer,
)
from toolkit.checkpoint.remote.retention import agreed_step, best_steps, removable_folders
from toolkit.checkpoint.remote.upload import Uploader, UploadPhase, poll_seconds
from toolkit.checkpoint.remote.upload_folder import UploadFolder
from toolkit.checkpoint.source import open_source
from toolkit.checkpoint.verify import verify
from toolkit.config.reshard import ReshardAction, ReshardConfig
from toolkit.errors import CheckpointError, ConfigError
from toolkit.remote.objects import StoredObject, StoreObjects

PREFIX = "runs/mine"


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_often(monkeypatch)


def url_of(store: Store) -> str:
    return f"{store.s3}/{PREFIX}"


def pointer_of(store: Store) -> Pointer:
    return parse_pointer((store.root / PREFIX / "latest").read_bytes(), "latest")


def folders(store: Store) -> list[str]:
    """Folders of checkpoints with an object, without the hash."""
    return sorted(
        {
            file.relative_to(store.root / PREFIX).parts[0].rpartition("-")[0]
            for file in (store.root / PREFIX).rglob("*")
            if file.is_file() and file.name != "latest"
        }
    )


def check_loads(url: str, step: int) -> None:
    """Check that the store's newest checkpoint has the state of ``step``, and that every byte is intact."""
    reader = open_reader(url)
    assert reader.step == step
    found, expected = whole(reader), state(step)
    assert found.keys() == expected.keys()
    assert all(same_bits(found[key], expected[key]) for key in expected)
    assert verify(url) == []


# ---- kills


@pytest.mark.parametrize(
    ("phase", "nth", "loads"),
    [
        pytest.param(UploadPhase.FILES, 2, 1, marks=pytest.mark.full),  # two files each of two checkpoints
        (UploadPhase.FILES, 3, 1),
        pytest.param(UploadPhase.VERIFY, 1, 1, marks=pytest.mark.full),
        pytest.param(UploadPhase.MANIFEST, 1, 1, marks=pytest.mark.full),
        (UploadPhase.POINTER, 1, 1),
        pytest.param(UploadPhase.RETENTION, 0, 2, marks=pytest.mark.full),  # of the first: keep_last=1
        (UploadPhase.RETENTION, 1, 2),
    ],
)
def test_a_run_killed_in_any_phase_leaves_a_checkpoint_that_loads(
    store: Store, tmp_path: Path, forks: ForkServerContext, phase: UploadPhase, nth: int, loads: int
) -> None:
    folder, url = tmp_path / "run", url_of(store)
    arguments = (folder, url, environment(store), (phase, nth), (1, 2))
    process = forks.Process(target=run_until_killed, args=arguments)
    process.start()
    process.join(240)
    assert process.exitcode == -9, f"ended with {process.exitcode} instead of by our kill"
    check_loads(url, loads)
    store.writes.clear()
    again = UploadingRun(folder, url, 3, keep_last=1)
    assert again.close()
    check_loads(url, 2)
    assert folders(store) == ["step-00000002"], "leftovers of the dead upload were removed"
    repeated = [key for key in store.writes if key.startswith("PUT") and "part-" in key]
    assert len(repeated) <= (2 if phase is UploadPhase.FILES else 0), f"{repeated} were complete"


def test_control_a_pointer_that_moves_too_early_is_detected(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = UploadingRun(tmp_path / "run", url_of(store))
    run.save(1)
    assert run.close()
    check_loads(url_of(store), 1)
    for early in ("_send_files", "_await_records", "_verify"):
        monkeypatch.setattr(Uploader, early, lambda *arguments: None)
    run = UploadingRun(tmp_path / "run", url_of(store), 2)
    run.save(2)
    run.close()
    assert pointer_of(store).checkpoint is not None
    with pytest.raises(CheckpointError, match=r"part-0000[01]\.safetensors: absent") as caught:
        check_loads(url_of(store), 2)
    first = next(path for path in (store.root / PREFIX).glob("step-00000001-*"))
    assert f"resume={url_of(store)}/{first.name}" in caught.value.problems[0].remedy
    check_loads(f"{url_of(store)}/{first.name}", 1)  # the remedy


def test_an_object_that_differs_from_what_was_sent_stops_the_commit(store: Store, tmp_path: Path) -> None:
    """Between upload and commit, as a store that lost a write would look."""
    delays: list[str] = []
    broken: list[Path] = []

    def lose(phase: UploadPhase) -> None:
        if phase is UploadPhase.VERIFY and not broken:
            broken.extend((store.root / PREFIX).glob("step-*/part-00001*"))
            broken[0].write_bytes(b"of another size")

    run = UploadingRun(
        tmp_path / "run", url_of(store), on_phase=lose, on_delay=lambda text, _: delays.append(text)
    )
    run.save(1)
    assert run.close()
    assert any("differ from what was sent" in text for text in delays)
    assert run.uploaders[0].upload_seconds > 0
    check_loads(url_of(store), 1)


def test_a_store_that_never_has_what_was_sent_ends_the_wait_for_the_last_checkpoint(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "END_OUTAGE_SECONDS", 0.5)
    monkeypatch.setattr(upload, "MAX_PAUSE_SECONDS", 0.05)

    def lose(phase: UploadPhase) -> None:
        if phase is UploadPhase.VERIFY:
            next((store.root / PREFIX).glob("step-*/part-00001*")).write_bytes(b"of another size")

    run = UploadingRun(tmp_path / "run", url_of(store), on_phase=lose)
    run.save(1)
    assert not run.close(), "although no rank fails to send its part"


def test_a_file_that_was_damaged_on_disk_is_not_uploaded(store: Store, tmp_path: Path) -> None:
    delays: list[str] = []
    run = UploadingRun(tmp_path / "run", url_of(store), on_delay=lambda failure, _: delays.append(failure))
    path = save(run.checkpoints, 1, shards_of(state(1), LAYOUTS["flat"], 2))
    file = path / "part-00000.safetensors"
    flip_byte(file)
    run.uploaders[0].send(path)
    assert not run.close(lambda: 0.0 if delays else 5.0)
    assert "differs from what was written" in delays[0]
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        open_reader(url_of(store))


# ---- the order of uploads


def test_an_upload_is_finished_and_checkpoints_in_between_are_skipped(store: Store, tmp_path: Path) -> None:
    saved: list[int] = []

    def save_meanwhile(phase: UploadPhase) -> None:
        """While the first is being sent, five more are saved, each of which removes the one before."""
        if phase is UploadPhase.VERIFY and not saved:
            for step in range(2, 7):
                saved.append(step)
                run.save(step)

    run = UploadingRun(tmp_path / "run", url_of(store), on_phase=save_meanwhile, keep_last=9)
    run.save(1)
    assert run.close()
    assert saved == [2, 3, 4, 5, 6]
    assert folders(store) == ["step-00000001", "step-00000006"]
    check_loads(url_of(store), 6)
    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == ["step-00000001", "step-00000006"]


def test_an_outage_delays_uploads_and_the_last_checkpoint_arrives(store: Store, tmp_path: Path) -> None:
    delays: list[tuple[str, float]] = []
    run = UploadingRun(
        tmp_path / "run", url_of(store), on_delay=lambda failure, seconds: delays.append((failure, seconds))
    )
    store.faults.down = True
    begin = time.monotonic()
    run.save(1)
    run.save(2)
    assert time.monotonic() - begin < 60, "saving does not wait for the store"
    wait_until(lambda: bool(delays), SECONDS, "delayed")
    assert "attempts in" in delays[0][0]
    store.faults.down = False
    assert run.close()
    check_loads(url_of(store), 2)


def test_files_that_a_power_failure_emptied_are_written_again(store: Store, tmp_path: Path) -> None:
    delays: list[str] = []

    def fail(phase: UploadPhase) -> None:
        if phase is UploadPhase.MANIFEST:  # every file has been sent
            raise OSError("the power fails soon")

    folder = tmp_path / "run"
    run = UploadingRun(
        folder, url_of(store), on_phase=fail, on_delay=lambda failure, _: delays.append(failure)
    )
    run.save(1)
    assert not run.close(lambda: 0.0 if delays else 5.0)
    emptied = {file for file in (folder / "uploads").rglob("*.json") if file.name != "run.json"}
    assert len(emptied) == 3, "two records and what rank 0 wants"
    for file in emptied:
        file.write_bytes(b"")
    again = UploadingRun(folder, url_of(store), 2)
    deadline = time.monotonic() + 60
    assert again.close(lambda: deadline - time.monotonic())
    check_loads(url_of(store), 1)


def test_a_rank_that_cannot_report_its_failure_repeats_its_part(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[int] = []

    def fail(folder: UploadFolder, rank: int, *, damaged: bool) -> None:
        failures.append(rank)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UploadFolder, "set_failing", fail)
    run = UploadingRun(tmp_path / "run", url_of(store))
    store.faults.down = True
    run.save(1)
    wait_until(lambda: bool(failures), SECONDS, "failing")
    store.faults.down = False
    deadline = time.monotonic() + 60
    assert run.close(lambda: deadline - time.monotonic())
    check_loads(url_of(store), 1)


def test_ranks_that_wait_for_checkpoints_read_the_shared_folder_at_a_bounded_rate() -> None:
    assert poll_seconds(1) == poll_seconds(2) == upload.POLL_SECONDS
    assert 4096 / poll_seconds(4096) <= 100


def test_a_stop_does_not_wait_longer_than_its_time(store: Store, tmp_path: Path) -> None:
    run = UploadingRun(tmp_path / "run", url_of(store))
    store.faults.down = True
    run.save(1)
    deadline = time.monotonic() + 0.5
    assert not run.close(lambda: deadline - time.monotonic())
    assert (tmp_path / "run/uploads/pending").exists()
    for uploader in run.uploaders:
        uploader._thread.join(60)  # the process ends; here its thread must not meet the store again
    store.faults.down = False
    again = UploadingRun(tmp_path / "run", url_of(store), 2)  # the next start sends it
    assert again.close()
    check_loads(url_of(store), 1)


def test_uploading_to_and_reading_from_a_failing_store_give_the_same_state(
    store: Store, tmp_path: Path
) -> None:
    store.faults.failing = 0.12
    run = UploadingRun(tmp_path / "run", url_of(store))
    for step in range(1, 6):
        run.save(step)
        run.wait_until_sent()
    assert run.close()
    for _ in range(3):
        check_loads(url_of(store), 5)
    assert store.faulty.total() > 2


# ---- other writers, lost pointers


def test_an_older_attempt_that_is_still_alive_is_refused(store: Store, tmp_path: Path) -> None:
    run = UploadingRun(tmp_path / "run", url_of(store))
    run.save(1)
    run.wait_until_sent()
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")  # as a partitioned node sees it
    second = UploadingRun(tmp_path / "elsewhere", url_of(store), 2)
    run.save(2)
    run.close()
    with pytest.raises(ConfigError, match=r"attempt 2 of run .* has replaced the pointer"):
        raise run.uploaders[0].error or AssertionError
    check_loads(url_of(store), 1)
    second.save(3)
    assert second.close()
    check_loads(url_of(store), 3)


def test_an_attempt_that_was_paused_removes_nothing_once_another_writes(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is paused after it has replaced the pointer. Control: attempts that are not remove step 1."""
    list_objects, claims = StoreObjects.listing, [1]

    def claim_first(objects: StoreObjects, folder: str = "") -> list[StoredObject]:
        if not folder and claims and (run.checkpoints / "step-00000002").exists():
            claims.clear()
            shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")
            UploadingRun(tmp_path / "elsewhere", url_of(store), 2)
        return list_objects(objects, folder)

    run = UploadingRun(tmp_path / "run", url_of(store), keep_last=1)
    run.save(1)
    run.wait_until_sent()
    monkeypatch.setattr(StoreObjects, "listing", claim_first)
    run.save(2)
    run.close()
    with pytest.raises(ConfigError, match=r"attempt 2 of run .* has replaced the pointer"):
        raise run.uploaders[0].error or AssertionError
    assert folders(store) == ["step-00000001", "step-00000002"]


def test_a_fresh_folder_continues_and_the_abandoned_one_is_refused(store: Store, tmp_path: Path) -> None:
    run = UploadingRun(tmp_path / "run", url_of(store))
    run.save(1)
    assert run.close()
    fresh = UploadingRun(tmp_path / "fresh", url_of(store))
    assert fresh.claimed.newest is not None
    assert open_reader(fresh.claimed.newest).step == 1
    assert fresh.close()
    with pytest.raises(ConfigError, match="has replaced the pointer"):
        UploadingRun(tmp_path / "run", url_of(store), 2)
    with pytest.raises(ConfigError, match="belongs to a run of identity 01234567, here 76543210"):
        UploadingRun(tmp_path / "other", url_of(store), identity="76543210")


def test_a_lost_pointer_is_an_error_that_names_the_newest_complete_checkpoint(
    store: Store, tmp_path: Path
) -> None:
    run = UploadingRun(tmp_path / "run", url_of(store), keep_last=3)
    for step in (1, 2, 3):
        run.save(step)
        run.wait_until_sent()
    assert run.close()
    root = store.root / PREFIX
    (root / "latest").unlink()
    newest = {step: next(root.glob(f"step-0000000{step}-*")) for step in (2, 3)}
    (newest[3] / "part-00001.safetensors").unlink()  # it is not complete
    for access in (
        lambda: open_reader(url_of(store)),
        lambda: UploadingRun(tmp_path / "run", url_of(store), 2),
    ):
        with pytest.raises(CheckpointError, match="has no pointer latest") as caught:
            access()
        remedy = f"{url_of(store)}/{newest[2].name}"
        assert caught.value.problems[0].remedy == f"continue from it: resume={remedy}"
    check_loads(remedy, 2)
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        open_reader(f"{store.s3}/empty")


def test_a_damaged_pointer_or_manifest_is_refused(store: Store, tmp_path: Path) -> None:
    run = UploadingRun(tmp_path / "run", url_of(store))
    run.save(1)
    assert run.close()
    pointer, manifest = store.root / PREFIX / "latest", next((store.root / PREFIX).glob("*/manifest.json"))
    good, text = pointer.read_bytes(), manifest.read_bytes()
    for content in (b"{", b"[]", good.replace(b'"step": 1', b'"step": "1"'), good.replace(b"-pointer", b"")):
        pointer.write_bytes(content)
        with pytest.raises(CheckpointError, match="latest is not a pointer"):
            open_reader(url_of(store))
    pointer.write_bytes(good)
    manifest.write_bytes(text.replace(b'"ranks": 2', b'"ranks": 3'))
    with pytest.raises(CheckpointError, match="does not match its content_hash"):
        open_reader(url_of(store))
    manifest.write_bytes(text)
    check_loads(url_of(store), 1)
    part = next((store.root / PREFIX).glob("*/part-00001*"))
    flip_byte(part, -5)
    with pytest.raises(CheckpointError, match="differs from what was written"):
        whole(open_reader(url_of(store)))
    assert [finding.where for finding in verify(url_of(store))] == ["part-00001.safetensors"]


# ---- reading


@pytest.mark.parametrize("to", ["flat", "rows", "columns", "replicated"])
def test_a_rank_reads_only_the_bytes_that_it_needs(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """In every change of layout, each verified block with elements of the rank once, and the manifest."""
    run = UploadingRun(tmp_path / "run", url_of(store))
    run.save(1)
    assert run.close()
    store.forget()
    for rank in range(3):
        reader = open_reader(url_of(store))
        shards = shards_of(state(1), LAYOUTS[to], 3, empty=True)[rank]
        reads = ReadPlanner(open_source(url_of(store)).catalog).plan(shards)
        assert all(block_count(read.piece.end - read.piece.begin) == 1 for read in reads)
        needed = sum(read.piece.end - read.piece.begin for read in reads)
        elements = sum(shard.data.numel() * 4 for shard in shards)
        store.forget()
        reader.read(shards)
        assert elements <= needed
        assert needed <= store.served_bytes <= 1.1 * needed + 1
        expected = shards_of(state(1), LAYOUTS[to], 3)[rank]
        assert all(torch.equal(a.data, b.data) for a, b in zip(shards, expected, strict=True))


def test_inspecting_reads_no_tensor_and_verifying_reads_each_byte_once(store: Store, tmp_path: Path) -> None:
    run = UploadingRun(tmp_path / "run", url_of(store))
    path = run.save(1)
    assert run.close()
    size = sum(file.stat().st_size for file in path.iterdir())
    store.forget()
    config = ReshardConfig(source=url_of(store), action=ReshardAction.inspect)
    assert any("step" in line for line in reshard.inspect(config))
    assert store.served_bytes < size / 2
    store.forget()
    assert verify(url_of(store)) == []
    assert store.served_bytes < 1.1 * size


# ---- decisions


def start(**changes: object) -> StoreClaim:
    writer = Writer(run="mine", identity=IDENTITY, attempt=2)
    return replace(StoreClaim(writer=writer, resume="auto", local_step=None), **changes)


OWN, OTHER = (Writer(run=run, identity=IDENTITY, attempt=1) for run in ("mine", "other"))
AT_30 = StoredCheckpoint(30, "0" * 32)
AT_20 = StoredCheckpoint(20, "1" * 32)


@pytest.mark.parametrize(
    ("found", "started", "follows", "checkpoint", "went_back"),
    [
        (None, start(), False, None, False),
        (Pointer(writer=OTHER), start(), False, None, False),
        (Pointer(writer=OTHER, checkpoint=AT_30), start(), True, AT_30, False),  # a fresh folder
        (Pointer(writer=OWN, checkpoint=AT_30), start(local_step=20), True, AT_30, False),
        (Pointer(writer=OWN, checkpoint=AT_30), start(local_step=30), False, AT_30, False),
        (Pointer(writer=OWN, checkpoint=AT_30), start(local_step=40), False, AT_30, False),
        (Pointer(writer=OWN, checkpoint=AT_30), start(resume="PATH", local_step=40), False, AT_30, True),
        (Pointer(writer=OWN, checkpoint=AT_30, went_back=True), start(local_step=20), False, AT_30, True),
        (Pointer(writer=OTHER, checkpoint=AT_30, went_back=True), start(), True, AT_30, False),
        (Pointer(writer=OTHER, checkpoint=AT_30), start(resume="URL", explicit=AT_20), False, AT_20, False),
        (None, start(resume="URL", explicit=AT_20), False, AT_20, False),  # of a lost pointer
    ],
)
def test_who_continues_from_the_pointer(
    found: Pointer | None,
    started: StoreClaim,
    follows: bool,
    checkpoint: StoredCheckpoint | None,
    went_back: bool,
) -> None:
    pointer, continues = claimed_pointer(found, started, "s3://b/p")
    assert (continues, pointer.checkpoint, pointer.went_back) == (follows, checkpoint, went_back)
    assert pointer.writer == started.writer
    assert parse_pointer(pointer.encode(), "latest") == pointer


@pytest.mark.parametrize(
    ("writer", "started", "key"),
    [
        (OTHER, start(local_step=40), "checkpoint.url"),
        (OTHER, start(forks=True), "checkpoint.url"),
        (replace(OTHER, identity="76543210"), start(), "checkpoint.url"),
        (OTHER, start(resume="never"), "resume"),
    ],
)
def test_who_is_refused(writer: Writer, started: StoreClaim, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        claimed_pointer(Pointer(writer=writer, checkpoint=AT_30), started, "s3://b/p")
    assert caught.value.problems[0].key == key


def test_retention_keeps_what_the_rule_keeps_and_removes_leftovers() -> None:
    def folder(step: int) -> str:
        return StoredCheckpoint(step, "a" * 32).folder

    names = [f"{folder(step)}/{file}" for step in (10, 20, 30, 40) for file in ("manifest.json", "part-0")]
    dead, foreign = StoredCheckpoint(40, "b" * 32).folder, "notes/step-00000001"
    names += [f"{dead}/part-0", foreign, "latest"]
    now = StoredCheckpoint(40, "a" * 32)

    def removed(**keep: object) -> list[str]:
        sound = keep.pop("sound", ())
        options: dict[str, object] = {
            "keep_last": 1,
            "keep_every": 0,
            "is_sound": lambda name: name in {folder(step) for step in sound},  # type: ignore[attr-defined]
            **keep,
        }
        return removable_folders(names, now, **options)  # type: ignore[arg-type]

    assert removed() == sorted([folder(10), folder(20), folder(30), dead])
    assert removed(keep_last=2) == sorted([folder(10), folder(20), dead])
    assert removed(keep_every=20, best=[10]) == sorted([folder(30), dead])
    assert removed(sound=[10, 20]) == sorted([folder(10), folder(30), dead])
    assert removed(sound=[10, 20, 40]) == sorted([folder(10), folder(20), folder(30), dead])
    assert removed(sound=[10, 20, 40], agreed=25) == sorted([folder(10), folder(30), dead])
    now = StoredCheckpoint(30, "a" * 32)
    assert removed(sound=[20, 40]) == [folder(10)], "later ones are of an abandoned state or another attempt"
    scalars = {"hooks": {"checkpoint.keep_best": {"saved": [[10, 0.5], [30, 0.6]]}}}
    assert best_steps(scalars) == [10, 30]
    assert best_steps({}) == []
    assert agreed_step({"hooks": {"monitor.computation_every": {"equal_at": 30}}}) == 30
    assert agreed_step(scalars) is None


@pytest.mark.parametrize(
    ("sound", "agreed", "left"),
    [
        ((True, False, False), None, [1, 3]),
        ((True, True, True), None, [3]),  # control
        ((True, True, True), 1, [1, 3]),
    ],
)
def test_store_keeps_the_newest_sound_checkpoint_and_the_newest_confirmed_one(
    store: Store, tmp_path: Path, sound: tuple[bool, ...], agreed: int | None, left: list[int]
) -> None:
    """Each start knows the checkpoints of the one before from the store only."""
    hooks = {} if agreed is None else {"monitor.computation_every": {"equal_at": agreed}}
    for step, is_sound in enumerate(sound, 1):
        run = UploadingRun(tmp_path / "run", url_of(store), step, keep_last=1)
        run.save(step, sound=is_sound, hooks=hooks)
        assert run.close()
    assert folders(store) == [f"step-{step:08d}" for step in left]
