"""The vision task, and whole runs on images.

pytest tests/train/test_vision.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.images import BANDS, CLASSES, SIZE, VIT, image_plan, image_task, make_small_tiles, use_images
from tests.train.tiny_run import TinyRun, equal_tensors
from toolkit.config.schema import EvalConfig, RunConfig
from toolkit.data.evaluation import IGNORE_INDEX
from toolkit.data.kinds.arrays import IMAGE, LABEL
from toolkit.data.records.reader import open_records
from toolkit.data.records.writer import RecordWriter
from toolkit.data.registry import prepare_data
from toolkit.errors import CheckpointError, ConfigError, ExitCode, InputError, PlanError
from toolkit.estimate.plan_report import to_json
from toolkit.plan import make_plan
from toolkit.progress import Progress

STEPS = 40
CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "train__steps": STEPS,
    "train__global_batch": 16,
    "train__micro_batch": 8,
    "train__sequence_length": 128,
    "optim__lr": 3e-3,
}


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "tiles"
    make_small_tiles(folder, train=256, validation=50)
    return folder


def start(
    folder: Path, tiles: Path, stop_after: int | None = None, dropout: float = 0.1, **changes: Any
) -> TinyRun:
    def images(config: RunConfig) -> None:
        use_images(config, tiles)
        config.model.arguments["dropout"] = dropout
        config.eval = EvalConfig(every=20, batches=9)

    return TinyRun(folder, tiles, stop_after, images, **{**SETTINGS, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiles: Path) -> TinyRun:
    return start(tmp_path_factory.mktemp("runs") / "whole", tiles, checkpoint__export=True)


def evaluations(run: TinyRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.directory.eval_file.read_text().splitlines()]


def test_model_generalizes_to_the_validation_split(whole: TinyRun) -> None:
    assert whole.code is ExitCode.DONE
    rows = whole.rows()
    assert rows[0]["loss"] == pytest.approx(np.log(CLASSES), abs=0.3)
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert all(row["images"] == 16 and "tokens" not in row for row in rows)
    first, last = evaluations(whole)
    assert list(last) == ["step", "set", "loss", "accuracy", "images", "seconds"]
    assert (first["step"], last["step"], last["images"]) == (20, 40, 50)
    assert last["accuracy"] > 0.75, "chance is 0.25"
    assert last["loss"] < first["loss"]


def test_resumed_run_equals_an_unstopped_run_bitwise(whole: TinyRun, tiles: Path, tmp_path: Path) -> None:
    stopped = start(tmp_path / "run", tiles, stop_after=17)
    assert (stopped.code, stopped.status.step) == (ExitCode.STOPPED, 17)
    resumed = start(tmp_path / "run", tiles)
    assert resumed.rows() == whole.rows()
    assert [row[2] for row in resumed.evals()] == [row[2] for row in whole.evals()]
    assert equal_tensors(resumed.state(), whole.state())


@pytest.mark.full
def test_micro_batch_does_not_change_the_losses(tiles: Path, tmp_path: Path) -> None:
    """The control uses another shuffle seed."""

    def losses(name: str, *, config: dict[str, Any], stop_after: int | None = None) -> list[float]:
        run = start(tmp_path / name, tiles, stop_after, dropout=0.0, **{"train__steps": 10, **config})
        return [row["loss"] for row in run.rows()]

    alone = losses("alone", config={})
    losses("hop", config={"train__micro_batch": 2}, stop_after=4)
    assert losses("hop", config={"train__micro_batch": 16}) == pytest.approx(alone, abs=1e-5)
    assert (
        max(abs(a - b) for a, b in zip(losses("other", config={"data__shuffle_seed": 1}), alone, strict=True))
        > 1e-2
    )


def test_transformers_opens_the_export(whole: TinyRun, tiles: Path) -> None:
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(whole.directory.export).eval()
    task, records = image_task(image_plan(tiles)), open_records(tiles, "validation")
    with torch.no_grad():
        sums = task.eval_sums(model, task.collate(records.read(np.zeros(50, dtype=np.int64), np.arange(50))))
    last = evaluations(whole)[-1]
    assert float(sums["loss"]) / 50 == pytest.approx(last["loss"], abs=1e-5)
    assert int(sums["accuracy"]) == round(50 * last["accuracy"])


def test_resume_with_other_records_is_refused(whole: TinyRun, tiles: Path, tmp_path: Path) -> None:
    shutil.copytree(whole.directory.path, tmp_path / "run")
    make_small_tiles(tmp_path / "other", train=255, validation=50)
    with pytest.raises(CheckpointError, match=r"data=.*the checkpoint has data="):
        start(tmp_path / "run", tmp_path / "other", train__steps=STEPS + 1)


# -- the task


def test_images_are_standardized_by_the_training_split(tiles: Path) -> None:
    task, records = image_task(image_plan(tiles)), open_records(tiles, "train")
    samples = records.read(np.zeros(256, dtype=np.int64), np.arange(256))
    batch = task.collate(samples)
    pixels = task.standardize(batch["images"])
    assert pixels.shape == (256, BANDS, SIZE, SIZE)
    assert pixels.dtype == torch.float32
    assert torch.allclose(pixels.mean(dim=(0, 2, 3)), torch.zeros(BANDS), atol=1e-4)
    assert torch.allclose(pixels.std(dim=(0, 2, 3)), torch.ones(BANDS), atol=1e-4)
    assert batch["labels"].tolist() == samples[LABEL].tolist()
    raw = torch.from_numpy(samples[IMAGE].astype(np.float64)).numpy()
    statistics = records.split.statistics[IMAGE]
    again = (raw - np.array(statistics.mean)[:, None, None]) / np.array(statistics.std)[:, None, None]
    assert np.allclose(pixels.numpy(), again, atol=1e-4)


def test_collate_of_no_samples_gives_a_masked_image(tiles: Path) -> None:
    task, records = image_task(image_plan(tiles)), open_records(tiles, "validation")
    nothing = np.zeros(0, dtype=np.int64)
    batch = task.collate(records.read(nothing, nothing))
    assert (task.units(batch), batch["labels"].tolist()) == (0, [IGNORE_INDEX])
    sums = task.eval_sums(Constant(CLASSES), batch)
    assert {name: float(value.detach()) for name, value in sums.items()} == {"loss": 0.0, "accuracy": 0.0}


class Constant(nn.Module):
    """The same logits for every image; class 0 is the most likely."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.arange(classes, 0, -1.0))

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.logits.expand(len(pixel_values), -1)}


def test_evaluation_sums_loss_and_accuracy(tiles: Path) -> None:
    task, records = image_task(image_plan(tiles)), open_records(tiles, "validation")
    samples = records.read(np.zeros(50, dtype=np.int64), np.arange(50))
    sums = task.eval_sums(Constant(CLASSES), task.collate(samples))
    assert int(sums["accuracy"]) == int((samples[LABEL] == 0).sum())
    logits = torch.arange(CLASSES, 0, -1.0)
    expected = (logits.logsumexp(0) - logits)[torch.from_numpy(samples[LABEL])].sum()
    assert float(sums["loss"].detach()) == pytest.approx(float(expected), rel=1e-5)


# -- what does not fit


def test_too_few_classes_are_refused(tiles: Path) -> None:
    task = image_task(image_plan(tiles))
    samples = open_records(tiles, "train").read(np.zeros(2, dtype=np.int64), np.arange(2))
    with pytest.raises(ConfigError, match=r"returned a tensor of shape \[2, 3\] for 2 images"):
        task.loss_sum(Constant(CLASSES - 1), task.collate(samples))


def test_text_settings_are_refused_with_images(tiles: Path) -> None:
    plan = image_plan(tiles)
    assert to_json(plan)["batch"]["images_per_step"] == 8
    for section, name, value, shows in (
        ("model", "target", None, "images need a module of your own"),
        ("monitor", "prompt", "once", "cannot continue a text"),
    ):
        config = image_plan(tiles).config
        setattr(getattr(config, section), name, value)
        if name == "target":
            config.model.arguments, config.model.family = {}, "llama"
        with pytest.raises(PlanError, match=shows) as caught:
            make_plan(config, plan.world)
        assert all(problem.remedy for problem in caught.value.problems)


def write(folder: Path, fields: dict[str, Any], **values: Any) -> Path:
    with RecordWriter(folder, fields, description="", licence="") as writer:
        writer.add("train", **values)
    return folder


IMAGES = np.zeros((BANDS, SIZE, SIZE))
UNFIT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no label": ({"image": ("uint8", IMAGES.shape)}, {"image": IMAGES}, "label must be a whole number"),
    "fraction": (
        {"image": ("uint8", IMAGES.shape), "label": ("float32", ())},
        {"image": IMAGES, "label": 1},
        "label must be a whole",
    ),
    "flat image": (
        {"image": ("uint8", (4, 4)), "label": ("uint8", ())},
        {"image": IMAGES[0, :4, :4], "label": 1},
        "image must be numbers",
    ),
    "no class": (
        {"image": ("uint8", IMAGES.shape), "label": ("int8", ())},
        {"image": IMAGES, "label": -1},
        "label of -1",
    ),
}


@pytest.mark.parametrize(("fields", "values", "shows"), UNFIT.values(), ids=list(UNFIT))
def test_records_without_what_the_task_needs_are_refused(
    fields: dict[str, Any], values: dict[str, Any], shows: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=shows):
        prepare_data(
            image_plan(write(tmp_path / "records", fields, **values)).config, None, Progress.silent()
        )


def test_a_missing_split_is_refused(tiles: Path, tmp_path: Path) -> None:
    config = image_plan(tiles).config
    assert prepare_data(config, None, Progress.silent()) == str(tiles)
    config.eval = EvalConfig(every=1, sets=["validation", "test"])
    with pytest.raises(InputError, match=r"no split test"):
        prepare_data(config, None, Progress.silent())


def test_experiment_model_fits_its_tiles() -> None:
    """Shapes and classes of ``python -m toolkit.data.tiles`` as it stands, and of +exp=vit_tiles."""
    from toolkit.config.compose import compose
    from toolkit.data.tiles import CLASSES as TILE_CLASSES
    from toolkit.data.tiles import make_tile
    from toolkit.models.user_model import build_user_module

    config = compose(["+exp=vit_tiles"])
    assert set(VIT) <= set(config.model.arguments)
    assert config.model.arguments["classes"] == TILE_CLASSES
    model = build_user_module(config.model, 0)
    image = torch.from_numpy(make_tile(3, np.random.default_rng(0), 12, 64, TILE_CLASSES).astype(np.float32))[
        None
    ]
    assert model(pixel_values=image).logits.shape == (1, TILE_CLASSES)
