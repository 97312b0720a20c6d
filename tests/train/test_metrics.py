"""+metrics.NAME.target: users' metrics, reduced exactly over ranks.

pytest tests/train/test_metrics.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.train import user_tasks
from tests.train.user_tasks import Errors
from toolkit.config.schema import EngineName, EvalConfig, RunConfig
from toolkit.engine.rank_sync import make_data_gather
from toolkit.errors import ConfigError, PlanError
from toolkit.layout.axes import Axes
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.testing.dist import RankPool, rank_pool
from toolkit.testing.tiny import tiny_config
from toolkit.train.metrics import EvaluationMetrics, Metric
from toolkit.train.user_task import build_metrics

HERE = "tests.train.user_tasks"
CPU = torch.device("cpu")
MICRO_BATCHES = 12


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as pool:
        yield pool


def config_of(**metrics: Any) -> RunConfig:
    config = tiny_config(None, model__target=f"{HERE}.Network")
    config.metrics = {
        name: given if isinstance(given, dict) else {"target": f"{HERE}.{given}"}
        for name, given in metrics.items()
    }
    return config


def metrics_of(gather: Any = None, **metrics: Any) -> EvaluationMetrics:
    found = build_metrics(config_of(**metrics), CPU, gather)
    assert found is not None
    return found


def micro_batch(number: int) -> dict[str, torch.Tensor]:
    """Predictions over many orders of magnitude, in fp32."""
    generator = torch.Generator().manual_seed(number)
    preds = torch.randn(7, generator=generator) * 10 ** torch.randint(-4, 5, (7,), generator=generator)
    return {"preds": preds, "target": torch.randn(7, generator=generator)}


def results_on_rank(rank: int, ranks: int, *, tensor: int = 1, targets: Sequence[str]) -> dict[str, float]:
    """Micro-batch ``m`` belongs to data rank ``m % data ranks``, as in a run."""
    axes = Axes(data=ranks // tensor, tensor=tensor, pipeline=1, context=1, expert=1)
    metrics = metrics_of(make_data_gather(axes), **{target.lower(): target for target in targets})
    metrics.reset()
    for number in range(axes.coordinates(rank).data, MICRO_BATCHES, axes.data):
        metrics.update(micro_batch(number))
    return metrics.compute()


def on_rank(rank: int, ranks: int, tensor: int, targets: Sequence[str]) -> dict[str, float]:
    return results_on_rank(rank, ranks, tensor=tensor, targets=targets)


def test_metrics_are_equal_to_the_bit_for_any_number_of_ranks(pool: RankPool) -> None:
    targets = ["Errors", "SinglePrecisionTotal"]
    alone = results_on_rank(0, 1, targets=targets)
    errors = torch.cat(
        [(batch["preds"] - batch["target"]).abs() for batch in map(micro_batch, range(MICRO_BATCHES))]
    )
    assert alone["errors/samples"] == len(errors) == 84
    assert alone["errors/mean"] == pytest.approx(float(errors.double().mean()), rel=1e-6)
    assert (alone["errors/smallest"], alone["errors/largest"]) == (float(errors.min()), float(errors.max()))
    control = {alone.pop("singleprecisiontotal")}
    for ranks, tensor in ((2, 1), (4, 1), (4, 2)):
        found = pool.run(on_rank, tensor, targets, ranks=ranks)
        assert all(each == found[0] for each in found)
        control.add(found[0].pop("singleprecisiontotal"))
        assert found[0] == alone, f"{ranks} ranks"
    assert len(control) > 1, "the control: an fp32 sum depends on the number of ranks"


def test_each_set_starts_from_the_default_state() -> None:
    metrics = metrics_of(errors="Errors")
    first = []
    for _ in range(2):
        metrics.reset()
        metrics.update(micro_batch(0))
        first.append(metrics.compute())
    assert first[0] == first[1]
    metrics.update(micro_batch(1))
    assert metrics.compute() != first[0], "the control: without a reset samples are added"


def test_states_are_tensors_of_64_bits() -> None:
    metric = Errors()
    assert {name: tensor.dtype for name, tensor in metric.state().items()} == {
        "total": torch.float64,
        "samples": torch.int64,
        "smallest": torch.float64,
        "largest": torch.float64,
    }
    with pytest.raises(ValueError, match="reduce='mean' of the state total"):
        metric.add_state("total", 0.0, reduce="mean")  # type: ignore[arg-type]


def test_names_of_other_results_are_refused() -> None:
    metrics = metrics_of(close="Errors")
    metrics.update(micro_batch(0))
    with pytest.raises(
        ConfigError, match=rf"evaluate returns close, too\n.*\n.*write \+metrics.my_close.target={HERE}"
    ):
        metrics.compute({"close", "rows"})


def test_a_metric_may_be_defined_without_states() -> None:
    class Nothing(Metric):
        def update(self, preds: torch.Tensor) -> None:  # type: ignore[override]
            pass

        def compute(self) -> float:
            return 1.0

    assert Nothing().state() == {}


@pytest.mark.parametrize(
    ("result", "seen"),
    [
        (None, "returned NoneType"),
        (torch.zeros(2), r"returned a tensor of shape \[2\]"),
        ({"a": "text"}, "returned str"),
    ],
)
def test_a_result_that_is_no_number_is_refused(result: Any, seen: str) -> None:
    metrics = metrics_of(mine={"target": f"{HERE}.NotANumber", "arguments": {"result": result}})
    with pytest.raises(ConfigError, match=rf"metrics.mine.target=.*compute \(.*user_tasks.py:\d+\) {seen}"):
        metrics.compute()


def test_not_a_number_is_named_with_the_line_of_the_metric() -> None:
    metrics = metrics_of(mine="NotANumber", errors="Errors")
    metrics.update(micro_batch(0))
    problem = metrics.check_finite(metrics.compute())
    assert problem is not None
    assert f"metrics.mine.target={HERE}.NotANumber: compute ({user_tasks.__file__}:" in str(problem)
    assert "returned nan for mine" in str(problem)
    assert metrics.check_finite({"errors/mean": 0.0, "mine": 1.0}) is None
    assert "inf for errors/mean" in str(metrics.check_finite({"errors/mean": math.inf}))


def test_update_gets_the_tensors_with_the_names_of_its_parameters() -> None:
    metrics = metrics_of(mine="WantsMore")
    with pytest.raises(
        ConfigError, match=r"needs sample_weight, and the task's evaluate returns the tensors preds, "
    ):
        metrics.update(micro_batch(0))
    metrics.update({**micro_batch(0), "sample_weight": torch.ones(7), "other": torch.ones(1)})


@pytest.mark.parametrize(
    ("target", "seen"),
    [
        ("Regression", "the class Regression is not derived from Metric"),
        ("Erors", f"write metrics.mine.target={HERE}.Errors"),
    ],
)
def test_mistakes_in_the_target_are_refused(target: str, seen: str) -> None:
    with pytest.raises(ConfigError, match=seen):
        metrics_of(mine=target)


PLANS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "never": ({"mine": "Errors"}, {"eval": EvalConfig(every=0)}, "metrics are computed in evaluations"),
    "column": ({"loss": "Errors"}, {}, r"write \+metrics.my_loss.target="),
}


@pytest.mark.parametrize("case", PLANS)
def test_metrics_that_cannot_be_reported_are_refused(case: str) -> None:
    metrics, changes, seen = PLANS[case]
    config = config_of(**metrics)
    config.eval = EvalConfig(every=2)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(PlanError, match=seen):
        make_plan(config, World(ranks=1, ranks_per_node=1, device=Device.CPU))


def test_metrics_without_the_output_of_the_model_are_refused() -> None:
    config = tiny_config("llama", engine__name=EngineName.megatron)
    config.eval, config.metrics = EvalConfig(every=2), {"mine": {"target": f"{HERE}.Errors"}}
    with pytest.raises(PlanError, match="write engine=deepspeed zero=stage3, or leave"):
        make_plan(config, World(ranks=2, ranks_per_node=2, device=Device.CPU))


def torch_metrics_on_rank(rank: int, ranks: int) -> dict[str, float]:
    metrics = metrics_of(
        make_data_gather(Axes(data=ranks, tensor=1, pipeline=1, context=1, expert=1)),
        mae={"target": "torchmetrics.MeanAbsoluteError"},
        spearman={"target": "torchmetrics.SpearmanCorrCoef"},
    )
    for _ in range(2):  # twice, because compute must not leave its reduced states behind
        metrics.reset()
        for number in range(rank, MICRO_BATCHES, ranks):
            metrics.update(micro_batch(number))
        found = metrics.compute()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchmetrics_are_reduced_over_ranks(ranks: int, pool: RankPool) -> None:
    pytest.importorskip("torchmetrics")
    alone = torch_metrics_on_rank(0, 1)
    found = pool.run(torch_metrics_on_rank, ranks=ranks)
    assert all(each == found[0] for each in found)
    assert found[0] == pytest.approx(alone, rel=1e-6)
