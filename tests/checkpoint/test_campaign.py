"""Corrupt checkpoints of every format at random: none loads wrong values or an older state silently, and
errors are user errors.

    pytest tests/checkpoint/test_campaign.py
    pytest tests/checkpoint/test_campaign.py -m full                          600 corruptions
    CORRUPTION_SEED=7 pytest tests/checkpoint/test_campaign.py -m full -s     with another seed, prints counts

Undetectable damage is excluded: changed values in safetensors files without this toolkit's manifest, and
swapped files of a universal checkpoint, because none of them records its parameter.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from torch.distributed import checkpoint as dcp_of_torch

from tests.checkpoint.corruption import DAMAGES
from tests.checkpoint.layouts import LAYOUTS, shards_of
from tests.checkpoint.tiny_run import tensors_of, tiny_checkpoint, tiny_shape
from tests.damage import flip_byte
from toolkit.checkpoint import manifest
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.offline.reshard import lay_out
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, WEIGHT, Box, Shard, TensorKey
from toolkit.checkpoint.source import open_source
from toolkit.checkpoint.verify import verify
from toolkit.checkpoint_folder import disagreement_error
from toolkit.config.reshard import TargetConfig, TargetFormat, TargetParallelConfig, TargetZeroStage
from toolkit.errors import UserError
from toolkit.families.base import ModelShape
from toolkit.goodput import AttemptTimes, SaveRecord, append_save, write_times
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

SEED = int(os.environ.get("CORRUPTION_SEED", "18"))
QUICK, FULL = 5, 60  # corruptions of each kind of checkpoint
STEPS = (1, 2, 3)
REFUSED, HARMLESS = "refused", "harmless"
Tensors = Mapping[TensorKey, torch.Tensor]
SHAPE = tiny_shape()


@dataclass(frozen=True)
class Kind:
    """A folder to be damaged.

    Attributes:
        model: Model options that the user gives.
        damages: Names of ``DAMAGES`` that can be detected in such a folder.
        run: It is a run directory.
    """

    folder: Path
    held: Tensors
    model: ModelShape | None = None
    damages: tuple[str, ...] = tuple(DAMAGES)
    run: bool = False


def native_run(folder: Path) -> Kind:
    """Create a run that was killed after its third save. Values differ between steps."""
    named: dict[TensorKey, torch.Tensor] = {}
    attempt = folder / "attempts" / "001"
    attempt.mkdir(parents=True)
    for step in STEPS:
        exact = torch.randn(300, 40, generator=torch.Generator().manual_seed(step))
        named = {TensorKey(state, "w"): exact + number for number, state in enumerate((WEIGHT, EXP_AVG))} | {
            TensorKey(EXP_AVG_SQ, "w"): exact.square(),
            TensorKey(WEIGHT, "b"): exact[0],
        }
        stores = [CheckpointStore(folder / "checkpoints", keep_last=3) for _ in range(2)]
        scalars = {"step": step, "optimizer_step": step, "consumed_samples": 8 * step}
        pending = [
            store.save(
                step, shards, scalars, namespace="test/1", rank=rank, ranks=2, attempt=1, background=True
            )
            for rank, (store, shards) in enumerate(
                zip(stores, shards_of(named, LAYOUTS["flat"], 2), strict=True)
            )
        ]
        saved, _ = [one.wait() for one in pending]
        append_save(attempt, SaveRecord(step=step, seconds=1.0, bytes=1, stepping=1.0))
    write_times(attempt, AttemptTimes(began=1.0, seen=2.0, first=0))
    run = RunDirectory(folder)
    run.metrics_file.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 4)))
    run.write_status(Status(state=RunState.RUNNING, attempt=1, step=3, checkpoint=str(saved)))
    return Kind(folder, named, run=True)


def converted(folder: Path, source: Path, config: TargetConfig) -> Path:
    found = open_source(source)
    Conversion(found, lay_out(found, config), folder).run()
    return folder


def without_manifest(folder: Path) -> Path:
    (folder / manifest.FOREIGN_NAME).unlink()
    return folder


def dcp(folder: Path, held: Tensors) -> Path:
    state = {
        name: {kind: held[TensorKey(kind, name)] for kind in (EXP_AVG, EXP_AVG_SQ)}
        | {"step": torch.tensor(3.0)}
        for name in {key.name for key in held}
    }
    weights = {key.name: tensor for key, tensor in held.items() if key.state == WEIGHT}
    dcp_of_torch.save({"model": weights, "optim": {"state": state}}, checkpoint_id=str(folder))
    return folder


TARGETS = {
    "zero1": TargetConfig(
        format=TargetFormat.deepspeed, zero=TargetZeroStage.stage1, parallel=TargetParallelConfig(data=2)
    ),
    "zero3": TargetConfig(
        format=TargetFormat.deepspeed, zero=TargetZeroStage.stage3, parallel=TargetParallelConfig(data=2)
    ),
    "universal": TargetConfig(format=TargetFormat.universal),
    "megatron": TargetConfig(format=TargetFormat.megatron, parallel=TargetParallelConfig(tensor=2)),
}
HUGGING_FACE = TargetConfig(format=TargetFormat.huggingface, optimizer=True)
KINDS: Mapping[str, Callable[[Path, Path, Tensors], Kind]] = {
    "native": lambda folder, source, held: native_run(folder),
    "zero1": lambda folder, source, held: Kind(
        without_manifest(converted(folder, source, TARGETS["zero1"])), held, SHAPE
    ),
    "zero3": lambda folder, source, held: Kind(
        without_manifest(converted(folder, source, TARGETS["zero3"])), held, SHAPE
    ),
    "universal": lambda folder, source, held: Kind(
        without_manifest(converted(folder, source, TARGETS["universal"])),
        held,
        SHAPE,
        tuple(name for name in DAMAGES if name != "swap"),
    ),
    "megatron": lambda folder, source, held: Kind(
        without_manifest(converted(folder, source, TARGETS["megatron"])), held, SHAPE
    ),
    "dcp": lambda folder, source, held: Kind(dcp(folder, held), held, SHAPE),
    "huggingface": lambda folder, source, held: Kind(
        without_manifest(converted(folder, source, HUGGING_FACE)),
        held,
        None,
        ("truncate", "delete", "delete_folder", "forge"),
    ),
    "our huggingface": lambda folder, source, held: Kind(converted(folder, source, HUGGING_FACE), held),
    "our megatron": lambda folder, source, held: Kind(converted(folder, source, TARGETS["megatron"]), held),
    "our zero3": lambda folder, source, held: Kind(converted(folder, source, TARGETS["zero3"]), held),
}


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Kind]:
    folder, held = tmp_path_factory.mktemp("sound"), tensors_of(SHAPE)
    source = tiny_checkpoint(folder / "checkpoints")
    return {name: make(folder / name.replace(" ", "-"), source, held) for name, make in KINDS.items()}


def load(folder: Path, kind: Kind) -> dict[TensorKey, torch.Tensor]:
    """Load as a training start does: the tensors of the model, in its shapes and dtypes."""
    if kind.run:
        found = RunDirectory(folder).newest_with_disagreements()
        if found.disagreements:
            raise disagreement_error(folder / "checkpoints", found)
    reader = open_source(folder, kind.model).reader()
    read = {key: torch.zeros_like(tensor) for key, tensor in kind.held.items()}
    reader.read(
        [Shard(key, tuple(tensor.shape), Box.whole(tensor.shape), tensor) for key, tensor in read.items()]
    )
    return read


def outcome(folder: Path, kind: Kind) -> str:
    """Return REFUSED, HARMLESS (the right values), or a description of the error."""
    try:
        verify(folder, kind.model, workers=1)
    except UserError:
        pass
    except Exception as error:  # noqa: BLE001  whatever it is, a person would see a traceback
        return f"traceback of verify: {type(error).__name__}: {error}"[:300]
    try:
        read = load(folder, kind)
    except UserError:
        return REFUSED
    except Exception as error:  # noqa: BLE001  as above
        return f"traceback: {type(error).__name__}: {error}"[:300]
    wrong = [str(key) for key, tensor in read.items() if not torch.equal(tensor, kind.held[key])]
    return f"wrong values of {', '.join(wrong[:3])}" if wrong else HARMLESS


def campaign(kinds: Mapping[str, Kind], each: int, seed: int, room: Path) -> tuple[Counter[str], list[str]]:
    """Return the number of each outcome, and the damages that were not handled correctly."""
    counts: Counter[str] = Counter()
    bad: list[str] = []
    for name, kind in kinds.items():
        for number in range(each):
            random = Random(f"{seed} {name} {number}")
            folder = Path(shutil.copytree(kind.folder, room / "copy" / "of" / "it" / "here"))
            what = DAMAGES[random.choice(kind.damages)](folder, random)
            found = outcome(folder, kind)
            counts[found if found in (REFUSED, HARMLESS) else "bad"] += 1
            if found not in (REFUSED, HARMLESS):
                bad.append(f"{name} {number}: {what}: {found}")
            shutil.rmtree(room / "copy")
    return counts, bad


def test_load_detects_sampled_corruptions(kinds: Mapping[str, Kind], tmp_path: Path) -> None:
    assert {name: outcome(kind.folder, kind) for name, kind in kinds.items()} == dict.fromkeys(
        kinds, HARMLESS
    )
    counts, bad = campaign(kinds, QUICK, SEED, tmp_path)
    assert not bad, "\n".join(bad)
    assert counts[REFUSED] > QUICK * len(kinds) / 2


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_load_detects_six_hundred_corruptions(kinds: Mapping[str, Kind], tmp_path: Path) -> None:
    counts, bad = campaign(kinds, FULL, SEED + 1, tmp_path)
    print(f"CORRUPTION_SEED={SEED}: {dict(counts)}")
    assert not bad, "\n".join(bad)
    assert counts[REFUSED] > FULL * len(kinds) / 2


def test_campaign_detects_wrong_load(kinds: Mapping[str, Kind], tmp_path: Path) -> None:
    """Control: a changed value in a file without hashes."""
    kind = kinds["huggingface"]
    folder = Path(shutil.copytree(kind.folder, tmp_path / "copy"))
    file = folder / "model.safetensors"
    flip_byte(file)
    assert outcome(folder, kind).startswith("wrong values of weight:")
