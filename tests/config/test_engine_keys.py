"""The schemas of the engines' keys against the engines, which only this module imports.

pytest tests/config/test_engine_keys.py
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from toolkit.config import engine_keys, engine_keys_megatron, keys
from toolkit.config.compose import compose
from toolkit.config.keys import flatten
from toolkit.config.vendors import generate, installed
from toolkit.config.vendors.key_schema import KeySchema
from toolkit.plan import deepspeed as plan_deepspeed
from toolkit.plan.batch import plan_batch
from toolkit.plan.types import Device, World

SCHEMA = installed.deepspeed_schema()
assert SCHEMA is not None

# Section of the configuration -> DeepSpeed's pydantic model of it, below the package deepspeed.
MODELS = {
    "zero_optimization": "runtime.zero.config.DeepSpeedZeroConfig",
    "zero_optimization.offload_optimizer": "runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig",
    "zero_optimization.offload_param": "runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.zenflow": "runtime.zenflow.zenflow_config.ZenFlowConfig",
    "zero_optimization.leaf_module": "runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig",
    "bf16": "runtime.precision_config.DeepSpeedBF16Config",
    "fp16": "runtime.precision_config.DeepSpeedFP16Config",
    "comms_logger": "comm.config.CommsLoggerConfig",
    "tensorboard": "monitor.config.TensorBoardConfig",
    "wandb": "monitor.config.WandbConfig",
    "csv_monitor": "monitor.config.CSVConfig",
    "comet": "monitor.config.CometConfig",
    "compile": "compile.config.CompileConfig",
    "hybrid_engine": "runtime.config.HybridEngineConfig",
    "timers.throughput": "utils.config.DeepSpeedThroughputTimerConfig",
    "tensor_parallel": "runtime.tensor_parallel.config.TPTrainingConfig",
    "tensor_parallel.tensor_parallel": "runtime.tensor_parallel.config.TPConfig",
    "weight_quantization": "inference.config.WeightQuantConfig",
}
SAMPLES = (True, 3, -2, 0.5, 5e8, "cpu", "text", [1], ["a"], {"a": 1}, None)


def key_at(path: str) -> KeySchema:
    key = SCHEMA
    assert key is not None
    for part in path.split("."):
        assert key.fields is not None, path
        key = key.fields[part]
    return key


@pytest.mark.parametrize(
    ("package", "read"),
    [
        pytest.param(installed.DEEPSPEED, generate.read_deepspeed, id="deepspeed"),
        pytest.param(installed.MEGATRON, generate.read_megatron, id="megatron", marks=pytest.mark.full),
    ],
)
def test_schema_files_equal_the_schemas_of_the_installed_packages(package: Any, read: Any) -> None:
    if package.installed_version != package.schema_version:
        pytest.skip(f"{package.distribution} {package.installed_version} has no schema file")
    assert generate.schema_text(read()) == package.schema_file.read_text(encoding="utf-8")


def test_another_version_uses_the_newest_schema_and_errors_name_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(installed, "FOLDER", tmp_path)
    for version, name in (("0.9.10", "old"), ("0.19.8", "stable"), ("0.20.0", "fast")):
        (tmp_path / f"deepspeed-{version}.json").write_text(json.dumps({"fields": {name: {}}}))
    monkeypatch.setattr(installed, "_version", lambda _: "0.19.8")
    assert not engine_keys.problems(compose(["+engine.deepspeed.stable=1"]))
    assert "0.19.8" not in engine_keys.problems(compose(["+engine.deepspeed.fastt=1"]))[0].remedy
    monkeypatch.setattr(installed, "_version", lambda _: "0.20.1")
    assert not engine_keys.problems(compose(["+engine.deepspeed.fast=1"]))
    (problem,) = engine_keys.problems(compose(["+engine.deepspeed.fastt=1"]))
    assert "write +engine.deepspeed.fast=1;" in problem.remedy
    assert "deepspeed 0.20.1 is installed, and keys are checked against 0.20.0" in problem.remedy


def test_keys_are_refused_if_the_engine_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    (problem,) = engine_keys.problems(compose(["+engine.deepspeed.dump_state=true"]))
    assert problem.remedy == "install it: pip install deepspeed"


def test_loading_a_schema_does_not_import_the_engine() -> None:
    code = (
        "import sys; from toolkit.config.vendors.installed import deepspeed_schema, megatron_schema; "
        "deepspeed_schema(), megatron_schema(); "
        "print([name for name in ('deepspeed', 'megatron', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_schema_accepts_no_more_than_pydantic() -> None:
    """Keys are the models' names and aliases, and pydantic accepts all values that the schema accepts."""
    from pydantic import TypeAdapter, ValidationError

    for path, dotted in MODELS.items():
        module, _, name = dotted.rpartition(".")
        model = getattr(importlib.import_module(f"deepspeed.{module}"), name)
        section = key_at(path)
        assert section.fields is not None
        removed = {key for key, inner in section.fields.items() if inner.removed}
        names = {key for field, info in model.model_fields.items() for key in (field, info.alias) if key}
        assert set(section.fields) - removed == names
        for field, info in model.model_fields.items():
            key = section.fields[field]
            assert (key.deprecated is not None) == bool((info.json_schema_extra or {}).get("deprecated"))
            if key.fields is not None:
                continue
            default = info.get_default(call_default_factory=True)
            if isinstance(default, bool | int | float | str | list):
                plain = (
                    int(default) if isinstance(default, int) and not isinstance(default, bool) else default
                )
                assert key.broken_rule(plain) is None, f"{path}.{field}: DeepSpeed's default {default!r}"
            if not (key.types or key.choices):
                continue
            adapter: TypeAdapter[Any] = TypeAdapter(_with_bounds(info))
            for sample in SAMPLES:
                if key.broken_rule(sample) is None:
                    try:
                        adapter.validate_python(sample)
                    except ValidationError as error:
                        raise AssertionError(f"{path}.{field}: DeepSpeed refuses {sample!r}") from error


def _with_bounds(info: Any) -> Any:
    from typing import Annotated

    return Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation


class RecordingDict(dict[str, Any]):
    """A configuration that records every key that is read from it."""

    def __init__(self, values: Mapping[str, Any], seen: set[str], prefix: str = "") -> None:
        super().__init__(
            {
                key: RecordingDict(value, seen, f"{prefix}{key}.") if isinstance(value, Mapping) else value
                for key, value in values.items()
            }
        )
        self.seen, self.prefix = seen, prefix

    def record(self, key: object) -> None:
        if isinstance(key, str):
            self.seen.add(self.prefix + key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.record(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.record(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.record(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def __copy__(self) -> RecordingDict:
        return self


def test_schema_has_exactly_the_keys_that_deepspeed_reads() -> None:
    """DeepSpeedConfig reads no key that the schema lacks, and reads every top-level key of the schema."""
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
    DeepSpeedConfig(RecordingDict({"train_batch_size": 1, **sections}, seen))
    assert len(seen) > 120, "keys are recorded"
    for path in seen:
        assert_in_schema(path)
    assert SCHEMA is not None
    assert SCHEMA.fields is not None
    top = {path for path in seen if "." not in path}
    # DeepSpeed reads these in branches that do not run here: with a process group, and for bf16's old name.
    assert set(SCHEMA.fields) - top <= {"bfloat16", "sequence_parallel_size"}


def assert_in_schema(path: str) -> None:
    key: KeySchema | None = SCHEMA
    for part in path.split("."):
        assert key is not None
        if key.open or key.fields is None:
            return
        assert part in key.fields, path
        key = key.fields[part]


def test_unknown_deepspeed_keys_are_refused() -> None:
    assert engine_keys.problems(compose(["+engine.deepspeed.no_such_key=1"]))
    assert not engine_keys.problems(
        compose(
            [
                "+engine.deepspeed.zero_optimization.overlap_comm=null",
                "+engine.deepspeed.zero_optimization.stage3_max_live_parameters=1e9",
                "+engine.deepspeed.zero_optimization.leaf_module.classes=[a.B]",
                "+engine.deepspeed.flops_profiler.enabled=true",
                "+engine.deepspeed.wall_clock_breakdown=true",
                "+engine.deepspeed.data_types.grad_accum_dtype=bf16",
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


@pytest.mark.parametrize("overrides", RUNS, ids=" ".join)
def test_keys_that_the_plan_overwrites_are_refused(overrides: list[str]) -> None:
    """No value that the user wrote is replaced silently."""
    for world in WORLDS:
        config = compose(overrides)
        derived = flatten(plan_deepspeed.build_settings(config, world, plan_batch(config, 2), [64]))
        for name, value in derived.items():
            written: Any = "mine"
            for part in reversed(name.split(".")):
                written = {part: written}
            config.engine.deepspeed = written
            kept = (
                flatten(plan_deepspeed.build_settings(config, world, plan_batch(config, 2), [64])).get(name)
                == "mine"
            )
            keys = {problem.key for problem in engine_keys.problems(config)}
            assert kept or any(f"engine.deepspeed.{name}".startswith(key) for key in keys), (
                f"{name}={value} is overwritten"
            )


def test_wrong_keys_are_left_out_of_the_plan() -> None:
    config = compose(
        ["+engine.deepspeed.zero_optimization.reduce_bucket_size=big", "+engine.deepspeed.dump_state=true"]
    )
    usable = engine_keys.drop_wrong_keys(config, engine_keys.problems(config))
    assert usable.engine.deepspeed == {"dump_state": True}
    assert config.engine.deepspeed["zero_optimization"] == {"reduce_bucket_size": "big"}


# -- Megatron-core


def test_megatron_sections_have_the_fields_of_the_dataclasses() -> None:
    """The schema has the names of each dataclass and accepts its defaults."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    sections = engine_keys_megatron.sections()
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
            mistyped = {"suggested_communication_unit_size"}  # an int whose default is None
            if isinstance(field.default, bool | int | float | str) or (
                field.default is None and field.name not in mistyped
            ):
                assert sections[name][field.name].broken_rule(field.default) is None, (
                    f"{field.name}: default {field.default!r}"
                )


def test_every_megatron_field_is_in_exactly_one_table() -> None:
    schema = engine_keys_megatron.flat_schema()
    assert schema is not None
    tables = (
        engine_keys_megatron.TUNABLE,
        engine_keys_megatron.GPU_ONLY,
        engine_keys_megatron.TRANSFORMER_ENGINE,
        engine_keys_megatron.RUN_KEYS,
        engine_keys_megatron.DERIVED,
    )
    listed = Counter(name for table in tables for name in table)
    assert set(schema.fields or {}) == set(listed), (
        "a field of Megatron-core is in no table, or a table has a field that no longer exists"
    )
    assert max(listed.values()) == 1
    known = set(keys.keys_by_name())
    assert set(engine_keys_megatron.RUN_KEYS.values()) <= known


def test_megatron_settings_go_to_the_dataclasses_that_have_them() -> None:
    config = compose(
        [
            "engine=megatron",
            "+engine.megatron.sequence_parallel=true",
            "+engine.megatron.bucket_size=1000",
            "+engine.megatron.overlap_param_gather=true",
        ]
    )
    assert not engine_keys.problems(config)
    assert engine_keys_megatron.megatron_keys(config) == (
        {"sequence_parallel": True},
        {"bucket_size": 1000, "overlap_param_gather": True},
        {"overlap_param_gather": True},
    )
    assert engine_keys_megatron.megatron_keys(compose([])) == ({}, {}, {})
