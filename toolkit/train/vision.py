"""The training task for labelled images: classification by cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from toolkit.data.evaluation import IGNORE_INDEX
from toolkit.data.kinds.arrays import IMAGE, LABEL, count_classes
from toolkit.data.records.reader import RecordManifest
from toolkit.engine.protocol import LOSS, MicroBatch
from toolkit.errors import ConfigError, Problem
from toolkit.plan.types import RunPlan
from toolkit.train.task import Task


class ImageClassificationTask(Task):
    """Image classification with ``model.target`` or ``model.hf``.

    ``forward(pixel_values)`` returns logits [images, classes], as a tensor or as ``logits`` of an object or
    mapping. ``pixel_values`` are fp32 [images, bands, height, width], standardized by the mean and standard
    deviation of each band in the training split. They are cast to the dtype of the model.

    Args:
        key, value: what selects the model, for errors.
    """

    unit = "image"

    def __init__(self, key: str, value: str, manifest: RecordManifest) -> None:
        self._key, self._value = key, value
        self._classes = count_classes(manifest)
        statistics = manifest.split("train").statistics[IMAGE]
        self._mean = _by_band(statistics.mean)
        # a constant band has no std
        self._scale = _by_band([1 / std if std else 1.0 for std in statistics.std])

    def collate(self, samples: Any) -> Mapping[str, torch.Tensor]:
        """Collate structs [images] with ``image`` and ``label``.

        Without samples the result is one masked image, because all ranks must run the model.
        """
        masked = not len(samples)
        if masked:
            samples = np.zeros(1, dtype=samples.dtype)
        labels = torch.from_numpy(samples[LABEL].astype(np.int64))
        return {
            "images": torch.from_numpy(samples[IMAGE]),
            "labels": torch.full_like(labels, IGNORE_INDEX) if masked else labels,
        }

    def units(self, batch: MicroBatch) -> int:
        return int((batch["labels"] != IGNORE_INDEX).sum())

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        return _loss_sum(self._logits(model, batch), batch["labels"])

    def evaluate(self, model: nn.Module, batch: MicroBatch) -> Mapping[str, torch.Tensor]:
        logits, labels = self._logits(model, batch), batch["labels"]
        return {
            LOSS: _loss_sum(logits, labels),
            "accuracy": (logits.argmax(dim=1) == labels).sum(),
            "preds": logits,
            "target": labels,
        }

    def standardize(self, images: torch.Tensor) -> torch.Tensor:
        """Return fp32 ``pixel_values`` of images of any dtype, on the device to which they were moved."""
        pixels = images.to(torch.float32, copy=True)  # copied, because what follows is in place
        mean, scale = (each.to(images.device, non_blocking=True) for each in (self._mean, self._scale))
        return pixels.sub_(mean).mul_(scale)

    def _logits(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        """fp32 [images, classes]."""
        dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        output: Any = model(pixel_values=self.standardize(batch["images"]).to(dtype))
        logits = (
            output["logits"]
            if isinstance(output, dict) and "logits" in output
            else getattr(output, "logits", output)
        )
        images = len(batch["labels"])
        if (
            not isinstance(logits, torch.Tensor)
            or logits.dim() != 2
            or len(logits) != images
            or logits.shape[1] < self._classes
        ):
            seen = (
                f"a tensor of shape {list(logits.shape)}"
                if isinstance(logits, torch.Tensor)
                else type(logits).__name__
            )
            raise ConfigError(
                Problem(
                    self._key,
                    f"{self._key}={self._value}, whose forward returned {seen} for {images} images",
                    "forward(pixel_values) returns logits [images, classes], as a tensor or as logits of "
                    f"an object; the labels need {self._classes} classes",
                    f"return such logits, for {self._classes} classes or more",
                )
            )
        return logits.float()


def _loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")


def _by_band(values: Any) -> torch.Tensor:
    """fp32 [bands, 1, 1]."""
    return torch.tensor(list(values), dtype=torch.float32)[:, None, None]


def vision_task(plan: RunPlan, manifest: RecordManifest) -> Task:
    """Return the task of the plan's model for records of labelled images."""
    model = plan.config.model
    return ImageClassificationTask(model.source_key, str(model.target or model.hf.architecture), manifest)
