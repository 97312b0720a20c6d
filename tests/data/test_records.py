"""Records: written completely or not at all, read by number, refused if damaged, and ordered by streams."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.damage import flip_byte
from tests.data.data_folders import batch_plan, documents, make_folder
from tests.data.local_stores import served
from tests.data.test_stream import global_batch
from toolkit.data.evaluation import eval_sample_batches
from toolkit.data.manifest_file import write_manifest_file
from toolkit.data.order.stream import Stream
from toolkit.data.records import writer as write_records
from toolkit.data.records.reader import (
    DTYPES,
    RecordSamples,
    describe_records,
    open_records,
    read_record_manifest,
    verify_records,
)
from toolkit.data.records.writer import RecordWriter
from toolkit.data.remote.cache import BlockCache
from toolkit.data.tokens.token_array import open_split
from toolkit.errors import CheckpointError, InputError
from toolkit.progress import Progress

Ints = npt.NDArray[np.int64]
FIELDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "image": ("uint16", (3, 4, 5)),
    "weight": ("float64", ()),
    "label": ("uint8", ()),
}
PAGE = Path(__file__).resolve().parents[2] / "docs/data.md"


def make(
    folder: Path, records: int = 40, *, shard_bytes: int = 1 << 20, seed: int = 0, **splits: int
) -> dict[str, npt.NDArray[Any]]:
    """Write records whose ``weight`` is their number; return the training split's values by field."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 60_000, (records, 3, 4, 5), dtype=np.uint16)
    with RecordWriter(folder, FIELDS, description="made", licence="none", shard_bytes=shard_bytes) as writer:
        for number, image in enumerate(images):
            writer.add("train", image=image, weight=float(number), label=number % 7)
        for name, count in splits.items():
            for number in range(count):
                writer.add(name, image=images[0], weight=float(number), label=0)
    return {"image": images, "weight": np.arange(records) * 1.0, "label": np.arange(records) % 7}


def read(records: RecordSamples, *numbers: int) -> npt.NDArray[np.void]:
    return records.read(np.zeros(len(numbers), dtype=np.int64), np.array(numbers, dtype=np.int64))


@given(data=st.data(), shard_records=st.integers(1, 9), buffered=st.integers(1, 9), count=st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_records_round_trip(data: st.DataObject, shard_records: int, buffered: int, count: int) -> None:
    """Any fields round-trip, in any number of shards and for any buffer size."""
    kinds = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=3).map(tuple))
    fields = data.draw(st.dictionaries(st.sampled_from("abcdef"), kinds, min_size=1))
    random = np.random.default_rng(count)
    values = {
        name: random.integers(0, 2, (count, *shape)).astype(kind) for name, (kind, shape) in fields.items()
    }
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as context:
        size = np.dtype([(name, kind, shape) for name, (kind, shape) in fields.items()], align=True).itemsize
        context.setattr(write_records, "BUFFER_BYTES", buffered * size)
        place = Path(folder) / "records"
        with RecordWriter(
            place, fields, description="", licence="", shard_bytes=shard_records * size
        ) as writer:
            for number in range(count):
                writer.add("train", **{name: value[number] for name, value in values.items()})
        records = open_records(place, "train")
        assert (records.count, len(records.split.shards)) == (count, -(-count // shard_records))
        numbers = random.integers(0, count, 50)
        found = records.read(np.zeros_like(numbers), numbers)
        for name, (kind, _) in fields.items():
            assert found[name].dtype == np.dtype(kind)
            assert np.array_equal(found[name], values[name][numbers])
            statistics = records.split.statistics[name]
            axes = tuple(axis for axis in range(values[name].ndim) if axis != 1)
            assert np.allclose(statistics.mean, values[name].mean(axis=axes, dtype=np.float64).ravel())
            assert np.allclose(statistics.std, values[name].std(axis=axes, dtype=np.float64).ravel())


def test_a_record_is_one_range_of_one_file(tmp_path: Path) -> None:
    """As documented for other readers, a record is a C struct at ``number * record_bytes``."""
    written = make(tmp_path / "records")
    manifest = read_record_manifest(tmp_path / "records")
    content = json.loads((tmp_path / "records/manifest.json").read_text())
    assert content["record_bytes"] == manifest.record_bytes == 136
    assert [(field["name"], field["offset"]) for field in content["fields"]] == [
        ("image", 0),
        ("weight", 120),
        ("label", 128),
    ]
    whole = (tmp_path / "records/train-00000.records").read_bytes()
    assert len(whole) == 40 * 136
    record = whole[17 * 136 : 18 * 136]
    assert np.array_equal(np.frombuffer(record, "<u2", 60).reshape(3, 4, 5), written["image"][17])
    assert np.frombuffer(record, "<f8", 1, 120) == 17
    assert record[128:] == bytes([17 % 7, 0, 0, 0, 0, 0, 0, 0])


def test_statistics_are_exact_enough_for_large_offsets(tmp_path: Path) -> None:
    """Control: the textbook difference of sums of squares has no correct digit."""
    values = 1e8 + np.random.default_rng(0).normal(0, 0.01, (5000, 2))
    with RecordWriter(
        tmp_path / "records", {"value": ("float64", (2,))}, description="", licence=""
    ) as writer:
        for value in values:
            writer.add("train", value=value)
    found = read_record_manifest(tmp_path / "records").split("train").statistics["value"]
    assert np.allclose(found.std, values.std(axis=0), rtol=1e-5)
    assert not np.allclose(
        np.sqrt(np.abs((values**2).mean(axis=0) - values.mean(axis=0) ** 2)), values.std(axis=0), rtol=0.5
    )


def test_documented_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (code,) = (code for code in codes if "RecordWriter" in code)
    assert len(code.splitlines()) <= 16, "the page promises a short example"
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(PAGE), "exec"), {})
    manifest = verify_records(tmp_path / "data/mine", Progress.silent())
    assert manifest.split("train").records + manifest.split("validation").records == 100
    assert any("CC-BY-4.0" in line for line in describe_records(manifest))


# ---- errors


def test_writer_removes_files_after_an_error(tmp_path: Path) -> None:
    def interrupted() -> None:
        with RecordWriter(tmp_path / "a", FIELDS, description="", licence="") as writer:
            writer.add("train", **GOOD)
            assert not (tmp_path / "a").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with (
        pytest.raises(InputError, match="no record"),
        RecordWriter(tmp_path / "a", FIELDS, description="", licence=""),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


GOOD: dict[str, Any] = {"image": np.zeros((3, 4, 5)), "weight": 1.0, "label": 1}
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"image": GOOD["image"], "weight": 1.0}, "record 0 of split train has image, weight"),
    "unknown": ({**GOOD, "mask": 1}, "has image, weight, label, mask"),
    "shape": ({**GOOD, "image": np.zeros((4, 5, 3))}, r"a image of shape \[4, 5, 3\]"),
    "too large": ({**GOOD, "label": 256}, "label in 256 .. 256"),
    "negative": ({**GOOD, "label": -1}, "label in -1 .. -1"),
    "fraction": ({**GOOD, "image": np.full((3, 4, 5), 0.5)}, r"image in 0.5 .. 0.5"),
    "no number": ({**GOOD, "weight": np.nan}, "a weight with NaN"),
    "words": ({**GOOD, "label": "ship"}, "a label of dtype"),
}


@pytest.mark.parametrize(("values", "shows"), UNFIT.values(), ids=list(UNFIT))
def test_values_that_do_not_fit_are_refused(values: dict[str, Any], shows: str, tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=shows),
        RecordWriter(tmp_path / "a", FIELDS, description="", licence="") as writer,
    ):
        writer.add("train", **values)


def test_writer_refuses_an_existing_folder(tmp_path: Path) -> None:
    make(tmp_path / "records")
    with pytest.raises(InputError, match="exists"):
        make(tmp_path / "records")
    for fields in ({}, {"a": ("complex64", ())}, {"a b": ("uint8", ())}, {"a": ("uint8", (0,))}):
        with pytest.raises(InputError):
            RecordWriter(tmp_path / "other", fields, description="", licence="")
    assert [path.name for path in tmp_path.iterdir()] == ["records"]


def flip(folder: Path) -> None:
    file = folder / "train-00001.records"
    flip_byte(file, 100)


def change_manifest(old: str, new: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "manifest.json"
        assert old in file.read_text()
        write_manifest_file(folder, json.loads(file.read_text().replace(old, new)))

    return change


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (flip, r"train-00001\.records: xxh3 [0-9a-f]{32}"),
    "truncated": (
        lambda folder: (folder / "train-00002.records").write_bytes(b"abc"),
        r"train-00002\.records: 3 bytes",
    ),
    "missing": (lambda folder: (folder / "train-00000.records").unlink(), r"train-00000\.records: absent"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json"),
    "newer": (change_manifest('"format_version": 2', '"format_version": 7'), "format_version=7"),
    "another dtype": (change_manifest('"uint16"', '"object"'), "object"),
    "beyond the record": (change_manifest('"record_bytes": 136', '"record_bytes": 100'), r"manifest\.json"),
    "another size": (change_manifest('"record_bytes": 136', '"record_bytes": 144'), "records of 144 bytes"),
    "a lost field": (change_manifest('"statistics"', '"elsewhere"'), "statistics"),
}


@pytest.mark.parametrize(("damage", "shows"), DAMAGES.values(), ids=list(DAMAGES))
def test_damage_is_refused_by_name(damage: Callable[[Path], object], shows: str, tmp_path: Path) -> None:
    make(tmp_path / "records", shard_bytes=136 * 15)
    open_records(tmp_path / "records", "train")
    damage(tmp_path / "records")
    with pytest.raises(InputError, match=shows):
        open_records(tmp_path / "records", "train")
    with pytest.raises(InputError, match=shows):
        verify_records(tmp_path / "records", Progress.silent())


def test_tokens_and_records_are_not_interchangeable(tmp_path: Path) -> None:
    make(tmp_path / "records")
    make_folder(tmp_path / "tokens", {"train": documents(3, 300)})
    with pytest.raises(InputError, match="holds records") as caught:
        open_split(tmp_path / "records", "train")
    assert "data=arrays" in caught.value.problems[0].remedy
    with pytest.raises(InputError, match="holds tokens"):
        open_records(tmp_path / "tokens", "train")
    with pytest.raises(InputError, match="split test of"):
        open_records(tmp_path / "records", "test")


# -- order


def stream_of(
    records: RecordSamples, seed: int, ranks: int, rank: int, micro: int = 1, size: int = 8
) -> Stream:
    return Stream({"train": records}, None, seed=seed, batch=batch_plan(micro, size, ranks), data_rank=rank)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RecordSamples:
    folder = tmp_path_factory.mktemp("order") / "records"
    make(folder, 101, shard_bytes=136 * 30)
    return open_records(folder, "train")


def numbers(samples: npt.NDArray[np.void]) -> list[int]:
    return [int(weight) for weight in samples["weight"]]


@given(
    power=st.integers(0, 3),
    micro_power=st.integers(0, 3),
    step=st.integers(0, 10**6),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=12, deadline=None)
def test_any_layout_sees_the_same_global_batch(
    records: RecordSamples, power: int, micro_power: int, step: int, seed: int
) -> None:
    """Also after a stop, since a stream begins at any step; a rank that only counted its own records would
    not.
    """
    ranks, micro = 2**power, min(2**micro_power, 8 // 2**power)
    alone = global_batch([stream_of(records, seed, 1, 0, micro=8)], step)
    many = global_batch([stream_of(records, seed, ranks, rank, micro) for rank in range(ranks)], step)
    assert numbers(alone) == numbers(many)
    assert np.array_equal(alone["image"], many["image"])
    another = global_batch([stream_of(records, seed + 1, 1, 0, micro=8)], step)
    assert numbers(alone) != numbers(another), "another seed is another order"


def test_epoch_contains_every_record_once(records: RecordSamples) -> None:
    stream = stream_of(records, 5, 1, 0)
    epochs = [numbers(stream.samples(np.arange(first, first + 101))) for first in (0, 101)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(101))] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(range(101))


def test_a_changed_record_or_normalisation_is_another_fingerprint(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        make(tmp_path / name, seed=seed)
    change_manifest('"std"', '"std" ')(tmp_path / "c")
    first, other, same = (stream_of(open_records(tmp_path / name, "train"), 0, 1, 0) for name in "abc")
    first.check_fingerprint(json.loads(json.dumps(same.fingerprint())))
    with pytest.raises(CheckpointError, match=r"data=.*the checkpoint has data="):
        first.check_fingerprint(other.fingerprint())
    found = read_record_manifest(tmp_path / "a").split("train").statistics["weight"]
    change_manifest(repr(found.mean[0]), repr(found.mean[0] + 1))(tmp_path / "a")
    with pytest.raises(CheckpointError):
        stream_of(open_records(tmp_path / "a", "train"), 0, 1, 0).check_fingerprint(first.fingerprint())


@pytest.mark.parametrize(
    ("count", "batches", "seen", "global_batches"),
    [(101, 2, 16, 2), (13, 4, 13, 2), (3, 1, 3, 1), (8, 5, 8, 1)],
)
def test_an_evaluation_takes_the_first_records_once(
    count: int, batches: int, seen: int, global_batches: int, tmp_path: Path
) -> None:
    make(tmp_path / "records", count)
    records = open_records(tmp_path / "records", "train")
    for ranks, micro in ((1, 8), (2, 2), (4, 1), (8, 1)):
        found = [
            list(eval_sample_batches(records, batches, batch_plan(micro, 8, ranks), rank))
            for rank in range(ranks)
        ]
        assert {len(of_rank) for of_rank in found} == {global_batches}
        assert {len(batch) for of_rank in found for batch in of_rank} == {8 // micro // ranks}, (
            "as many micro-batches on each rank"
        )
        everything = [
            number
            for of_rank in found
            for batch in of_rank
            for samples in batch
            for number in numbers(samples)
        ]
        assert sorted(everything) == list(range(seen))


# -- in a store


def test_a_store_gives_the_same_records(tmp_path: Path) -> None:
    """Read in any order, neighbours as one request; with a cache the second epoch needs no request."""
    make(tmp_path / "records", 60, shard_bytes=136 * 25)
    here = open_records(tmp_path / "records", "train")
    numbers = np.random.default_rng(0).permutation(60)[:40]
    epochs = np.zeros_like(numbers)
    with served(tmp_path) as store:
        there = open_records(f"{store.http}/records", "train")
        assert there.fingerprint() == here.fingerprint()
        store.forget()
        assert there.read(epochs, numbers).tobytes() == here.read(epochs, numbers).tobytes()
        assert (sum(store.requests.values()), store.served_bytes) == (
            3 + 3,
            60 * 136 + 3 * 8,
        )  # a block and its sum of each shard
        kept = open_records(f"{store.http}/records", "train", cache=BlockCache(tmp_path / "cache", 1.0))
        kept.read(epochs, numbers)
        store.forget()
        assert kept.read(epochs, numbers).tobytes() == here.read(epochs, numbers).tobytes()
        assert sum(store.requests.values()) == 0
        cut = tmp_path / "records/train-00001.records"
        cut.write_bytes(cut.read_bytes()[:-1])
        with pytest.raises(InputError, match=r"train-00001\.records: 3399 bytes"):
            open_records(f"{store.http}/records", "train")
        with pytest.raises(InputError, match="absent"):
            open_records(f"{store.http}/nowhere", "train")


def test_max_samples_reads_the_first_records_only(tmp_path: Path) -> None:
    make(tmp_path / "made", 40)
    records, whole = (open_records(tmp_path / "made", "train") for _ in range(2))
    records.limit(6)
    stream = Stream({"train": records}, None, seed=1, batch=batch_plan(1, 1, 1), data_rank=0)
    assert sorted(stream.samples(np.arange(6))["weight"]) == list(range(6))
    assert records.fingerprint() != whole.fingerprint()
