"""Evaluation: reproducible windows shared by ranks, padded short splits, and the unigram baseline."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.data_folders import PositionTokens, batch_plan, make_folder
from toolkit.data import evaluation
from toolkit.data.evaluation import (
    IGNORE_INDEX,
    count_tokens,
    eval_batches,
    eval_targets,
    inputs_and_labels,
    unigram_loss,
)
from toolkit.data.tokens.token_array import open_split

LAYOUTS = st.sampled_from([(1, 1), (2, 2), (1, 4), (4, 1)])  # micro-batch, ranks


@given(tokens=st.integers(0, 400), length=st.integers(1, 9), batches=st.integers(1, 5), layout=LAYOUTS)
@settings(max_examples=100, deadline=None)
def test_ranks_share_the_first_windows(
    tokens: int, length: int, batches: int, layout: tuple[int, int]
) -> None:
    """For any length of the split, ranks have equally many micro-batches and every label occurs once."""
    micro, ranks = layout
    source, plan = PositionTokens(tokens), batch_plan(micro, 8, ranks)
    of_ranks = [list(eval_batches(source, length, batches, plan, rank)) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in of_ranks}) == 1
    assert 1 <= len(of_ranks[0]) <= batches
    labels = []
    for of_all in zip(*of_ranks, strict=True):
        assert {len(micro_batches) for micro_batches in of_all} == {8 // micro // ranks}
        for micro_batch in (part for parts in zip(*of_all, strict=True) for part in parts):
            assert micro_batch.shape == (micro, length + 1)
            inputs, targets = inputs_and_labels(micro_batch)
            assert (inputs >= 0).all()
            seen = targets != IGNORE_INDEX
            assert np.array_equal(inputs[seen] + 1, targets[seen])
            labels.append(targets[seen])
    expected = np.arange(1, max(1, min(tokens, batches * 8 * length + 1)))
    assert np.array_equal(np.concatenate(labels), expected)
    assert np.array_equal(eval_targets(source, length, batches, 8), expected)


def test_evaluation_batches_are_reproducible() -> None:
    first, second = (
        np.stack(
            [np.stack(batch) for batch in eval_batches(PositionTokens(500), 7, 4, batch_plan(2, 8, 2), 1)]
        )
        for _ in range(2)
    )
    assert np.array_equal(first, second)
    assert first.shape == (4, 2, 2, 8)


def test_unigram_loss_by_hand(tmp_path: Path) -> None:
    make_folder(
        tmp_path / "data",
        {"train": [np.array([5, 5, 5, 6])], "validation": [np.array([9, 5, 6, 7])]},
        vocab_size=10,
    )
    train, validation = (open_split(tmp_path / "data", name) for name in ("train", "validation"))
    targets = eval_targets(validation, 3, 1, 1)
    assert targets.tolist() == [5, 6, 7]  # the predicted tokens: all but the first
    by_hand = -(math.log(4 / 14) + math.log(2 / 14) + math.log(1 / 14)) / 3
    assert unigram_loss(train, targets) == pytest.approx(by_hand)


def test_unigram_loss_of_random_tokens_is_their_entropy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    make_folder(tmp_path / "data", {"train": [random.integers(0, 64, 200_000)]}, vocab_size=64)
    train = open_split(tmp_path / "data", "train")
    assert unigram_loss(train, random.integers(0, 64, 50_000)) == pytest.approx(math.log(64), abs=2e-3)
    assert count_tokens(train).sum() == 200_000
    monkeypatch.setattr(evaluation, "COUNTED_TOKENS", 1234)
    assert count_tokens(train).sum() == 1234
