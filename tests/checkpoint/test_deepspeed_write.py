"""DeepSpeed loads written checkpoints bitwise, and continues training as if uninterrupted.

    pytest tests/checkpoint/test_deepspeed_write.py
    pytest tests/checkpoint/test_deepspeed_write.py -m full     every stage, axis, family and precision

Settings of the parity tests (lr 1e-3, eps 1e-4). The control is a checkpoint without moments, which must
exceed the tolerance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.deepspeed_ranks import MORE, STOP, Layout, LoadOutcome, continue_with_vendor, train
from tests.checkpoint.layouts import same_bits, whole
from toolkit.checkpoint import manifest
from toolkit.checkpoint.formats.universal import target as universal_target
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.scalars import CONSUMED, OPTIM, OPTIMIZER_STEP, STEP
from toolkit.checkpoint.shard import MASTER, WEIGHT, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.target import CheckpointTarget
from toolkit.config.reshard import TargetConfig
from toolkit.config.schema import Precision
from toolkit.engine.protocol import StepResult
from toolkit.errors import CheckpointError
from toolkit.families import FAMILIES
from toolkit.testing.dist import RankPool
from toolkit.testing.tiny import GLOBAL_BATCH, tiny_plan

TOLERANCE = 1e-5  # of losses and gradient norms
# Nothing is a multiple of four, and some parameters are smaller than four ranks.
ODD: Mapping[str, Any] = {
    "model__hidden_size": 6,
    "model__num_attention_heads": 3,
    "model__num_key_value_heads": 3,
    "model__head_dim": 2,
    "model__intermediate_size": 7,
    "model__vocab_size": 263,
}
BF16: Mapping[str, Any] = {"precision__name": Precision.bf16}


def convert(source: CheckpointSource, target: CheckpointTarget, path: Path) -> Path:
    assert not Conversion(source, target, path).run()
    (path / manifest.FOREIGN_NAME).unlink()  # only DeepSpeed's files describe the content
    return path


@dataclass(frozen=True)
class Trained:
    source: CheckpointSource
    tensors: dict[TensorKey, torch.Tensor]
    went_on: list[StepResult]


class Runs:
    """Tiny training runs, created on demand."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self.get = cache(self._make)

    def _make(
        self, family: str, layout: Layout | None = None, more: tuple[tuple[str, Any], ...] = ()
    ) -> Trained:
        """Train on ``layout``; None: the local engine."""
        plan = tiny_plan(family, **dict(more)) if layout is None else layout.plan(family, **dict(more))
        folder = self._folder / f"{family}-{layout}-{len(more)}"
        results = self._pool.run(train, plan, folder, ranks=plan.axes.size)[0]
        source = open_source(folder)
        return Trained(source, whole(source.reader()), results)


@pytest.fixture(scope="module")
def runs(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(pool, tmp_path_factory.mktemp("trained"))


def furthest(results: list[StepResult], others: list[StepResult]) -> float:
    assert len(results) == len(others) == MORE
    return max(
        max(abs(a.loss - b.loss), abs(a.grad_norm - b.grad_norm))
        for a, b in zip(results, others, strict=True)
    )


def check_state(opened: LoadOutcome, trained: Trained) -> None:
    assert opened.state.keys() == trained.tensors.keys()
    assert not [str(key) for key, value in trained.tensors.items() if not same_bits(opened.state[key], value)]
    assert opened.scalars[OPTIMIZER_STEP] == STOP
    assert opened.counts == (STOP, STOP * GLOBAL_BATCH, 0)
    assert opened.decays == [0.1, 0.0]


def check_read(path: Path, trained: Trained, layout: Layout, *more: str) -> None:
    """Read the files without the manifest. In 16 bits, ZeRO 3 and universal checkpoints have masters only;
    sample counts are ignored if DeepSpeed counted tensor ranks as data ranks.
    """
    again = open_source(path, trained.source.shape)
    found, scalars = whole(again.reader()), trained.source.catalog.scalars
    for key in trained.tensors.keys() - found.keys():
        assert key.state == WEIGHT, key
        assert TensorKey(MASTER, key.name) in found, key
    assert not [str(key) for key, value in found.items() if not same_bits(value, trained.tensors[key])]
    known = (STEP, OPTIMIZER_STEP, *(() if layout.tensor > 1 else (CONSUMED,)), *more)
    assert {name: again.catalog.scalars.get(name) for name in known} == {
        name: scalars[name] for name in known
    }


def check(pool: RankPool, trained: Trained, layout: Layout, family: str, folder: Path, **more: Any) -> None:
    path = convert(trained.source, layout.target(trained.source), folder / "written")
    check_read(path, trained, layout, OPTIM)
    opened, *_ = pool.run(
        continue_with_vendor, layout.plan(family, **more), path, folder / "again", ranks=layout.ranks
    )
    check_state(opened, trained)
    assert furthest(opened.results, trained.went_on) <= TOLERANCE
    check_files(path, folder / "again")


QUICK = [
    pytest.param("qwen2", Layout(0, data=2), {}, marks=pytest.mark.full),
    pytest.param("qwen2", Layout(2, data=4), {}, marks=pytest.mark.full),
    pytest.param("gpt2", Layout(1, data=2), {}, marks=pytest.mark.full),
    ("qwen3", Layout(3, data=4, sub_group=50), ODD),
    ("qwen2", Layout(1, pipeline=2), {}),
    pytest.param("llama", Layout(3, tensor=2), {}, marks=pytest.mark.full),
]


def name(value: object) -> str | None:
    return "odd" if value is ODD else "" if value == {} else str(value) if isinstance(value, Layout) else None


@pytest.mark.parametrize(("family", "layout", "more"), QUICK, ids=name)
def test_deepspeed_resumes_from_written_checkpoint(
    family: str, layout: Layout, more: Mapping[str, Any], runs: Runs, pool: RankPool, tmp_path: Path
) -> None:
    check(pool, runs.get(family, None, tuple(more.items())), layout, family, tmp_path, **more)


def test_bf16_resumes_bitwise(runs: Runs, pool: RankPool, tmp_path: Path) -> None:
    """Two ranks of the same stage compute the same in the same order."""
    layout = Layout(1, data=2)
    trained = runs.get("qwen2", layout, tuple(BF16.items()))
    assert trained.tensors[TensorKey(WEIGHT, "model.norm.weight")].dtype is torch.bfloat16
    check(pool, trained, layout, "qwen2", tmp_path, **BF16)


@pytest.mark.full
def test_bf16_state_is_equal_in_other_stage(runs: Runs, pool: RankPool, tmp_path: Path) -> None:
    trained, layout = runs.get("qwen2", Layout(1, data=2), tuple(BF16.items())), Layout(3, data=2)
    path = convert(trained.source, layout.target(trained.source), tmp_path / "written")
    opened, *_ = pool.run(continue_with_vendor, layout.plan("qwen2", **BF16), path, ranks=2)
    check_state(opened, trained)


def test_control_missing_moments_change_losses(runs: Runs, pool: RankPool, tmp_path: Path) -> None:
    trained, layout = runs.get("qwen2"), Layout(2, data=2)
    path = convert(trained.source, layout.target(trained.source, optimizer=False), tmp_path / "written")
    opened, *_ = pool.run(continue_with_vendor, layout.plan("qwen2"), path, ranks=2)
    assert {key.state for key in opened.state} == {WEIGHT}
    assert all(same_bits(value, trained.tensors[key]) for key, value in opened.state.items())
    assert furthest(opened.results, trained.went_on) > 10 * TOLERANCE


# Odd sizes at every stage on one rank and on four, every other family at one stage on two.
STAGES = [
    *(("odd", stage, data) for stage in range(4) for data in (1, 4) if (stage, data) != (3, 4)),
    *((family, number % 4, 2) for number, family in enumerate(FAMILIES)),
]


@pytest.mark.full
@pytest.mark.parametrize(("family", "stage", "data"), STAGES)
def test_deepspeed_resumes_at_every_stage(
    family: str, stage: int, data: int, runs: Runs, pool: RankPool, tmp_path: Path
) -> None:
    family, more = ("qwen3", ODD) if family == "odd" else (family, {})
    check(
        pool, runs.get(family, None, tuple(more.items())), Layout(stage, data=data), family, tmp_path, **more
    )


# Every stage with tensor ranks, and every axis with and without data ranks and in each family.
AXES = [
    *(("llama", Layout(stage, data=1 + stage % 2, tensor=2)) for stage in range(4)),
    ("llama", Layout(0, pipeline=2)),
    ("llama", Layout(1, data=2, pipeline=2)),
    ("qwen2", Layout(1, tensor=2)),
    ("qwen2", Layout(0, data=2, pipeline=2)),
    ("gpt2", Layout(1, pipeline=2)),
    ("gpt2", Layout(1, tensor=2)),
]


@pytest.mark.full
@pytest.mark.parametrize(("family", "layout"), AXES, ids=str)
def test_deepspeed_resumes_on_each_axis(
    family: str, layout: Layout, runs: Runs, pool: RankPool, tmp_path: Path
) -> None:
    if family == "gpt2" and layout.tensor > 1:
        with pytest.raises(CheckpointError, match="cuts linear layers"):
            layout.target(runs.get(family).source)
    else:
        check(pool, runs.get(family), layout, family, tmp_path)


IN_BF16 = [
    *(Layout(stage, data=data) for stage, data in ((1, 4), (2, 1), (2, 4), (3, 1), (3, 4))),
    Layout(1, data=2, pipeline=2),
]


@pytest.mark.full
@pytest.mark.parametrize("layout", IN_BF16, ids=str)
def test_deepspeed_resumes_at_every_stage_in_bf16(
    layout: Layout, runs: Runs, pool: RankPool, tmp_path: Path
) -> None:
    check(pool, runs.get("gpt2", layout, tuple(BF16.items())), layout, "gpt2", tmp_path, **BF16)


# ---- against what DeepSpeed writes


OURS_TO_LEAVE_OUT = {
    "clip_grad",
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
}  # ZeRO 1, 2: the run's own settings are used
DIFFERENT = {"ds_config", "bias_correction", "lr_scheduler"}  # these programs have no scheduler
STORED_ONCE = "shared_params"  # only the file of DeepSpeed's first rank has it


def check_files(ours: Path, theirs: Path) -> None:
    """The files have the same content, except for known harmless differences."""
    names = {
        path.relative_to(theirs)
        for path in theirs.rglob("*")
        if path.is_file() and not path.name.startswith("zero_to_")
    }
    assert {path.relative_to(ours) for path in ours.rglob("*") if path.is_file()} == names
    assert (ours / "latest").read_text() == (theirs / "latest").read_text()
    found = [
        f"{file}: {what}"
        for file in sorted(names)
        if file.suffix == ".pt"
        for what in differences(
            torch.load(ours / file, weights_only=False), torch.load(theirs / file, weights_only=False)
        )
    ]
    assert not found, "\n".join(found[:20])


def differences(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    if isinstance(theirs, Mapping):
        for key in theirs.keys() | ours.keys():
            if (
                key in DIFFERENT
                or (key in OURS_TO_LEAVE_OUT and key not in ours)
                or (key == STORED_ONCE and not theirs.get(key))
            ):
                continue
            if key not in ours or key not in theirs:
                yield f"{at}/{key} is only in {'theirs' if key in theirs else 'ours'}"
            else:
                yield from differences(ours[key], theirs[key], f"{at}/{key}")
        if isinstance(theirs, OrderedDict) and list(ours) != list(theirs):
            yield f"{at} is in another order"
    elif isinstance(theirs, list | tuple) and not isinstance(theirs, torch.Size):
        if len(ours) != len(theirs):
            yield f"{at}: {len(ours)} and {len(theirs)}"
        for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            yield from differences(a, b, f"{at}[{number}]")
    elif at.endswith("/step"):
        if float(ours) != float(theirs):
            yield f"{at}: {ours} and {theirs}"
    elif isinstance(theirs, torch.Tensor):
        if not same_bits(ours, theirs):
            yield f"{at}: {tuple(ours.shape)} {ours.dtype} and {tuple(theirs.shape)} {theirs.dtype}"
    elif type(ours) is not type(theirs) or (
        vars(ours) != vars(theirs) if at.endswith("loss_scaler") else ours != theirs
    ):
        yield f"{at}: {ours!r} and {theirs!r}"


# ---- universal


def check_universal(
    pool: RankPool, trained: Trained, layout: Layout, family: str, folder: Path, **more: Any
) -> LoadOutcome:
    path = convert(
        trained.source, universal_target.lay_out(trained.source, TargetConfig()), folder / "written"
    )
    check_read(path, trained, layout)
    opened, *_ = pool.run(
        continue_with_vendor, layout.plan(family, **more), path, None, True, ranks=layout.ranks
    )
    check_state(opened, trained)
    assert furthest(opened.results, trained.went_on) <= TOLERANCE
    return opened


@pytest.mark.parametrize(
    "layout", [pytest.param(Layout(2, data=2), marks=pytest.mark.full), Layout(3, data=2)], ids=str
)
def test_one_universal_folder_serves_all_stages(
    layout: Layout, runs: Runs, pool: RankPool, tmp_path: Path
) -> None:
    """``check_state`` also checks weight decay, at ZeRO 3 too."""
    check_universal(pool, runs.get("qwen2"), layout, "qwen2", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("odd", Layout(stage, data=data)) for stage, data in ((1, 4), (2, 1), (3, 2), (3, 4))),
        ("gpt2", Layout(2, data=4)),
        ("llama", Layout(1, data=1)),
        ("llama", Layout(1, tensor=2)),
    ],
    ids=str,
)
def test_deepspeed_resumes_from_every_universal_folder(
    family: str, layout: Layout, runs: Runs, pool: RankPool, tmp_path: Path
) -> None:
    family, more = ("qwen3", ODD) if family == "odd" else (family, {})
    check_universal(pool, runs.get(family, None, tuple(more.items())), layout, family, tmp_path, **more)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_resumes_from_universal_in_bf16(
    stage: int, runs: Runs, pool: RankPool, tmp_path: Path
) -> None:
    layout = Layout(stage, data=2)
    check_universal(pool, runs.get("gpt2", layout, tuple(BF16.items())), layout, "gpt2", tmp_path, **BF16)


@pytest.mark.full
def test_universal_note_about_step_counter(runs: Runs, pool: RankPool, tmp_path: Path) -> None:
    """If this test fails, DeepSpeed has fixed its defect, and the note and this test can be removed."""
    trained, layout = runs.get("qwen2"), Layout(3, data=2)
    path = convert(
        trained.source, universal_target.lay_out(trained.source, TargetConfig()), tmp_path / "written"
    )
    opened, *_ = pool.run(continue_with_vendor, layout.plan("qwen2"), path, None, True, False, ranks=2)
    check_state(opened, trained)
    assert furthest(opened.results, trained.went_on) > 10 * TOLERANCE


def test_universal_requires_optimizer_state(runs: Runs) -> None:
    with pytest.raises(CheckpointError, match="has no optimizer state"):
        universal_target.lay_out(runs.get("qwen2").source, TargetConfig(optimizer=False))
