"""Files are complete or absent.

pytest tests/test_files.py
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from toolkit.files import write_whole

SIZE = 1 << 16


def test_write_whole_leaves_only_last_content(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.json", "1")
    write_whole(tmp_path / "a.json", "zw\u00f6lf")
    write_whole(tmp_path / "b.bin", b"\0\xff", durable=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "a.json": "zw\u00f6lf".encode(),
        "b.bin": b"\0\xff",
    }


def test_failed_write_keeps_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a.json", "old")

    def no_room(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "a.json", "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.json": "old"}


@pytest.mark.parametrize("durable", [True, False])
def test_sync_order(durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill cannot simulate a power failure, so the order is checked."""
    events: list[str] = []
    replace = Path.replace

    def logged_replace(self: Path, target: Path) -> Path:
        events.append("rename")
        return replace(self, target)

    def logged_fsync(descriptor: int) -> None:
        synced = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append("sync folder" if synced == tmp_path else f"sync {synced.read_text()}")

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "replace", logged_replace)
    write_whole(tmp_path / "a.json", "text", durable=durable)
    assert events == (["sync text", "rename", "sync folder"] if durable else ["rename"])


def test_concurrent_writers_do_not_interfere(tmp_path: Path) -> None:
    """For example, the main thread and a thread that is about to end the process both write the status."""
    path, failures = tmp_path / "status.json", []
    contents = {bytes([number]) * SIZE for number in range(4)}

    def write(content: bytes) -> None:
        try:
            for _ in range(50):
                write_whole(path, content, durable=False)
                assert path.read_bytes() in contents
        except BaseException as error:  # noqa: BLE001 - the test checks it
            failures.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]
