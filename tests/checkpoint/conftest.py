"""Fixtures shared by the checkpoint tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING

import pytest

from toolkit.testing.dist import RankPool, rank_pool

if TYPE_CHECKING:
    from tests.checkpoint.megatron_cells import Saves


@pytest.fixture(scope="session")
def forks() -> ForkServerContext:
    """A fork server that imports torch once and runs no threads. A test process has one server, which
    preloads every module needed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.checkpoint.writer", "tests.checkpoint.converter", "tests.checkpoint.uploads"]
    )
    return context


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks for tests that need engines."""
    with rank_pool(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def megatron_saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """Megatron-core's checkpoints of each layout, shared by all test modules."""
    from tests.checkpoint.megatron_cells import Saves

    return Saves(pool, tmp_path_factory.mktemp("megatron"))
