"""The stream as PyTorch datasets: the same samples with any number of workers, and portable states."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data.data_folders import Ints, PositionTokens, batch_plan, documents, make_folder
from tests.data.test_mixture import mixed
from toolkit.config.compose import compose
from toolkit.config.mixture import parse_phases
from toolkit.data.order.samples import TokenWindows
from toolkit.data.order.stream import Stream
from toolkit.data.torch_dataset import SampleDataset, StepDataset
from toolkit.errors import CheckpointError
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World

ROOT = Path(__file__).resolve().parents[2]

STEPS = 12


def stream(micro_batch: int = 2, ranks: int = 2, rank: int = 0, **changes: Any) -> Stream:
    return mixed(batch=batch_plan(micro_batch, 8, ranks), rank=rank, **changes)


def straight(steps: int = STEPS) -> list[np.ndarray]:
    mine = stream()
    items = [np.stack(step) for step in itertools.islice(mine.steps(0), steps)]
    mine.close()
    return items


def same(found: Iterable[torch.Tensor], expected: Iterable[np.ndarray]) -> bool:
    return all(np.array_equal(a.numpy(), b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_dataloader_yields_the_same_steps(workers: int) -> None:
    loader = DataLoader(StepDataset(stream(), STEPS), batch_size=None, num_workers=workers)
    assert same(loader, straight())
    data = StepDataset(stream(), STEPS)
    data.load_state_dict(json.loads(json.dumps(data.state_at(5))))
    assert same(DataLoader(data, batch_size=None, num_workers=workers), straight()[5:])


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("stop", [1, 4])
def test_stateful_dataloader_resumes(workers: int, stop: int) -> None:
    loader = StatefulDataLoader(StepDataset(stream(), STEPS), batch_size=None, num_workers=workers)
    iterator = iter(loader)
    assert same(itertools.islice(iterator, stop), straight(stop))
    saved = loader.state_dict()
    resumed = StatefulDataLoader(StepDataset(stream(), STEPS), batch_size=None, num_workers=workers)
    resumed.load_state_dict(saved)
    assert same(resumed, straight()[stop:])


def test_a_state_fits_other_ranks_and_stays_small() -> None:
    data = StepDataset(stream(), STEPS)
    assert same(map(torch.from_numpy, itertools.islice(data, 3)), straight(3))
    state = json.loads(json.dumps(data.state_dict()))
    assert (state["step"], state["samples"]) == (3, 24)
    assert len(json.dumps(state)) <= 1024
    parts = []
    for rank in range(4):
        other = StepDataset(stream(1, 4, rank), STEPS)
        other.load_state_dict(state)
        parts.append(next(iter(other)))
    both = [next(iter(StepDataset(stream(2, 2, rank), STEPS, first_step=3))) for rank in range(2)]
    assert np.array_equal(np.stack(parts, axis=1).reshape(8, -1), np.stack(both, axis=1).reshape(8, -1))


def test_a_state_of_something_else_is_refused() -> None:
    state = StepDataset(stream(), STEPS).state_at(3)
    with pytest.raises(CheckpointError, match="sample 48, in the saved state at 24"):
        StepDataset(mixed(batch=batch_plan(2, 16, 2)), STEPS).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"write data\.shuffle_seed=3"):
        StepDataset(stream(seed=4), STEPS).load_state_dict(state)


def test_sample_dataset_reads_by_position() -> None:
    """Map-style: all ranks' samples in the run's order, one by one, in batches and from the end."""
    mine = stream()
    data = SampleDataset(mine, 40)
    whole = mine.samples(np.arange(40))
    assert len(data) == 40
    assert np.array_equal(np.stack([data[i] for i in range(40)]), whole)
    assert np.array_equal(data[-1], whole[39])
    for workers in (0, 2):
        assert np.array_equal(
            torch.cat(list(DataLoader(data, batch_size=16, num_workers=workers))).numpy(), whole
        )
    for beyond in (40, -41):
        with pytest.raises(IndexError):
            data[beyond]


def test_consecutive_positions_are_located_once_per_run() -> None:
    """Ordering costs a hundred numpy calls for any number of positions: a loader that reads 8 at a time
    pays for them once per 4,096. Any other order of positions gives the same samples.
    """
    calls = []

    class Counted(Stream):
        def locate(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
            calls.append(len(positions))
            return super().locate(positions)

    stream = Counted(
        {"train": TokenWindows(PositionTokens(70_000), 7, 0)},
        None,
        seed=0,
        batch=batch_plan(1, 1, 1),
        data_rank=0,
    )
    positions = SampleDataset(stream, 10_000)
    in_order = np.concatenate(
        [positions.__getitems__(list(range(first, first + 8))) for first in range(0, 9_000, 8)]
    )
    assert len(calls) == 6, "two a run of 4,096: the first one it cannot know"
    order = np.random.default_rng(0).permutation(9_000)
    shuffled = np.concatenate(
        [positions.__getitems__(order[first : first + 9].tolist()) for first in range(0, 9_000, 9)]
    )
    assert np.array_equal(shuffled, in_order[order])


def test_training_loop_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code block of docs/data.md as it is, and the experiment of its curriculum."""
    guide = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    make_folder(tmp_path / "data" / "web", {"train": documents(100, 300), "validation": documents(9, 300)})
    monkeypatch.chdir(tmp_path)
    code = guide.partition("## In your own loop")[2].partition("```python\n")[2].partition("```")[0]
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["step"] == 9
    assert found["tokens"].shape == (4, 4, 65)
    assert np.array_equal(found["resumed"], np.stack(next(found["stream"].steps(10))))
    found["stream"].close()
    (tmp_path / "mine" / "exp").mkdir(parents=True)
    text = guide.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "mine" / "exp" / "curriculum.yaml").write_text(text, encoding="utf-8")
    config = compose(["--config-dir=mine", "+exp=curriculum"])
    assert [phase.from_step for phase in parse_phases(config.data.sources, config.data.phases)] == [0, 8000]
    make_plan(config, World(ranks=2, ranks_per_node=2, device=Device.CPU))
