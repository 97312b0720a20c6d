"""Direct preference optimization (Rafailov et al., 2305.18290): prefer one continuation to another."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from toolkit import Hook, Metric, Task

WORDS, PROMPT, LENGTH = 48, 4, 16


class Preferences(torch.utils.data.Dataset):
    """A prompt that counts in steps of 1 to 3; the preferred continuation goes on, the other one does not."""

    def __init__(self, split: str, pairs: int = 1024) -> None:
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        first = torch.randint(WORDS, (pairs, 1), generator=generator)
        stride = torch.randint(1, 4, (pairs, 1), generator=generator)
        self.chosen = (first + stride * torch.arange(LENGTH)) % WORDS
        self.rejected = torch.randint(WORDS, (pairs, LENGTH), generator=generator)
        self.rejected[:, :PROMPT] = self.chosen[:, :PROMPT]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"chosen": self.chosen[number], "rejected": self.rejected[number]}


class PolicyAndReference(nn.Module):
    """A language model, and a frozen copy of its first weights: saved and sharded, but not trained."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
        self.policy = LlamaForCausalLM(config)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return how much more likely the policy makes each continuation than the reference: [sequences]."""
        with torch.no_grad():
            before = log_likelihood(self.reference, input_ids)
        return log_likelihood(self.policy, input_ids) - before


def log_likelihood(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=input_ids, use_cache=False).logits.float()
    of_tokens = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2)
    return of_tokens[:, PROMPT - 1 :].sum(1)  # the prompt is given


class DirectPreferenceOptimization(Task):
    """Equation 7 of the paper, with one forward pass for each continuation.

    Args:
        beta: how closely the policy stays to the reference.
    """

    unit = "pair"

    def __init__(self, beta: float = 0.1) -> None:
        self.beta = beta

    def loss_sum(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.evaluate(model, batch)["loss"]

    def evaluate(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        margins = self.beta * (model(batch["chosen"]) - model(batch["rejected"]))
        return {"loss": -nn.functional.logsigmoid(margins).sum(), "margins": margins}


class Preferred(Metric):
    """The share of pairs in which the policy moved towards the preferred continuation."""

    def __init__(self) -> None:
        self.add_state("right", 0)
        self.add_state("pairs", 0)
        self.add_state("smallest", float("inf"), reduce="min")

    def update(self, margins: torch.Tensor) -> None:
        self.right += (margins > 0).sum()
        self.pairs += len(margins)
        self.smallest = torch.minimum(self.smallest, margins.min())

    def compute(self) -> dict[str, torch.Tensor]:
        return {"share": self.right / self.pairs, "smallest_margin": self.smallest}


class BestMargin(Hook):
    """Remember the largest of the smallest margins, also when the run resumes."""

    best = float("-inf")

    def on_eval(self, row: Mapping[str, Any]) -> None:
        self.best = max(self.best, row["preferred/smallest_margin"])
        self.context.log_metrics({"best_margin": self.best})

    def state_dict(self) -> Mapping[str, Any]:
        return {"best": self.best} if self.best > float("-inf") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = state["best"]
