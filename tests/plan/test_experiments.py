"""Each experiment runs with the command and on the hardware in its file.

pytest tests/plan/test_experiments.py
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from toolkit.config.compose import compose
from toolkit.errors import PlanError, Severity
from toolkit.plan.devices import GPUS
from toolkit.plan.make import make_plan
from toolkit.plan.types import Device, RunPlan, World

FILES = sorted((Path(__file__).resolve().parents[2] / "conf" / "exp").glob("*.yaml"))
HARDWARE = re.compile(r"# Hardware: (\d+) nodes? of (\d+) (.+)\.")
EXPECTED = {  # keys of warnings
    "mixtral_8x7b": {"model.router_aux_loss_coef"},
    "bench_1b": {"checkpoint.every"},
    "bench_8b": {"checkpoint.every"},
}


def world_of(text: str) -> World:
    found = HARDWARE.search(text)
    assert found is not None, "the file has a line with its hardware"
    nodes, per_node, kind = int(found[1]), int(found[2]), found[3]
    on_cpu = kind == "CPU ranks"
    assert on_cpu or kind in GPUS
    return World(
        ranks=nodes * per_node,
        ranks_per_node=per_node,
        device=Device.CPU if on_cpu else Device.CUDA,
        gpu=None if on_cpu else kind,
        has_libaio=True,
        has_compiler=True,
        has_nvcc=True,
        transformer_engine="2.11.0",
    )


def planned(file: Path, *more: str) -> RunPlan:
    text = file.read_text()
    command = next(line for line in text.splitlines() if "launch/train.py" in line)
    return make_plan(compose([*shlex.split(command.partition("launch/train.py")[2]), *more]), world_of(text))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_experiments_fit_their_hardware(file: Path) -> None:
    text = file.read_text()
    command = next(line for line in text.splitlines() if "launch/train.py" in line)
    assert command.endswith(f"launch/train.py +exp={file.stem}"), "the command has no further overrides"
    plan = planned(file)
    assert {warning.key for warning in plan.warnings} == EXPECTED.get(file.stem, set())
    nodes, per_node = (
        re.search(rf"(?:{word})[ =](\d+)", command) for word in ("nnodes", "nproc_per_node|num_gpus")
    )
    world = world_of(text)
    assert nodes is None or int(nodes[1]) == world.nodes
    assert per_node is None or int(per_node[1]) == world.ranks_per_node


def test_fp32_without_zero_does_not_fit() -> None:
    """Control: memory is checked."""
    file = next(file for file in FILES if file.stem == "mixtral_8x7b")
    with pytest.raises(PlanError, match="fit on its device"):
        planned(file, "precision=fp32", "zero=stage0")


def test_remedy_for_an_indivisible_batch_works() -> None:
    world = World(
        ranks=64,
        ranks_per_node=8,
        device=Device.CUDA,
        gpu="h100",
        has_libaio=True,
        has_compiler=True,
        has_nvcc=True,
    )
    with pytest.raises(PlanError, match=r"train\.global_batch=16") as refused:
        make_plan(compose(["+exp=quickstart"]), world)
    (word,) = re.findall(r"write (train\.global_batch=\d+)", refused.value.problems[0].remedy)
    plan = make_plan(compose(["+exp=quickstart", word]), world)
    assert plan.batch.data_parallel == 64
    assert not [problem for problem in plan.warnings if problem.severity is Severity.ERROR]
