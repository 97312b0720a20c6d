"""A tiny training for whole commands: its keys, its data and its losses."""

from __future__ import annotations

import json
from pathlib import Path

from toolkit.data.tokens.stdlib import ensure_stdlib

STEPS, EVERY = 6, 2
KEYS = (
    "model=gpt2",
    "model.vocab_size=264",
    "model.max_position_embeddings=32",
    "data=prepared",
    "train.sequence_length=32",
    "train.global_batch=8",
    f"train.steps={STEPS}",
    "optim.lr=3e-3",
    "optim.eps=1e-4",
    "schedule=constant",
    "schedule.warmup=0",
    "eval.every=0",
    f"checkpoint.every={EVERY}",
    "checkpoint.keep_last=1",
    "monitor=files",
    "debug.threads=1",
    "cluster.restarts=0",
)


def prepare_data(folder: Path) -> Path:
    """Tokenize the source of the package under test."""
    ensure_stdlib(folder, 264, root=Path(__file__).resolve().parents[2] / "toolkit")
    return folder


def read_losses(file: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in map(json.loads, file.read_text().splitlines())]
