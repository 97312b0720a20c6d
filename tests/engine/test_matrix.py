"""Layouts of both engines compared with ``local``.

    pytest tests/engine/test_matrix.py             a cell of every axis, and controls
    pytest tests/engine/test_matrix.py -m full     the core, a cell of each further setting, all controls

Losses, norms, gradients of the first step, final weights and evaluation must agree over eleven steps. The
whole matrix, with both optimizers and twenty steps, is ``python launch/verify.py --cells all``. A control
breaks one thing of a cell, and its loss must differ by more than ten tolerances, with the optimizer that
shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engine.matrix_checks import (
    CONTROL_STEPS,
    STEPS,
    References,
    changed,
    check,
    far,
    named,
    right,
    wrong_on_rank,
)
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import ALL, CORE, TOLERANCE, Cell, OptimizerCase, select_cells
from toolkit.testing.measure import Measured, measure
from toolkit.testing.parity import DoubledGradients, repeat_first_rank
from toolkit.testing.wrong_maps import rotate_groups, swap_gate_and_up, wrong_map

# Quick cells of DeepSpeed's other axes are in test_deepspeed_axes.py and test_deepspeed_pipe.py.
QUICK = select_cells(
    (
        "megatron/llama/tp2-sp",
        "megatron/llama/pp2-vpp2",
        "megatron/llama/cp2",
        "megatron/qwen2/dp2-zero1",
        "megatron/mixtral/ep2-dp2",
        "megatron/gpt2/tp2-pp2-sp",
        "deepspeed/llama/dp2-zero3-eps1e-08",
        "deepspeed/mixtral/ep4-dp4-zero2-idle",
        "deepspeed/llama/dp2-zero2",
    )
)


# Settings and combinations of axes that the core lacks, except for those of the other files of this folder.
FURTHER = select_cells(
    (
        "megatron/llama/dp2-zero1-overlap",
        "megatron/llama/dp2-zero2",
        "megatron/llama/cp2-pp2",
        "megatron/llama/cp4",
        "megatron/llama/tp2-pp2-sp-vpp2",
        "megatron/llama/tp2-sp-selective",
        "megatron/llama/pp2-full",
        "megatron/mixtral/tp2-sp",
        "megatron/mixtral/ep2-dp2-allgather",
        "megatron/mixtral/ep3-dp3-zero1-idle",
        "megatron/mixtral/ep2-pp2-dp2-idle",
        "megatron/qwen3_moe/tp2-pp2-sp",
        "megatron/qwen3_moe/cp2",
        "megatron/gpt2/tp2-pp2-sp-fused",
        "megatron/llama/cp2-fused",
        "megatron/llama/pp2-vpp2-documents",
        "megatron/llama/tp2-sp-full-documents",
        "deepspeed/llama/dp2-zero2-odd",
        "deepspeed/gpt2/cp2-zero2",
        "deepspeed/qwen3_moe/ep2-dp2-zero2-fused",
        "deepspeed/mixtral/ep3-dp3-zero1-idle",
        "deepspeed/mixtral/ep4-dp4-zero2-full-idle",
        "deepspeed/mixtral/ep2-dp2-zero2-documents",
        "deepspeed/llama/pp2-zero1-full-documents",
    )
)
CELLS = (*QUICK, *(cell for cell in (*CORE, *FURTHER) if cell not in QUICK))


@pytest.mark.parametrize(
    ("cell", "case"),
    [
        pytest.param(
            cell,
            cell.cases[number % len(cell.cases)],  # the optimizers alternate
            id=f"{cell}-{cell.cases[number % len(cell.cases)]}",
            marks=() if cell in QUICK else pytest.mark.full,
        )
        for number, cell in enumerate(CELLS)
    ],
)
def test_cells_match_local(cell: Cell, case: OptimizerCase, pool: RankPool, references: References) -> None:
    check(cell, case, pool, references)


def test_idle_experts_get_no_token(references: References) -> None:
    """In idle cells two experts of each layer, different in both layers, get all tokens."""
    cell = named("deepspeed/mixtral/ep2-dp2-zero1-idle").reference()
    right = references.of(cell, OptimizerCase.SGD)
    for layer, visited in ((0, slice(0, 2)), (1, slice(2, 4))):
        gradient = right.gradients[f"model.layers.{layer}.mlp.experts.down_proj"]
        assert [bool(expert.any()) for expert in gradient] == [
            number in range(4)[visited] for number in range(4)
        ]
    assert min(right.gaps) > 1.0, "chosen and idle experts stay far apart in every step"


# -- Controls: each is a context in which a rank's run is wrong, or has other samples or another objective


def doubled(plan: RunPlan) -> Any:
    """Doubled gradients under Megatron-core, whose engine scales the loss itself."""
    from toolkit.engine.megatron.engine import MegatronEngine

    run = MegatronEngine._forward_backward
    return changed(
        MegatronEngine,
        "_forward_backward",
        lambda self, batches, weight, step: run(self, batches, weight and 2 * weight, step),
    )


def everything_decays(plan: RunPlan) -> Any:
    """Weight decay on norms too."""
    from toolkit.engine.megatron.build import MegatronModel

    set_learning_rate = MegatronModel.set_learning_rate

    def wrong(self: MegatronModel, lr: float) -> None:
        set_learning_rate(self, lr)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = plan.config.optim.weight_decay

    return changed(MegatronModel, "set_learning_rate", wrong)


def rotated(plan: RunPlan) -> Any:
    assert plan.shape is not None
    return wrong_map(plan.shape.family, rotate_groups)


def swapped(plan: RunPlan) -> Any:
    assert plan.shape is not None
    return wrong_map(plan.shape.family, swap_gate_and_up)


@contextmanager
def crossed(plan: RunPlan) -> Iterator[None]:
    """The first stage has two micro-batches in flight and swaps their gradients."""
    from megatron.core.pipeline_parallel import schedules

    forward_step, backward_step, forward_backward = (
        schedules.forward_step,
        schedules.backward_step,
        schedules.forward_backward_pipelining_without_interleaving,
    )
    outputs: list[Any] = []
    backwards = 0

    def forward(*arguments: Any, **settings: Any) -> Any:
        output, tokens = forward_step(*arguments, **settings)
        outputs.append(output)
        return output, tokens

    def backward(inputs: Any, output: Any, *arguments: Any) -> Any:
        nonlocal backwards
        backwards += 1
        if inputs[0] is None and backwards <= 2:
            output = outputs[2 - backwards]
        return backward_step(inputs, output, *arguments)

    def fresh(**settings: Any) -> Any:
        nonlocal backwards
        backwards = 0
        outputs.clear()
        return forward_backward(**settings)

    with (
        changed(schedules, "forward_step", forward),
        changed(schedules, "backward_step", backward),
        changed(schedules, "forward_backward_pipelining_without_interleaving", fresh),
    ):
        yield


CONTROLS: dict[str, tuple[str, OptimizerCase, Callable[[RunPlan], Any], dict[str, Any]]] = {
    "doubled gradients": ("megatron/llama/tp2-sp", OptimizerCase.SGD, doubled, {}),
    "doubled gradients, DeepSpeed": (
        "deepspeed/llama/dp2-zero2",
        OptimizerCase.SGD,
        right,
        {"task": DoubledGradients()},
    ),
    "duplicated micro-batch": (
        "megatron/llama/dp2-zero1",
        OptimizerCase.ADAM,
        right,
        {"batches": repeat_first_rank},
    ),
    "decay of norms": ("megatron/llama/tp2-sp", OptimizerCase.ADAM, everything_decays, {}),
    "rotated query groups": ("megatron/llama/tp2-sp", OptimizerCase.ADAM, rotated, {}),
    "gate and up swapped": ("megatron/llama/tp2-sp", OptimizerCase.ADAM, swapped, {}),
    "activations crossed": ("megatron/llama/pp2", OptimizerCase.ADAM, crossed, {}),
}


QUICK_CONTROLS = ("doubled gradients", "activations crossed")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK_CONTROLS else pytest.mark.full) for name in CONTROLS],
)
def test_control_is_far_from_the_reference(name: str, pool: RankPool, references: References) -> None:
    cell_name, case, wrong, settings = CONTROLS[name]
    cell = named(cell_name)
    steps = STEPS if wrong is everything_decays else CONTROL_STEPS
    found = pool.run(wrong_on_rank, cell.plan(case), wrong, settings, steps, ranks=cell.ranks)[0]
    far(cell, case, found, references)


@pytest.mark.full
def test_control_no_clipping(pool: RankPool, references: References) -> None:
    cell = named("megatron/llama/tp2-sp")
    plan = cell.plan(OptimizerCase.ADAM, optim__clip=0.0)
    found = pool.run(wrong_on_rank, plan, right, {}, STEPS, ranks=cell.ranks)[0]
    far(cell, OptimizerCase.ADAM, found, references)


@pytest.mark.parametrize("name", ["deepspeed/llama/dp2-zero1", "megatron/llama/dp2-zero1"])
def test_sgd_adds_weight_decay_to_the_gradient_on_every_engine(name: str, pool: RankPool) -> None:
    """Decay enters the momentum, as in torch's SGD. Control: without decay the weights differ."""
    cell, settings = named(name), {"optim__momentum": 0.9, "optim__lr": 0.02}
    found, reference, control = (
        pool.run(
            measure_steps, one.plan(OptimizerCase.SGD, **settings, optim__weight_decay=decay), ranks=one.ranks
        )[0]
        for one, decay in ((cell, 0.3), (cell.reference(), 0.3), (cell.reference(), 0.0))
    )
    differences = found.differences(reference)
    assert not differences.over(TOLERANCE), differences
    assert control.differences(reference).weight > 100 * TOLERANCE.weight


def measure_steps(rank: int, ranks: int, plan: RunPlan) -> Measured:
    return measure(rank, ranks, plan, steps=5)


def test_cell_names_are_unique() -> None:
    assert len({cell.name for cell in ALL}) == len(ALL) >= 50
    assert {cell.family for cell in ALL} == {"gpt2", "llama", "qwen2", "mixtral", "qwen3", "qwen3_moe"}
    assert set(CORE) < set(ALL)
