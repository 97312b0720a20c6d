"""A small vision transformer on small synthetic tiles: plans and micro-batches for ``testing/parity.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.config.model import ModelConfig
from toolkit.config.schema import EngineName, EvalConfig, RunConfig
from toolkit.data.kinds.arrays import ARRAYS
from toolkit.data.order.stream import Stream, rank_positions
from toolkit.data.records.reader import RecordManifest, read_record_manifest
from toolkit.data.tiles import make_tiles
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.protocol import EvalResult, MicroBatch
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.testing.parity import RunTrace, run_trace
from toolkit.testing.tiny import tiny_config
from toolkit.train.micro_batches import prepare_batch
from toolkit.train.vision import ImageClassificationTask, vision_task

BANDS, SIZE, CLASSES = 4, 16, 4
VIT: dict[str, Any] = {
    "bands": BANDS,
    "image_size": SIZE,
    "patch_size": 4,
    "classes": CLASSES,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def make_small_tiles(folder: Path, **splits: int) -> RecordManifest:
    return make_tiles(folder, splits, bands=BANDS, size=SIZE, classes=CLASSES)


def use_images(config: RunConfig, folder: Path) -> None:
    """Change a run on text into one on the tiles of ``folder``."""
    config.model = ModelConfig(target="toolkit.models.vision.vit", arguments=dict(VIT))
    config.data.name, config.data.path = "arrays", str(folder)


def image_plan(folder: Path, *, ranks: int = 1, **changes: Any) -> RunPlan:
    """Keys as in ``tiny_config``; engine ``local`` on one rank and ``deepspeed`` on several."""
    config = tiny_config(None, train__sequence_length=128, **changes)
    use_images(config, folder)
    config.engine.name = EngineName.local if ranks == 1 else EngineName.deepspeed
    return make_plan(config, World(ranks=ranks, ranks_per_node=ranks, device=Device.CPU, has_compiler=True))


def image_task(plan: RunPlan) -> ImageClassificationTask:
    task = vision_task(plan, read_record_manifest(plan.config.data.path))
    assert isinstance(task, ImageClassificationTask)
    return task


def image_batches(plan: RunPlan, step: int, data_rank: int) -> list[MicroBatch]:
    """Return a data rank's part of the global batch of ``step``, read through the run's stream."""
    stream = ARRAYS.open(plan.config, plan.batch, data_rank, plan.config.data.path).stream
    assert isinstance(stream, Stream)
    task, positions = image_task(plan), rank_positions(plan.batch, step, data_rank)
    return [task.collate(stream.samples(some)) for some in positions]


def trace_images(rank: int, ranks: int, plan: RunPlan, steps: int = 20) -> RunTrace:
    assert ranks == plan.axes.size
    return run_trace(plan, rank=rank, steps=steps, task=image_task(plan), batches=image_batches)


def evaluate_images(rank: int, ranks: int, plan: RunPlan, evaluation: EvalConfig) -> EvalResult:
    """Evaluate the validation split with the initial weights; sums over all ranks."""
    plan.config.eval = evaluation
    task = image_task(plan)
    data = ARRAYS.open(plan.config, plan.batch, plan.axes.coordinates(rank).data, plan.config.data.path)
    engine = build_engine(plan, task, rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    results = [
        engine.eval_step([prepare_batch(task, some, engine.device) for some in batch])
        for batch in data.sets["validation"].batches()
    ]
    engine.close()
    right = sum(result.others["accuracy"] for result in results)
    return EvalResult(
        sum(result.loss_sum for result in results),
        sum(result.tokens for result in results),
        {"accuracy": right},
    )
