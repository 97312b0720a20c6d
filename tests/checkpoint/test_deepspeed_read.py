"""Read checkpoints that DeepSpeed saved, bitwise equal to the engine's memory and to the output of
DeepSpeed's tools.

pytest tests/checkpoint/test_deepspeed_read.py
pytest tests/checkpoint/test_deepspeed_read.py -m full      every stage, precision, family and axis
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import deepspeed_saves as saves
from tests.checkpoint.deepspeed_checks import EVEN, ODD, compare_copies, differing, read_like
from tests.checkpoint.deepspeed_saves import MORE, STOP, TAG, State
from tests.checkpoint.layouts import same_bits, whole
from tests.engine.cases import BF16, FP16, OFFLOAD, OFFLOAD_ALL, SGD, Cell, cell
from toolkit import families
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.formats import native, torch_zip
from toolkit.checkpoint.formats.deepspeed import names
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.scalars import LOSS_SCALER
from toolkit.checkpoint.shard import EXP_AVG, MASTER, WEIGHT, Box, StateReader, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.target_tensors import select_target_tensors
from toolkit.checkpoint.verify import compute_digest, verify, verify_source
from toolkit.config.schema import Precision
from toolkit.errors import CheckpointError, InputError
from toolkit.testing.dist import RankPool, RanksFailed, rank_pool
from toolkit.testing.parity import RunTrace
from toolkit.testing.tiny import tiny_plan

TOLERANCE = 1e-5
MUON: dict[str, Any] = {"optim__name": "muon", "optim__clip": 0.0, "optim__momentum": 0.9}
EXPERTS: dict[str, Any] = {
    "model__vocab_size": 263,
    "model__intermediate_size": 40,
}  # rows of experts are whole 16 bytes
SMALL: dict[str, Any] = {**ODD, "model__head_dim": 2}
SUB_GROUPS: dict[str, Any] = {"engine__deepspeed": {"zero_optimization": {"sub_group_size": 5000}}}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as ranks:
        yield ranks


class Saves:
    """Checkpoints of each cell with the engine's state, created on demand."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self._folder = pool, folder
        self._made: dict[str, tuple[Path, State, dict[str, object], RunTrace]] = {}

    def get(self, case: Cell) -> tuple[Path, State, dict[str, object], RunTrace]:
        """Return the folder, the engine's state and scalars, and the steps that follow."""
        if str(case) not in self._made:
            self._made[str(case)] = self._make(case)
        return self._made[str(case)]

    def _make(self, case: Cell) -> tuple[Path, State, dict[str, object], RunTrace]:
        folder = self._folder / f"{len(self._made)}"
        saved_state, scalars, continued = self.pool.run(
            saves.save, case, folder, MORE if case in RESUMED else 0, ranks=case.ranks
        )[0]
        return folder, saved_state, scalars, continued


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(pool, tmp_path_factory.mktemp("saved"))


QUICK = [
    cell(0, 2, 1, "gpt2", **ODD),
    cell(1, 3, 1, "qwen3", **SMALL, **BF16),
    cell(2, 2, 2, "gpt2", **ODD, **FP16),
    cell(3, 4, 1, "qwen3", **SMALL, **SUB_GROUPS),
    cell(3, 3, 1, "llama", **ODD, **BF16),
    cell(1, 2, 1, "llama", **EVEN, **BF16, parallel__tensor=2),
    cell(1, 2, 1, "gpt2", **ODD, **BF16, parallel__pipeline=2),
]
RESUMED = (
    QUICK[0],
    cell(3, 2, 1, "qwen3", **SMALL, **SUB_GROUPS),
    cell(1, 2, 2, "llama", parallel__tensor=2),
    cell(1, 2, 2, "gpt2", parallel__pipeline=2),
)
FULL = [
    # every stage in every precision, with each number of ranks once per stage and once per precision
    *(
        cell(stage, (1, 2, 4)[(stage + turn) % 3], 1, "qwen3", **SMALL, **precision)
        for stage in (1, 2, 3)
        for turn, precision in enumerate(({}, BF16, FP16))
    ),
    cell(0, 1, 1, "qwen3", **SMALL),
    *(cell(stage, 3, 1, family, **ODD) for stage, family in enumerate(("qwen2", "llama", "gpt2", "qwen2"))),
    *(cell(stage, 3, 1, "mixtral", **EXPERTS) for stage in (1, 3)),
    *(cell(stage, 2, 1, "llama", **ODD, **SGD, optim__momentum=0.9) for stage in (0, 2, 3)),
    cell(1, 4, 1, "llama", **EVEN, parallel__tensor=2),
    cell(2, 4, 1, "qwen2", **EVEN, **BF16, parallel__tensor=2),
    cell(3, 4, 1, "qwen2", **EVEN, parallel__tensor=2),
    cell(3, 4, 1, "llama", **EVEN, **BF16, parallel__tensor=2),
    cell(0, 2, 1, "llama", parallel__tensor=2),
    cell(0, 4, 1, "llama", **ODD, parallel__pipeline=2),
    cell(1, 4, 1, "gpt2", **ODD, parallel__pipeline=2),
    cell(1, 4, 1, "llama", **ODD, **BF16, parallel__pipeline=2),
    cell(1, 3, 1, "llama", model__num_hidden_layers=5, parallel__pipeline=3),
    cell(1, 2, 1, "llama", parallel__context=2),
    *(
        cell(stage, 3, 1, "llama", **ODD, **precision, **MUON)
        for stage, precision in ((1, BF16), (2, {}), (3, BF16))
    ),
    cell(2, 2, 1, "llama", **ODD, **BF16, **OFFLOAD),
    cell(3, 2, 1, "llama", **ODD, **BF16, **OFFLOAD_ALL),
]


def check(case: Cell, saved: Saves) -> CheckpointSource:
    folder, saved_state, scalars, _ = saved.get(case)
    source = open_source(folder, case.plan().shape)
    assert (source.format, source.step) == ("deepspeed", STOP)
    assert not differing(read_like(source, saved_state), saved_state)
    absent = {
        key
        for key in saved_state
        if key.state == WEIGHT and case.stage == 3 and TensorKey(MASTER, key.name) in saved_state
    }
    assert source.catalog.tensors.keys() == saved_state.keys() - absent, (
        "in 16 bits ZeRO 3 saves masters alone"
    )
    for key, value in scalars.items():
        if (
            key == LOSS_SCALER
        ):  # DeepSpeed's own is the run's divided by the ranks whose gradients it averages
            value = {**value, "cur_scale": value["cur_scale"] / case.plan().axes.data}
        assert source.catalog.scalars[key] == value, key
    if "parallel__tensor" not in dict(case.more):
        assert source.catalog.scalars["consumed_samples"] == STOP * case.plan().batch.global_batch
    compare_copies(source)
    assert verify_source(source) == []
    return source


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_read_deepspeed_checkpoint(case: Cell, saved: Saves) -> None:
    check(case, saved)


@pytest.mark.full
@pytest.mark.parametrize("case", FULL, ids=str)
def test_read_every_deepspeed_layout(case: Cell, saved: Saves) -> None:
    check(case, saved)


@pytest.fixture
def any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were saved to open file objects may have any name."""
    load = torch_zip.load
    monkeypatch.setattr(torch_zip, "load", lambda *args, named=False: load(*args))


def changed_over(folder: Path, path: Path) -> Path:
    """Copy a checkpoint with the files of the first two ranks swapped.

    The names in their records reveal it.
    """
    shutil.copytree(folder, path)
    one, other = (path / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    aside = one.rename(path / "aside")
    other.rename(one)
    aside.rename(other)
    return path


def test_swapped_rank_files_are_rejected(saved: Saves, tmp_path: Path) -> None:
    folder, *_ = saved.get(QUICK[4])
    with pytest.raises(
        CheckpointError,
        match=r"rank_0_mp_rank_00_optim_states.pt was saved as bf16_zero_pp_rank_1_mp_rank_00",
    ):
        open_source(changed_over(folder, tmp_path / "changed"), QUICK[4].plan().shape)


def test_control_swapped_ranks_change_tensors(saved: Saves, tmp_path: Path, any_name: None) -> None:
    """Control: a reader that swapped two ranks' files would give other tensors."""
    folder, saved_state, *_ = saved.get(QUICK[4])
    changed_over(folder, tmp_path / "changed")
    found = read_like(open_source(tmp_path / "changed", QUICK[4].plan().shape), saved_state)
    assert len(differing(found, saved_state)) > len(saved_state) // 2


def test_verify_detects_swapped_rank_files(saved: Saves, tmp_path: Path, any_name: None) -> None:
    """The model's weights, if saved, differ from their masters."""
    folder, *_ = saved.get(QUICK[1])
    changed_over(folder, tmp_path / "changed")
    found = verify(tmp_path / "changed", QUICK[1].plan().shape)
    assert any("not their master" in str(finding) for finding in found), found


def test_zero3_converts_to_bf16_weights_and_masters(saved: Saves, tmp_path: Path) -> None:
    """ZeRO 3 masters become 16-bit weights and masters."""
    folder, saved_state, *_ = saved.get(QUICK[4])
    source = open_source(folder, QUICK[4].plan().shape)
    target = native.lay_out(source, select_target_tensors(source, Precision.bf16, optimizer=True))
    Conversion(source, target, tmp_path / "native").run()
    made = open_source(tmp_path / "native")
    assert made.catalog.tensors.keys() == saved_state.keys()
    assert not differing(read_like(made, saved_state), saved_state)
    assert made.catalog.scalars["optimizer_step"] == STOP


@pytest.mark.full
def test_deepspeed_rejects_toolkit_experts(pool: RankPool, tmp_path: Path) -> None:
    """DeepSpeed's saver requires attributes of its own expert layers, so such files cannot exist."""
    with pytest.raises(RanksFailed, match="expert_group_name"):
        pool.run(saves.save, cell(1, 2, 1, "mixtral", parallel__expert=2), tmp_path, ranks=2)


# ---- DeepSpeed's own tools

DIFFERENTIAL = QUICK[1]
PRECISIONS = ({}, BF16, FP16)
DIFFERENTIAL_FULL = [
    QUICK[3],
    # each pair of stage, family and precision once
    *(
        cell(stage, 2, 1, family, **sizes, **PRECISIONS[(stage + number) % 3])
        for stage in (1, 2, 3)
        for number, (family, sizes) in enumerate((("llama", ODD), ("gpt2", ODD), ("mixtral", EXPERTS)))
    ),
]


def test_read_output_of_deepspeed_tools(saved: Saves, tmp_path: Path) -> None:
    check_tools(DIFFERENTIAL, saved, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", DIFFERENTIAL_FULL, ids=str)
def test_read_output_of_deepspeed_tools_in_every_layout(case: Cell, saved: Saves, tmp_path: Path) -> None:
    check_tools(case, saved, tmp_path)


def check_tools(case: Cell, saved: Saves, folder: Path) -> None:
    """The outputs of zero_to_fp32 and ds_to_universal equal what is read here."""
    made, saved_state, *_ = saved.get(case)
    shape = case.plan().shape
    source = open_source(made, shape)
    weights = saved.pool.run(saves.full_weights, made, ranks=1)[0]
    aliases = names.build_name_table(shape) if shape else {}
    state = MASTER if TensorKey(MASTER, next(iter(saved_state)).name) in saved_state else WEIGHT
    read = whole(source.reader())
    for name, tensor in weights.items():
        assert same_bits(tensor, read[TensorKey(state, aliases[name].name)]), name
    saved.pool.run(saves.to_universal, made, folder / "universal", ranks=1)
    converted = open_source(folder / "universal", shape)
    assert converted.format == "universal"
    assert open_source(folder, shape).folder == converted.folder, "latest_universal names it"
    assert converted.catalog.scalars == source.catalog.scalars
    assert compute_digest(converted.reader()) == compute_digest(source.reader())
    compare_copies(converted)


@pytest.mark.full
@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_universal_of_a_pipeline(precision: dict[str, Any], saved: Saves, tmp_path: Path) -> None:
    """The converter copies no layers, so 16-bit weights are missing."""
    case = cell(1, 4, 1, "gpt2", **ODD, **precision, parallel__pipeline=2)
    folder, saved_state, *_ = saved.get(case)
    saved.pool.run(saves.to_universal, folder, tmp_path / "universal", ranks=1)
    converted = open_source(tmp_path / "universal", case.plan().shape)
    assert converted.catalog.tensors.keys() == {
        key for key in saved_state if key.state != WEIGHT or not precision
    }
    assert not differing(read_like(converted, saved_state), saved_state)


@pytest.mark.full
def test_universal_with_unrecorded_tensor_axis(saved: Saves, tmp_path: Path) -> None:
    """DeepSpeed's converter concatenates tensor ranks if the cut is not recorded; shapes reveal it."""
    case = cell(1, 4, 1, "llama", **EVEN, **BF16, parallel__tensor=2)
    folder, *_ = saved.get(case)
    saved.pool.run(saves.to_universal, folder, tmp_path / "universal", ranks=1)
    with pytest.raises(CheckpointError, match="whole or cut along one dim"):
        open_source(tmp_path / "universal", case.plan().shape)


# ---- training goes on


def test_training_resumes_from_deepspeed_checkpoint(saved: Saves) -> None:
    check_resumed(RESUMED[0], saved)


@pytest.mark.full
@pytest.mark.parametrize("case", RESUMED[1:], ids=str)
def test_training_resumes_from_every_deepspeed_checkpoint(case: Cell, saved: Saves) -> None:
    check_resumed(case, saved)


def check_resumed(case: Cell, saved: Saves) -> None:
    """Six steps match an uninterrupted run; with zeroed moments they do not."""
    folder, _, _, continued = saved.get(case)
    again, forgot = (
        saved.pool.run(saves.resume, case, folder, forget, ranks=case.ranks)[0] for forget in (False, True)
    )

    def apart(trace: RunTrace) -> float:
        return max(abs(a - b) for a, b in zip(trace.losses, continued.losses, strict=True))

    assert len(continued.losses) == MORE
    assert apart(again) <= TOLERANCE, apart(again)
    assert apart(forgot) > 10 * TOLERANCE, apart(forgot)


# ---- errors


def test_deepspeed_model_is_required(saved: Saves) -> None:
    folder, *_ = saved.get(QUICK[0])
    with pytest.raises(InputError, match="describe the model"):
        open_source(folder)


def test_model_is_found_in_nearby_config(saved: Saves, tmp_path: Path) -> None:
    """As transformers' Trainer saves: a DeepSpeed checkpoint with optimizer state."""
    folder, saved_state, *_ = saved.get(QUICK[3])
    shape = QUICK[3].plan().shape
    assert shape is not None
    shutil.copytree(folder, tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "config.json").write_text(
        json.dumps(families.get_family(shape.family).hugging_face_config(shape))
    )
    source = open_source(tmp_path / "checkpoint-3")
    assert (source.format, source.catalog.tensors.keys()) == ("deepspeed", saved_state.keys())


def test_other_model_is_rejected(saved: Saves) -> None:
    folder, *_ = saved.get(QUICK[0])
    with pytest.raises(CheckpointError, match="no parameter of llama"):
        open_source(folder, tiny_plan("llama").shape)
    with pytest.raises(CheckpointError, match="whole or cut along one dim"):
        open_source(folder, tiny_plan("gpt2").shape)
    with pytest.raises(CheckpointError, match="has no weight"):
        open_source(folder, tiny_plan("gpt2", **ODD, model__num_hidden_layers=3).shape)


@pytest.mark.parametrize(
    "file", ["bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"]
)
@pytest.mark.parametrize("how", ["missing", "short"])
def test_damaged_files_are_reported_by_name(file: str, how: str, saved: Saves, tmp_path: Path) -> None:
    folder, *_ = saved.get(QUICK[4])
    shutil.copytree(folder, tmp_path / "damaged")
    path = tmp_path / "damaged" / TAG / file
    data = path.read_bytes()
    path.unlink()
    if how == "short":
        path.write_bytes(data[: len(data) // 2])
    with pytest.raises(
        CheckpointError, match=file if how == "short" or "optim" in file else "no model states"
    ):
        open_source(tmp_path / "damaged", QUICK[4].plan().shape)


def test_files_of_different_runs_are_rejected(saved: Saves, tmp_path: Path, any_name: None) -> None:
    """A rank's file of another layout is detected by its sizes."""
    folder, *_ = saved.get(QUICK[4])
    other, *_ = saved.get(QUICK[3])
    shutil.copytree(folder, tmp_path / "mixed")
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / TAG / name, tmp_path / "mixed" / TAG / f"bf16_{name}")
    with pytest.raises(CheckpointError, match="sub-group"):
        open_source(tmp_path / "mixed", QUICK[4].plan().shape)


def test_deepspeed_experts_are_rejected(saved: Saves, tmp_path: Path) -> None:
    folder, *_ = saved.get(QUICK[0])
    shutil.copytree(folder, tmp_path / "experts")
    (tmp_path / "experts" / TAG / "layer_0_expert_1_mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="own experts"):
        open_source(tmp_path / "experts", QUICK[0].plan().shape)


def test_invalid_tensor_cut_is_rejected() -> None:
    shape = tiny_plan("gpt2").shape
    assert shape is not None
    part = names.build_name_table(shape)["transformer.h.0.attn.c_attn.weight"]
    with pytest.raises(CheckpointError, match="c_attn"):
        names.rank_boxes(part, "transformer.h.0.attn.c_attn.weight", [(64, 96), (64, 96)], Path("x"))
    part = names.build_name_table(shape)["transformer.h.0.attn.c_proj.weight"]
    assert names.rank_boxes(part, "x", [(40, 64), (24, 64)], Path("x")) == [
        Box((0, 0), (40, 64)),
        Box((40, 0), (24, 64)),
    ]
    with pytest.raises(CheckpointError, match="whole or cut"):
        names.rank_boxes(part, "x", [(40, 64), (40, 64)], Path("x"))


def test_reading_imports_neither_deepspeed_nor_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, toolkit.checkpoint.formats.deepspeed.source, "
        "toolkit.checkpoint.formats.universal.source\n"
        "assert not {'torch', 'deepspeed'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_training_checks_namespace(saved: Saves) -> None:
    folder, saved_state, *_ = saved.get(QUICK[0])
    reader: StateReader = open_reader(folder, "gpt2/1", QUICK[0].plan().shape)
    assert {key.state for key in reader.tensors} == {key.state for key in saved_state}
    assert EXP_AVG in {key.state for key in saved_state}
