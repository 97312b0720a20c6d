"""The check whether a machine can read a run's data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.data_folders import batch_plan, documents, make_folder
from tests.data.local_stores import BUCKET, served, set_environment
from toolkit.config.compose import compose
from toolkit.data.registry import DataReadCheck, check_data_read

VOCABULARY = 300
BATCH = batch_plan(2, 4, 1)


def read(path: str, name: str = "prepared") -> DataReadCheck:
    config = compose([f"data={name}", f"data.path={path}", f"model.vocab_size={VOCABULARY}"])
    return check_data_read(config, VOCABULARY, BATCH)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = documents(60, VOCABULARY)
    make_folder(tmp_path / "data", {"train": texts, "valid": texts[:5]}, VOCABULARY)
    return tmp_path / "data"


@pytest.mark.parametrize("stored", [False, True])
def test_readable_data_is_read(
    folder: Path, stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(folder) as store:
        set_environment(monkeypatch, store, tmp_path / "home")
        found = read(store.s3 if stored else str(folder))
        asked = sum(store.requests.values())
    assert (found.problems, found.note) == ((), None)
    assert found.read_seconds is not None
    assert (asked > 0) is stored


@pytest.mark.parametrize(
    ("forbidden", "bucket", "message"),
    [(True, BUCKET, "refused with status 403"), (False, "corpse", "no such bucket")],
)
def test_refusal_of_a_store_is_reported(
    folder: Path, forbidden: bool, bucket: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single problem with the store's remedy is reported."""
    with served(folder, forbidden=forbidden) as store:
        set_environment(monkeypatch, store, tmp_path / "home")
        found = read(f"s3://{bucket}")
    assert found.read_seconds is None
    (problem,) = found.problems
    assert message in problem.seen
    assert "\n" not in problem.seen
    assert "JSON" not in problem.rule
    assert "prepare" not in problem.remedy


def test_a_folder_that_is_absent_or_not_made_yet(tmp_path: Path) -> None:
    absent = read(str(tmp_path / "nothing"))
    assert "manifest.json" in absent.problems[0].rule
    later = read(str(tmp_path / "nothing"), "stdlib")
    assert (later.problems, later.note) == ((), f"the first run makes {tmp_path / 'nothing'} when it starts")
    assert not (tmp_path / "nothing").exists()


def test_without_a_plan_no_samples_are_read(folder: Path) -> None:
    config = compose(["data=prepared", f"data.path={folder}", f"model.vocab_size={VOCABULARY}"])
    found = check_data_read(config, VOCABULARY, None)
    assert (found.problems, found.read_seconds, found.note) == (
        (),
        None,
        "without a plan no samples are read",
    )
