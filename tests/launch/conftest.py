"""Fixtures shared by the tests of commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.metadata_server import Metadata, serve_metadata
from tests.launch.tiny_runs import KEYS, prepare_data, read_losses
from toolkit.config.compose import compose
from toolkit.estimate.plan_report import to_json
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.rundir.directory import RunDirectory
from toolkit.train.run import run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_data(tmp_path_factory.mktemp("data") / "toolkit")


@pytest.fixture(scope="session")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of ``tiny_runs.KEYS``, in this process: local engine, one rank, the same samples."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    config = compose([*KEYS, f"data.path={data}", f"run.dir={folder}", "engine=local"])
    plan = make_plan(config, World(ranks=1, ranks_per_node=1, device=Device.CPU))
    run_directory = RunDirectory(folder)
    run(plan, rank=0, local_rank=0, stop=lambda: None, attempt=run_directory.begin(config, to_json(plan)))
    run_directory.release()
    losses = [loss for _, loss in read_losses(run_directory.metrics_file)]
    assert losses[0] - losses[-1] > 0.3, "otherwise a run that restarted or skipped a step could pass"
    return losses


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with serve_metadata() as server:
        yield server
