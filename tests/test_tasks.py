"""The toolkit's tasks for models of transformers: masks, prefixes, padding.

pytest tests/test_tasks.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from toolkit.tasks import ClassificationTask, MaskedLanguageModelTask, SequenceToSequenceTask

MASK, LENGTH = 99, 64


def tokens(count: int, first: int = 0) -> np.ndarray:
    """Int64 [count, LENGTH + 1], all below 90."""
    return (np.arange(first, first + count)[:, None] * 7 + np.arange(LENGTH + 1)) % 90


def collate(samples: np.ndarray, numbers: Any, **arguments: Any) -> dict[str, torch.Tensor]:
    task = MaskedLanguageModelTask(MASK, 90, **arguments)
    task.sample_numbers = None if numbers is None else np.asarray(numbers)
    return dict(task.collate(samples))


def test_masks_follow_from_seed_and_sample_number() -> None:
    whole = collate(tokens(4), [0, 1, 2, 3])
    for row in range(4):
        alone = collate(tokens(1, row), [row])
        assert all(torch.equal(whole[name][row], alone[name][0]) for name in whole), "of the micro-batch"
    assert not torch.equal(whole["input_ids"], collate(tokens(4), [4, 5, 6, 7])["input_ids"])
    assert not torch.equal(whole["input_ids"], collate(tokens(4), [0, 1, 2, 3], seed=1)["input_ids"])
    fixed = collate(tokens(4), None)
    assert torch.equal(fixed["input_ids"][2:3], collate(tokens(1, 2), None)["input_ids"]), "in evaluations"


def test_shares_of_masked_random_and_kept_tokens() -> None:
    samples = tokens(400)
    batch = collate(samples, np.arange(400), special_tokens=(5, 6))
    chosen = batch["labels"] >= 0
    original = torch.from_numpy(samples[:, :-1])
    assert torch.equal(batch["labels"][chosen], original[chosen])
    assert torch.equal(batch["input_ids"][~chosen], original[~chosen])
    assert not chosen[(original == 5) | (original == 6)].any()
    assert chosen.float().mean() == pytest.approx(0.15 * 88 / 90, abs=0.01)
    inputs = batch["input_ids"][chosen]
    assert (inputs == MASK).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (inputs == original[chosen]).float().mean() == pytest.approx(0.1 + 0.1 / 90, abs=0.02)
    assert MaskedLanguageModelTask(MASK, 90).units(batch) == int(chosen.sum())


def test_padding_of_an_evaluation_counts_nothing() -> None:
    samples = tokens(2)
    samples[1, 10:] = -100
    batch = collate(samples, None, probability=1.0)
    assert (batch["labels"] >= 0).sum(dim=1).tolist() == [LENGTH, 10]
    assert batch["attention_mask"].sum(dim=1).tolist() == [LENGTH, 10]
    assert batch["input_ids"].min() >= 0
    text = SequenceToSequenceTask().collate(samples)
    assert text["attention_mask"].sum(dim=1).tolist() == [LENGTH // 2, 10]
    assert SequenceToSequenceTask().units(dict(text)) == LENGTH // 2


def test_samples_of_different_lengths_are_padded_and_masked() -> None:
    rows = [{"input_ids": [3, 4, 5], "labels": [1]}, {"input_ids": [6], "labels": [2, 3]}]
    batch = SequenceToSequenceTask(pad_token=9).collate(rows)
    assert batch["input_ids"].tolist() == [[3, 4, 5], [6, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[1, -100], [2, 3]]
    sounds = [{"input_values": np.ones(length, np.float32), "labels": length} for length in (2, 4)]
    batch = ClassificationTask().collate(sounds)
    assert batch["input_values"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["labels"].tolist() == [2, 4]


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_shares_outside_of_their_range_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        MaskedLanguageModelTask(MASK, 90, probability=share)
    with pytest.raises(ValueError, match="share"):
        SequenceToSequenceTask(prefix=share)
