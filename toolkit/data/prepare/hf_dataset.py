"""Rows of a ``datasets`` source: a folder of ``save_to_disk``, or a folder or hub id to stream."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.prepare import InputDatasetConfig
from toolkit.errors import InputError, Problem

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

BATCH_ROWS = 64


def row_ranges(path: str, config: InputDatasetConfig, target_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield ranges [start, end) of rows of about ``target_bytes``, with their bytes.

    For a streamed dataset the ranges are its shards, of unknown size.
    """
    from datasets import Dataset

    opened = _open(path, config.name, config.split, config.revision)
    if not isinstance(opened, Dataset):
        yield from ((number, number + 1, 0) for number in range(opened.num_shards))
        return
    rows = max(1, int(opened.num_rows * target_bytes / max(1, opened.data.nbytes)))
    for start in range(0, opened.num_rows, rows):
        end = min(start + rows, opened.num_rows)
        yield start, end, opened.data.nbytes * (end - start) // opened.num_rows


def read_range(
    path: str, config: InputDatasetConfig, column: str, start: int, end: int
) -> Iterator[tuple[int, Any]]:
    """Yield (number, {column: value}) of a range; numbers of a streamed dataset count in its shard.

    For ``meta.body`` the column is ``meta``, unless a column has that whole name.
    """
    from datasets import Dataset

    opened = _open(path, config.name, config.split, config.revision)
    map_style = isinstance(opened, Dataset)
    selected: Any = (
        opened.select(range(start, end))
        if isinstance(opened, Dataset)
        else opened.shard(opened.num_shards, start)
    )
    number = start if map_style else 0
    for table in selected.with_format("arrow").iter(batch_size=BATCH_ROWS):
        name = column if column in table.column_names else column.partition(".")[0]
        if name not in table.column_names:
            seen, available = f"text={column}, no such column in {path}", ", ".join(table.column_names)
            raise InputError(
                Problem("text", seen, f"the columns are {available}", "write text=COLUMN with one of them")
            )
        for value in table.column(name).to_pylist():
            yield number, {name: value}
            number += 1


@cache
def _open(path: str, name: str | None, split: str, revision: str | None) -> Dataset | IterableDataset:
    import datasets

    datasets.disable_progress_bars()
    try:
        if (Path(path) / "dataset_dict.json").is_file() or (Path(path) / "state.json").is_file():
            saved = datasets.load_from_disk(path)
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(path, name, split=split, streaming=True, revision=revision)
    except (KeyError, ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        seen = f"input={path} dataset.split={split}: {type(error).__name__} {error}"
        remedy = (
            "write input=FOLDER or a hub id that is reachable, "
            "with its dataset.split=, dataset.name= and dataset.revision="
        )
        raise InputError(Problem("input", seen, "the package datasets opens the input", remedy)) from error
