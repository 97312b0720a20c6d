"""One pool of ranks for all tests of engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.matrix_checks import References
from tests.engine.resuming import Saved
from toolkit.testing.dist import RankPool, rank_pool


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread for the reference, which runs in the test process next to waiting ranks."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(pool, tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="session")
def references(pool: RankPool) -> References:
    return References(pool)
