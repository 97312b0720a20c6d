"""The attempt spec survives both transports unchanged."""

from __future__ import annotations

import json
from pathlib import Path

from toolkit.cluster.attempt.attempt_spec import AttemptSpec
from toolkit.plan.types import Device, World
from toolkit.restart_phases import RestartPhase, RestartPhases

START = AttemptSpec(
    yaml="run:\n  name: 'ü: \"quoted\"'\n",
    attempt=7,
    data="data/stdlib/0123456789ab",
    memory="/dev/shm/dmt-0-0123456789ab-abcdefgh",
    restart=RestartPhases(100.0, ranks=8, standbys=7).ended(RestartPhase.DETECT, 100.5),
    world=World(
        ranks=16, ranks_per_node=8, device=Device.CUDA, gpu="h100", device_memory_bytes=1, has_libaio=True
    ),
)


def test_spec_survives_the_store() -> None:
    again = AttemptSpec.from_json(json.loads(json.dumps(START.to_json())))
    assert again == START
    assert again.world.device is Device.CUDA


def test_spec_survives_a_file(tmp_path: Path) -> None:
    START.write(tmp_path / "handover.json")
    assert AttemptSpec.read(tmp_path / "handover.json") == START
