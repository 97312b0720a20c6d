"""The training task for labelled images: classification by cross-entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from toolkit.data.evaluation import IGNORED
from toolkit.data.records.arrays import IMAGE, LABEL, classes
from toolkit.data.records.reader import RecordManifest
from toolkit.engine.protocol import LOSS, MicroBatch
from toolkit.errors import ConfigError, Problem
from toolkit.plan.types import RunPlan
from toolkit.train.task import Task


class VisionTask(Task):
    """Image classification with a ``model.target`` module, for example one of transformers'.

    ``forward(pixel_values)`` returns logits [images, classes], as a tensor or as ``logits`` of an object or
    mapping. ``pixel_values`` are fp32 [images, bands, height, width], standardized by the mean and standard
    deviation of each band in the training split. They are cast to the dtype of the model.
    """

    def __init__(self, target: str, manifest: RecordManifest) -> None:
        self._target = target
        self._classes = classes(manifest)
        statistics = manifest.split("train").statistics[IMAGE]
        self._mean = _by_band(statistics.mean)
        self._scale = _by_band(
            [1 / std if std else 1.0 for std in statistics.std]
        )  # a constant band has no std

    def collate(self, samples: np.ndarray, device: torch.device) -> MicroBatch:
        """Collate structs [images] with ``image`` and ``label``.

        Without samples the result is one masked image, because all ranks must run the model.
        """
        masked = not len(samples)
        if masked:
            samples = np.zeros(1, dtype=samples.dtype)
        # Transfer the stored dtype and convert on the device. Always copy, because what follows is in place.
        pixels = torch.from_numpy(samples[IMAGE]).to(device).to(torch.float32, copy=True)
        pixels.sub_(self._mean.to(device)).mul_(self._scale.to(device))
        labels = torch.from_numpy(samples[LABEL].astype(np.int64)).to(device)
        return {"pixel_values": pixels, "labels": torch.full_like(labels, IGNORED) if masked else labels}

    def units(self, batch: MicroBatch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        return _loss_sum(self._logits(model, batch), batch["labels"])

    def eval_sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, torch.Tensor]:
        logits = self._logits(model, batch)
        return {
            LOSS: _loss_sum(logits, batch["labels"]),
            "accuracy": (logits.argmax(dim=1) == batch["labels"]).sum(),
        }

    def _logits(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        """fp32 [images, classes]."""
        dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        output: Any = model(pixel_values=batch["pixel_values"].to(dtype))
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
                    "model.target",
                    f"model.target={self._target}, whose forward returned {seen} for {images} images",
                    "forward(pixel_values) returns logits [images, classes], as a tensor or as logits of "
                    f"an object; the labels need {self._classes} classes",
                    f"return such logits, for {self._classes} classes or more",
                )
            )
        return logits.float()


def _loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def _by_band(values: Any) -> torch.Tensor:
    """fp32 [bands, 1, 1]."""
    return torch.tensor(list(values), dtype=torch.float32)[:, None, None]


def vision_task(plan: RunPlan, manifest: RecordManifest) -> Task:
    """Return the task of the plan's model for records of labelled images."""
    assert plan.config.model.target is not None, "a rule refuses images with the families' models"
    return VisionTask(plan.config.model.target, manifest)
