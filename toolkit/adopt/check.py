"""Compose and plan an adopted experiment, as its first start would."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.adopt.decide import Adoption, refuse_keys
from toolkit.adopt.experiment import write_experiment
from toolkit.config import engine_keys
from toolkit.config.compose import compose
from toolkit.config.schema import RunConfig
from toolkit.errors import PlanError, Problem
from toolkit.plan.make import make_plan
from toolkit.plan.pretrained import resolve
from toolkit.plan.train_steps import resolve_epochs
from toolkit.plan.transformer_engine import NEWEST
from toolkit.plan.types import Device, RunPlan, World

NAME = "adopted"
SAMPLES = 1_000_000  # in place of the size of the data, which only a start reads


def resolve_adoption(adoption: Adoption, files: Sequence[str]) -> tuple[Adoption, RunPlan]:
    """``adoption`` without the engines' keys that the run's rules refuse, and its plan.

    Raises:
        UserError: the experiment cannot be planned; the problems name what is missing.
    """
    for _ in range(3):  # a rule may refuse a key only once another one is gone
        config = compose_text(write_experiment(adoption, NAME, files))
        try:
            return adoption, plan_adopted(config, adoption)
        except PlanError as error:
            refused = [problem for problem in error.problems if _engine_key(problem)]
            if not refused:
                raise
            adoption = refuse_keys(adoption, refused)
    return adoption, plan_adopted(config, adoption)


def compose_text(text: str) -> RunConfig:
    """Compose the text of an experiment file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "exp" / f"{NAME}.yaml"
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
        return compose([f"--config-dir={folder}", f"+exp={NAME}"])


def plan_adopted(config: RunConfig, adoption: Adoption) -> RunPlan:
    """Plan on as many GPUs, of an unknown kind, as the files name."""
    context = adoption.context
    model_ranks = config.parallel.tensor * config.parallel.pipeline * config.parallel.context
    ranks = max(context.ranks or 1, model_ranks, config.parallel.expert * model_ranks)
    world = World(
        ranks=ranks,
        ranks_per_node=min(8, ranks),
        device=Device.CUDA,
        has_libaio=True,
        has_compiler=True,
        has_nvcc=True,
        transformer_engine=NEWEST,
    )
    config = resolve_epochs(_resolved(config), SAMPLES)
    return make_plan(replace(config, cluster=replace(config.cluster, nodes=None)), world)


def _resolved(config: RunConfig) -> RunConfig:
    """Fill in the sizes of the pretrained model.

    A hub model is replaced by a Llama, because only training downloads it.
    """
    pretrained = config.model.pretrained
    if pretrained is None or Path(pretrained).expanduser().is_dir():
        return resolve(config)
    tiny = compose(["model=llama"]).model
    return replace(config, model=replace(tiny, max_position_embeddings=2**20, vocab_size=2**20))


def _engine_key(problem: Problem) -> bool:
    return problem.key.startswith(tuple(f"{keys.root}." for keys in engine_keys.ENGINES))
