"""One pool of ranks for all of tests/engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from toolkit.testing.dist import RankPool, rank_pool


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The oracle runs in the tests' own process, beside ranks that wait: more threads than cores only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as ranks:
        yield ranks
