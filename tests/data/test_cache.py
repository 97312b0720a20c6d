"""The block cache: bounded, oldest first, shared by processes, never wrong bytes after kills or disk
errors.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from toolkit.data.order.permutation import BLOCK_BYTES
from toolkit.data.remote.cache import WAYS, BlockCache, CachedFile, read_cached
from toolkit.errors import InputError
from toolkit.remote.storage import Buffer, ByteRange, DataFolder

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**-10


@functools.cache
def block(number: int, size: int = BLOCK_BYTES) -> bytes:
    return np.random.default_rng(number).bytes(size)


class Counted(DataFolder):
    """A folder in memory that counts requests and answers after a delay."""

    def __init__(self, files: dict[str, bytes], seconds: float = 0.0) -> None:
        self.location = Path("memory")
        self.files, self.seconds = files, seconds
        self.asked: list[ByteRange] = []

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[Buffer]:
        self.asked += ranges
        time.sleep(self.seconds)
        return [memoryview(self.files[one.name])[one.start : one.end] for one in ranges]


def test_cached_blocks_are_visible_to_other_processes(tmp_path: Path) -> None:
    mine, theirs = BlockCache(tmp_path, 4 * MIB), BlockCache(tmp_path, 4 * MIB)
    for number in range(100):
        mine.put("a", number, block(number))
    mine.put("a", 100, block(100, 77))  # a file's last block
    assert [theirs.get("a", number) for number in range(101)] == [
        *(block(number) for number in range(100)),
        block(100, 77),
    ]
    assert theirs.get("b", 3) is None
    assert theirs.get("a", 101) is None


def test_full_cache_evicts_oldest_blocks(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, MIB)
    assert cache.slots == 2 * WAYS
    for number in range(5 * cache.slots):
        cache.put("a", number, block(number))
    kept = [number for number in range(5 * cache.slots) if cache.get("a", number) is not None]
    assert kept == list(range(4 * cache.slots, 5 * cache.slots))
    assert (tmp_path / "32KiB-32.blocks").stat().st_size == cache.slots * BLOCK_BYTES
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < cache.slots * (BLOCK_BYTES + 64)
    # The control: if the newest were dropped, the first blocks would remain.
    assert cache.get("a", 0) is None


def test_cache_of_another_size_starts_empty(tmp_path: Path) -> None:
    BlockCache(tmp_path, MIB).put("a", 1, block(1))
    assert BlockCache(tmp_path, MIB).get("a", 1) == block(1)
    larger = BlockCache(tmp_path, 2 * MIB)
    assert larger.get("a", 1) is None
    assert {file.name for file in tmp_path.iterdir()} == {
        f"32KiB-{larger.slots}.{ending}" for ending in ("blocks", "index", "claims")
    }


@pytest.mark.parametrize("damage", ["flipped", "cut", "other"])
def test_partly_written_block_is_a_miss(tmp_path: Path, damage: str) -> None:
    cache = BlockCache(tmp_path, MIB)
    cache.put("a", 1, block(1))
    file = tmp_path / f"32KiB-{cache.slots}.blocks"
    content = bytearray(file.read_bytes())
    at = content.index(block(1)[:64])
    if damage == "flipped":
        content[at + 20_000] ^= 1
    elif damage == "cut":
        del content[at + 20_000 :]
    else:
        content[at : at + BLOCK_BYTES] = block(2)
    file.write_bytes(content)
    assert BlockCache(tmp_path, MIB).get("a", 1) is None
    cache.put("a", 1, block(1))
    assert BlockCache(tmp_path, MIB).get("a", 1) == block(1)


WRITER = """
import sys
from pathlib import Path
import numpy as np
from toolkit.data.remote.cache import BlockCache
cache = BlockCache(Path(sys.argv[1]), 2**-10)
print("ready", flush=True)
number = 0
while True:
    cache.put("a", number % 64, np.random.default_rng(number % 64).bytes(32 << 10))
    number += 1
"""


def test_a_killed_writer_leaves_no_wrong_block(tmp_path: Path) -> None:
    """64 blocks compete for 32 slots among two writers and a reader; the writers are killed."""
    seen, cache = Counter[bool](), BlockCache(tmp_path, MIB)
    for turn in range(2):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        try:
            for writer in writers:
                assert writer.stdout is not None
                assert writer.stdout.readline() == b"ready\n"
            until = time.monotonic() + 0.3 + 0.01 * turn
            while time.monotonic() < until:
                _check_all(cache, seen)
        finally:
            for writer in writers:
                os.kill(writer.pid, signal.SIGKILL)
                writer.communicate()
        _check_all(cache, seen)
    assert seen[True] > 100


def _check_all(cache: BlockCache, seen: Counter[bool]) -> None:
    for number in range(64):
        content = cache.get("a", number)
        assert content in (None, block(number))
        seen[content is not None] += 1


def test_read_cached_fetches_each_block_once(tmp_path: Path) -> None:
    content = block(0, 10 * BLOCK_BYTES + 123)
    files = {"a.bin": CachedFile("a.bin", "hash", len(content))}
    folder, cache = Counted({"a.bin": content}), BlockCache(tmp_path, MIB)
    ranges = [
        ByteRange("a.bin", 5, 900),
        ByteRange("a.bin", 40_000, 140_000),
        ByteRange("a.bin", 10 * BLOCK_BYTES - 3, len(content)),
    ]
    expected = [content[one.start : one.end] for one in ranges]
    assert [bytes(got) for got in read_cached(cache, folder, files, ranges)] == expected
    # Neighbours are one request; whole blocks, and the last one as long as the file.
    assert [(one.start, one.end) for one in folder.asked] == [
        (0, 5 * BLOCK_BYTES),
        (9 * BLOCK_BYTES, len(content)),
    ]
    folder.asked.clear()
    assert [bytes(got) for got in read_cached(cache, folder, files, ranges)] == expected
    assert folder.asked == []


PEER = """
import sys, time
from pathlib import Path
from tests.data.test_cache import Counted, block
from toolkit.data.remote.cache import BlockCache, CachedFile, read_cached
from toolkit.data.order.permutation import BLOCK_BYTES
from toolkit.remote.storage import ByteRange
content = block(0, 64 * BLOCK_BYTES)
folder, cache = Counted({"a.bin": content}, seconds=0.5), BlockCache(Path(sys.argv[1]), 4 * 2**-10)
print("ready", flush=True)
time.sleep(max(0, float(sys.stdin.readline()) - time.time()))
start = int(sys.argv[2]) * BLOCK_BYTES
files = {"a.bin": CachedFile("a.bin", "hash", len(content))}
got = read_cached(cache, folder, files, [ByteRange("a.bin", start, start + 40 * BLOCK_BYTES)])
assert bytes(got[0]) == content[start : start + 40 * BLOCK_BYTES]
print(sum(one.end - one.start for one in folder.asked) // BLOCK_BYTES)
"""


def test_ranks_of_a_node_fetch_a_block_once(tmp_path: Path) -> None:
    """Two processes that want blocks 0..40 and 24..64 at the same time fetch 64 blocks in all, not 80."""
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", PEER, str(tmp_path), first],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for first in ("0", "24")
    ]
    for peer in peers:
        assert peer.stdout is not None
        assert peer.stdout.readline() == "ready\n"
    start = time.time() + 0.2
    fetched = [int(peer.communicate(f"{start}\n", timeout=60)[0]) for peer in peers]
    assert sum(fetched) == 64


def test_claim_of_a_dead_process_is_released(tmp_path: Path) -> None:
    script = "import os, sys\nfrom pathlib import Path\nfrom toolkit.data.remote.cache import BlockCache\n"
    script += "assert BlockCache(Path(sys.argv[1]), 2**-10).claim('hash', 0)\nos._exit(9)"
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, timeout=60).returncode == 9
    content, begin = block(0), time.monotonic()
    folder = Counted({"a.bin": content})
    got = read_cached(
        BlockCache(tmp_path, MIB),
        folder,
        {"a.bin": CachedFile("a.bin", "hash", len(content))},
        [ByteRange("a.bin", 1, 2)],
    )
    assert bytes(got[0]) == content[1:2]
    assert time.monotonic() - begin < 2


def test_threads_share_a_cache(tmp_path: Path) -> None:
    content, cache = block(0, 32 * BLOCK_BYTES), BlockCache(tmp_path, 2 * MIB)
    folder, wrong = Counted({"a.bin": content}), list[int]()

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for start in random.integers(0, len(content) - 9000, 50).tolist():
            got = read_cached(
                cache,
                folder,
                {"a.bin": CachedFile("a.bin", "h", len(content))},
                [ByteRange("a.bin", start, start + 9000)],
            )
            wrong.extend([start] * (bytes(got[0]) != content[start : start + 9000]))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_cache_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"data\.cache\.folder=.* has room for .* GiB.*\n.*\n.*write data\.cache\.gib="
    ):
        BlockCache(tmp_path, 1 << 30)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"data\.cache\.folder=.*file/cache: Not a directory"):
        BlockCache(tmp_path / "file" / "cache", 1)
