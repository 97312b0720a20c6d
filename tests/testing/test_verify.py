"""The verdicts of the parity matrix: figures, gradients from one step, stored rows, selected cells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.config.schema import EngineName
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.protocol import StepResult
from toolkit.errors import InputError
from toolkit.plan.types import Device
from toolkit.testing import parity_report as report
from toolkit.testing.dist import rank_pool
from toolkit.testing.matrix import ALL, CORE, TOLERANCE, Cell, Excess, OptimizerCase, select_cells
from toolkit.testing.measure import Measured, first_gradients, measure, relative_difference
from toolkit.testing.parity import RunTrace, rank_samples
from toolkit.testing.verify import ParityRow, ParityVerdict, judge, package_versions, verify_cell
from toolkit.train.task import text_task

LOCAL = Cell(engine=EngineName.local, family="llama")


def fabricated(gaps: tuple[float, ...] = (), gradients: bool = False, **at: tuple[int, float]) -> Measured:
    """A run of six steps that learns, with ``loss=(step, by)`` or ``norm=`` changed from a step on."""

    def changed(name: str, step: int, value: float) -> float:
        first, by = at.get(name, (99, 0.0))
        return value + (by if step >= first else 0.0)

    results = tuple(
        StepResult(changed("loss", step, 5.0 - step), changed("norm", step, 1.0), 10) for step in range(6)
    )
    weights = {"w": torch.ones(3) + changed("weight", 0, 0.0)}
    found = {"w": torch.tensor([1.0, 100.0]) + changed("gradient", 0, 0.0)} if gradients else {}
    return Measured(RunTrace(results, weights), 3.0 + changed("evaluation", 0, 0.0), found, gaps)


@pytest.mark.parametrize(
    ("name", "by"),
    [("loss", 2e-5), ("norm", 2e-4), ("weight", 2e-5), ("evaluation", 2e-5), ("gradient", 2e-3)],
)
def test_each_figure_is_judged(name: str, by: float) -> None:
    right = fabricated(gradients=True)
    verdict, cause, differences = judge(LOCAL, fabricated(gradients=True, **{name: (0, by)}), right)
    assert verdict is ParityVerdict.APART
    assert name in cause
    assert differences.over(TOLERANCE) == [name]
    assert judge(LOCAL, fabricated(gradients=True, **{name: (0, by / 4)}), right)[0] is ParityVerdict.EQUAL
    assert (
        judge(LOCAL, fabricated(gradients=True, **{name: (0, float("nan"))}), right)[0] is ParityVerdict.APART
    )


def test_excess_is_bounded_and_has_a_cause() -> None:
    cell = replace(LOCAL, excess=Excess(replace(TOLERANCE, loss=1e-3), "rounding of a router"))
    assert judge(cell, fabricated(loss=(0, 5e-4)), fabricated())[:2] == (
        ParityVerdict.BOUND,
        "rounding of a router",
    )
    assert judge(cell, fabricated(loss=(0, 5e-3)), fabricated())[0] is ParityVerdict.APART
    assert judge(cell, fabricated(), fabricated())[0] is ParityVerdict.EQUAL


def test_routing_flip_does_not_excuse_earlier_differences() -> None:
    close = (1.0, 1.0, 1.0, 3e-7, 1.0, 1.0)
    verdict, cause, differences = judge(LOCAL, fabricated(loss=(3, 1e-4), weight=(0, 1.0)), fabricated(close))
    assert verdict is ParityVerdict.FLIP
    assert "step 3" in cause
    assert "3.0e-07" in cause
    assert differences.loss == 0
    assert (
        judge(LOCAL, fabricated(loss=(3, 1e-4), norm=(1, 1e-3)), fabricated(close))[0] is ParityVerdict.APART
    ), "wrong before"
    assert judge(LOCAL, fabricated(loss=(1, 1e-4)), fabricated(close))[0] is ParityVerdict.APART, (
        "long before the routers come close"
    )
    assert judge(LOCAL, fabricated(loss=(3, 1e-4)), fabricated((1.0,) * 6))[0] is ParityVerdict.APART, (
        "no router is close"
    )


def test_reference_that_does_not_learn_makes_a_cell_invalid() -> None:
    still = Measured(RunTrace((StepResult(5.0, 1.0, 1),) * 6, {"w": torch.ones(1)}), 3.0)
    assert judge(LOCAL, still, still)[0] is ParityVerdict.INVALID


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_gradients_from_one_step_match_backward(family: str) -> None:
    """They equal those that backward leaves, to the last bits."""
    plan = Cell(engine=EngineName.local, family=family).plan(OptimizerCase.SGD)
    engine: Any = build_engine(plan, text_task(plan), rank=0, local_rank=0)
    found = first_gradients(engine, plan, 0)
    engine.load(open_initial_weights(plan))
    batches = rank_samples(engine, plan, 0, 0)
    engine._accumulate(batches, 0, 1 / sum(text_task(plan).units(batch) for batch in batches))
    taken = {name: master.grad for name, master in engine._masters.items()}
    assert relative_difference(found, taken) < 3e-7
    doubled = {name: 2 * value for name, value in taken.items()}
    assert relative_difference(found, doubled) == pytest.approx(0.5, rel=1e-3)


def test_routing_gaps_require_experts() -> None:
    plan = Cell(engine=EngineName.local, family="mixtral").plan(OptimizerCase.ADAM)
    found = measure(0, 1, plan, steps=3, gaps=True)
    assert len(found.gaps) == 3
    assert all(0 < gap < 0.1 for gap in found.gaps)
    assert measure(0, 1, plan, steps=3).trace.losses == found.trace.losses, "watching changes nothing"


def test_cells_with_too_few_devices_are_not_run() -> None:
    cell = next(cell for cell in CORE if cell.ranks == 4)
    with rank_pool(1) as pool:
        row = verify_cell(
            cell, OptimizerCase.ADAM, pool, lambda *_: fabricated(), devices=1, device=Device.CPU
        )
    assert row.verdict is ParityVerdict.NOT_RUN
    assert row.verdict.good
    assert "4" in row.cause


def test_failing_cell_is_reported() -> None:
    cell = Cell(engine=EngineName.deepspeed, family="gpt2", tensor=2, pipeline=2, label="refused")
    with rank_pool(1) as pool:
        row = verify_cell(
            cell, OptimizerCase.ADAM, pool, lambda *_: fabricated(), devices=4, device=Device.CPU
        )
    assert row.verdict is ParityVerdict.FAILED
    assert not row.verdict.good
    assert "rule:" in row.cause


def a_row(
    cell: Cell, verdict: ParityVerdict = ParityVerdict.EQUAL, device: str = "cpu", cause: str = ""
) -> ParityRow:
    return ParityRow(
        cell=cell.name,
        engine=cell.engine.value,
        family=cell.family,
        layout=cell.layout,
        ranks=cell.ranks,
        case="adam",
        device=device,
        hardware="x86_64",
        versions=package_versions(cell.engine),
        day="2026-01-01",
        seconds=1.0,
        verdict=verdict,
        cause=cause,
        differences=None if verdict is ParityVerdict.NOT_RUN else TOLERANCE,
        tolerance=TOLERANCE,
    )


def test_later_rows_replace_earlier_rows(tmp_path: Path) -> None:
    first, second = ALL[0], ALL[1]
    report.write_json([a_row(first), a_row(second)], tmp_path / "parity.json")
    old = report.read_rows(tmp_path / "parity.json")
    assert old == [a_row(first), a_row(second)]
    new = [
        a_row(second, ParityVerdict.APART, cause="loss"),
        a_row(first, ParityVerdict.NOT_RUN, cause="needs"),
        a_row(first, device="cuda"),
    ]
    merged = report.merge_rows(old, new)
    assert [(row.cell, row.device, row.verdict) for row in merged] == [
        (first.name, "cpu", ParityVerdict.EQUAL),
        (second.name, "cpu", ParityVerdict.APART),
        (first.name, "cuda", ParityVerdict.EQUAL),
    ]
    page = report.format_markdown(merged)
    assert f"| `{second.name}` | adam |" in page
    assert f"`{second.name}` adam, apart: loss" in page
    assert f"loss 1.0e-05 (`{second.name}`)" in page or f"loss 1.0e-05 (`{first.name}`)" in page
    never = page.rpartition("## Never run on a GPU")[2]
    assert f"`{first.name}`" not in never
    assert f"`{second.name}`" in never
    assert "All of them" in report.format_markdown(old)
    assert report.read_rows(tmp_path / "none.json") == []


def test_cells_are_selected_by_name_and_pattern() -> None:
    assert select_cells(["core"]) == CORE
    assert select_cells(["all", "core"]) == ALL
    assert {cell.engine for cell in select_cells(["megatron/*"])} == {EngineName.megatron}
    assert [cell.name for cell in select_cells(["deepspeed/llama/dp2-zero3"])] == [
        "deepspeed/llama/dp2-zero3"
    ]
    with pytest.raises(InputError, match="--cells nonsense"):
        select_cells(["nonsense"])


def test_command_reports_an_unknown_cell(capsys: pytest.CaptureFixture[str]) -> None:
    from launch.verify import main

    assert main(["--cells", "nonsense"]) == 2
    error = capsys.readouterr().err
    assert "--cells nonsense" in error
    assert "remedy" in error
