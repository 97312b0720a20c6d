"""Tests that need a GPU. Without one they are deselected with one message instead of many skips."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from toolkit.cluster.world.machine_info import detect_machine
from toolkit.plan.types import Device
from toolkit.testing.dist import RankPool, rank_pool


@pytest.fixture(scope="session", autouse=True)
def a_gpu() -> None:
    machine = detect_machine()
    if not machine.gpus:
        pytest.exit("no GPU here: nothing was run", returncode=0)
    assert machine.torch_has_cuda, (
        f"here is a {machine.gpus[0].product}, and torch is built without CUDA: install a build with it"
    )


@pytest.fixture(scope="session")
def gpu() -> Iterator[RankPool]:
    """One rank on the first GPU."""
    with rank_pool(1, Device.CUDA) as pool:
        yield pool


@pytest.fixture(scope="session")
def cpu() -> Iterator[RankPool]:
    with rank_pool(1) as pool:
        yield pool
