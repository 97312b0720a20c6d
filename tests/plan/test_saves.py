"""The plan decides whether saves are written in the background, and how much host memory they copy to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from tests.plan.cases import run_config
from toolkit.config.checkpoint import CheckpointConfig
from toolkit.config.schema import Precision
from toolkit.errors import PlanError
from toolkit.estimate.plan_report import format_plan
from toolkit.plan import make_plan
from toolkit.plan.checkpoint_size import checkpoint_bytes
from toolkit.plan.types import Device, RunPlan, World

GPU = World(ranks=2, ranks_per_node=2, device=Device.CUDA, gpu="h100", has_compiler=True)


def planned(world: World = GPU, **checkpoint: Any) -> RunPlan:
    config = run_config(
        checkpoint=CheckpointConfig(**checkpoint), zero__stage=1, precision__name=Precision.bf16
    )
    return make_plan(config, world)


def test_saves_are_in_the_background_on_gpus_only() -> None:
    plan = planned()
    size = checkpoint_bytes(plan)
    assert size is not None
    assert plan.saves.background
    assert plan.saves.copy_bytes == -(-size // 2)
    on_cpu = planned(replace(GPU, device=Device.CPU, gpu=None)).saves
    assert (on_cpu.background, on_cpu.copy_bytes) == (False, 0)
    assert planned(replace(GPU, device=Device.CPU, gpu=None), background=True).saves.background
    assert not planned(background=False).saves.background


def test_saves_stay_in_the_foreground_without_room_for_a_copy() -> None:
    size = planned().saves.copy_bytes
    assert planned(replace(GPU, host_memory_bytes=4 * size)).saves.background
    tight = planned(replace(GPU, host_memory_bytes=4 * size - 1)).saves
    assert not tight.background
    assert "50%" in tight.reason
    small = planned(staging_gib=(size - 1) / 2**30).saves
    assert not small.background
    assert "staging_gib" in small.reason


def test_a_demanded_background_save_that_does_not_fit_is_refused() -> None:
    size = planned().saves.copy_bytes
    with pytest.raises(PlanError, match="copies the"):
        planned(background=True, staging_gib=(size - 1) / 2**30)


def test_snapshots_in_memory_take_the_copy_and_two_snapshots_and_twice_those_on_several_nodes() -> None:
    size = planned().saves.copy_bytes
    assert planned().saves.snapshot_bytes == 0
    assert planned(memory_every=10).saves.snapshot_bytes == 3 * size
    nodes = replace(GPU, ranks_per_node=1)
    assert planned(nodes, memory_every=10).saves.snapshot_bytes == 5 * size
    local_disk = planned(nodes, memory_every=10, memory_folder="/nvme")
    assert local_disk.saves.snapshot_bytes == size, "only the copy that is being written"
    assert planned(replace(GPU, host_memory_bytes=16 * size), memory_every=10).saves.background
    assert not planned(replace(GPU, host_memory_bytes=16 * size - 1), memory_every=10).saves.background


def test_host_memory_of_snapshots_is_a_line_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    for every, shown in ((10, True), (0, False)):
        Console().print(format_plan(planned(memory_every=every)))
        assert ("host memory: snapshots" in capsys.readouterr().out) is shown
