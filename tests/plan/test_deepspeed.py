"""The dictionary for DeepSpeed.

pytest tests/plan/test_deepspeed.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.cases import CPU, h100s, run_config
from toolkit.config.optim import OptimizerKernel
from toolkit.config.schema import OffloadDevice, Precision
from toolkit.plan import make_plan
from toolkit.plan.deepspeed import merge, optimizer_kernel
from toolkit.plan.types import World


def settings(world: World = CPU, **changes: Any) -> dict[str, Any]:
    found = make_plan(run_config(**changes), world).deepspeed
    assert found is not None
    return dict(found)


def test_complete_settings_of_a_small_run() -> None:
    assert settings(zero__stage=2) == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 2147483647,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 3e-4,
                "betas": [0.9, 0.95],
                "eps": 1e-8,
                "weight_decay": 0.1,
                "torch_adam": True,
            },
        },
        "zero_optimization": {
            "stage": 2,
            "round_robin_gradients": False,
            "reduce_bucket_size": 48288,
            "allgather_bucket_size": 48288,
        },
        "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "timers": {"throughput": {"enabled": False}},
    }


def test_disabled_clipping_is_written() -> None:
    assert settings(optim__clip=0.0)["gradient_clipping"] == 0.0


def test_fp16_loss_scaling_follows_the_run() -> None:
    fp16 = settings(
        world=h100s(2),
        precision__name=Precision.fp16,
        precision__initial_scale_power=8,
        precision__scale_window=50,
        zero__stage=1,
    )["fp16"]
    assert fp16 == {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 8,
        "loss_scale_window": 50,
        "hysteresis": 1,
        "min_loss_scale": 1,
    }


@pytest.mark.parametrize(
    ("stage", "place", "expected"),
    [
        (1, OffloadDevice.none, None),
        (2, OffloadDevice.none, {"grad_accum_dtype": "fp32"}),
        (2, OffloadDevice.cpu, None),
        (3, OffloadDevice.cpu, {"grad_accum_dtype": "fp32"}),
    ],
)
def test_bf16_gradients_accumulate_in_fp32_if_they_are_partitioned(
    stage: int, place: OffloadDevice, expected: object
) -> None:
    found = settings(precision__name=Precision.bf16, zero__stage=stage, offload__optimizer=place)
    assert found["bf16"] == {"enabled": True}
    assert found.get("data_types") == expected


def test_nvme_offload_settings() -> None:
    zero = settings(
        zero__stage=3,
        offload__optimizer=OffloadDevice.nvme,
        offload__parameters=OffloadDevice.nvme,
        offload__nvme_path="/disk",
    )["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "nvme", "pin_memory": False, "nvme_path": "/disk"}
    assert zero["offload_param"] == {
        "device": "nvme",
        "pin_memory": False,
        "nvme_path": "/disk",
        "buffer_size": 100_000_000,
    }


def test_optimizer_settings() -> None:
    sgd = settings(optim__name="sgd", optim__momentum=0.9)
    assert sgd["optimizer"] == {"type": "SGD", "params": {"lr": 3e-4, "momentum": 0.9, "weight_decay": 0.1}}
    assert sgd["zero_allow_untested_optimizer"]
    muon = settings(optim__name="muon", optim__momentum=0.95, optim__clip=0.0, zero__stage=3)
    assert muon["optimizer"]["type"] == "Muon"
    assert muon["optimizer"]["params"]["momentum"] == 0.95
    assert muon["zero_optimization"]["reduce_scatter"] is False


@pytest.mark.parametrize(
    ("world", "place", "expected"),
    [
        (CPU, OffloadDevice.none, OptimizerKernel.torch),
        (CPU, OffloadDevice.cpu, OptimizerKernel.torch),
        (h100s(2), OffloadDevice.none, OptimizerKernel.fused),
        (h100s(2), OffloadDevice.cpu, OptimizerKernel.cpu),
        (replace(h100s(2), has_compiler=False), OffloadDevice.cpu, OptimizerKernel.torch),
    ],
)
def test_adamw_kernel_depends_on_device_and_offload(
    world: World, place: OffloadDevice, expected: OptimizerKernel
) -> None:
    assert optimizer_kernel(run_config(offload__optimizer=place), world) is expected
    assert (
        optimizer_kernel(run_config(offload__optimizer=place, optim__kernel=OptimizerKernel.torch), world)
        is OptimizerKernel.torch
    )


def test_kernel_settings() -> None:
    fused = settings(world=h100s(2), zero__stage=2)["optimizer"]["params"]
    assert fused["fused"]
    assert fused["torch_adam"]
    assert (
        "torch_adam"
        not in settings(world=h100s(2), zero__stage=2, offload__optimizer=OffloadDevice.cpu)["optimizer"][
            "params"
        ]
    )


def test_user_keys_override_defaults_but_not_derived_keys() -> None:
    own = {
        "zero_optimization": {"reduce_bucket_size": 1000, "overlap_comm": True},
        "wall_clock_breakdown": True,
    }
    found = settings(zero__stage=2, engine__deepspeed=own)
    assert found["zero_optimization"]["reduce_bucket_size"] == 1000
    assert found["zero_optimization"]["allgather_bucket_size"] == 48288
    assert found["zero_optimization"]["overlap_comm"]
    assert found["zero_optimization"]["stage"] == 2
    assert found["wall_clock_breakdown"]
    assert own == {
        "zero_optimization": {"reduce_bucket_size": 1000, "overlap_comm": True},
        "wall_clock_breakdown": True,
    }


def test_merge_is_recursive() -> None:
    assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 4}, "e": {"f": 5}}) == {
        "a": {"b": 4, "c": 2},
        "d": 3,
        "e": {"f": 5},
    }
