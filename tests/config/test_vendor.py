"""The engines' keys as read from their source against the engines themselves, which only this file imports.

pytest tests/config/test_vendor.py
"""

from __future__ import annotations

import importlib
import json
import os
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from toolkit.config import keys, vendor, vendor_megatron
from toolkit.config.compose import compose
from toolkit.config.keys import flatten
from toolkit.config.vendors import cache
from toolkit.config.vendors.key_schema import KeySchema
from toolkit.plan import deepspeed as plan_deepspeed
from toolkit.plan.batch import plan_batch
from toolkit.plan.types import Device, World

SCHEMA = cache.deepspeed_schema()
assert SCHEMA is not None

# Where in the configuration each of DeepSpeed's models stands.
MODELS = {
    "zero_optimization": "deepspeed.runtime.zero.config.DeepSpeedZeroConfig",
    "zero_optimization.offload_optimizer": "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig",
    "zero_optimization.offload_param": "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.zenflow": "deepspeed.runtime.zenflow.zenflow_config.ZenFlowConfig",
    "zero_optimization.leaf_module": "deepspeed.runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig",
    "bf16": "deepspeed.runtime.precision_config.DeepSpeedBF16Config",
    "fp16": "deepspeed.runtime.precision_config.DeepSpeedFP16Config",
    "comms_logger": "deepspeed.comm.config.CommsLoggerConfig",
    "tensorboard": "deepspeed.monitor.config.TensorBoardConfig",
    "wandb": "deepspeed.monitor.config.WandbConfig",
    "csv_monitor": "deepspeed.monitor.config.CSVConfig",
    "comet": "deepspeed.monitor.config.CometConfig",
    "compile": "deepspeed.compile.config.CompileConfig",
    "hybrid_engine": "deepspeed.runtime.config.HybridEngineConfig",
    "timers.throughput": "deepspeed.utils.config.DeepSpeedThroughputTimerConfig",
    "tensor_parallel": "deepspeed.runtime.tensor_parallel.config.TPTrainingConfig",
    "tensor_parallel.tensor_parallel": "deepspeed.runtime.tensor_parallel.config.TPConfig",
    "weight_quantization": "deepspeed.inference.config.WeightQuantConfig",
}
SAMPLES = (True, 3, -2, 0.5, 5e8, "cpu", "text", [1], ["a"], {"a": 1}, None)


def node_at(path: str) -> KeySchema:
    node = SCHEMA
    assert node is not None
    for part in path.split("."):
        assert node.fields is not None, path
        node = node.fields[part]
    return node


@pytest.mark.parametrize("path", MODELS)
def test_models_are_read_as_they_are(path: str) -> None:
    """The same names, with aliases; and what our types accept, pydantic accepts too."""
    from pydantic import TypeAdapter, ValidationError

    module, _, name = MODELS[path].rpartition(".")
    model = getattr(importlib.import_module(module), name)
    node = node_at(path)
    assert node.fields is not None
    removed = {key for key, inner in node.fields.items() if inner.removed}
    names = {key for field, info in model.model_fields.items() for key in (field, info.alias) if key}
    assert set(node.fields) - removed == names
    for field, info in model.model_fields.items():
        ours = node.fields[field]
        assert (ours.deprecated is not None) == bool((info.json_schema_extra or {}).get("deprecated"))
        if ours.fields is not None:
            continue
        default = info.get_default(call_default_factory=True)
        if isinstance(default, bool | int | float | str | list):
            plain = int(default) if isinstance(default, int) and not isinstance(default, bool) else default
            assert ours.wrong(plain) is None, f"{path}.{field}: DeepSpeed's own default {default!r}"
        if not (ours.types or ours.choices):
            continue
        adapter: TypeAdapter[Any] = TypeAdapter(_with_bounds(info))
        for sample in SAMPLES:
            if ours.wrong(sample) is None:
                try:
                    adapter.validate_python(sample)
                except ValidationError as error:
                    raise AssertionError(
                        f"{path}.{field} takes {sample!r} for us, not for DeepSpeed"
                    ) from error


def _with_bounds(info: Any) -> Any:
    from typing import Annotated

    return Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation


class Watched(dict[str, Any]):
    """A configuration that notes every key that is looked for in it."""

    def __init__(self, values: Mapping[str, Any], seen: set[str], prefix: str = "") -> None:
        super().__init__(
            {
                key: Watched(value, seen, f"{prefix}{key}.") if isinstance(value, Mapping) else value
                for key, value in values.items()
            }
        )
        self.seen, self.prefix = seen, prefix

    def note(self, key: object) -> None:
        if isinstance(key, str):
            self.seen.add(self.prefix + key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.note(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.note(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def __copy__(self) -> Watched:
        return self


def test_functions_look_for_the_keys_that_were_read_in_the_source() -> None:
    """DeepSpeed's own reading, watched: nothing that it looks for is missing from the schema, nothing at the top is invented."""
    from deepspeed.runtime.config import DeepSpeedConfig

    seen: set[str] = set()
    sections = {
        name: {}
        for name in (
            "activation_checkpointing",
            "flops_profiler",
            "aio",
            "data_types",
            "torch_autocast",
            "checkpoint",
            "timers",
            "data_efficiency",
            "autotuning",
            "expert_parallel",
            "hybrid_engine",
            "compile",
        )
    }
    sections["checkpoint"] = {"writer": {}, "parallel_write": {}}
    DeepSpeedConfig(Watched({"train_batch_size": 1, **sections}, seen))
    assert len(seen) > 120, "the watch works"
    for path in seen:
        assert_known(path)
    assert SCHEMA is not None
    assert SCHEMA.fields is not None
    top = {path for path in seen if "." not in path}
    # These stand in branches that this reading does not take: without a process group, and with bf16 under its new name.
    assert set(SCHEMA.fields) - top <= {"bfloat16", "sequence_parallel_size"}


def assert_known(path: str) -> None:
    node: KeySchema | None = SCHEMA
    for part in path.split("."):
        assert node is not None
        if node.open or node.fields is None:
            return
        assert part in node.fields, path
        node = node.fields[part]


def test_what_is_in_none_of_deepspeeds_keys_is_refused() -> None:
    assert vendor.problems(compose(["+engine.deepspeed.no_such_key=1"]))
    assert not vendor.problems(
        compose(
            [
                "+engine.deepspeed.zero_optimization.overlap_comm=null",
                "+engine.deepspeed.zero_optimization.stage3_max_live_parameters=1e9",
                "+engine.deepspeed.zero_optimization.leaf_module.classes=[a.B]",
                "+engine.deepspeed.flops_profiler.enabled=true",
                "+engine.deepspeed.activation_checkpointing.cpu_checkpointing=true",
                "+engine.deepspeed.wall_clock_breakdown=true",
                "+engine.deepspeed.data_types.grad_accum_dtype=bf16",
                "+engine.deepspeed.compile.passes=[z3]",
                "+engine.deepspeed.aio.queue_depth=32",
                "+engine.deepspeed.zero_optimization.offload_optimizer.buffer_count=5",
            ]
        )
    )


WORLDS = (
    World(ranks=2, ranks_per_node=2, device=Device.CPU),
    World(
        ranks=2,
        ranks_per_node=2,
        device=Device.CUDA,
        gpu="h100",
        device_memory_bytes=80 * 2**30,
        has_compiler=True,
    ),
)
RUNS = (
    ["zero=stage0"],
    ["zero=stage2", "precision=fp16", "optim=sgd"],
    ["zero=stage3", "precision=bf16", "offload=cpu"],
    ["zero=stage3", "optim=muon", "model.family=llama"],
    ["zero=stage3", "offload=nvme", "offload.nvme_path=/disk"],
    ["zero=stage1", "parallel.tensor=2"],
    ["zero=stage1", "parallel.context=2"],
)


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_a_key_that_the_plan_derives_is_refused(words: list[str]) -> None:
    """Whatever the plan would write over is refused, so nothing that somebody wrote is changed silently."""
    for world in WORLDS:
        config = compose(words)
        derived = flatten(plan_deepspeed.settings(config, world, plan_batch(config, 2), [64]))
        for name, value in derived.items():
            written: Any = "mine"
            for part in reversed(name.split(".")):
                written = {part: written}
            config.engine.deepspeed = written
            kept = (
                flatten(plan_deepspeed.settings(config, world, plan_batch(config, 2), [64])).get(name)
                == "mine"
            )
            keys = {problem.key for problem in vendor.problems(config)}
            assert kept or any(f"engine.deepspeed.{name}".startswith(key) for key in keys), (
                f"{name}={value} is written over"
            )


def test_a_wrong_key_is_left_out_of_what_is_planned() -> None:
    config = compose(
        ["+engine.deepspeed.zero_optimization.reduce_bucket_size=big", "+engine.deepspeed.dump_state=true"]
    )
    assert vendor.usable(config).engine.deepspeed == {"dump_state": True}
    assert config.engine.deepspeed["zero_optimization"] == {"reduce_bucket_size": "big"}


# -- Megatron-core


def test_megatrons_fields_are_read_as_they_are() -> None:
    """The names of each dataclass; and what its own defaults are, our types accept."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    sections = vendor_megatron.sections()
    assert sections is not None
    classes = {
        "transformer": TransformerConfig,
        "ddp": DistributedDataParallelConfig,
        "optimizer": OptimizerConfig,
    }
    assert list(sections) == list(classes)
    for name, kind in classes.items():
        assert set(sections[name]) == {field.name for field in fields(kind)}
        for field in fields(kind):
            untold = {"suggested_communication_unit_size"}  # an int whose default is None
            if isinstance(field.default, bool | int | float | str) or (
                field.default is None and field.name not in untold
            ):
                assert sections[name][field.name].wrong(field.default) is None, (
                    f"{field.name}: its own default {field.default!r}"
                )


def test_every_field_has_its_answer_and_only_one() -> None:
    schema = vendor_megatron.flat_schema()
    assert schema is not None
    tables = (
        vendor_megatron.TUNABLE,
        vendor_megatron.GPU_ONLY,
        vendor_megatron.TRANSFORMER_ENGINE,
        vendor_megatron.OWN,
        vendor_megatron.DERIVED,
    )
    listed = Counter(name for table in tables for name in table)
    assert set(schema.fields or {}) == set(listed), (
        "a field of Megatron-core that nobody has decided about, or one that is gone"
    )
    assert max(listed.values()) == 1
    known = set(keys.table())
    assert set(vendor_megatron.OWN.values()) <= known


def test_settings_go_to_the_dataclasses_that_have_them() -> None:
    config = compose(
        [
            "engine=megatron",
            "+engine.megatron.sequence_parallel=true",
            "+engine.megatron.bucket_size=1000",
            "+engine.megatron.overlap_param_gather=true",
        ]
    )
    assert not vendor.problems(config)
    assert vendor_megatron.megatron_keys(config) == (
        {"sequence_parallel": True},
        {"bucket_size": 1000, "overlap_param_gather": True},
        {"overlap_param_gather": True},
    )
    assert vendor_megatron.megatron_keys(compose([])) == ({}, {}, {})


# -- the cache

CODE = """
import time; began = time.perf_counter()
from toolkit.config.vendors.installed import deepspeed_schema
import json, sys
print(len(json.dumps(deepspeed_schema().to_json())), "deepspeed" in sys.modules)
"""


def read_with(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},
    )
    return done.stdout


def test_the_cache_changes_nothing(tmp_path: Path) -> None:
    first = read_with(tmp_path)
    assert first.split()[1] == "False", "DeepSpeed is not imported"
    (file,) = (tmp_path / "deepspeed-megatron-toolkit").iterdir()
    assert file.name.startswith("deepspeed-0.19.")
    whole = file.read_text()
    assert KeySchema.from_json(json.loads(whole)) == SCHEMA
    assert read_with(tmp_path) == first
    for torn in (whole[:1000], "", "[]", "{}", '{"fields": {"a": 3}}'):
        file.write_text(torn)
        assert cache._load(file) is None, torn
    assert read_with(tmp_path) == first
    assert file.read_text() == whole, "mended"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")  # a file where the folder should be: nobody, root neither, can make it
    expected = read_with(tmp_path / "other")
    assert read_with(blocked) == expected
    assert stat.S_ISREG(blocked.stat().st_mode)
