"""One pool of ranks for all tests of engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from toolkit.testing.dist import RankPool, rank_pool


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread for the oracle, which runs in the test process next to waiting ranks."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as ranks:
        yield ranks
