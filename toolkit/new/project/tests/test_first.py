"""The experiment conf/exp/first.yaml trains: pytest tests."""

from __future__ import annotations

from pathlib import Path

from toolkit import load_config, train

# One rank and one thread on the CPU, with plain PyTorch.
SHORT = ("+exp=first", "engine=local", "cluster.gpus_per_node=0", "debug.threads=1", "eval.every=0")


def test_first_experiment_learns_and_resumes(tmp_path: Path) -> None:
    run = f"run.dir={tmp_path / 'run'}"
    first = train(load_config(*SHORT, run, "train.steps=12"))
    second = train(load_config(*SHORT, run, "train.steps=20"))
    assert (first.state, first.step, second.state, second.step) == ("done", 12, "done", 20)
    losses = second.metrics["loss"].to_pylist()
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.2
