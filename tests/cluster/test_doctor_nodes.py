"""The doctor on two simulated machines: both reports reach the first one, and the ranks connect.

    pytest tests/cluster/test_doctor_nodes.py -rs -m full

Skipped without root or namespaces.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.simulated_nodes import ENVIRON, PORT, deepspeed, torchrun, two_nodes, wait_for_exit_codes
from tests.launch.processes import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

DOCTOR = ROOT / "launch" / "doctor.py"
FEW_FILES = ["bash", "-c", 'ulimit -Sn 200; exec "$@"', "bash"]  # of one machine


@pytest.mark.parametrize(("launcher", "fit"), [("torchrun", True), ("deepspeed", True), ("torchrun", False)])
def test_doctor_on_two_nodes(launcher: str, fit: bool, tmp_path: Path) -> None:
    with two_nodes(tmp_path) as nodes, ExitStack() as stack:
        words = ("--json", "+exp=quickstart", f"run.dir={nodes.shared / 'run'}")
        commands = []
        for node in nodes:
            argv = (torchrun if launcher == "torchrun" else deepspeed)(
                nodes, node.number, PORT, str(DOCTOR), *words
            )
            around = FEW_FILES if node.number == 1 and not fit else []
            commands.append(
                stack.enter_context(
                    node.start([*around, *argv], tmp_path / f"output-{node.number}.txt", ENVIRON)
                )
            )
        codes = wait_for_exit_codes(commands, 200)
        output = commands[0].output
    assert (codes == [0, 0]) is fit, output
    assert '"format_version"' not in commands[1].output, "only the first machine reports"
    report, _ = json.JSONDecoder().raw_decode(output[output.index('{\n "format_version"') :])
    assert [(item["node"], item["host"]) for item in report["machines"]] == [(0, "node0"), (1, "node1")]
    failing = [
        (machine["host"], item["check"])
        for machine in report["machines"]
        for item in machine["findings"]
        if item["verdict"] == "fail"
    ]
    assert failing == ([] if fit else [("node1", "limits")])
    together = {item["check"]: item for item in report["together"]}
    assert together["clocks"]["verdict"] == "ok", "it is one clock"
    assert "node1" in together["clocks"]["evidence"]
    assert together["uniformity"]["evidence"].startswith("2 machines have the same ")
    assert together["rendezvous"]["evidence"].startswith("data (2 ranks): ")
    seen = [item for machine in report["machines"] for item in machine["findings"]]
    assert not [item for item in seen if "the check failed" in item["evidence"]]
    assert [item["evidence"] for item in seen if item["check"] == "interfaces"] == [
        "lo, wire; none is selected by name"
    ] * 2
