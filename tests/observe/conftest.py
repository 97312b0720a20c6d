"""Fixtures shared by the tests of observers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from toolkit.testing.dist import RankPool, rank_pool


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    """Four ranks for the whole folder, which import the engines once."""
    with rank_pool(4) as ranks:
        ranks.run(do_nothing)  # so that no test times the start of the ranks
        yield ranks


def do_nothing(rank: int, ranks: int) -> None:
    pass
