"""A task of a user in which some samples have a loss that is NaN or far too large."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit import NextTokenTask


def digest(sample: Any) -> str:
    return hashlib.sha256(np.asarray(sample, dtype=np.int64).tobytes()).hexdigest()[:16]


class PoisonedTask(NextTokenTask):
    """Weights the loss of samples by their content, and writes which samples are trained on.

    Args:
        poison: a JSON file with the weight of each poisoned sample by its ``digest``; null is NaN.
        seen: a folder for a file of each process, with a row ``[sample number, digest]`` per sample.
    """

    def __init__(self, poison: str, seen: str) -> None:
        self._weights = json.loads(Path(poison).read_text())
        self._seen = Path(seen)

    def collate(self, samples: Any) -> dict[str, torch.Tensor]:
        batch = dict(super().collate(samples))
        digests = [digest(sample) for sample in samples]
        weights = [self._weights.get(each, 1.0) for each in digests]
        rows = torch.tensor([math.nan if weight is None else weight for weight in weights])
        batch["loss_weights"] = rows[:, None].expand(batch["labels"].shape).contiguous()
        if self.sample_numbers is not None:
            with (self._seen / f"{os.getpid()}.jsonl").open("a") as file:
                for number, each in zip(self.sample_numbers.tolist(), digests, strict=True):
                    file.write(json.dumps([number, each]) + "\n")
        return batch
