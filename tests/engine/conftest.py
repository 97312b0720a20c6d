"""One pool of ranks for all of tests/engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    ranks = Pool(4)
    yield ranks
    ranks.close()
