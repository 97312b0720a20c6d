"""A run on two ranks that is killed during an upload continues on one, from the store or from its folder.

    pytest tests/launch/test_killed_during_upload.py -m full

An upload that is killed in each phase, without a training: tests/checkpoint/test_uploads.py.
"""

from __future__ import annotations

import shutil
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from tests.data.local_stores import BUCKET, Store, environment, served
from tests.launch.processes import ROOT, TRAIN, RunningCommand, command, read_status
from tests.launch.tiny_runs import EVERY, KEYS, STEPS, read_losses
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.remote.pointer import Pointer, parse_pointer
from toolkit.checkpoint.verify import verify
from toolkit.checkpoint_folder import newest_checkpoint, step_name
from toolkit.goodput import read_times
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

URL = f"s3://{BUCKET}/run"
FIRST, SECOND = (
    EVERY,
    2 * EVERY,
)  # steps of the checkpoint in the store, and of the one whose upload is killed
SECONDS = 300.0  # for anything, on a busy machine


def failing_store(root: Path) -> AbstractContextManager[Store]:
    return served(root, failing=0.05, seed=8)


def train(run_dir: Path, data: Path, store: Store, ranks: int) -> RunningCommand:
    argv = command(
        "python",
        TRAIN,
        *KEYS,
        "zero=stage2",
        f"data.path={data}",
        f"run.dir={run_dir}",
        f"checkpoint.url={URL}",
        "+hooks.gate.target=tests.launch.gated_steps.GatedSteps",
        ranks=ranks,
    )
    environ = {
        "PYTHONPATH": str(ROOT),
        "TORCHDYNAMO_DISABLE": "1",
        "GATE_STEP": str(SECOND + 1) if ranks > 1 else "0",
        "GATE": str(run_dir / "never"),
        **environment(store),
    }
    return RunningCommand(argv, run_dir, cwd=run_dir.parent, environ=environ)


def pointer(bucket: Path) -> Pointer:
    return parse_pointer((bucket / "run" / "latest").read_bytes(), "latest")


def folders(bucket: Path) -> list[str]:
    return sorted(path.name for path in (bucket / "run").iterdir() if path.is_dir() and any(path.iterdir()))


@pytest.fixture(scope="module")
def killed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a killed command leaves: ``run``, and ``bucket``, which has one of two files of the second
    checkpoint.
    """
    folder = tmp_path_factory.mktemp("killed")
    bucket, run_dir = folder / "bucket", folder / "run"
    bucket.mkdir()
    sending, gone = threading.Event(), threading.Event()

    def hold(key: str) -> None:
        """The file of rank 1 does not arrive."""
        if step_name(SECOND) in key and "part-00001" in key:
            sending.set()
            gone.wait(SECONDS)
            raise ConnectionAbortedError

    with failing_store(bucket) as store, train(run_dir, data, store, ranks=2) as started:
        store.on_write = hold
        started.wait_until(sending.is_set, SECONDS, "sending the file of rank 1")
        record = f"{step_name(SECOND)}-*/part-00000*"
        started.wait_until(
            lambda: any((run_dir / "uploads").glob(record)), SECONDS, "sent the file of rank 0"
        )
        for process in (psutil.Process(started.process.pid), *started.processes()):
            process.kill()
        started.wait_until_gone()
        gone.set()
    return folder


def continue_on_one_rank(folder: Path, data: Path, step: int) -> tuple[dict[int, float], Store]:
    """Continue in ``folder``, check that it was from ``step`` and how the store is left. Returns the losses
    and the store's counts.
    """
    bucket, run_dir = folder / "bucket", folder / "run"
    with failing_store(bucket) as store, train(run_dir, data, store, ranks=1) as started:
        assert started.wait_for_exit(SECONDS) == 0, started.output
        started.wait_until_gone()
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.step) == (RunState.DONE, STEPS)
    times = read_times(RunDirectory(run_dir).attempt_folder(end.attempt))
    assert times is not None
    assert times.first == step
    named = pointer(bucket).checkpoint
    assert named is not None
    assert named.step == STEPS
    assert folders(bucket) == [named.folder], "leftovers of the killed upload were removed"
    assert [path.name for path in (run_dir / "uploads").glob("step-*")] == [named.folder]
    with pytest.MonkeyPatch.context() as patch, failing_store(bucket) as reading:
        for name, value in environment(reading).items():
            patch.setenv(name, value)
        assert open_reader(URL).step == STEPS
        assert verify(URL) == []
    return dict(read_losses(run_dir / "metrics.jsonl")), store


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_run_without_its_folder_continues_from_the_pointer_on_another_number_of_ranks(
    killed: Path, data: Path, uninterrupted: list[float], tmp_path: Path
) -> None:
    shutil.copytree(killed / "bucket", tmp_path / "bucket")
    named = pointer(tmp_path / "bucket").checkpoint
    assert named is not None
    assert named.step == FIRST
    assert len(folders(tmp_path / "bucket")) == 2, "the upload was in progress"
    losses, store = continue_on_one_rank(tmp_path, data, FIRST)
    assert losses == pytest.approx(dict(enumerate(uninterrupted[FIRST:], FIRST + 1)), abs=1e-5)
    assert store.faulty.total() > 0
    late = dict(enumerate(uninterrupted[FIRST - 1 : -1], FIRST + 1))
    assert losses != pytest.approx(late, abs=1e-5), "control: one step late is outside of the tolerance"


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_control_a_run_with_its_folder_continues_from_its_newer_checkpoint(
    killed: Path, data: Path, uninterrupted: list[float], tmp_path: Path
) -> None:
    """It also completes the upload of the other ranks: a file that they sent is not sent again."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    newest = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.name == step_name(SECOND)
    losses, store = continue_on_one_rank(tmp_path, data, SECOND)
    assert losses == pytest.approx(dict(enumerate(uninterrupted, 1)), abs=1e-5)
    sent = [key for key in store.writes if key.startswith("PUT") and step_name(SECOND) in key]
    assert not any("part-00000" in key for key in sent)
    assert any("part-00001" in key for key in sent)
