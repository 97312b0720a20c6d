"""launch/reshard.py as a command."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from launch import reshard
from tests.checkpoint.tiny_run import STEP, tiny_checkpoint, tiny_shape
from tests.damage import flip_byte
from toolkit import families
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.model_discovery import find_model, unknown_model_error
from toolkit.checkpoint.offline import convert
from toolkit.checkpoint.offline.reshard import WRITERS
from toolkit.checkpoint.offline.unit_writer import ConversionUnit, UnitWriter
from toolkit.checkpoint.shard import EXP_AVG_SQ, MASTER, WEIGHT
from toolkit.checkpoint.source import open_source
from toolkit.checkpoint.verify import compute_digest
from toolkit.errors import CheckpointError, ExitCode

ROOT = Path(__file__).resolve().parents[2]
Captured = pytest.CaptureFixture[str]


def run(*words: object) -> int:
    return reshard.main([str(word) for word in words])


def run_reshard(capsys: Captured, *words: object, code: int = 0) -> str:
    """Run the command and return its output: stdout on success, stderr on an error."""
    assert run(*words) == code, capsys.readouterr()
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return captured.err if code == 2 else captured.out


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a bf16 run, in its run folder."""
    return tiny_checkpoint(tmp_path_factory.mktemp("run") / "checkpoints", mixed=True)


def files_below(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_convert_prints_a_summary(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    out = run_reshard(
        capsys, f"source={checkpoint.parent.parent}", f"target={tmp_path}/out", "target.precision=fp32"
    )
    assert f"source     native: {checkpoint}" in out
    assert f"target     native: {tmp_path}/out" in out
    assert f"step       {STEP}" in out
    assert "not used   weight (all 21)" in out
    reader = open_reader(tmp_path / "out")
    assert {key.state for key in reader.tensors} == {WEIGHT, "exp_avg", EXP_AVG_SQ}
    before = open_reader(checkpoint)
    masters = {
        key.name: hashed for key, hashed in compute_digest(before).tensors.items() if key.state == MASTER
    }
    assert masters == {
        key.name: hashed for key, hashed in compute_digest(reader).tensors.items() if key.state == WEIGHT
    }
    assert reader.scalars == before.scalars
    err = run_reshard(capsys, f"source={checkpoint}", f"target={tmp_path}/out", code=2)
    assert "already exists" in err


def test_round_trip_is_identical(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    run_reshard(capsys, f"source={checkpoint}", f"target={tmp_path}/out")
    assert compute_digest(open_reader(tmp_path / "out")) == compute_digest(open_reader(checkpoint))
    run_reshard(capsys, f"source={checkpoint}", f"target={tmp_path}/weights", "target.optimizer=false")
    assert {key.state for key in open_reader(tmp_path / "weights").tensors} == {WEIGHT}
    err = run_reshard(
        capsys, f"source={tmp_path}/weights", f"target={tmp_path}/more", "target.optimizer=true", code=2
    )
    assert "has no optimizer state" in err


def test_inspect_describes_without_changes(checkpoint: Path, capsys: Captured) -> None:
    before = files_below(checkpoint.parent)
    out = run_reshard(capsys, f"source={checkpoint}", "action=inspect")
    assert files_below(checkpoint.parent) == before
    parameters = sum(spec.numel for spec in families.get_family("llama").parameters(tiny_shape()))
    for line in (
        "format     native",
        "names      llama/1",
        "model      llama: hidden_size=64",
        f"parameters {parameters:,} in 21 tensors: the whole model",
        f"step       {STEP}",
        "scalar     consumed_samples=24",
    ):
        assert line in out, out
    rows = [line.split() for line in out.splitlines()]
    assert [
        "model.layers.*.self_attn.k_proj.weight",
        "2",
        "[32,",
        "64]",
        "weight",
        "master",
        "exp_avg",
        "exp_avg_sq",
    ] in rows
    assert any(row[:2] == ["exp_avg_sq", "21"] and row[-1] == "float32" for row in rows)
    assert any(row[:2] == ["weight", "21"] and row[-1] == "bfloat16" for row in rows)


def test_plan_estimates_without_changes(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    before = files_below(checkpoint.parent)
    words = (f"source={checkpoint}", f"target={tmp_path}/out", "action=plan")
    out = run_reshard(capsys, *words)
    assert "measured by copying" in out
    assert "proven     every element" in out
    assert "at 2 GB/s, as stated" in run_reshard(capsys, *words, "rate=2")
    assert "unknown: set target=PATH" in run_reshard(capsys, words[0], words[2])
    assert files_below(checkpoint.parent) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "shows"),
    [
        (("source=/no/such", "action=inspect"), "/no/such does not exist"),
        (("source={empty}", "action=inspect"), "contains no checkpoint"),
        (
            ("source={checkpoint}", "target={empty}/x", "target.zero=stage3"),
            "native takes target.precision, target.optimizer",
        ),
        (("source={checkpoint}", "target={empty}/x", "model.hidden_size=64"), "add model=FAMILY"),
        (
            ("source={checkpoint}", "target={empty}/x", "model=llama", "model.num_attention_heads=5"),
            "divisible by model.num_attention_heads",
        ),
    ],
)
def test_reshard_mistakes_leave_nothing(
    checkpoint: Path, tmp_path: Path, capsys: Captured, typed: tuple[str, ...], shows: str
) -> None:
    err = run_reshard(capsys, *(word.format(checkpoint=checkpoint, empty=tmp_path) for word in typed), code=2)
    assert shows in err
    assert "rule:" in err
    assert "remedy:" in err
    assert list(tmp_path.iterdir()) == []


def test_insufficient_space_is_detected_first(
    checkpoint: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: full)
        err = run_reshard(capsys, f"source={checkpoint}", f"target={tmp_path}/new/out", code=2)
    assert f"{tmp_path} has 1 kB free" in err
    assert not list(tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    asked: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda which: (64, limits[1]))
        patch.setattr(resource, "setrlimit", lambda which, to: asked.append(to))
        run_reshard(capsys, f"source={checkpoint}", f"target={tmp_path}/out")
    [(soft, hard)] = asked
    assert 64 < soft < 100
    assert hard == limits[1]
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda which: (64, 64))
        err = run_reshard(capsys, f"source={checkpoint}", f"target={tmp_path}/another", code=2)
    assert f"ulimit -n {soft}" in err


def test_damaged_source_is_named(tmp_path: Path, capsys: Captured) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoints")
    file = checkpoint / "part-00000.safetensors"
    flip_byte(file, -100)
    err = run_reshard(capsys, f"source={checkpoint}", f"target={tmp_path}/out", code=2)
    assert str(file) in err
    assert not (tmp_path / "out").exists()


def test_source_of_the_model_configuration(tmp_path: Path) -> None:
    """The run around the checkpoint is used first, then config.json; without either, the error explains what
    to set.
    """
    checkpoint = tiny_checkpoint(tmp_path / "run" / "checkpoints", "qwen3", with_model=False)
    assert open_source(checkpoint).shape is None
    shape = tiny_shape("qwen3")
    assert open_source(checkpoint, shape).shape == shape
    (tmp_path / "run" / "config.json").write_text(
        json.dumps(families.get_family("qwen3").hugging_face_config(shape))
    )
    found = open_source(checkpoint).shape
    assert found is not None
    assert found.head_dim == shape.head_dim
    (tmp_path / "run" / "attempts").mkdir()
    (tmp_path / "run" / "plan.json").write_text(
        json.dumps({"model": {**asdict(tiny_shape()), "of a later version": 1}})
    )
    assert find_model(checkpoint) == tiny_shape(), "the run's plan comes first"
    assert "model=pretrained model.pretrained=FOLDER" in str(unknown_model_error(checkpoint))


def test_resumed_folder_is_found_again(checkpoint: Path, tmp_path: Path) -> None:
    """``latest`` names what resume=PATH resolved to, in any format; if it is gone, training does not restart
    silently.
    """
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "latest").write_text(f"{checkpoint}\n")
    assert open_source(tmp_path).folder == checkpoint
    (checkpoints / "latest").write_text(f"{tmp_path}/gone\n")
    with pytest.raises(CheckpointError, match=r"gone.*which does not exist"):
        open_source(tmp_path)


def test_newest_checkpoint_of_a_reused_target_is_read(
    checkpoint: Path, tmp_path: Path, capsys: Captured
) -> None:
    """Vendors' programs continue in the folder that they resumed from. Our manifest covers only what we
    wrote.
    """
    words = ("target.format=deepspeed", "target.zero=stage2", "target.parallel.data=2")
    run_reshard(capsys, f"source={checkpoint}", f"target={tmp_path}/out", *words)
    found = open_source(tmp_path / "out")
    assert (found.folder, found.step) == (tmp_path / "out", STEP)
    assert any(piece.hashes for of_key in found.catalog.pieces.values() for piece in of_key)
    shutil.copytree(tmp_path / "out" / f"global_step{STEP}", tmp_path / "out" / "global_step5")
    (tmp_path / "out" / "latest").write_text("global_step5")
    assert open_source(tmp_path / "out", tiny_shape()).folder == tmp_path / "out" / "global_step5"
    out = run_reshard(
        capsys,
        f"source={tmp_path}/out",
        f"target={checkpoint}",
        "action=diff",
        "model=llama",
        *(
            f"model.{name}={getattr(tiny_shape(), name)}"
            for name in ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")
        ),
    )
    assert "equal: " in out.splitlines()[-1]


TARGETS = {
    "native": ("target.format=native",),
    "deepspeed, ZeRO 0": ("target.format=deepspeed", "target.zero=stage0"),
    "deepspeed, ZeRO 1, tensor ranks": (
        "target.format=deepspeed",
        "target.zero=stage1",
        "target.parallel.tensor=2",
    ),
    "deepspeed, ZeRO 1, stages": (
        "target.format=deepspeed",
        "target.parallel.data=2",
        "target.parallel.pipeline=2",
    ),
    "deepspeed, ZeRO 3": ("target.format=deepspeed", "target.zero=stage3", "target.parallel.data=2"),
    "universal": ("target.format=universal",),
    "megatron": ("target.format=megatron",),
    "megatron in 2 x 2": ("target.format=megatron", "target.parallel.tensor=2", "target.parallel.pipeline=2"),
    "huggingface": ("target.format=huggingface", "target.optimizer=true"),
}


ONE_EACH = {options[0]: name for name, options in TARGETS.items()}.values()  # the last of each format


@pytest.mark.parametrize(
    "target", [name if name in ONE_EACH else pytest.param(name, marks=pytest.mark.full) for name in TARGETS]
)
def test_every_target_format_round_trips(target: str, tmp_path: Path, capsys: Captured) -> None:
    assert {words[0].removeprefix("target.format=") for words in TARGETS.values()} == {
        "native",
        *(item.name for item in WRITERS),
    }
    checkpoint = tiny_checkpoint(tmp_path / "checkpoints")
    run_reshard(capsys, f"source={checkpoint}", f"target={tmp_path}/out", *TARGETS[target])
    assert "is intact" in run_reshard(capsys, f"source={tmp_path}/out", "action=verify")
    run_reshard(capsys, f"source={tmp_path}/out", f"target={tmp_path}/back", "target.format=native")
    assert "is intact" in run_reshard(capsys, f"source={tmp_path}/back", "action=verify")
    assert compute_digest(open_reader(tmp_path / "back")) == compute_digest(open_reader(checkpoint))


def test_verify_and_diff_exit_with_1_on_a_difference(tmp_path: Path, capsys: Captured) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoints")
    run_reshard(capsys, f"source={checkpoint}", f"target={tmp_path}/out")
    assert "is intact" in run_reshard(capsys, f"source={tmp_path}/out", "action=verify")
    assert "equal: 63 of 63" in run_reshard(
        capsys, f"source={tmp_path}/out", f"target={checkpoint}", "action=diff"
    )
    file = tmp_path / "out" / "part-00000.safetensors"
    flip_byte(file, -3)
    assert "differs from what was written" in run_reshard(
        capsys, f"source={tmp_path}/out", "action=verify", code=1
    )
    assert "not equal: 62 of 63" in run_reshard(
        capsys, f"source={tmp_path}/out", f"target={checkpoint}", "action=diff", code=1
    )


def test_interrupted_conversion_resumes(
    checkpoint: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (f"source={checkpoint}", f"target={tmp_path}/out", "workers=1")
    write, started = UnitWriter.write, []

    def interrupted(self: UnitWriter, unit: ConversionUnit, *arguments: Any) -> Any:
        started.append(unit)
        if len(started) == 30:
            raise KeyboardInterrupt
        return write(self, unit, *arguments)

    with monkeypatch.context() as context:
        context.setattr(convert, "SYNC_BYTES", 2**16)
        context.setattr(UnitWriter, "write", interrupted)
        assert run(*words) == ExitCode.STOPPED
    assert "run the same command to resume" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert "resumed    " in run_reshard(capsys, *words)
    assert compute_digest(open_reader(tmp_path / "out")) == compute_digest(open_reader(checkpoint))


def test_reshard_is_fast_and_imports_no_torch(checkpoint: Path, tmp_path: Path) -> None:
    """It works without an installed engine. Measured: 0.6 s for this size, of which 0.3 s are imports."""
    words = [f"source={checkpoint}", f"target={tmp_path}/out"]
    code = (
        f"import sys, time; from launch import reshard; assert reshard.main({words!r}) == 0\n"
        "assert reshard.main(['source=x', 'actoin=plan']) == 2 and reshard.main(['--help']) == 0\n"
        "heavy = ('torch', 'deepspeed', 'megatron', 'transformers')\n"
        "print([name for name in heavy if name in sys.modules], time.process_time())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    modules, seconds = done.stdout.splitlines()[-1].rsplit(" ", 1)
    assert modules == "[]"
    assert float(seconds) < 3
    assert "write action=plan" in done.stderr
    assert "target.format=megatron target.parallel.tensor=4" in done.stdout
