"""Fixtures shared by the tests of commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.metadata_server import Metadata, serve_metadata
from tests.launch.tiny_runs import prepare_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_data(tmp_path_factory.mktemp("data") / "toolkit")


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with serve_metadata() as server:
        yield server
