"""Which processes supervise ranks."""

from __future__ import annotations

import pytest

from toolkit.cluster.supervisor import needs_supervisor
from toolkit.cluster.world.environment import Launch, Launcher
from toolkit.config.cluster import ClusterConfig
from toolkit.plan.types import Device, World


@pytest.mark.parametrize(
    ("launcher", "ranks", "restarts", "answer"),
    [
        (Launcher.NONE, 2, 3, True),
        (Launcher.NONE, 2, 0, True),
        (Launcher.NONE, 1, 3, True),
        (Launcher.NONE, 1, 0, False),
        (Launcher.SUPERVISOR, 2, 3, False),
        (Launcher.SUPERVISOR, 1, 3, False),
        (Launcher.TORCHELASTIC, 2, 3, False),
        (Launcher.DEEPSPEED, 1, 3, False),
    ],
)
def test_only_plain_python_supervises_ranks(
    launcher: Launcher, ranks: int, restarts: int, answer: bool
) -> None:
    world = World(ranks=ranks, ranks_per_node=ranks, device=Device.CPU)
    assert needs_supervisor(Launch(launcher=launcher), world, ClusterConfig(restarts=restarts)) is answer
