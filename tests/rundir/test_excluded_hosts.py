"""A run excludes hosts from its next start on Slurm.

pytest tests/rundir/test_excluded_hosts.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import InputError
from toolkit.rundir.excluded_hosts import FILE, SLURM_JOB, ExcludedHost, exclude_hosts, read_excluded_hosts

FIRST = ExcludedHost(host="node1", step=20, reason="rank 3 computed another output")
SECOND = ExcludedHost(host="node7", step=40, reason="rank 9 computed another output")


def test_excluded_hosts_accumulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLURM_JOB, "7")
    assert read_excluded_hosts(tmp_path) == []
    assert exclude_hosts(tmp_path, []) == ()
    assert not (tmp_path / FILE).exists()
    assert exclude_hosts(tmp_path, [FIRST]) == ("node1",)
    again = ExcludedHost(host="node1", step=60, reason="again")
    assert exclude_hosts(tmp_path, [SECOND, again]) == ("node7", "node1")
    assert read_excluded_hosts(tmp_path) == [again, SECOND]


def test_nothing_is_written_outside_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would read it, and host names need not be those of Slurm."""
    monkeypatch.delenv(SLURM_JOB, raising=False)
    assert exclude_hosts(tmp_path, [FIRST]) == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["{", "{}x", "[1]", '[{"host": "a"}]', '[{"host": 1, "step": 1, "reason": ""}]']
)
def test_invalid_file_is_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(InputError, match="correct or delete it"):
        read_excluded_hosts(tmp_path)
