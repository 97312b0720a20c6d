"""From ``data.name`` to what a run reads: its stream of samples, and its evaluation sets. The loop knows nothing else of data.

data = open_data(config, batch, data_rank, ready_for(config, None, progress))
for micro_batches in data.stream.steps(first_step): ...
"""

from __future__ import annotations

from toolkit.config.schema import RunConfig
from toolkit.data.dataset.kind import DATASET
from toolkit.data.mixed import MIXTURE
from toolkit.data.records.arrays import ARRAYS
from toolkit.data.registry import DataKind, RunData
from toolkit.data.text import TEXT
from toolkit.plan.types import BatchPlan
from toolkit.progress import Progress

KINDS: dict[str, DataKind] = {
    "stdlib": TEXT,
    "prepared": TEXT,
    "mixture": MIXTURE,
    "dataset": DATASET,
    "arrays": ARRAYS,
}


def ready_for(config: RunConfig, vocab_size: int | None, progress: Progress) -> str:
    """The data of a run, ready and fit for it.

    Args:
        vocab_size: rows of the embedding, where the plan knows better than ``model.vocab_size`` (``model.pretrained``).

    Returns:
        The folder to open them from: ``data.path`` may point to another generation of the data later.

    Raises:
        InputError: they are absent or cannot be read, or lack what the run asks of them.
    """
    return KINDS[config.data.name].ready(config, vocab_size, progress)


def open_data(config: RunConfig, batch: BatchPlan, data_rank: int, folder: str) -> RunData:
    """
    Args:
        folder: that ``ready_for`` gave.

    Raises:
        InputError: a file is absent or is not what its manifest says.
    """
    return KINDS[config.data.name].open(config, batch, data_rank, folder)
