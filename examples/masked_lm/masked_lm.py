"""Masked language modelling with a Hugging Face encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from toolkit import CompletedStep, Hook, Metric, Task

WORDS, MASK, LENGTH = 16, 16, 16  # the mask is the token after the words


class Sequences(torch.utils.data.Dataset):
    """Sequences that count from a random number, so that each token follows from any other."""

    def __init__(self, split: str, sequences: int = 4096) -> None:
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        first = torch.randint(WORDS, (sequences, 1), generator=generator)
        self.tokens = (first + torch.arange(LENGTH)) % WORDS

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """Mask other tokens in each epoch. The toolkit seeds torch for each sample, so a resumed run masks
        the same ones."""
        tokens = self.tokens[number]
        masked = torch.rand(LENGTH) < 0.2
        return {"input_ids": tokens.masked_fill(masked, MASK), "labels": tokens.masked_fill(~masked, -100)}


def bert(width: int = 64, layers: int = 2) -> nn.Module:
    """BERT with random weights. ``from_pretrained`` would start from published ones."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS + 1,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=2 * width,
            max_position_embeddings=LENGTH,
            initializer_range=0.1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


class MaskedLanguageModelling(Task):
    """Cross-entropy of the masked tokens; the loss is a mean over them, however many a micro-batch has."""

    unit = "label"

    def units(self, batch: Mapping[str, torch.Tensor]) -> int:
        return int((batch["labels"] != -100).sum())

    def loss_sum(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.evaluate(model, batch)["loss"]

    def evaluate(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        logits = model(input_ids=batch["input_ids"]).logits.float().flatten(0, 1)
        labels = batch["labels"].flatten()
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return {"loss": loss, "preds": logits.argmax(1), "target": labels}


class MaskedAccuracy(Metric):
    def __init__(self) -> None:
        self.add_state("right", 0)
        self.add_state("labels", 0)

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.right += ((preds == target) & (target != -100)).sum()
        self.labels += (target != -100).sum()

    def compute(self) -> torch.Tensor:
        return self.right / self.labels


class CountLabels(Hook):
    """Count the labels that the model has seen, also when the run resumes in another layout."""

    seen = 0

    def on_step(self, completed: CompletedStep) -> None:
        self.seen += completed.result.tokens
        self.context.log_metrics({"labels_seen": self.seen})

    def state_dict(self) -> Mapping[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]
