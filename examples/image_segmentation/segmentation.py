"""Segmentation of drawn shapes: each pixel is background, disc or square; pixels at edges do not count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from toolkit import CompletedStep, Hook, Metric, Task

CLASSES, SIZE, IGNORED = 3, 24, 255


class Shapes(torch.utils.data.Dataset):
    """A disc and a square at random places, with noise. Sample ``number`` is always the same picture."""

    def __init__(self, split: str, pictures: int = 512) -> None:
        self.first, self.pictures = (0 if split == "train" else 1_000_000), pictures

    def __len__(self) -> int:
        return self.pictures

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.first + number)
        centres = torch.randint(5, SIZE - 5, (2, 2), generator=generator)
        grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"))
        away = (grid[None] - centres[:, :, None, None]).abs().float()
        disc, square = (away[0] ** 2).sum(0).sqrt(), away[1].amax(0)
        labels = torch.zeros(SIZE, SIZE, dtype=torch.int64)
        labels[disc <= 4], labels[square <= 3] = 1, 2
        image = (labels > 0).float() + 0.3 * torch.randn(SIZE, SIZE, generator=generator)
        labels[((disc - 4.5).abs() < 0.5) & (square > 3)] = IGNORED
        return {"image": image[None], "labels": labels}


class ConvolutionalNetwork(nn.Module):
    """GroupNorm instead of BatchNorm, whose running statistics would differ between ranks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def block(inputs: int, dilation: int) -> list[nn.Module]:
            convolution = nn.Conv2d(inputs, width, 3, padding=dilation, dilation=dilation)
            return [convolution, nn.GroupNorm(4, width), nn.GELU()]

        self.layers = nn.Sequential(
            *block(1, 1), *block(width, 2), *block(width, 4), nn.Conv2d(width, CLASSES, 1)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image.to(self.layers[0].weight.dtype)).float()


class Segmentation(Task):
    """Cross-entropy of the pixels that count."""

    unit = "pixel"

    def units(self, batch: Mapping[str, torch.Tensor]) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def loss_sum(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.evaluate(model, batch)["loss"]

    def evaluate(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        logits, labels = model(batch["image"]), batch["labels"]
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        right = (logits.argmax(1) == labels).sum()
        return {"loss": loss, "accuracy": right, "preds": logits.argmax(1), "target": labels}


class IntersectionOverUnion(Metric):
    """Mean over the classes, from a confusion matrix."""

    def __init__(self) -> None:
        self.add_state("confusion", torch.zeros(CLASSES, CLASSES, dtype=torch.int64))

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        counted = target != IGNORED
        pairs = CLASSES * target[counted] + preds[counted]
        self.confusion += torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES)

    def compute(self) -> dict[str, torch.Tensor]:
        both = self.confusion.diag()
        each = both / (self.confusion.sum(0) + self.confusion.sum(1) - both).clamp(min=1)
        return {"mean": each.mean(), "disc": each[1], "square": each[2]}


class SmoothLoss(Hook):
    """Log an exponential average of the loss, which continues when the run resumes."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay, self.average = decay, 0.0

    def on_step(self, completed: CompletedStep) -> None:
        share = max(1 - self.decay, 1 / completed.step)
        self.average += share * (completed.result.loss - self.average)
        self.context.log_metrics({"smooth_loss": self.average})

    def state_dict(self) -> Mapping[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average = state["average"]
