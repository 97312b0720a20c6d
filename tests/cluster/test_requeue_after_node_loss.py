"""A job of Slurm that has lost the node of its script is requeued by another node.

pytest tests/cluster/test_requeue_after_node_loss.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.cluster.jobs import requeue_after_node_loss, slurm_controller
from toolkit.cluster.jobs.requeue_after_node_loss import (
    BatchNodeState,
    main,
    parse_batch_node_state,
    parse_fields,
)

KEPT = "JobId=7 JobState=RUNNING NodeList=node[1-2] BatchHost=node1 NumNodes=2"
LOST = "JobId=7 JobState=RUNNING NodeList=node2 BatchHost=node1 NumNodes=1"
FINAL = f"{LOST} Requeue=0"
PENDING = "JobId=7 JobState=PENDING NodeList= NumNodes=2"
NO_ANSWER = "slurm_load_jobs error: Unable to contact slurm controller"


@pytest.mark.parametrize(
    ("description", "state"),
    [
        (KEPT, BatchNodeState.KEPT),
        (LOST, BatchNodeState.LOST),
        (PENDING, BatchNodeState.ENDED),
        ("", BatchNodeState.ENDED),
    ],
)
def test_state_of_the_batch_node(description: str, state: BatchNodeState) -> None:
    names = {"node[1-2]": ["node1", "node2"], "node2": ["node2"]}
    assert parse_batch_node_state(parse_fields(description), names.__getitem__) is state


def test_node_is_not_lost_if_the_names_of_the_nodes_are_unknown() -> None:
    assert parse_batch_node_state(parse_fields(LOST), lambda nodes: []) is BatchNodeState.KEPT


Slurm = Callable[..., Callable[[], list[str]]]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Commands of Slurm that describe the job in turn and record what they are asked for."""

    def install(*descriptions: str, fails: str = "exit 1", times: int = 0) -> Callable[[], list[str]]:
        """Let the first ``times`` requests to change the job fail."""
        calls = tmp_path / "calls"
        calls.touch()
        (tmp_path / "descriptions").write_text("".join(f"{text}\n" for text in descriptions))
        bodies = {
            "scontrol": f"""case "$*" in
  *hostnames*1-2*) printf "node1\\nnode2\\n";;
  *hostnames*) echo node2;;
  *show*) line=$(head -n 1 {tmp_path}/descriptions); sed -i 1d {tmp_path}/descriptions
    [ "$line" != "{NO_ANSWER}" ] || exit 1
    echo "$line";;
  *) echo "scontrol $*" >> {calls}; [ "$(wc -l < {calls})" -gt {times} ] || {fails};;
esac""",
            "scancel": f'echo "scancel $*" >> {calls}; [ "$(wc -l < {calls})" -gt {times} ] || {fails}',
        }
        for name, body in bodies.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setattr(requeue_after_node_loss, "POLL_SECONDS", 0.01)
        monkeypatch.setattr(requeue_after_node_loss, "is_open", lambda *_: None)
        return lambda: calls.read_text().splitlines()

    return install


def test_job_is_requeued_once_slurm_has_removed_the_node(slurm: Slurm) -> None:
    calls = slurm(KEPT, KEPT, LOST)
    assert main(["node1:1"]) == 0
    assert calls() == ["scontrol requeue 7"]


def test_controller_that_does_not_answer_is_asked_again(slurm: Slurm) -> None:
    calls = slurm(NO_ANSWER, KEPT, NO_ANSWER, LOST)
    assert main(["node1:1"]) == 0
    assert calls() == ["scontrol requeue 7"]


@pytest.mark.parametrize("fails", ["exit 1", "exec sleep 60"])
def test_job_is_requeued_again_if_the_controller_does_not_answer(
    fails: str, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_controller, "ANSWER_SECONDS", 1.0)
    calls = slurm(LOST, LOST, LOST, fails=fails, times=2)
    assert main(["node1:1"]) == 0
    assert calls() == ["scontrol requeue 7"] * 3


@pytest.mark.parametrize("times", [0, 1])
def test_job_that_may_not_be_requeued_frees_its_nodes(times: int, slurm: Slurm) -> None:
    calls = slurm(FINAL, FINAL, times=times)
    main(["node1:1"])
    assert calls() == ["scancel 7"] * (times + 1)


def test_job_that_another_node_has_requeued_is_left_alone(slurm: Slurm) -> None:
    calls = slurm(LOST, PENDING, times=1)
    main(["node1:1"])
    assert calls() == ["scontrol requeue 7"]


def test_job_that_ends_is_not_requeued(slurm: Slurm) -> None:
    calls = slurm(KEPT, PENDING)
    main(["node1:1"])
    assert calls() == []


def test_job_that_keeps_its_node_is_not_requeued(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the server has died: the script notices that all tasks have ended."""
    calls = slurm(*[KEPT] * 500)
    monkeypatch.setattr(requeue_after_node_loss, "WAIT_SECONDS", 0.2)
    main(["node1:1"])
    assert calls() == []


@pytest.mark.parametrize("is_open", [True, False])
def test_node_that_leaves_a_job_with_its_script_does_nothing(
    is_open: bool, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = slurm(LOST)
    monkeypatch.setattr(requeue_after_node_loss, "is_open", lambda *_: is_open)
    main(["node1:1"])
    assert calls() == []
