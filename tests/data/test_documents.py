"""Document boundaries in windows and their waste, compared with direct counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.data_folders import batch_plan, make_folder
from toolkit.config.data import DataConfig, DocumentMasking
from toolkit.config.schema import RunConfig, TrainConfig
from toolkit.data.manifest import DataManifest, write_manifest
from toolkit.data.registry import open_data, prepare_data
from toolkit.data.tokens.documents import compute_waste, estimate_waste, position_ids
from toolkit.data.tokens.token_array import open_split
from toolkit.errors import InputError
from toolkit.progress import Progress

END = 0


def written_out(row: list[int]) -> list[int]:
    places, place = [], 0
    for token in row[:-1]:
        places.append(place)
        place = 0 if token == END else place + 1
    return places


def rows_of(width: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(
        st.lists(st.sampled_from([END, 1, 2, -100]), min_size=width + 1, max_size=width + 1),
        min_size=1,
        max_size=5,
    )


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12).flatmap(rows_of))
def test_positions_restart_after_each_end_of_text(rows: list[list[int]]) -> None:
    found = position_ids(np.array(rows, dtype=np.int64), END)
    assert found.dtype == np.int64
    assert found.tolist() == [written_out(row) for row in rows]


def test_positions_depend_on_the_end_token() -> None:
    """Control: another token as the end."""
    window = np.array([[5, END, 7, 8, END, 9]])
    assert position_ids(window, END).tolist() == [[0, 1, 0, 1, 2]]
    assert position_ids(window, 7).tolist() == [[0, 1, 2, 0, 1]]


def counted(lengths: list[int], size: int) -> tuple[float, float]:
    """Count cut documents and tokens without their document's beginning over every first window position."""
    cut = lost = 0
    for shift in range(size):
        place = shift
        for length in lengths:
            windows = [(place + token) // size for token in range(length)]
            cut += len(set(windows)) > 1
            lost += sum(window != windows[0] for window in windows)
            place += length
    return cut / size, lost / size


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_waste_is_the_mean_over_all_shifts(size: int) -> None:
    lengths = np.random.default_rng(size).integers(0, 20, 40).astype(np.int32)
    cut, lost = counted(lengths.tolist(), size)
    found = compute_waste(lengths, size)
    assert (found.documents, found.tokens) == (40, lengths.sum())
    assert found.cut == pytest.approx(cut / 40)
    assert found.lost == pytest.approx(lost / lengths.sum())
    assert found.longer == pytest.approx((lengths > size).mean())


def test_waste_grows_with_shorter_windows_and_is_none_without_documents() -> None:
    lengths = np.random.default_rng(0).integers(1, 3000, 1000)
    shares = [compute_waste(lengths, size).lost for size in (128, 512, 2048, 8192)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] > 0.5
    nothing = compute_waste(np.array([], dtype=np.int32), 128)
    assert (nothing.documents, nothing.cut, nothing.longer, nothing.lost) == (0, 0, 0, 0)


LENGTHS = np.random.default_rng(3).integers(1, 40, 60)


@pytest.fixture
def manifest(tmp_path: Path) -> DataManifest:
    """Write documents of LENGTHS tokens, each ending with END."""
    return make_folder(
        tmp_path / "data",
        {"train": [np.append(np.ones(length - 1, dtype=np.int64), END) for length in LENGTHS]},
    )


def test_waste_of_a_source_is_that_of_its_documents(manifest: DataManifest) -> None:
    source = open_split(manifest.folder, "train")
    assert estimate_waste(source, END, 16) == compute_waste(LENGTHS, 16)
    assert estimate_waste(source, 7, 16).longer == 1, "without an end all is one document"


def separate(data: Mapping[str, Any]) -> RunConfig:
    return RunConfig(
        data=DataConfig(documents=DocumentMasking.separate, **data), train=TrainConfig(sequence_length=16)
    )


def test_run_data_has_the_end_of_text_token(manifest: DataManifest) -> None:
    path = str(manifest.folder)
    for sources, data in (
        (["train"], {"name": "prepared", "path": path}),
        (["a", "b"], {"name": "mixture", "sources": {name: {"path": path} for name in "ab"}}),
    ):
        config = separate(data)
        reads = open_data(config, batch_plan(1, 1, 1), 0, prepare_data(config, None, Progress.silent()))
        reads.stream.close()
        assert reads.end_of_text == END
        assert dict(reads.waste()) == dict.fromkeys(sources, compute_waste(LENGTHS, 16))


def test_source_without_document_ends_is_refused(manifest: DataManifest, tmp_path: Path) -> None:
    silent = make_folder(tmp_path / "silent", {"train": [np.ones(100, dtype=np.int64)]})
    write_manifest(replace(silent, tokenizer=replace(silent.tokenizer, ends_documents=False)), silent.folder)
    sources = {"good": {"path": str(manifest.folder)}, "bad": {"path": str(silent.folder)}}
    with pytest.raises(InputError) as refused:
        prepare_data(separate({"name": "mixture", "sources": sources}), None, Progress.silent())
    (problem,) = refused.value.problems
    assert problem.key == "data.documents"
    assert "data.sources.bad.path" in problem.seen
