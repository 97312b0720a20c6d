"""One pool of ranks for all of tests/engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from toolkit.testing.dist import RankPool, rank_pool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as ranks:
        yield ranks
