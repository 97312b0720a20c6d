"""Whole runs with ``checkpoint.url``: a fresh folder continues from the store to the bit.

pytest tests/train/test_uploads.py
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data.local_stores import Store
from tests.train.tiny_run import STEPS, TinyRun, equal_tensors, read_jsonl
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.directory import rewind_to_checkpoint
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.remote import upload
from toolkit.checkpoint.remote.pointer import Pointer, Writer, parse_pointer
from toolkit.checkpoint_folder import step_of
from toolkit.config.compose import from_yaml
from toolkit.config.schema import RunConfig
from toolkit.errors import CheckpointError, ConfigError, ExitCode, InputError
from toolkit.paths import Url
from toolkit.remote.fetch import RequestLimits
from toolkit.rundir.start_checks import NothingToDo, check_remaining_work
from toolkit.rundir.status import RunState
from toolkit.train import uploads


def prefix(store: Store) -> str:
    return f"{store.s3}/run"


def pointed_step(folder: Path) -> int | None:
    """The step of the checkpoint that the pointer in a copy of the bucket names."""
    pointer = parse_pointer((folder / "run" / "latest").read_bytes(), "latest")
    return None if pointer.checkpoint is None else pointer.checkpoint.step


def test_a_run_lost_at_any_moment_of_an_upload_continues_to_the_bit(
    store: Store, whole: TinyRun, data: Path, tmp_path: Path
) -> None:
    """The bucket before each write is what a kill at that moment leaves; the run's folder is lost."""
    moments: list[tuple[str, Path]] = []

    def copy(key: str) -> None:
        moments.append((key, tmp_path / "moments" / f"{len(moments)}"))
        shutil.copytree(store.root, moments[-1][1])

    store.on_write = copy
    settings = {"checkpoint__every": "2", "checkpoint__url": prefix(store)}
    assert TinyRun(tmp_path / "run", data, stop_after=2, **settings).code is ExitCode.STOPPED
    assert TinyRun(tmp_path / "run", data, **settings).code is ExitCode.DONE
    store.on_write = lambda key: None
    assert pointed_step(store.root) == STEPS
    last_with: dict[int | None, Path] = {}
    for _, folder in moments[1:]:  # the first write creates the pointer
        store.root = folder
        store.cached.clear()
        step = pointed_step(folder)
        last_with[step] = folder
        if step is not None:
            assert open_reader(prefix(store)).step == step
        else:
            with pytest.raises(CheckpointError, match="contains no checkpoint"):
                open_reader(prefix(store))
    assert {None, 2} <= last_with.keys()
    store.root = last_with[2]  # the upload of a later checkpoint has begun
    assert len({path.parent for path in store.root.rglob("part-*")}) == 2
    store.cached.clear()
    fresh = TinyRun(tmp_path / "fresh", data, **settings)
    assert fresh.code is ExitCode.DONE
    assert fresh.rows() == whole.rows()[2:]
    assert equal_tensors(fresh.state(), whole.state())
    assert pointed_step(store.root) == STEPS


def test_a_url_is_resumed_and_forked(store: Store, whole: TinyRun, data: Path, tmp_path: Path) -> None:
    settings = {"checkpoint__every": "2", "checkpoint__url": prefix(store)}
    TinyRun(tmp_path / "run", data, stop_after=3, **settings)

    def resume(config: RunConfig) -> None:
        config.resume = prefix(store)

    def fork(config: RunConfig) -> None:
        config.run.fork, config.optim.lr = prefix(store), config.optim.lr / 2

    resumed = TinyRun(tmp_path / "resumed", data, config=resume)
    assert resumed.rows() == whole.rows()[3:]
    killed = tmp_path / "killed" / "checkpoints"  # after resume=URL, before the first save
    rewind_to_checkpoint(killed, Url(open_reader(prefix(store)).path), 3, tmp_path / "aside")
    assert TinyRun(killed.parent, data).rows() == whole.rows()[3:]
    forked = TinyRun(tmp_path / "forked", data, config=fork)
    assert forked.rows()[0]["loss"] == whole.rows()[3]["loss"]
    assert forked.rows()[-1]["loss"] != whole.rows()[-1]["loss"]
    assert pointed_step(store.root) == 3, "they did not write there"


def test_a_store_that_cannot_be_written_is_found_before_training(
    store: Store, data: Path, tmp_path: Path
) -> None:
    store.faults.forbidden = True
    with pytest.raises(InputError, match="refused with status 403") as caught:
        TinyRun(tmp_path / "run", data, checkpoint__url=prefix(store))
    assert "give credentials in the environment: AWS_ACCESS_KEY_ID" in caught.value.problems[0].remedy
    store.faults.forbidden, store.faults.read_only = False, True
    with pytest.raises(InputError, match="latest: refused with status 403"):
        TinyRun(tmp_path / "run", data, checkpoint__url=prefix(store))
    store.faults.read_only = False
    with pytest.raises(InputError, match="no such bucket"):
        TinyRun(tmp_path / "run", data, checkpoint__url="s3://absent/run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "no step was trained"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report a failed upload at once, and wait a second for the last one."""
    for module, name, value in (
        (upload, "END_OUTAGE_SECONDS", 1.0),
        (uploads, "DELAY_SECONDS", 0.0),
        (uploads, "WRITE_LIMITS", RequestLimits(opening_seconds=0.2)),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("impatient")
def test_an_outage_does_not_stop_training(store: Store, whole: TinyRun, data: Path, tmp_path: Path) -> None:
    settings = {"checkpoint__every": "2", "checkpoint__url": prefix(store)}
    store.on_write = lambda key: setattr(store.faults, "down", True)  # after the start
    run = TinyRun(tmp_path / "run", data, **settings)
    assert run.code is ExitCode.DONE
    assert run.rows() == whole.rows()
    assert pointed_step(store.root) is None
    alerts = read_jsonl(run.directory.alerts_file)
    assert ("slow-checkpoint", "late-upload") in [(alert["name"], alert["fault"]) for alert in alerts]
    store.on_write = lambda key: None
    store.faults.down = False
    config = from_yaml(run.directory.config_file.read_text())
    run.directory.finish(RunState.DONE, 0, None, attempt=run.attempt, overwrite=True)
    check_remaining_work(config, run.directory)  # the last checkpoint is not in the store
    again = TinyRun(tmp_path / "run", data, **settings)
    assert again.code is ExitCode.DONE
    assert pointed_step(store.root) == STEPS
    run.directory.finish(RunState.DONE, 0, None, attempt=again.attempt, overwrite=True)
    with pytest.raises(NothingToDo):
        check_remaining_work(config, run.directory)


def test_a_run_whose_pointer_another_run_has_replaced_ends_with_an_error(
    store: Store, data: Path, tmp_path: Path
) -> None:
    def replace_pointer(key: str) -> None:
        pointer = store.root / "run" / "latest"
        if key.endswith("manifest.json"):
            writer = Writer(run="another", identity="01234567", attempt=7)
            pointer.write_bytes(Pointer(writer=writer).encode())

    store.on_write = replace_pointer
    with pytest.raises(ConfigError, match="attempt 7 of run another has replaced the pointer latest"):
        TinyRun(tmp_path / "run", data, checkpoint__every="2", checkpoint__url=prefix(store))
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


def test_a_run_whose_pointer_was_removed_ends_with_an_error_that_says_so(
    store: Store, whole: TinyRun, data: Path, tmp_path: Path
) -> None:
    def remove_pointer(key: str) -> None:
        if key.endswith("manifest.json") and pointed_step(store.root) == 2:
            (store.root / "run" / "latest").unlink()

    store.on_write = remove_pointer
    settings = {"checkpoint__every": "2", "checkpoint__url": prefix(store)}
    with pytest.raises(ConfigError, match="the pointer latest was removed while this run was writing there"):
        TinyRun(tmp_path / "run", data, **settings)
    store.on_write = lambda key: None
    with pytest.raises(CheckpointError, match="has no pointer latest"):
        TinyRun(tmp_path / "run", data, **settings)
    remedy = TinyRun(tmp_path / "run", data, **{**settings, "checkpoint__url": f"{prefix(store)}/other"})
    assert remedy.code is ExitCode.DONE
    assert remedy.rows() == whole.rows()
    assert open_reader(f"{prefix(store)}/other").step == STEPS


@pytest.mark.usefixtures("impatient")
def test_credentials_that_expire_do_not_stop_training_and_an_alert_names_them(
    store: Store, whole: TinyRun, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def expire(key: str) -> None:
        """The pointer has been written at the start; its second version is the last write."""
        if key.endswith("latest") and store.writes[f"PUT {key}"] == 1:
            store.faults.forbidden = True

    store.on_write = expire
    settings = {"checkpoint__every": "2", "checkpoint__url": prefix(store)}
    run = TinyRun(tmp_path / "run", data, **settings)
    assert run.code is ExitCode.DONE
    assert run.rows() == whole.rows()
    assert pointed_step(store.root) == 2
    alerts = [alert for alert in read_jsonl(run.directory.alerts_file) if alert["fault"] == "late-upload"]
    assert "refused with status 403" in alerts[0]["evidence"]
    assert "check the store and the credentials" in alerts[0]["next_step"]
    assert "the same command uploads it" in caplog.text
    store.faults.forbidden, store.on_write = False, lambda key: None
    assert TinyRun(tmp_path / "run", data, **settings).code is ExitCode.DONE
    assert pointed_step(store.root) == STEPS


@pytest.mark.parametrize(("only_sound", "sent"), [(True, [2]), (False, [2, 4])])
def test_a_run_that_may_roll_back_uploads_sound_checkpoints_only(
    only_sound: bool,
    sent: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(uploads, "Uploader", lambda *arguments: SimpleNamespace(send=steps.append))
    steps: list[Path] = []
    hook = uploads.CheckpointUploads(
        uploads.OpenedStore(Url("s3://bucket/run"), state=SimpleNamespace()),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        lambda alert: None,
        lambda: None,
        only_sound=only_sound,
    )
    checkpoints = CheckpointStore(tmp_path)
    for step, sound in ((2, True), (4, False)):
        scalars = {"step": step, "sound": sound}
        hook.on_checkpoint(
            checkpoints.save(step, [], scalars, namespace="a", rank=0, ranks=1, attempt=1).path
        )
    assert [step_of(path) for path in steps] == sent
    assert ("step-00000004 is not uploaded" in caplog.text) == only_sound


@pytest.mark.parametrize(("state", "warnings"), [(SimpleNamespace(), 1), (None, 0)], ids=["rank 0", "rank 1"])
def test_an_incomplete_upload_is_reported_once_over_all_ranks(
    state: Any, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uploader = SimpleNamespace(error=None, close=lambda seconds_left: False)
    monkeypatch.setattr(uploads, "Uploader", lambda *arguments: uploader)
    store = uploads.OpenedStore(Url("s3://bucket/run"), state=state)
    settings: Any = SimpleNamespace()
    uploads.CheckpointUploads(store, settings, lambda alert: None, lambda: None).on_end(4)
    assert [record.getMessage()[:50] for record in caplog.records] == [
        "the newest checkpoint is not in s3://bucket/run ye"
    ] * warnings
