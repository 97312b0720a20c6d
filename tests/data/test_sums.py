"""Damage in a split too large to hash at opening is found before a damaged sample is used, local or
remote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.data_folders import batch_plan, documents, make_folder, remove_checksums
from tests.data.local_stores import served, set_environment
from toolkit.data import checksums as sums
from toolkit.data.checksums import BLOCK, UNIT, CheckedReader, ChecksumBuilder, block_checksums
from toolkit.data.manifest import read_manifest
from toolkit.data.manifest_file import MANIFEST_NAME, write_manifest_file
from toolkit.data.order.samples import TokenWindows
from toolkit.data.order.stream import Stream
from toolkit.data.records import reader as records
from toolkit.data.records.reader import open_records
from toolkit.data.records.writer import RecordWriter
from toolkit.data.remote.cache import BlockCache
from toolkit.data.tokens import token_array as tokens
from toolkit.data.tokens.token_array import MappedTokens, open_split, verify_tokens
from toolkit.errors import InputError
from toolkit.progress import Progress
from toolkit.remote.storage import ByteRange

LENGTH = 512


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards of 200 KB of uint16, each with a part of a block at its end, as a split above 256 MiB: not
    hashed at opening.
    """
    random = np.random.default_rng(0)
    make_folder(
        tmp_path / "data",
        {"train": [random.integers(0, 60_000, 999) for _ in range(300)]},
        vocab_size=60_000,
        shard_bytes=200_000,
    )
    monkeypatch.setattr(tokens, "HASHED_AT_OPENING_BYTES", 0)
    monkeypatch.setattr(records, "HASHED_AT_OPENING_BYTES", 0)
    return tmp_path / "data"


def epoch(source: Any) -> list[np.ndarray]:
    windows = TokenWindows(source, LENGTH, seed=1)
    stream = Stream({"train": windows}, None, seed=1, batch=batch_plan(4, 4, 1), data_rank=0)
    try:
        steps = stream.steps(0)
        return [np.concatenate(next(steps)) for _ in range(-(-windows.count // 4))]
    finally:
        stream.close()


def change(file: Path, at: int, count: int = 1, *, zero: bool = False) -> None:
    content = bytearray(file.read_bytes())
    for place in range(at, at + count):
        content[place] = 0 if zero else content[place] ^ 1
    file.write_bytes(content)


@pytest.mark.parametrize("sizes", [[1], [4096], [4095, 2, 4095], [10_000] * 5, [1, 0, 3, 20_000, 7]])
def test_checksums_do_not_depend_on_chunking(sizes: list[int]) -> None:
    content = np.random.default_rng(0).bytes(sum(sizes))
    made, start = ChecksumBuilder(), 0
    for size in sizes:
        made.update(content[start : start + size])
        start += size
    found = np.frombuffer(made.content(), "<u8").tolist()
    assert found == block_checksums(content)
    assert len(found) == -(-len(content) // BLOCK)


def test_random_damage_is_found_when_it_is_first_read(folder: Path) -> None:
    """Single bits and zeroed pages anywhere are detected. Control: without checksums all of it passes."""
    random = np.random.default_rng(3)
    whole = epoch(open_split(folder, "train"))
    shards = read_manifest(folder).split("train").shards
    for number in range(40):
        shard = shards[random.integers(len(shards))]
        file, zeroed = folder / f"{shard.name}.bin", number % 3 == 0
        kept, at = file.read_bytes(), int(random.integers(shard.bin.bytes))
        if zeroed:
            at = min(at // BLOCK * BLOCK, shard.bin.bytes // BLOCK * BLOCK - BLOCK)
        change(file, at, BLOCK if zeroed else 1, zero=zeroed)
        with pytest.raises(InputError, match=rf"{shard.name}\.bin: bytes {at // BLOCK * BLOCK} to "):
            epoch(open_split(folder, "train"))
        file.write_bytes(kept)
    np.testing.assert_array_equal(epoch(open_split(folder, "train")), whole)
    remove_checksums(folder)
    change(folder / f"{shards[1].name}.bin", 5000)
    assert not np.array_equal(epoch(open_split(folder, "train")), whole)


def test_only_blocks_that_are_read_are_checked_and_each_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    monkeypatch.setattr(
        sums, "block_checksums", lambda content: hashed.append(len(content)) or block_checksums(content)
    )
    source = open_split(folder, "train")
    assert isinstance(source, MappedTokens)
    source.windows(np.array([0, 10, 500]), 100)
    assert hashed == [UNIT]
    epoch(source)
    assert sum(hashed) == sum(shard.bin.bytes for shard in source.split.shards)
    epoch(source)
    assert sum(hashed) == sum(shard.bin.bytes for shard in source.split.shards)


def test_a_damaged_window_across_shards_is_found(folder: Path) -> None:
    first = read_manifest(folder).split("train").shards[0]
    change(folder / "train-00001.bin", 3)
    source = open_split(folder, "train")
    with pytest.raises(InputError, match=r"train-00001\.bin: bytes 0 to 4096"):
        source.windows(np.array([first.tokens - 5]), 10)
    source.windows(np.array([first.tokens - 15]), 10)  # the control: a window that ends before


@pytest.mark.parametrize("version", [1, 2])
def test_folders_without_sums_are_read_as_before(folder: Path, version: int) -> None:
    whole = epoch(open_split(folder, "train"))
    fingerprint = open_split(folder, "train").data_hash
    remove_checksums(folder, version)
    assert verify_tokens(folder, Progress.silent()).split("train").shards[0].sums is None
    np.testing.assert_array_equal(epoch(open_split(folder, "train")), whole)
    assert open_split(folder, "train").data_hash == fingerprint


def test_damaged_sums_are_found_by_verify(folder: Path) -> None:
    change(folder / "train-00001.sums", 9)
    with pytest.raises(InputError, match=r"train-00001\.sums: xxh3"):
        verify_tokens(folder, Progress.silent())


def test_a_manifest_with_another_number_is_refused(folder: Path) -> None:
    content = json.loads((folder / MANIFEST_NAME).read_text())
    content["tokenizer"]["end_of_text"] = 7
    (folder / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"its content has xxh3 .*\n.*manifest_xxh3_128") as caught:
        read_manifest(folder)
    assert "restore manifest.json" in caught.value.problems[0].remedy
    del content["manifest_xxh3_128"]
    (folder / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(InputError, match="manifest_xxh3_128 is None"):
        read_manifest(folder)
    write_manifest_file(folder, content)  # the control
    assert read_manifest(folder).tokenizer.end_of_text == 7


def test_damaged_records_are_found_when_they_are_read(folder: Path, tmp_path: Path) -> None:
    fields = {"board": ("uint8", (1000,))}
    with RecordWriter(
        tmp_path / "records", fields, description="boards", licence="none", shard_bytes=100_000
    ) as made:
        for number in range(250):
            made.add("train", board=np.full(1000, number % 251))
    change(tmp_path / "records" / "train-00001.records", 70_500)  # record 170
    opened, epochs = open_records(tmp_path / "records", "train"), np.zeros(1, np.int64)
    assert opened.read(epochs, np.array([5]))["board"][0, 0] == 5
    with pytest.raises(InputError, match=r"train-00001\.records: bytes 69632 to 73728"):
        opened.read(epochs, np.array([170]))


# -- in a store


@pytest.mark.parametrize("cached", [False, True])
def test_a_flipped_bit_in_a_store_is_found(
    folder: Path, tmp_path: Path, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = epoch(open_split(folder, "train"))
    with served(folder) as store:
        set_environment(monkeypatch, store, tmp_path)

        def opened(name: str) -> Any:
            return open_split(
                store.s3, "train", cache=BlockCache(tmp_path / name, 8 / 1024) if cached else None
            )

        np.testing.assert_array_equal(epoch(opened("first")), whole)
        change(folder / "train-00001.bin", 123_456)
        with pytest.raises(
            InputError, match=r"train-00001\.bin: bytes 122880 to 126976 came twice with another hash"
        ):
            epoch(opened("second"))
        remove_checksums(folder)  # the control
        assert not np.array_equal(epoch(opened("third")), whole)


def test_damaged_records_in_a_store_are_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RecordWriter(
        tmp_path / "records", {"board": ("uint8", (1000,))}, description="boards", licence="none"
    ) as made:
        for number in range(250):
            made.add("train", board=np.full(1000, number % 251))
    change(tmp_path / "records" / "train-00000.records", 70_500)
    with served(tmp_path / "records") as store:
        set_environment(monkeypatch, store, tmp_path)
        opened, epochs = open_records(store.s3, "train"), np.zeros(1, np.int64)
        assert opened.read(epochs, np.array([5]))["board"][0, 0] == 5
        with pytest.raises(InputError, match=r"train-00000\.records: bytes 69632 to 73728"):
            opened.read(epochs, np.array([70]))


class Wire:
    """Files in memory; the first ``damaged`` answers about data have a flipped bit."""

    def __init__(self, files: dict[str, bytes], damaged: int) -> None:
        self.files, self.damaged, self.asked = files, damaged, list[ByteRange]()

    def read_ranges(self, ranges: Any) -> list[bytes]:
        self.asked += ranges
        found = [bytearray(self.files[one.name][one.start : one.end]) for one in ranges]
        for one, content in zip(ranges, found, strict=True):
            if one.name.endswith(".bin") and self.damaged:
                content[0] ^= 1
                self.damaged -= 1
        return [bytes(content) for content in found]


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_block_damaged_in_transit_is_fetched_again(tmp_path: Path, damaged: int) -> None:
    content = np.random.default_rng(0).bytes(5_000_001)
    made = ChecksumBuilder()
    made.update(content)
    wire = Wire({"a.bin": content, "a.sums": made.content()}, damaged)
    reader = CheckedReader(wire, tmp_path, {"a.bin": len(content)})
    starts = (0, 4_000_000, 2_097_000, 4_997_501)  # one with sums in two pages, and the end of the file
    ranges = [ByteRange("a.bin", start, start + 2500) for start in starts]
    if damaged == 2:
        wire.damaged = 1000
        with pytest.raises(InputError, match="came twice with another hash"):
            reader.read_ranges(ranges)
        return
    assert [bytes(one) for one in reader.read_ranges(ranges)] == [
        content[one.start : one.end] for one in ranges
    ]
    pages = len([one for one in wire.asked if one.name == "a.sums"])
    assert [bytes(one) for one in reader.read_ranges(ranges)] == [
        content[one.start : one.end] for one in ranges
    ]
    assert len([one for one in wire.asked if one.name == "a.sums"]) == pages  # the sums are cached


def test_adjacent_ranges_are_merged(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(100_000)
    made = ChecksumBuilder()
    made.update(content)
    wire = Wire({"a.bin": content, "a.sums": made.content()}, 0)
    starts = np.random.default_rng(1).permutation(300).tolist()
    ranges = [*(ByteRange("a.bin", start, start + 100) for start in starts), ByteRange("a.bin", 0, 5000)]
    found = CheckedReader(wire, tmp_path, {"a.bin": len(content)}).read_ranges(ranges)
    assert [bytes(one) for one in found] == [content[one.start : one.end] for one in ranges]
    assert [one for one in wire.asked if one.name == "a.bin"] == [ByteRange("a.bin", 0, 2 * BLOCK)]


def test_cached_checksums_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "CACHED_PAGES", 1)
    content = np.random.default_rng(0).bytes(5_000_001)
    made = ChecksumBuilder()
    made.update(content)
    reader = CheckedReader(
        Wire({"a.bin": content, "a.sums": made.content()}, 0), tmp_path, {"a.bin": len(content)}
    )
    for _ in range(2):
        (found,) = reader.read_ranges([ByteRange("a.bin", 0, 5_000_001)])
        assert bytes(found) == content
    assert len(reader._cached_pages) == 1


def test_a_written_manifest_names_every_file(folder: Path) -> None:
    manifest = read_manifest(folder)
    there = {path.name for path in folder.glob("train-*")}
    assert set(manifest.split("train").files) == there
    assert len([name for name in there if name.endswith(".sums")]) == len(manifest.split("train").shards)


def test_the_sums_of_a_small_split_are_hashed_at_opening(tmp_path: Path) -> None:
    make_folder(tmp_path / "data", {"train": documents(50, 300)})
    change(tmp_path / "data" / "train-00000.sums", 0)
    with pytest.raises(InputError, match=r"train-00000\.sums"):
        open_split(tmp_path / "data", "train")
