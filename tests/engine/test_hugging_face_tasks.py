"""Masked language models, sequence to sequence, images and audio of transformers: ZeRO compared with local.

pytest tests/engine/test_hugging_face_tasks.py             bert
pytest tests/engine/test_hugging_face_tasks.py -m full     every task
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.engine.cases import Cell, quick
from toolkit.config.model import HuggingFaceConfig
from toolkit.config.schema import EngineName
from toolkit.engine.protocol import MicroBatch
from toolkit.plan import make_plan
from toolkit.plan.types import RunPlan
from toolkit.tasks import ClassificationTask, MaskedLanguageModelTask, SequenceToSequenceTask
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import Distance, RunTrace, check_parity, run_trace
from toolkit.testing.tiny import LENGTH, MICRO_BATCH, VOCABULARY, tiny_config
from toolkit.train.task import Task

TOLERANCE = Distance(loss=1e-5, norm=2e-3, weight=1e-5)  # gradient norms of images are above 10
MASK = VOCABULARY - 1
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def text(number: int) -> np.ndarray:
    """Tokens that count by one, int64 [LENGTH + 1]."""
    return (7 * number + np.arange(LENGTH + 1)) % 16


def image(number: int) -> dict[str, Any]:
    """A noisy square in one of four quadrants, whose number is the label."""
    random, label = np.random.default_rng(number), number % 4
    pixels = random.normal(scale=0.1, size=(3, 16, 16)).astype(np.float32)
    row, column = divmod(label, 2)
    pixels[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1
    return {"pixel_values": pixels, "labels": label}


def sound(number: int) -> dict[str, Any]:
    """A tone with one of four frequencies, of 600 to 899 samples."""
    label, length = number % 4, 600 + 37 * number % 300
    return {"input_values": np.sin(np.arange(length) * 0.1 * (label + 1)).astype(np.float32), "labels": label}


@dataclass(frozen=True)
class Example:
    """A tiny model, its task and its samples by number."""

    architecture: str
    config: dict[str, Any]
    task: Callable[[], Task]
    sample: Callable[[int], Any]
    lr: float = 3e-3
    steps: int = 11  # until the loss has fallen by REQUIRED_FALL


EXAMPLES = {
    "bert": Example(
        "AutoModelForMaskedLM",
        {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH},
        lambda: MaskedLanguageModelTask(MASK, 16, probability=0.3, seed=3),
        text,
    ),
    "t5": Example(
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",  # rounding flips relu units, which changes losses by 1e-5
            "decoder_start_token_id": 0,
        },
        SequenceToSequenceTask,
        text,
    ),
    "vit": Example(
        "AutoModelForImageClassification",
        {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 4},
        lambda: ClassificationTask(attention_mask=False),
        image,
        lr=1e-3,  # at 3e-3 its loss rises for some steps, which amplifies rounding
    ),
    "wav2vec2": Example(
        "AutoModelForAudioClassification",
        {
            **{name.removesuffix("_prob"): value for name, value in SIZES.items()},
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "feat_proj_dropout": 0.0,
            "final_dropout": 0.0,
            "layerdrop": 0.0,
            "apply_spec_augment": False,
            "conv_dim": [16, 16],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "feat_extract_norm": "layer",
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
            "classifier_proj_size": 16,
            "num_labels": 4,
        },
        ClassificationTask,
        sound,
        steps=20,
    ),
}


@dataclass(frozen=True)
class TaskCell(Cell):
    family: str | None = None
    model_type: str = "bert"

    def __str__(self) -> str:
        return super().__str__().replace("target", self.model_type)

    def plan(self) -> RunPlan:
        example = EXAMPLES[self.model_type]
        return make_plan(
            tiny_config(
                None,
                engine__name=EngineName.local if self.stage is None else EngineName.deepspeed,
                zero__stage=self.stage or 0,
                train__global_batch=self.data * MICRO_BATCH * self.accumulation,
                optim__lr=example.lr,
                model__hf=HuggingFaceConfig(
                    architecture=example.architecture, model_type=self.model_type, config=dict(example.config)
                ),
                task__target=f"toolkit.tasks.{type(example.task()).__name__}",
            ),
            self.world(),
        )


def cell(stage: int | None, model_type: str = "bert", ranks: int = 2) -> TaskCell:
    return TaskCell(stage, ranks, 4 // ranks, None, (), model_type)


def batches(plan: RunPlan, step: int, data_rank: int) -> list[MicroBatch]:
    """The micro-batches of a data rank, with the same samples in every layout."""
    from toolkit.data.order.stream import rank_positions

    example = EXAMPLES[str(plan.config.model.hf.model_type)]
    task = example.task()
    found = []
    for numbers in rank_positions(plan.batch, step, data_rank):
        samples = [example.sample(int(number) % 64) for number in numbers]
        task.sample_numbers = numbers
        found.append(dict(task.collate(np.stack(samples) if example.sample is text else samples)))
    return found


def first_rank_batches(plan: RunPlan, step: int, data_rank: int) -> list[MicroBatch]:
    """A control: every rank gets the samples of the first."""
    return batches(plan, step, 0)


def trace(rank: int, ranks: int, case: TaskCell, wrong: bool = False) -> RunTrace:
    example = EXAMPLES[case.model_type]
    return run_trace(
        case.plan(),
        rank=rank,
        task=example.task(),
        batches=first_rank_batches if wrong else batches,
        steps=example.steps,
    )


CELLS = [cell(stage, model_type) for model_type, stage in itertools.product(EXAMPLES, (3, 1))]


@pytest.mark.parametrize("case", quick(CELLS, 1), ids=str)
def test_zero_matches_local(case: TaskCell, pool: RankPool) -> None:
    traces = pool.run(trace, case, ranks=case.ranks)
    assert all(other.results == traces[0].results for other in traces)
    check_parity(traces[0], trace(0, 1, cell(None, case.model_type, ranks=1)), TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("model_type", EXAMPLES)
def test_duplicated_samples_are_detected(model_type: str, pool: RankPool) -> None:
    wrong = pool.run(trace, cell(2, model_type), True, ranks=2)[0]
    distance = wrong.distance(trace(0, 1, cell(None, model_type, ranks=1)))
    assert distance.loss > 10 * TOLERANCE.loss
